"""The scaling study's pictures with their captions: the results, and fits of their samples. Measures nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest import style
from loadtest.scaling import fit, operations
from loadtest.scaling.evidence import (
    Evidence,
    grid_of,
    mark_crossover,
    plot_curve,
    plot_series,
    tokens_axis,
)
from loadtest.scaling.fit import Array, Examination
from loadtest.style import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, logarithmic_axis, new_figure
from model.spec import cost

# Below this ratio of quadratic coefficients, a kernel does not skip masked pairs: between 1/2 and 1.
_SKIPS = 0.75
_MEBIBYTE = float(1 << 20)
# Series, color, marker and label of the memory picture's left drawing, and the caption's name for it.
_MEMORY = (
    ("memory_whole", BLUE, "o-", "whole prompt", "whole prompts"),
    ("memory_chunked", SKY, "s-", "in chunks", "chunked prompts"),
    ("memory_source", ORANGE, "v-", "source of an encoder-decoder", "sources"),
)


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: its name in files, title, caption and drawing."""

    name: str
    title: str
    caption: Callable[[Evidence], str]
    draw: Callable[[Evidence], Figure]

    def svg(self, evidence: Evidence) -> bytes:
        """The picture as SVG."""
        return style.to_svg(lambda: self.draw(evidence), "scaling")


def _plot_best_line(axes: Axes, evidence: Evidence, series: str, label: str) -> None:
    line = evidence.examined(series, 1)
    grid = grid_of(line)
    axes.plot(grid, 1e3 * line.curve.at(grid), color=GREY, linestyle="--", linewidth=1.1, label=label)


def _draw_law(evidence: Evidence) -> Figure:
    figure, (axes,) = new_figure()
    whole = plot_series(axes, evidence, "prefill", BLUE, "whole prompt")
    plot_series(axes, evidence, "prefill_chunked", SKY, f"in chunks of {evidence.chunk}", "s")
    _plot_best_line(axes, evidence, "prefill", "whole prompt, best line")
    extrapolated = 1e3 * fit.fit(whole.medians.without_longest(), 2, whole.curve.regimes).at([whole.longest])
    label = f"extrapolated from the others, {whole.extrapolation_error:.1%} off"
    axes.plot([whole.longest], extrapolated, "*", color=RED, markersize=11, markeredgecolor="white", label=label)
    mark_crossover(axes, whole)
    tokens_axis(axes, evidence.lengths("prefill", "prefill_chunked"), "prompt, tokens")
    logarithmic_axis(axes, "prefill, ms")
    axes.legend(loc="lower right")
    return figure


def _caption_law(evidence: Evidence) -> str:
    whole, chunked = evidence.examined("prefill"), evidence.examined("prefill_chunked")
    text = (
        "Server-side prefill at batch 1: every sample, medians, fits a + bn + cn² with 95 % bands. ΔBIC in favor of "
        f"the quadratic is {_gain(whole):.0f} for whole prompts and {_gain(chunked):.0f} in chunks."
    )
    if whole.coefficients[2] > 0:
        ratio = chunked.coefficients[2] / whole.coefficients[2]
        text += f" In chunks c is {ratio:.2f} of that of whole prompts: the kernel " + (
            "computes the pairs that the causal mask forbids."
            if ratio < _SKIPS
            else "skips what the causal mask forbids, so chunks save nothing."
        )
    return text


def _draw_terms(evidence: Evidence) -> Figure:
    found = evidence.examined("prefill")
    grid = np.linspace(0.0, found.longest, 200)
    terms = [1e3 * found.curve.term_at(degree, grid) for degree in range(3)]
    figure, (axes,) = new_figure()
    labels = ("a, constant", "b n, cost of each token", "c n², cost of each pair of tokens")
    axes.stackplot(grid, *terms, labels=labels, colors=(GREY, ORANGE, BLUE), alpha=0.75, linewidth=0)
    axes.plot(found.medians.lengths, 1e3 * found.medians.seconds, "o", color=BLACK, markersize=4, label="measured")
    mark_crossover(axes, found)
    tokens_axis(axes, grid, "prompt, tokens", is_logarithmic=False)
    axes.set_ylabel("prefill, ms")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, found.longest * 1.02)
    axes.legend(loc="upper left", bbox_to_anchor=(0.25, 1.0), reverse=True)
    return figure


