"""Which data a model is trained on and how text becomes tokens, as plain data. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from model.spec.config import Architecture
from model.spec.fields import coerce_enums, from_json_values, to_json_values


class DataConfigError(ValueError):
    """A data configuration is invalid; `problems` lists everything that is wrong with it."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("invalid data configuration: " + "; ".join(problems))


class DataSource(StrEnum):
    """Where examples come from. The first two need no files."""

    DATES = "dates"
    STDLIB = "stdlib"
    TEXT = "text"
    TSV = "tsv"
    GETTEXT = "gettext"
    JSONL = "jsonl"


class TokenizerKind(StrEnum):
    """Byte-level BPE, single bytes, or single characters."""

    BPE = "bpe"
    BYTES = "bytes"
    CHARACTERS = "characters"


ARCHITECTURES: Mapping[DataSource, frozenset[Architecture]] = {
    DataSource.DATES: frozenset({Architecture.ENCODER_DECODER}),
    DataSource.STDLIB: frozenset({Architecture.DECODER_ONLY}),
    DataSource.TEXT: frozenset({Architecture.DECODER_ONLY}),
    DataSource.TSV: frozenset({Architecture.ENCODER_DECODER}),
    DataSource.GETTEXT: frozenset({Architecture.ENCODER_DECODER}),
    DataSource.JSONL: frozenset(Architecture),
}
"""The families that can learn from each source: pairs are translated, text is continued."""

NEEDS_FILES = frozenset({DataSource.TEXT, DataSource.TSV, DataSource.GETTEXT, DataSource.JSONL})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """One data set.

    Attributes:
        source: the format, or one of the two that need no files.
        paths: files and folders to train on, relative to the working directory; folders are read recursively. One alone
            need not be in a list.
        validation_paths: what scores a run under way; empty takes `validation_fraction` out of `paths`.
        test_paths: what scores a finished run; empty takes `test_fraction` out of `paths`.
        validation_fraction: share of the examples (of a text: of its characters), chosen by a hash of their source.
        test_fraction: as `validation_fraction`.
        max_examples: at most so many training examples; 0 is all. `dates` draws as many, and needs at least 1.
        text_field: of a JSON line, for a decoder-only model.
        source_field: of a JSON line, for an encoder-decoder.
        target_field: of a JSON line, for an encoder-decoder.
        strip_markup: takes `<tags>` out of both sides of a pair; a pair whose tags differ in number is left out.
        min_words: shorter sources or targets are left out.
        tokenizer: the kind that is made, from training data alone, within the model's vocabulary.
        shared_tokenizer: one tokenizer for source and target; False makes one for each.
        tokenizer_file: a tokenizer.json to use instead of making one.
        target_tokenizer_file: the same for the target, where it is not shared.

    Raises:
        DataConfigError: listing every invalid field.
    """

    source: DataSource
    paths: tuple[str, ...] = ()
    validation_paths: tuple[str, ...] = ()
    test_paths: tuple[str, ...] = ()
    validation_fraction: float = 0.02
    test_fraction: float = 0.02
    max_examples: int = 0
    text_field: str = "text"
    source_field: str = "source"
    target_field: str = "target"
    strip_markup: bool = False
    min_words: int = 0
    tokenizer: TokenizerKind = TokenizerKind.BPE
    shared_tokenizer: bool = True
    tokenizer_file: str = ""
    target_tokenizer_file: str = ""

    def __post_init__(self) -> None:
        problems = coerce_enums(self, {"source": DataSource, "tokenizer": TokenizerKind})
        # JSON and TOML have lists; the instance is still being made, so nothing sees the change.
        for name in ("paths", "validation_paths", "test_paths"):
            paths = getattr(self, name)
            object.__setattr__(self, name, (paths,) if isinstance(paths, str) else tuple(paths))
            if "" in getattr(self, name):
                # To the system it would be the working directory; to people it is a variable that was not set.
                problems.append(f"{name} holds an empty path")
        for name in ("validation_fraction", "test_fraction"):
            if not 0.0 <= (share := getattr(self, name)) < 1.0:
                problems.append(f"{name} is {share}, must be in [0, 1)")
        if self.validation_fraction + self.test_fraction >= 1.0:
            problems.append("validation_fraction and test_fraction leave nothing to train on")
        problems += [
            f"{name} is {number}, must not be negative"
            for name in ("max_examples", "min_words")
            if (number := getattr(self, name)) < 0
        ]
        if self.source is DataSource.DATES and not self.max_examples:
            problems.append("max_examples is 0, dates needs at least 1")
        if self.source not in NEEDS_FILES and (self.paths or self.validation_paths or self.test_paths):
            problems.append(f"paths are given, {self.source} reads no files")
        if self.target_tokenizer_file and self.shared_tokenizer:
            problems.append("target_tokenizer_file is given, shared_tokenizer must then be false")
        if problems:
            raise DataConfigError(problems)

    @property
    def lacks_files(self) -> bool:
        """Whether a source that reads files has been given none to train on."""
        return self.source in NEEDS_FILES and not self.paths

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` is its inverse."""
        return to_json_values(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataConfig:
        """Builds from JSON; unknown, missing and wrongly typed fields are all reported at once.

        Raises:
            DataConfigError: listing every problem.
        """
        return from_json_values(cls, values, DataConfigError)
