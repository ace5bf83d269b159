"""Texts for a decoder-only model: plain files and folders, or one text per JSON line, split into three sides.

Files are assigned by a hash of their path inside the folder, JSON lines by a hash of their text. If a side would get no
file, as with a single file, every file is split near its end: the last part is for test, the one before it for
validation. Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from model.data import jsonl
from model.data.config import DataConfig, DataSource
from model.data.corpus import EMPTY, Corpus, Document, Reading, Side, fractions, gather, side_of
from model.data.files import DataFile, read_text

_BY_HASH = "hash"
_BY_END = "end of each file"
_BY_PATHS = "paths"


def load(config: DataConfig) -> Corpus[Document]:
    """All texts in the configuration's paths.

    Raises:
        DataError: when a path is missing, a file is empty or damaged, or a side has no text.
    """
    corpus = gather(
        config,
        what="text",
        suffixes=jsonl.SUFFIXES if config.source is DataSource.JSONL else (),
        read=partial(_read, config),
        split=partial(_split, config),
    )
    sizes = {
        f"num_{side}_bytes": sum(len(document.text.encode()) for document in documents)
        for side, documents in zip(Side, (corpus.training, corpus.validation, corpus.test), strict=True)
    }
    notes: tuple[str, ...] = ()
    if corpus.facts["split_by"] == _BY_END and len(corpus.training) > 1:
        notes = (f"{len(corpus.training)} files are too few for one per side: each is split near its end",)
    return replace(corpus, facts={**corpus.facts, **sizes}, notes=notes)


def _read(config: DataConfig, file: DataFile) -> Reading[Document]:
    """The texts of one file, with a count of those of whitespace alone."""
    if config.source is DataSource.TEXT:
        found = [Document(file.name, read_text(file.path))]
    else:
        lines = jsonl.read(file.path, (config.text_field,))
        found = [Document(f"{file.name}:{number}", text) for number, (text,) in lines]
    kept = [document for document in found if document.text.strip()]
    return Reading(kept, +Counter({EMPTY: len(found) - len(kept)}))


def _split(config: DataConfig, documents: Sequence[Document]) -> tuple[dict[Side, list[Document]], str]:
    validation_fraction, test_fraction = fractions(config)
    by_name = config.source is DataSource.TEXT
    sides: dict[Side, list[Document]] = {side: [] for side in Side}
    for document in documents:
        key = document.name if by_name else document.key
        sides[side_of(key, validation_fraction, test_fraction)].append(document)
    if not (validation_fraction or test_fraction):
        return sides, _BY_PATHS
    wanted = {Side.VALIDATION: validation_fraction, Side.TEST: test_fraction, Side.TRAINING: 1.0}
    if not by_name or (len(documents) > 1 and all(sides[side] for side, share in wanted.items() if share)):
        return sides, _BY_HASH
    sides = {side: [] for side in Side}
    for document in documents:
        for side, text in _cut(document.text, validation_fraction, test_fraction).items():
            if text.strip():
                sides[side].append(Document(document.name, text))
    return sides, _BY_END


def _cut(text: str, validation_fraction: float, test_fraction: float) -> dict[Side, str]:
    """The three parts of a text: training, validation and test in this order."""
    test_at = _cut_at(text, test_fraction)
    validation_at = min(test_at, _cut_at(text, validation_fraction + test_fraction))
    return {
        Side.TRAINING: text[:validation_at],
        Side.VALIDATION: text[validation_at:test_at],
        Side.TEST: text[test_at:],
    }


def _cut_at(text: str, share: float) -> int:
    """Where the last `share` of a text begins: after the closest line break before it, else after a blank.

    The part grows to twice the share at most; a text without either there is cut between any two characters.
    """
    at = int(len(text) * (1.0 - share))
    earliest = max(0, 2 * at - len(text))
    for mark in "\n ":
        if (found := text.rfind(mark, earliest, at)) >= 0:
            return found + 1
    return at