def _caption_terms(evidence: Evidence) -> str:
    found = evidence.examined("prefill")
    return (
        f"The fitted terms of a whole prompt's prefill. Beyond n* = {_tokens(found.crossover)} tokens the quadratic "
        f"term exceeds the linear one; at {found.longest:,.0f} tokens it is {found.leading_share:.0%} of the time."
    )


def _draw_slope(evidence: Evidence) -> Figure:
    figure, (axes,) = new_figure()
    for series, color, marker, label in (
        ("prefill", BLUE, "o", "attention, whole prompt"),
        ("prefill_chunked", SKY, "s", f"attention, chunks of {evidence.chunk}"),
        ("gru", RED, "^", "recurrent model of equal size"),
    ):
        found = evidence.examined(series)
        at = fit.local_slopes(found)
        errors = np.clip([at.slopes - at.low, at.high - at.slopes], 0.0, None)
        looks: dict[str, Any] = {"fmt": marker, "color": color, "markersize": 4.5, "linewidth": 0.9, "label": label}
        axes.errorbar(at.lengths, at.slopes, errors, **looks)
        grid = grid_of(found)
        axes.plot(grid, found.curve.local_slope_at(grid), color=color, linewidth=1.3)
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (0, 3), "textcoords": "offset points"}
    for exponent, text in ((1.0, "linear"), (2.0, "quadratic")):
        axes.axhline(exponent, color=BLACK, linewidth=0.8, linestyle="--")
        axes.annotate(text, (0.01, exponent), **place)
    tokens_axis(axes, evidence.lengths("prefill", "prefill_chunked", "gru"), "prompt, tokens")
    axes.set_ylabel("local exponent, d ln t / d ln n")
    axes.set_ylim(0.0, 2.45)
    axes.legend(loc="lower right")
    return figure


def _caption_slope(evidence: Evidence) -> str:
    found = evidence.examined("prefill")
    return (
        "The local exponent: measured between adjacent lengths, with 95 % intervals, and that of the fitted curve. "
        f"It approaches 2 only far beyond n* = {_tokens(found.crossover)}: at {found.longest:,.0f} tokens it is "
        f"{found.local_slope:.2f} for whole prompts."
    )


def _draw_residuals(evidence: Evidence) -> Figure:
    figure, (left, right) = new_figure(2)
    found, samples = evidence.examined("prefill"), evidence.samples("prefill")
    medians = found.medians
    for degree, color, line, label in (
        (1, GREY, "s--", "a + bn"),
        (2, BLUE, "o-", "a + bn + cn²"),
        (3, PINK, "^:", "a + bn + cn² + dn³"),
    ):
        off = 100 * (fit.fit(medians, degree, found.curve.regimes).at(medians.lengths) / medians.seconds - 1.0)
        left.plot(medians.lengths, off, line, color=color, markersize=4, linewidth=1.2, label=label)
    left.set_ylabel("fit over median, %")
    left.legend()
    off = 100 * found.deviations(samples)
    right.scatter([length for length, _ in samples], off, s=7, color=BLUE, alpha=0.35, linewidths=0)
    residuals = 100 * (medians.seconds / found.curve.at(medians.lengths) - 1.0)
    right.plot(medians.lengths, residuals, "o-", color=BLUE, markersize=4)
    # Outliers would compress the rest: the title counts those beyond the axis.
    limit = max(10.0, 1.3 * float(np.quantile(np.abs(off), 0.95)))
    right.set_ylim(-limit, limit)
    if hidden := int(np.sum(np.abs(off) > limit)):
        right.set_title(f"{hidden} of {len(off)} samples lie beyond", loc="right", fontsize=9.0)
    right.set_ylabel("sample over fit, %")
    for axes in (left, right):
        axes.axhline(0.0, color=BLACK, linewidth=0.8)
        tokens_axis(axes, medians.lengths, "prompt, tokens")
    return figure


