"""Every number of the lecture notes, once, with its source: the lessons and the parity tests read it here.

A *given* is an input of an example. A *result* is what the notes print of it; lessons compute it anew and show both.
Some inputs are ours, where the notes have words or symbols only. Needs NumPy alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

SIX_STEPS = "notes, “Transformer: Self-Attention” (six steps)"
RNN_AND_SELF_ATTENTION = "notes, “RNN and Self-Attention” (2024)"
IN_TRANSFORMERS = "notes, “Self Attention in Transformers”"
TRANSFORMERS = "notes, “Transformers”"
PAPER = "Vaswani et al. (2017)"
OURS = "ours"

SHOW_ME = ("Show", "me", "the", "money")
HELP_ME = ("help", "me")
ON_YOUR_LIFE = ("<start>", "not", "on", "your", "life", "<end>")
MONEY_SENTENCE = ("money", "bank", "grows")
RIVER_SENTENCE = ("river", "bank", "flows")
BANK = MONEY_SENTENCE.index("bank")
MONEY_POSITION = SHOW_ME.index("money")


def _given(value: Any, source: str) -> Any:
    return _field(value, source, is_result=False)


def _result(value: Any, source: str) -> Any:
    return _field(value, source, is_result=True)


def _field(value: Any, source: str, *, is_result: bool) -> Any:
    metadata = {"source": source, "is_result": is_result}
    if isinstance(value, list):
        return field(default_factory=lambda: np.array(value), metadata=metadata)
    return field(default=value, metadata=metadata)


@dataclass(frozen=True, eq=False, kw_only=True)
class Notes:
    """The numbers. Where a row has a word, columns have the same words in the same order."""

    # Six steps.
    model_width: int = _given(512, SIX_STEPS)
    head_width: int = _given(64, SIX_STEPS)
    root_of_head_width: float = _result(8.0, SIX_STEPS)

    # "help me!": each word's scores against both words, and the softmax of their quarters.
    help_me_width: int = _given(16, f"{TRANSFORMERS}, appendix")
    help_me_scores: Array = _given([[6.0, 4.0], [3.0, 8.0]], f"{TRANSFORMERS}, appendix")
    help_me_scaled: Array = _result([[1.5, 1.0], [0.75, 2.0]], f"{TRANSFORMERS}, appendix")
    help_me_weights: Array = _result([[0.62, 0.38], [0.22, 0.78]], f"{TRANSFORMERS}, appendix")

    # Two senses of *bank*: the weights of each word's mixture.
    money_weights: Array = _given([[0.7, 0.2, 0.1], [0.25, 0.7, 0.05], [0.1, 0.2, 0.7]], IN_TRANSFORMERS)
    river_weights: Array = _given([[0.8, 0.15, 0.05], [0.2, 0.78, 0.02], [0.4, 0.01, 0.59]], IN_TRANSFORMERS)
    # Each word a vector of (money, growth, river, water), *bank* the same in both sentences.
    money_bank_grows: Array = _given([[1.0, 0.2, 0.0, 0.0], [0.5, 0.0, 0.5, 0.1], [0.2, 1.0, 0.1, 0.0]], OURS)
    river_bank_flows: Array = _given([[0.0, 0.0, 1.0, 0.6], [0.5, 0.0, 0.5, 0.1], [0.0, 0.1, 0.6, 1.0]], OURS)

    # "Show me the money": the attention filter S, the words' embeddings, and their positions.
    show_me_weights: Array = _given(
        [[0.61, 0.18, 0.04, 0.17], [0.16, 0.57, 0.08, 0.19], [0.03, 0.07, 0.74, 0.16], [0.17, 0.23, 0.12, 0.48]],
        f"{TRANSFORMERS}, section 3.3",
    )
    show_me_embeddings: Array = _given(
        [[0.12, 0.63, 0.29, 0.41], [0.83, 0.34, 0.04, 0.53], [0.39, 0.77, 0.64, 0.09], [0.41, 0.08, 0.51, 0.87]],
        f"{TRANSFORMERS}, section 3.2",
    )
    frequency_base: float = _given(10000.0, f"{TRANSFORMERS}, section 3.2, equation 2")
    positions_in_degrees: Array = _result(
        [[0.0, 1.0, 0.0, 1.0], [0.02, 1.0, 0.0, 1.0], [0.04, 1.0, 0.0, 1.0], [0.05, 1.0, 0.0, 1.0]],
        f"{TRANSFORMERS}, section 3.2",
    )
    money_with_position: Array = _result([0.46, 1.08, 0.51, 1.87], f"{TRANSFORMERS}, section 3.2, equation 5")

    # "<start> not on your life <end>": scores up to the diagonal; the notes mask the rest, ours stood there.
    on_your_life_scores: Array = _given(
        [
            [16.2, 30.0, 30.0, 30.0, 30.0, 30.0],
            [3.2, 21.5, 30.0, 30.0, 30.0, 30.0],
            [1.9, 4.3, 18.7, 30.0, 30.0, 30.0],
            [2.7, 4.1, 7.6, 22.3, 30.0, 30.0],
            [4.4, 5.8, 6.9, 5.6, 24.5, 30.0],
            [4.0, 3.9, 6.7, 7.3, 6.1, 16.8],
        ],
        f"{TRANSFORMERS}, section 4.2; above the diagonal {OURS}",
    )

    # What the paper reached.
    english_german_bleu: float = _given(28.4, f"{RNN_AND_SELF_ATTENTION}, abstract of {PAPER}")
    english_french_bleu: float = _given(41.8, f"{RNN_AND_SELF_ATTENTION}, abstract of {PAPER}")
    bleu_above_earlier: float = _given(2.0, f"{RNN_AND_SELF_ATTENTION}, abstract of {PAPER}")
    days_of_training: float = _given(3.5, f"{RNN_AND_SELF_ATTENTION}, abstract of {PAPER}")
    num_cards: int = _given(8, f"{RNN_AND_SELF_ATTENTION}, abstract of {PAPER}")
    english_german_pairs: float = _given(4.5e6, f"{PAPER}, section 5.1")
    english_french_pairs: float = _given(36e6, f"{PAPER}, section 5.1")
    base_english_german_bleu: float = _given(27.3, f"{PAPER}, table 2")
    base_english_french_bleu: float = _given(38.1, f"{PAPER}, table 2")
    num_layers: int = _given(6, f"{TRANSFORMERS}, sections 3 and 4")


NOTES = Notes()
"""As the notes print them."""


def source(name: str) -> str:
    """Where a number comes from."""
    return str(_metadata(name)["source"])


def results() -> list[str]:
    """The names of the numbers that the notes compute."""
    return [each.name for each in fields(Notes) if each.metadata["is_result"]]


def _metadata(name: str) -> Any:
    return next(each.metadata for each in fields(Notes) if each.name == name)
