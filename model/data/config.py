"""Data configuration: training data and tokenizers, as plain data. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from model.spec.config import Architecture
from model.spec.fields import coerce_enums, from_json_values, to_json_values


class DataConfigError(ValueError):
    """Invalid data configuration; `problems` lists every reason."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("invalid data configuration: " + "; ".join(problems))


class DataSource(StrEnum):
    """The source of examples. The first two need no files."""

    DATES = "dates"
    STDLIB = "stdlib"
    TEXT = "text"
    TSV = "tsv"
    GETTEXT = "gettext"
    JSONL = "jsonl"


class TokenizerKind(StrEnum):
    """Byte-level BPE, single bytes, single characters, or whole words."""

    BPE = "bpe"
    BYTES = "bytes"
    CHARACTERS = "characters"
    WORDS = "words"


ARCHITECTURES: Mapping[DataSource, frozenset[Architecture]] = {
    DataSource.DATES: frozenset({Architecture.ENCODER_DECODER}),
    DataSource.STDLIB: frozenset({Architecture.DECODER_ONLY}),
    DataSource.TEXT: frozenset({Architecture.DECODER_ONLY}),
    DataSource.TSV: frozenset({Architecture.ENCODER_DECODER}),
    DataSource.GETTEXT: frozenset({Architecture.ENCODER_DECODER}),
    DataSource.JSONL: frozenset(Architecture),
}
"""The model families that can train on each source."""

NEEDS_FILES = frozenset({DataSource.TEXT, DataSource.TSV, DataSource.GETTEXT, DataSource.JSONL})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """One data set.

    Attributes:
        source: see `DataSource`.
        paths: files and folders to train on, relative to the working directory; folders are read recursively. A single
            path may be a plain string.
        validation_paths: for scores during a run; if empty, `validation_fraction` of `paths`.
        test_paths: for scores of the finished run; if empty, `test_fraction` of `paths`.
        validation_fraction: share of the examples (of a text: of its characters), chosen by a hash of their source.
        test_fraction: as `validation_fraction`.
        max_examples: maximum number of training examples; 0 is all. `dates` draws this many and needs at least 1.
        text_field: of a JSON line, for a decoder-only model.
        source_field: of a JSON line, for an encoder-decoder.
        target_field: of a JSON line, for an encoder-decoder.
        strip_markup: removes `<tags>` from both sides of a pair; a pair with unequal numbers of tags is left out.
        min_words: pairs with a shorter source or target are left out.
        tokenizer: the kind to train, on training data alone, within the model's vocabulary size.
        min_frequency: of a word in the training data, below which it is unknown; for `words` alone.
        shared_tokenizer: one tokenizer for source and target; False trains one for each.
        tokenizer_file: a tokenizer.json to use instead of training one.
        target_tokenizer_file: the same for the target, if it has its own.

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
    min_frequency: int = 1
    shared_tokenizer: bool = True
    tokenizer_file: str = ""
    target_tokenizer_file: str = ""

    def __post_init__(self) -> None:
        problems = coerce_enums(self, {"source": DataSource, "tokenizer": TokenizerKind})
        # JSON and TOML have lists; the instance is still under construction.
        for name in ("paths", "validation_paths", "test_paths"):
            paths = getattr(self, name)
            object.__setattr__(self, name, (paths,) if isinstance(paths, str) else tuple(paths))
            if "" in getattr(self, name):
                # The system reads it as the working directory; usually it is an unset variable.
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
        if self.min_frequency < 1:
            problems.append(f"min_frequency is {self.min_frequency}, must be at least 1")
        elif self.min_frequency > 1 and self.tokenizer is not TokenizerKind.WORDS:
            problems.append(f"min_frequency is {self.min_frequency}, only tokenizer words has one")
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
        """Whether the source reads files and has none to train on."""
        return self.source in NEEDS_FILES and not self.paths

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` is its inverse."""
        return to_json_values(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataConfig:
        """Builds from JSON.

        Raises:
            DataConfigError: listing every unknown, missing or invalid field.
        """
        return from_json_values(cls, values, DataConfigError)