def _caption_residuals(evidence: Evidence) -> str:
    found = evidence.examined("prefill")
    return (
        "Whole prompts. Left: relative error of polynomials of three degrees at the medians. Right: every sample and "
        f"the medians against the quadratic. A cubic term would be {found.next_share:.1%} of the time at "
        f"{found.longest:,.0f} tokens; BIC(cubic) - BIC(quadratic) = {found.bic[3] - found.bic[2]:+.1f}."
    )


def _draw_decode(evidence: Evidence) -> Figure:
    figure, (axes,) = new_figure()
    own = plot_series(axes, evidence, "decode", GREEN, "context of a decoder-only model")
    cross = plot_series(axes, evidence, "cross_attention", PINK, "source of an encoder-decoder", "s")
    tokens_axis(axes, own.medians.lengths, "tokens attended to", is_logarithmic=False)
    axes.set_xlim(0, 1.02 * max(own.longest, cross.longest))
    axes.set_ylim(0, 1.12e3 * max(float(each.medians.seconds.max()) for each in (own, cross)))
    axes.set_ylabel("ms per token")
    axes.legend(loc="upper left")
    return figure


def _caption_decode(evidence: Evidence) -> str:
    def growth(series: str) -> str:
        found = evidence.examined(series)
        between = found.intervals[1]
        return f"{1e9 * found.coefficients[1]:.1f} ns ({1e9 * between.low:.1f}…{1e9 * between.high:.1f})"

    return (
        f"Server-side time per token with the KV cache is linear. It grows by {growth('decode')} per token of the "
        f"context; in an encoder-decoder by {growth('cross_attention')} per token of the source. The slope may change "
        "where keys and values fill one of the processor's caches."
    )


