"""Lesson: self-attention in six steps, word by word, and then as one matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

from lessons import small
from lessons.frame import Lesson, Page, array
from lessons.notes import HELP_ME, SHOW_ME
from lessons.runtime import Computation, run_onnx_runtime
from model.nn.attention import SelfAttention, attend, attention_weights, dot_scores

_SHOWN = 6


def word_by_word(page: Page, attention: SelfAttention, x: Tensor) -> list[Tensor]:
    """The six steps, for one word after the other: `[1, S, d]` → for each word z `[d_v]`."""
    parts = [attention.split(page.call(attention.project, word[None, None])) for word in x[0]]  # 1: q, k, v
    outputs = []
    for q, _, _ in parts:
        scores = torch.cat([page.call(dot_scores, q, k, scale=1.0) for _, k, _ in parts], dim=-1)  # 2: q · k
        scaled = scores / attention.head_dim**0.5  # 3: / √d_k
        weights = page.call(attention_weights, scaled)  # 4: softmax
        values = torch.cat([v for _, _, v in parts], dim=-2)
        weighted = weights.transpose(-1, -2) * values  # 5: each word's weight times each number of its value
        outputs.append(weighted.sum(-2).flatten())  # 6: sum
    return outputs


def fill(page: Page) -> None:
    """Fills the page."""
    page.say("Self-attention by hand, in the sizes of the notes, which are the paper's:")
    width, head = page.given("model_width"), page.given("head_width")
    attention = SelfAttention(small.config(d_model=width, num_heads=1, head_dim=head))
    with torch.no_grad():
        attention.qkv.weight.copy_(small.normal(page.seed, 3 * head, width, deviation=width**-0.5))
    x = small.normal(page.seed + 1, 1, len(SHOW_ME), width)
    page.say(
        "Each word is a vector of {width} numbers. Three learned matrices of {rows} × {columns} make of it a query q, "
        "a key k and a value v of {head} numbers each. Here they are for “Show me the money”, with random weights.",
        width=width,
        rows=width,
        columns=head,
        head=head,
    )
    page.code(word_by_word)
    with torch.no_grad():
        z = torch.stack(word_by_word(page, attention, x))
        q, k, v = attention.split(page.call(attention.project, x))
        scores, scaled = page.call(dot_scores, q, k, scale=1.0), page.call(dot_scores, q, k)
        weights = page.call(attention_weights, scaled)
        whole = page.call(attend, q, k, v)[0, 0]
    page.show("1. the first word's query, its first numbers", q[0, 0, 0, :_SHOWN])
    page.show("2. scores: every query with every key", scores[0, 0], rows=SHOW_ME)
    page.compare("root_of_head_width", head**0.5, 0)
    page.show("3. scores / √d_k", scaled[0, 0], rows=SHOW_ME)
    page.show("4. softmax: each row is a distribution", weights[0, 0], rows=SHOW_ME)
    weighted = weights[0, 0, 0, :, None] * v[0, 0]
    page.show(
        "5. the first word's weights, each times its word's value (the Hadamard step), first numbers",
        weighted[:, :_SHOWN],
        4,
    )
    page.show("6. their sum, the first word's output", z[0, :_SHOWN], 4)
    page.say("The same as one matrix expression, softmax(QKᵀ/√d_k)V, in torch and in ONNX Runtime:")
    page.show("matrix, torch", whole[0, :_SHOWN], 4)
    in_runtime = page.call(run_onnx_runtime, Computation(attend), *map(array, (q, k, v)))[0, 0]
    page.show("matrix, ONNX Runtime", in_runtime[0, :_SHOWN], 4)
    _why_the_root(page, head)
    _help_me(page)
    for title, values in (
        ("not scaled", scores),
        ("/ √d_k", scaled),
        ("/ d_k", page.call(dot_scores, q, k, scale=1.0 / head)),
    ):
        page.heat(title, SHOW_ME, SHOW_ME, page.call(attention_weights, values)[0, 0])
    page.look(
        "Without scaling one word takes nearly all of each row; divided by d_k all words get about the same, and the "
        "query no longer matters. The root lies between: it keeps the scores' variance at one."
    )


def _why_the_root(page: Page, head: int) -> None:
    """The variance of scores over many pairs."""
    q, k = (small.normal(page.seed + shift, 1, 1, 1024, head) for shift in (2, 3))
    scales = {"q · k": 1.0, "/ √d_k, the paper": head**-0.5, "/ d_k, a slide": 1.0 / head}
    page.say(
        "One slide of the notes divides by d instead of √d_k. The variance of the scores of random queries and keys "
        "tells them apart: a sum of d_k products of unit variance has variance d_k."
    )
    rows = [(name, page.call(dot_scores, q, k, scale=scale).var()) for name, scale in scales.items()]
    page.table("variance of scores", ("divisor", "variance"), rows, 3)


def _help_me(page: Page) -> None:
    """The notes' own example, from its scores on."""
    page.say("The notes' own example, “help me”, begins with the scores and divides them by the root of the width:")
    width, scores = page.given("help_me_width"), torch.from_numpy(page.given("help_me_scores"))
    # With the rows of an identity as keys, a query's scores are its own first numbers.
    q, k = torch.zeros(1, 1, 2, width, dtype=torch.float64), torch.eye(2, width, dtype=torch.float64)[None, None]
    q[..., :2] = scores
    scaled = page.call(dot_scores, q, k)
    page.compare("help_me_scaled", scaled[0, 0], rows=HELP_ME)
    page.compare("help_me_weights", page.call(attention_weights, scaled)[0, 0], rows=HELP_ME)


LESSON = Lesson("six-steps", "Self-attention in six steps", fill, is_exact=True)
