"""`Task`: the data set of one run, as the trainer uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from model.data.batches import Batch
from model.nn.networks import Network
from model.spec.tokenizer import Tokenizer

Scores = Mapping[str, float | str]
"""Figures by name; a text says how a figure was computed, such as sacrebleu's signature."""


class TaskError(ValueError):
    """The data are missing, damaged, or do not fit the model."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """The validation score that selects the best weights."""

    name: str
    higher_is_better: bool

    def improves(self, value: float, best: float | None) -> bool:
        """Whether a score beats the best so far."""
        return best is None or (value > best if self.higher_is_better else value < best)


class Task(Protocol):
    """A prepared data set: its tokenizers, its batches, its scores."""

    @property
    def tokenizers(self) -> Mapping[str, Tokenizer]:
        """By file name: tokenizer.json, and target_tokenizer.json if the target has its own."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """JSON-ready: origin and size of the data, and `sha256` over all training examples."""

    @property
    def criterion(self) -> Criterion:
        """The score of `validate` that selects the best weights."""

    def batch(self, index: int) -> Batch:
        """One batch of an endless sequence; a function of configuration and index alone.

        A position in the data is thus a number: a resumed run continues from it, and processes share out the indices.
        """

    def validate(self, model: Network) -> Scores:
        """Scores on validation data, cheap enough to repeat; the model is in evaluation mode."""

    def test(self, model: Network) -> Scores:
        """Scores on test data, which select nothing; the model is in evaluation mode."""

    def baselines(self) -> Scores:
        """The same figures for methods without a model."""
