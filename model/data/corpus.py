"""`Corpus`: examples for training, validation and test, with an account of their origin.

Duplicates are removed, and no scored example is trained on. An example's side follows from a hash of its key, so it
does not depend on the order of files, the seed or the other examples. Standard library only.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from model.data.config import DataConfig
from model.data.files import DataError, DataFile, find

EMPTY = "empty"
"""Reason for leaving out an example of whitespace alone."""

_MAX_FILES_LISTED = 100


class TextPair(NamedTuple):
    """A source and its target, as text."""

    source: str
    target: str

    @property
    def key(self) -> str:
        """The key that decides the side: case and whitespace do not matter."""
        return fold(self.source)

    @property
    def content(self) -> tuple[str, ...]:
        """What is trained on; an example with equal content is a duplicate."""
        return self


class Document(NamedTuple):
    """A text to continue. `name` is its origin, which is not trained on."""

    name: str
    text: str

    @property
    def key(self) -> str:
        """The key that decides the side."""
        return self.text

    @property
    def content(self) -> tuple[str, ...]:
        """What is trained on; an example with equal content is a duplicate."""
        return (self.text,)


class Side(StrEnum):
    """The use of an example."""

    TRAINING = "training"
    VALIDATION = "validation"
    TEST = "test"


E = TypeVar("E", TextPair, Document)


class Reading(NamedTuple, Generic[E]):
    """Examples read from files, and how many entries were left out, by reason."""

    examples: list[E]
    left_out: Counter[str]


@dataclass(frozen=True, slots=True)
class Corpus(Generic[E]):
    """Examples by side, none of them empty, with `facts` for the run's manifest and `notes` to print."""

    training: tuple[E, ...]
    validation: tuple[E, ...]
    test: tuple[E, ...]
    facts: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def gather(
    config: DataConfig,
    *,
    what: str,
    suffixes: Collection[str],
    read: Callable[[DataFile], Reading[E]],
    split: Callable[[Sequence[E]], tuple[dict[Side, list[E]], str]],
) -> Corpus[E]:
    """All examples in the configuration's paths.

    Args:
        config: paths, fractions, and the maximum number of examples.
        what: an example's name in messages.
        suffixes: of the files to read in folders; empty is all.
        read: reads one file.
        split: splits the examples of `paths`; returns them by side, and the name of the method.

    Raises:
        DataError: when a path is missing, a file is empty or damaged, or a side has no example.
    """
    given = {Side.TRAINING: config.paths, Side.VALIDATION: config.validation_paths, Side.TEST: config.test_paths}
    files = {side: find(paths, suffixes) for side, paths in given.items() if paths or side is Side.TRAINING}
    readings = {side: _read_all(found, what, read) for side, found in files.items()}
    left_out = sum((reading.left_out for reading in readings.values()), Counter[str]())
    num_read = left_out.total() + sum(len(reading.examples) for reading in readings.values())
    sides, way = split(readings.pop(Side.TRAINING).examples)
    sides |= {side: reading.examples for side, reading in readings.items()}
    left_out += separate(sides)
    _require_all_sides(sides, config, what, left_out)
    training = sample(sides[Side.TRAINING], config.max_examples)
    left_out["training: more than max_examples"] = len(sides[Side.TRAINING]) - len(training)
    sides[Side.TRAINING] = list(training)
    names = [file.path.as_posix() for found in files.values() for file in found]
    facts = {
        "name": str(config.source),
        "source": ", ".join(config.paths),
        "num_files": len(names),
        "files": names if len(names) <= _MAX_FILES_LISTED else [],
        "num_read": num_read,
        "left_out": dict(sorted((+left_out).items())),
        "split_by": way,
        **side_facts(sides),
    }
    return Corpus(training, tuple(sides[Side.VALIDATION]), tuple(sides[Side.TEST]), facts)


def _read_all(files: Sequence[DataFile], what: str, read: Callable[[DataFile], Reading[E]]) -> Reading[E]:
    """All files together, deduplicated.

    Raises:
        DataError: naming a file without examples that was given by name; in a folder it is skipped.
    """
    examples: dict[tuple[str, ...], E] = {}
    left_out: Counter[str] = Counter()
    for file in files:
        reading = read(file)
        if not (reading.examples or reading.left_out.keys() - {EMPTY} or file.in_folder):
            raise DataError(f"{file.path}: no {what} in this file")
        left_out += reading.left_out
        for example in reading.examples:
            if examples.setdefault(example.content, example) is not example:
                left_out["duplicate"] += 1
    return Reading(list(examples.values()), left_out)


