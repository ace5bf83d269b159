"""Pairs of texts for an encoder-decoder: read, cleaned, deduplicated, and split so that no source is on two sides.

Sources are compared without case and whitespace. Tab-separated files have two columns, source and target, without
quoting or header.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from model.data import catalogs, jsonl
from model.data.config import DataConfig, DataSource
from model.data.corpus import EMPTY, Corpus, Reading, Side, TextPair, fractions, gather, side_of
from model.data.files import DataError, DataFile, numbered_lines
from model.data.markup import strip

_SUFFIXES = {
    DataSource.TSV: frozenset({".tsv"}),
    DataSource.GETTEXT: catalogs.SUFFIXES,
    DataSource.JSONL: jsonl.SUFFIXES,
}


def load(config: DataConfig) -> Corpus[TextPair]:
    """All pairs in the configuration's paths.

    Raises:
        DataError: when a path is missing, a file is empty or damaged, or a side has no pair.
    """
    return gather(
        config,
        what="pair",
        suffixes=_SUFFIXES[config.source],
        read=partial(_read, _reader(config), config),
        split=partial(_split, config),
    )


def _split(config: DataConfig, pairs: Sequence[TextPair]) -> tuple[dict[Side, list[TextPair]], str]:
    shares = fractions(config)
    sides: dict[Side, list[TextPair]] = {side: [] for side in Side}
    for pair in pairs:
        sides[side_of(pair.key, *shares)].append(pair)
    return sides, "hash" if any(shares) else "paths"


def _read(read: Callable[[Path], Reading[TextPair]], config: DataConfig, file: DataFile) -> Reading[TextPair]:
    """The clean pairs of one file, with counts of those left out."""
    raw, left_out = read(file.path)
    pairs = []
    for each in raw:
        pair, reason = _clean(each, config)
        if reason:
            left_out[reason] += 1
        else:
            pairs.append(pair)
    return Reading(pairs, left_out)


def _read_tsv(path: Path) -> Reading[TextPair]:
    pairs = []
    for number, line in numbered_lines(path):
        columns = line.split("\t")
        if len(columns) != 2:
            raise DataError(f"{path}:{number}: columns are {len(columns)}, must be 2 (source, tab, target)")
        pairs.append(TextPair(*columns))
    return Reading(pairs, Counter())


def _clean(pair: TextPair, config: DataConfig) -> tuple[TextPair, str]:
    """The pair as it is trained on, and the reason if it is left out."""
    source, target = pair.source.strip(), pair.target.strip()
    if config.strip_markup:
        (source, source_tags), (target, target_tags) = strip(source), strip(target)
        if source_tags != target_tags:
            return pair, "tags differ"
    if not source or not target:
        return pair, EMPTY
    if min(len(source.split()), len(target.split())) < config.min_words:
        return pair, "fewer than min_words"
    return TextPair(source, target), ""


def _reader(config: DataConfig) -> Callable[[Path], Reading[TextPair]]:
    readers: Mapping[DataSource, Callable[[Path], Reading[TextPair]]] = {
        DataSource.TSV: _read_tsv,
        DataSource.GETTEXT: catalogs.read,
        DataSource.JSONL: lambda path: Reading(
            [TextPair(*texts) for _, texts in jsonl.read(path, (config.source_field, config.target_field))], Counter()
        ),
    }
    return readers[config.source]
