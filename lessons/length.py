"""Lesson: n²; time against length here and now, the crossover, what is cut and what the cache changes."""

from __future__ import annotations

import time
from typing import Any

from matplotlib.figure import Figure

from lessons import small
from lessons.frame import Lesson, Page
from lessons.timing import LENGTHS, measure
from loadtest import style
from loadtest.machine import describe
from model.spec import cost
from model.training.presets import resolve


def fill(page: Page) -> None:
    """Fills the page."""
    config = small.config(vocab_size=256, context=max(LENGTHS), d_model=64, num_heads=2, d_ff=256)
    crossover = page.call(cost.crossover_length, config)
    page.say(
        "Every token attends to every other: n tokens make n² scores. All else in a layer grows with n. In a small "
        "model (width {width}, {layers} layers) attention takes half of the operations from {crossover} tokens on; in "
        "the paper's, from {paper}.",
        width=config.d_model,
        layers=config.num_layers,
        crossover=crossover,
        paper=page.call(cost.crossover_length, page.call(resolve, "paper").transformer),
    )
    page.code(measure)
    rows = measure(page, config)
    machine = describe()
    page.say(
        "Measured here and now on {processor}, one thread, on {day}; run the lesson for the times of your machine. The "
        "exponent is that of the step from the length above: one is a line, two is a square.",
        processor=machine["processor"] or "this processor",
        day=time.strftime("%Y-%m-%d"),
    )
    header = (
        "tokens",
        "whole prompt, ms",
        "exponent",
        "a token with cache, ms",
        "exponent, cached",
        "scores, MiB",
        "share n²",
    )
    page.table("time against length", header, rows, 2)
    last, half = rows[-1], rows[-2]
    page.say(
        "Twice the tokens cost {whole:.1f} times the time of a whole prompt, and {cached:.1f} times that of one more "
        "token with cached keys and values. Without the cache, that token would cost the whole prompt anew: "
        "{ratio:.0f} times as much. The score matrices of one sequence take {memory:.0f} MiB where they are written "
        "out, as in the notes, which cut long inputs for it; the fused kernel timed here never writes them.",
        whole=last[1] / half[1],
        cached=last[3] / half[3],
        ratio=last[1] / last[3],
        memory=last[5],
    )
    page.picture = style.to_svg(lambda: _draw(rows, crossover), LESSON.name).decode()
    page.look(
        "On two logarithmic axes a power is a line. The whole prompt bends upward where attention takes over; a token "
        "with the cache stays nearly level, since it reads n keys instead of computing n² scores. The served system's "
        "own measurement, with intervals, is the page on the law."
    )


def _draw(rows: list[tuple[Any, ...]], crossover: int) -> Figure:
    figure, (axes,) = style.new_figure()
    lengths = [row[0] for row in rows]
    axes.plot(lengths, [row[1] for row in rows], color=style.BLUE, marker="o", label="whole prompt")
    axes.plot(lengths, [row[3] for row in rows], color=style.GREEN, marker="s", label="one token, with the cache")
    first = rows[0]
    for power, mark, name in ((1, ":", "n"), (2, "--", "n²")):
        line = [first[1] * (length / first[0]) ** power for length in lengths]
        axes.plot(lengths, line, color=style.GREY, linestyle=mark, label=f"{name}, from the first")
    axes.axvline(crossover, color=style.ORANGE, linewidth=0.8, label="crossover of the operations")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens")
    style.logarithmic_axis(axes, "milliseconds")
    axes.legend()
    return figure


LESSON = Lesson("length", "n²: the price of length", fill)
