"""Lesson: two scores, additive and dot product; why dot products are scaled."""

from __future__ import annotations

import time

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lessons import small
from lessons.frame import Lesson, Page
from lessons.tasks import Reversal
from loadtest import style
from model.evaluate import exact_match, pair_loss
from model.nn.attention import AdditiveScore, attention_weights, dot_scores
from model.nn.transformer import build, num_parameters

_WIDTHS = (4, 16, 64, 256, 1024)
_STEPS = 200
_KEYS = 8
_LENGTH, _WIDTH = 256, 64


def gradient(page: Page, scores: Tensor) -> float:
    """The mean norm of softmax's Jacobian diag(p) - ppᵀ over rows of scores `[R, S]`."""
    norms = []
    for row in scores:
        jacobian: Tensor = torch.func.jacrev(lambda each: page.call(attention_weights, each))(row)
        norms.append(jacobian.norm())
    return float(torch.stack(norms).mean())


def fill(page: Page) -> None:
    """Fills the page."""
    page.say(
        "A score says how well a key answers a query. Bahdanau's is additive, vᵀtanh(q + k), with a learned v; the "
        "transformer's, q · k/√d_k, is a matrix product for all pairs at once. Times are this run's, on one thread."
    )
    _same_weights(page)
    _trained(page)
    page.say(
        "Why divide? Random queries and keys of d_k numbers have dot products of variance d_k. Softmax of large scores "
        "gives one word nearly all the weight; there a small change of a score changes nothing, so its gradient "
        "vanishes. Divided by √d_k the gradient does not depend on the width. Divided by d_k, as one slide has it, the "
        "weights become equal, whatever the query is."
    )
    page.code(gradient)
    lines: dict[str, list[float]] = {"q · k": [], "/ √d_k": [], "/ d_k": []}
    rows = []
    for width in _WIDTHS:
        q, k = (small.normal(page.seed + shift, 1, 1, count, width) for shift, count in ((0, 32), (1, _KEYS)))
        for name, scale in zip(lines, (1.0, width**-0.5, 1.0 / width), strict=True):
            scores = page.call(dot_scores, q, k, scale=scale)[0, 0]
            lines[name].append(gradient(page, scores))
            largest = page.call(attention_weights, scores).amax(-1).mean()
            rows.append((f"d_k {width}, {name}", largest, lines[name][-1]))
    page.table("softmax of scores", ("scores", "largest weight", "norm of its gradient"), rows, 4)

    def draw() -> Figure:
        figure, (axes,) = style.new_figure()
        for (name, values), color, mark in zip(lines.items(), (style.RED, style.BLUE, style.GREY), "os^", strict=True):
            axes.plot(_WIDTHS, values, color=color, marker=mark, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("d_k, width of a head")
        axes.set_ylabel("norm of softmax's gradient")
        axes.set_ylim(bottom=0.0)
        axes.legend()
        return figure

    page.picture = style.to_svg(draw, LESSON.name).decode()
    page.look(
        "The unscaled gradient falls as heads get wider: the softmax saturates. Scaled by the root it stays level. "
        "Divided by d_k it is level, too, but there the weights are nearly equal: attention averages."
    )


def _same_weights(page: Page) -> None:
    """Both scores of the same queries and keys, and what each costs."""
    score = AdditiveScore(small.config(num_heads=1, d_model=_WIDTH))
    with torch.no_grad():
        score.vector.copy_(small.normal(page.seed + 2, 1, _WIDTH, deviation=_WIDTH**-0.5))
    q, k = (small.normal(page.seed + shift, 1, 1, _LENGTH, _WIDTH) for shift in (3, 4))
    rows = []
    for name, function, numbers in (
        ("dot product", dot_scores, q.shape[-2] * k.shape[-2]),
        ("additive", score, q.shape[-2] * k.shape[-2] * q.shape[-1]),
    ):
        with torch.no_grad():
            seconds = []
            for _ in range(5):
                started = time.perf_counter()
                found = page.call(function, q, k)
                seconds.append(time.perf_counter() - started)
        rows.append((name, found.var(), numbers, 1e3 * min(seconds)))
    header = ("score", "variance", "numbers in memory", "milliseconds")
    page.table(f"{_LENGTH} queries and keys of {_WIDTH} numbers", header, rows, 3)


def _trained(page: Page) -> None:
    """The same small model with either score, on the same task."""
    task = Reversal(num_symbols=6, length=6, seed=page.seed)
    rows = []
    for score in ("dot", "additive"):
        model = build(small.pair_config(task.vocab_size, num_heads=2, attention_score=score), page.seed)
        started = time.perf_counter()
        page.call(small.train, model, task.batch, steps=_STEPS, seed=page.seed)
        milliseconds = 1e3 * (time.perf_counter() - started) / _STEPS
        pairs = task.held_out(200)
        right, loss = page.call(exact_match, model, pairs), page.call(pair_loss, model, pairs).loss
        rows.append((score, right, loss, num_parameters(model), milliseconds))
    page.say(
        "Two models differ in their score alone. Each reverses sequences of {length} symbols, drawn from {symbols}. "
        "Sequences this short have few pairs, so that the rest of the model decides a step's time:",
        length=task.length,
        symbols=task.num_symbols,
    )
    header = ("score", "reversed right", "nats a symbol", "parameters", "milliseconds a step")
    page.table("trained alike", header, rows, 3)


LESSON = Lesson("scores", "Additive and dot-product scores", fill)
