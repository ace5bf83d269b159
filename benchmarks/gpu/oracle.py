"""What PyTorch answers in float32 on the same device, without a cache: whom a greedy choice is held to.

Two choices that differ are no error where the oracle itself hardly prefers one: rounding decides there. So a difference
is told with its gap, how much higher the oracle's own logit of its choice is than that of the other, and is a tie while
that is at most twice what a logit may be off by (`model.spec.golden`), since both may be off in opposite directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from model.nn import reference
from model.nn.transformer import EncoderDecoder, Transformer
from model.spec.golden import Float32, Tolerance


@dataclass(frozen=True, slots=True)
class Choices:
    """Greedy choices beside the oracle's, given the same tokens before: how many, how many alike, and how the rest lie.

    `widest_gap` is the largest of a difference, in units of the spread (standard deviation) of the sequence's logits;
    `num_wrong` are those that are no ties.
    """

    num: int
    num_alike: int
    num_wrong: int
    widest_gap: float

    @property
    def agreement(self) -> float:
        """Share of equal choices."""
        return self.num_alike / self.num

    def __add__(self, other: Choices) -> Choices:
        """Of two sequences together."""
        return Choices(
            self.num + other.num,
            self.num_alike + other.num_alike,
            self.num_wrong + other.num_wrong,
            max(self.widest_gap, other.widest_gap),
        )


class Oracle:
    """PyTorch's answers.

    Args:
        model: in float32, on the device.
    """

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def judge(self, prompt: Sequence[int], chosen: Sequence[int], tolerance: Tolerance) -> Choices:
        """Holds each of the tokens that were chosen after a prompt, or source, to the oracle's choice there.

        Args:
            prompt: what was asked.
            chosen: what was answered.
            tolerance: how far a logit may be off.
        """
        return _judge(self._logits_before(prompt, chosen), chosen, tolerance)

    def judge_model(
        self, model: Transformer, prompt: Sequence[int], chosen: Sequence[int], tolerance: Tolerance
    ) -> Choices:
        """The same for what another model, in whatever precision, would choose in each of these places."""
        logits = self._logits_before(prompt, chosen)
        return _judge(logits, _choices(model, *_ids(model, prompt, chosen))[-len(chosen) :], tolerance)

    def is_tie(self, prompt: Sequence[int], first: Sequence[int], second: Sequence[int], tolerance: Tolerance) -> bool:
        """Whether two answers part where the oracle sees a tie. What follows then is another text, and not judged."""
        parting = next(
            (index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None
        )
        if parting is None:
            return len(first) == len(second)
        logits = self._logits_before(prompt, first[: parting + 1])
        both = logits[parting, [first[parting], second[parting]]]
        # Of the two the worse one beside the best of all: two wrong answers may lie side by side.
        return float(logits[parting].max() - both.min()) <= 2 * tolerance.of(logits)

    def _logits_before(self, prompt: Sequence[int], chosen: Sequence[int]) -> Float32:
        """The logits from which each chosen token comes, `[len(chosen), V]`."""
        logits: Float32 = reference.logits(self._model, *_ids(self._model, prompt, chosen)).numpy()
        return logits[-len(chosen) :]


def _ids(
    model: Transformer, prompt: Sequence[int], chosen: Sequence[int]
) -> tuple[Sequence[int], Sequence[int] | None]:
    """What a model is given to choose each of these tokens: its own sequence, and a source where it reads one."""
    if model.config.is_encoder_decoder:
        return [model.config.bos_id, *chosen[:-1]], prompt
    return [*prompt, *chosen[:-1]], None


def _choices(model: Transformer, sequence: Sequence[int], source: Sequence[int] | None) -> list[int]:
    """What comes most likely after each token, in the model's own precision."""
    device = model.embedding.tokens.weight.device
    ids = torch.tensor([sequence], device=device)
    with torch.inference_mode():
        if isinstance(model, EncoderDecoder):
            sources = torch.tensor([source], device=device)
            logits = model(sources, torch.tensor([sources.shape[1]], device=device), ids)
        else:
            logits = model(ids)
    chosen: list[int] = logits[0].argmax(-1).tolist()
    return chosen


def _judge(logits: Float32, chosen: Sequence[int], tolerance: Tolerance) -> Choices:
    """Choices beside the oracle's logits for them, `[len(chosen), V]`."""
    gaps = logits.max(-1) - logits[np.arange(len(chosen)), chosen]
    return Choices(
        num=len(chosen),
        num_alike=int((gaps == 0).sum()),
        num_wrong=int((gaps > 2 * tolerance.of(logits)).sum()),
        widest_gap=float(gaps.max() / (logits.std() or 1.0)),
    )