def share_of(key: str) -> float:
    """A hash of a text as a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(_encode(key)).digest()[:7], "big") / 2**56


def side_of(key: str, validation_fraction: float, test_fraction: float) -> Side:
    """The side of an example by its key; the same on every machine."""
    share = share_of(key)
    if share < test_fraction:
        return Side.TEST
    return Side.VALIDATION if share < test_fraction + validation_fraction else Side.TRAINING


def fold(text: str) -> str:
    """A text without differences of case and whitespace."""
    return " ".join(text.casefold().split())


def in_hash_order(examples: Sequence[E]) -> list[E]:
    """The examples in an order that depends on each alone, so that the first n are a random sample."""
    return sorted(examples, key=lambda example: (share_of("\0".join(example)), example))


def sample(examples: Sequence[E], max_examples: int) -> tuple[E, ...]:
    """The first `max_examples` in hash order, in their original order; all for 0."""
    if not max_examples or len(examples) <= max_examples:
        return tuple(examples)
    kept = set(in_hash_order(examples)[:max_examples])
    return tuple(example for example in examples if example in kept)


def digest(texts: Iterable[Iterable[str]]) -> str:
    """Sha256 (hex) over texts in order, each with its length."""
    state = hashlib.sha256()
    for group in texts:
        for text in group:
            data = _encode(text)
            state.update(len(data).to_bytes(8, "big") + data)
    return state.hexdigest()


def side_facts(corpus: Mapping[Side, Sequence[E]]) -> dict[str, Any]:
    """Number and hash of each side's examples, and `sha256` over all of them."""
    hashes = {side: digest(corpus[side]) for side in Side}
    return {
        **{str(side): {"num_examples": len(corpus[side]), "sha256": hashes[side]} for side in Side},
        "sha256": digest([list(hashes.values())]),
    }


def fractions(config: DataConfig) -> tuple[float, float]:
    """Shares of `paths` for validation and for test: 0 for a side with paths of its own."""
    return (
        0.0 if config.validation_paths else config.validation_fraction,
        0.0 if config.test_paths else config.test_fraction,
    )


def separate(sides: dict[Side, list[E]]) -> Counter[str]:
    """Removes from training what validation or test contains, and from validation what test contains; returns counts.

    An example on two sides would be memorized and count as generalization.
    """
    scored = {example.key for example in sides[Side.TEST]}
    left_out: Counter[str] = Counter()
    for side, others in ((Side.VALIDATION, "test"), (Side.TRAINING, "validation or test")):
        kept = [example for example in sides[side] if example.key not in scored]
        left_out[f"{side}: also in {others}"] = len(sides[side]) - len(kept)
        sides[side] = kept
        scored |= {example.key for example in kept}
    return +left_out


def _require_all_sides(
    sides: Mapping[Side, Sequence[E]], config: DataConfig, what: str, left_out: Mapping[str, int]
) -> None:
    """Rejects data with an empty side.

    Raises:
        DataError: with the sizes, and what to change.
    """
    total = sum(len(examples) for examples in sides.values())
    size = sum(len(example[-1].encode()) for examples in sides.values() for example in examples)
    paths = ", ".join(config.paths)
    if not total:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items())) or "nothing"
        raise DataError(f"no usable {what}s in {paths}: left out were {reasons}")
    for side, own_paths, share in (
        (Side.VALIDATION, config.validation_paths, config.validation_fraction),
        (Side.TEST, config.test_paths, config.test_fraction),
    ):
        if sides[side]:
            continue
        if own_paths:
            raise DataError(f"{side}_paths: nothing to score by in {', '.join(own_paths)}")
        if not share:
            raise DataError(f"{side}_fraction is 0 and {side}_paths is empty: there is nothing to score by")
        raise DataError(
            f"too few {what}s ({total}, {size} bytes) to take {side}_fraction {share} out of them: "
            f"give more, a larger fraction, or {side}_paths"
        )
    if not sides[Side.TRAINING]:
        raise DataError(f"no {what} is left to train on in {paths}: all {total} are for validation and test")


def _encode(text: str) -> bytes:
    """UTF-8; also encodes file names that are not valid UTF-8."""
    return text.encode(errors="surrogateescape")
