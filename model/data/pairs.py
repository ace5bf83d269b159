"""Pairs of texts for an encoder-decoder: read, cleaned, without copies, and split so that no source is on two sides.

Two sources that differ in capitals or blanks alone are the same source. Standard library and Babel only; knows nothing
of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from model.data import catalogs, jsonl, parallel
from model.data.config import DataConfig, DataSource
from model.data.corpus import EMPTY, Corpus, Reading, Side, TextPair, fractions, gather, side_of
from model.data.files import DataFile
from model.data.markup import strip

_SUFFIXES = {
    DataSource.TSV: parallel.SUFFIXES,
    DataSource.GETTEXT: catalogs.SUFFIXES,
    DataSource.JSONL: jsonl.SUFFIXES,
}


def load(config: DataConfig) -> Corpus[TextPair]:
    """Everything that the configuration's paths hold.

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
    """The clean pairs of one file; counts what is left out."""
    raw, left_out = read(file.path)
    pairs = []
    for each in raw:
        pair, reason = _clean(each, config)
        if reason:
            left_out[reason] += 1
        else:
            pairs.append(pair)
    return Reading(pairs, left_out)


def _clean(pair: TextPair, config: DataConfig) -> tuple[TextPair, str]:
    """The pair as it is trained on, and why it is left out, if it is."""
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
        DataSource.TSV: parallel.read,
        DataSource.GETTEXT: catalogs.read,
        DataSource.JSONL: lambda path: Reading(
            [TextPair(*texts) for _, texts in jsonl.read(path, (config.source_field, config.target_field))], Counter()
        ),
    }
    return readers[config.source]
