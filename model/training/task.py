"""What the trainer asks of a data set made ready for one run. Knows nothing of any data set in particular."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from model.data.batches import Batch
from model.nn.transformer import Transformer
from model.spec.tokenizer import Tokenizer

Scores = Mapping[str, float | str]
"""Figures by name; a text is how a figure of nearly the same name was computed, such as sacrebleu's signature."""


class TaskError(ValueError):
    """The data are not there, are damaged, or do not fit the model."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """The validation score that says which weights are best."""

    name: str
    higher_is_better: bool

    def improves(self, value: float, best: float | None) -> bool:
        """Whether a score beats the best so far."""
        return best is None or (value > best if self.higher_is_better else value < best)


class Task(Protocol):
    """A data set made ready: its tokenizers, its batches, its scores."""

    @property
    def tokenizers(self) -> Mapping[str, Tokenizer]:
        """By file name: tokenizer.json, and target_tokenizer.json where the target has another."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """JSON-ready: where the data come from, how much there is, and `sha256` over all that is trained on."""

    @property
    def criterion(self) -> Criterion:
        """Which of `validate`'s scores counts."""

    def batch(self, index: int) -> Batch:
        """One batch of an endless sequence; a function of configuration and index alone.

        So a position in the data is a number: a resumed run asks for the next one, and several processes share out
        the indices among themselves.
        """

    def validate(self, model: Transformer) -> Scores:
        """Scores on validation data, quick enough for now and then; the model is in evaluation mode."""

    def test(self, model: Transformer) -> Scores:
        """Scores on test data, which nothing was ever chosen by; the model is in evaluation mode."""

    def baselines(self) -> Scores:
        """The same figures of what needs no model."""