def _draw_cache(evidence: Evidence) -> Figure:
    figure, (axes,) = new_figure()
    without = plot_series(axes, evidence, "no_cache", RED, "without: the whole text again for each token", "s")
    found = plot_series(axes, evidence, "decode", GREEN, "with the cache")
    tokens_axis(axes, evidence.lengths("no_cache", "decode"), "context, tokens")
    logarithmic_axis(axes, "ms per token")
    longest = min(without.longest, found.longest)
    low, high = (1e3 * float(each.curve.at(longest)) for each in (found, without))
    axes.annotate("", (longest, high), (longest, low), arrowprops={"arrowstyle": "<->", "shrinkA": 4, "shrinkB": 4})
    place: dict[str, Any] = {"xytext": (-5, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
    axes.annotate(f"{high / low:,.0f} times", (longest, (low * high) ** 0.5), **place)
    axes.legend(loc="upper left")
    return figure


def _caption_cache(evidence: Evidence) -> str:
    same, asked = evidence.results["facts"]["same_tokens_without_cache"]
    return (
        "Time per token with the KV cache, and without it: the text so far sent again as a new prompt. Both ways gave "
        f"the same tokens: {same} of {asked}."
    )


def _draw_encoder(evidence: Evidence) -> Figure:
    figure, (axes,) = new_figure()
    found = plot_series(axes, evidence, "encoder", ORANGE, "encoding and a first token")
    _plot_best_line(axes, evidence, "encoder", "best line")
    mark_crossover(axes, found)
    tokens_axis(axes, found.medians.lengths, "source, tokens")
    logarithmic_axis(axes, "encoding, ms")
    axes.legend(loc="lower right")
    return figure


def _caption_encoder(evidence: Evidence) -> str:
    found = evidence.examined("encoder")
    return (
        "An encoder-decoder of the same sizes: every source token attends to every other, in both directions. n* is "
        f"{_tokens(found.crossover)} tokens, ΔBIC in favor of the quadratic {_gain(found):.0f}."
    )


def _draw_memory(evidence: Evidence) -> Figure:
    figure, (left, right) = new_figure(2)
    kv = ("kv", GREEN, "^", "reported by the server", "")
    for axes, (series, color, marker, label, _) in (*((left, each) for each in _MEMORY), (right, kv)):
        if samples := evidence.samples(series):
            lengths, values = np.array(sorted(samples)).T
            axes.plot(lengths, values / _MEBIBYTE, marker, color=color, markersize=5, label=label)
    held = [length for length, _ in evidence.samples("kv")]
    lengths = np.linspace(min(held), max(held), 100)
    computed = [cost.kv_bytes(evidence.config, int(length)) / _MEBIBYTE for length in lengths]
    right.plot(lengths, computed, color=BLACK, linewidth=1.0, linestyle="--", zorder=0, label="computed")
    left.set_ylabel("peak of the process, MiB")
    right.set_ylabel("keys and values, MiB")
    for axes, label in ((left, "prompt, tokens"), (right, "tokens")):
        tokens_axis(axes, lengths, label, is_logarithmic=False)
        axes.set_xlim(0, 1.04 * max(held))
        axes.set_ylim(0.0, 1.1 * axes.get_ylim()[1])
        axes.legend(loc="best")
    return figure


def _caption_memory(evidence: Evidence) -> str:
    text = "Memory of a fresh server process for each length. Keys and values grow linearly, as computed"
    start = evidence.results["facts"].get("start_bytes", {})
    for name, *_, what in _MEMORY:
        if len(samples := sorted(evidence.samples(name))) > 1:
            (shortest, least), (longest, most) = samples[0], samples[-1]
            growth = (most - least) / 1024 / (longest - shortest)
            text += f"; for {what} the peak grows by {growth:.1f} KiB a token from {shortest:,.0f} to {longest:,.0f}"
            if name in start:
                text += f" ({start[name] / _MEBIBYTE:,.0f} MiB before the prompt, after the parity check at start)"
    length = evidence.config.context
    held = 4 * evidence.config.num_heads * length**2 / _MEBIBYTE
    return f"{text}. All attention scores of one layer at {length:,.0f} tokens would take {held:,.0f} MiB."


def _draw_operations(evidence: Evidence) -> Figure:
    figure, (left, right) = new_figure(2)
    found, config = evidence.examined("prefill"), evidence.config
    grid = grid_of(found)
    flops = [operations.prefill(config, int(length), config.context) for length in grid]
    attention, linear = (np.array([getattr(each, part) for each in flops]) for part in ("attention", "linear"))
    allowed = attention * (grid + 1) / (2 * grid)
    for share, color, line, label in (
        (found.curve.term_at(2, grid) / found.curve.at(grid), BLUE, "-", "of the time, by the fit"),
        (attention / (attention + linear), BLACK, "--", "of all FLOPs"),
        (allowed / (allowed + linear), GREY, "-.", "of those that the mask allows"),
    ):
        left.plot(grid, 100 * share, color=color, linestyle=line, label=label)
    left.set_ylabel("attention's share, %")
    left.set_ylim(0, 100)
    left.legend(loc="upper left")
    for series, color, marker, label, chunk in (
        ("prefill", BLUE, "o-", "whole prompt", config.context),
        ("prefill_chunked", SKY, "s-", f"chunks of {evidence.chunk}", evidence.chunk),
    ):
        medians = evidence.examined(series).medians
        done = np.array([operations.prefill(config, int(length), chunk).total for length in medians.lengths])
        right.plot(medians.lengths, done / medians.seconds / 1e9, marker, color=color, markersize=4, label=label)
    right.set_ylabel("GFLOP/s")
    right.set_ylim(bottom=0)
    right.legend(loc="lower right")
    tokens_axis(left, grid, "prompt, tokens")
    tokens_axis(right, evidence.lengths("prefill", "prefill_chunked"), "prompt, tokens")
    return figure


def _caption_operations(evidence: Evidence) -> str:
    found, by_flops = evidence.examined("prefill"), operations.crossover(evidence.config)
    return (
        f"Time and FLOPs of whole prompts. Attention takes half of all FLOPs at {by_flops:,.0f} tokens, half of those "
        f"that the causal mask allows at {2 * by_flops:,.0f}, and half of the length-dependent time at "
        f"{_tokens(found.crossover)}. Right: matrix-product FLOPs a second, masked pairs included."
    )


def _draw_recurrence(evidence: Evidence) -> Figure:
    figure, (axes,) = new_figure()
    for series, color, marker, label in (
        ("prefill", BLUE, "o", "attention, whole prompt"),
        ("gru_whole", ORANGE, "v", "recurrent model of equal size, whole text"),
        ("gru", RED, "^", f"the same, in chunks of {evidence.chunk}"),
    ):
        if evidence.samples(series):
            found = evidence.examined(series)
            plot_curve(axes, found, color, scale=1e6, per_token=True)
            axes.plot(found.medians.lengths, 1e6 * _per_token(found), marker, color=color, markersize=5, label=label)
    tokens_axis(axes, evidence.lengths("prefill"), "prompt, tokens")
    axes.set_ylabel("µs per token of the prompt")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    return figure


def _caption_recurrence(evidence: Evidence) -> str:
    facts, control = evidence.results["facts"]["gru"], evidence.results["controls"]

    def verdict(series: str) -> str:
        seconds = _per_token(evidence.examined(series))
        refused = "refused" if control[f"{series}_rejects_quadratic"] else "accepted"
        return f"{refused} (a token of the longest text costs {seconds[-1] / seconds.min():.2f} times the cheapest)"

    text = (
        f"The linear baseline: a recurrent model of {facts['num_parameters']:,} parameters in the same runtime, beside "
        f"a transformer of {cost.num_parameters(evidence.config):,}: n d² operations against n² d, as in table 1 of "
        f"Vaswani et al. (2017). A quadratic of its times, read in chunks, is {verdict('gru')}"
    )
    if evidence.samples("gru_whole"):
        text += f"; read in one run, it is {verdict('gru_whole')}"
    return f"{text}."


def _draw_end_to_end(evidence: Evidence) -> Figure:
    figure, (axes,) = new_figure()
    server, user = evidence.examined("prefill_chunked"), evidence.examined("locust").medians
    client = plot_series(axes, evidence, "end_to_end", PINK, "first token, plain client")
    grid, seconds = grid_of(server), 1e3 * server.curve.at(grid_of(server))
    axes.plot(user.lengths, 1e3 * user.seconds, "x", color=BLACK, markersize=6, label="first token, Locust's user")
    axes.plot(grid, seconds, color=SKY, linestyle="--", linewidth=1.4, label="prefill, server")
    tokens_axis(axes, client.medians.lengths, "prompt, tokens")
    logarithmic_axis(axes, "first token, ms")
    axes.legend(loc="lower right")
    return figure


def _caption_end_to_end(evidence: Evidence) -> str:
    client, server = evidence.examined("end_to_end"), evidence.examined("prefill_chunked")
    over = 1e3 * float(np.median(client.medians.seconds - server.medians.seconds))
    user = evidence.examined("locust")
    return (
        f"Time to first token of a gRPC stream, one user, chunks of {evidence.chunk}. A plain client measures "
        f"{over:.1f} ms more than the server, in the median over the lengths. n* is {_tokens(user.crossover)} tokens "
        f"as measured by Locust's user, {_tokens(server.crossover)} by the server."
    )


def _gain(found: Examination) -> float:
    """ΔBIC in favor of the quadratic over the line."""
    return found.bic[1] - found.bic[2]


def _per_token(found: Examination) -> Array:
    """Median seconds per token of the text, by length."""
    seconds: Array = found.medians.seconds / found.medians.lengths
    return seconds


def _tokens(length: float) -> str:
    return f"{length:,.0f}" if np.isfinite(length) else "infinity"


PICTURES = (
    Picture("law", "Prefill is quadratic", _caption_law, _draw_law),
    Picture("terms", "The terms of prefill", _caption_terms, _draw_terms),
    Picture("slope", "The local exponent", _caption_slope, _draw_slope),
    Picture("residuals", "Residuals of the fit", _caption_residuals, _draw_residuals),
    Picture("decode", "With the KV cache a token is linear", _caption_decode, _draw_decode),
    Picture("cache", "Without it, quadratic", _caption_cache, _draw_cache),
    Picture("encoder", "The encoder", _caption_encoder, _draw_encoder),
    Picture("recurrence", "A network without attention", _caption_recurrence, _draw_recurrence),
    Picture("operations", "Time and FLOPs", _caption_operations, _draw_operations),
    Picture("memory", "Memory", _caption_memory, _draw_memory),
    Picture("end-to-end", "Time to first token, as clients measure it", _caption_end_to_end, _draw_end_to_end),
)
