"""The scaling study's pictures. Measures nothing: what is shown is in the results, or fitted anew from its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from loadtest import fit, operations, style
from loadtest.claims import BASELINES, CLAIMS, WITNESSES
from loadtest.fit import Array, Examination
from loadtest.style import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, logarithmic_axis, new_figure
from model.spec import cost
from model.spec.config import ModelConfig

Results = Mapping[str, Any]

# Between half the square and all of it.
_SKIPS = 0.75
_DEGREES: Mapping[str, int] = {claim.series: claim.degree for claim in (*CLAIMS, *WITNESSES, *BASELINES)}


class Evidence:
    """The results, and what their samples come to: fitted anew, with the draws and the seed that judged them."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.config = ModelConfig.from_dict(results["facts"]["config"])
        self.chunk: int = results["settings"]["chunk"]
        self._examined: dict[tuple[str, int], Examination] = {}

    def examined(self, series: str, degree: int | None = None) -> Examination:
        """A series under the law that is claimed for it, or another."""
        key = series, _DEGREES[series] if degree is None else degree
        if key not in self._examined:
            draws, seed = self.results["draws"], self.results["settings"]["seed"]
            self._examined[key] = fit.examine(self.samples(series), key[1], draws=draws, seed=seed)
        return self._examined[key]

    def samples(self, series: str) -> list[tuple[float, float]]:
        """A series as it was taken; empty if it was not."""
        return [(length, value) for length, value in self.results["series"][series]]


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: its name in files, its title, what it shows in a sentence or two, and how it is drawn."""

    name: str
    title: str
    caption: Callable[[Evidence], str]
    draw: Callable[[Evidence], Figure]


def draw(picture: Picture, evidence: Evidence, file_format: str = "svg") -> bytes:
    """A picture's bytes, SVG or PNG."""
    return style.to_bytes(lambda: picture.draw(evidence), "scaling", file_format)


def _tokens_axis(axes: Axes, lengths: Sequence[float] | Array, label: str, *, is_logarithmic: bool = True) -> None:
    """Lengths from left to right, at powers of two where logarithmic."""
    axes.set_xlabel(label)
    axes.grid(visible=True, alpha=0.25)
    if is_logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_xlim(float(np.min(lengths)) / 1.12, float(np.max(lengths)) * 1.12)
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _grid(examined: Examination) -> Array:
    """Where a curve is drawn."""
    return np.geomspace(examined.medians.lengths[0], examined.longest, 200)


def _plot(axes: Axes, evidence: Evidence, series: str, colour: str, label: str, *, marker: str = "o") -> Examination:
    """Every sample, the medians, the fit and its band; in milliseconds."""
    found = evidence.examined(series)
    lengths, values = np.array(evidence.samples(series)).T
    grid = _grid(found)
    low, high = found.bootstrap.band(grid)
    axes.scatter(lengths, 1e3 * values, s=5, color=colour, alpha=0.25, linewidths=0)
    axes.fill_between(grid, 1e3 * low, 1e3 * high, color=colour, alpha=0.25, linewidth=0)
    axes.plot(grid, 1e3 * found.curve.at(grid), color=colour, linewidth=1.3)
    axes.plot(
        found.medians.lengths,
        1e3 * found.medians.seconds,
        marker,
        color=colour,
        markersize=4.5,
        markeredgecolor="white",
        markeredgewidth=0.6,
        label=label,
    )
    return found


def _mark_crossover(axes: Axes, found: Examination) -> None:
    """A line at n*, if it lies among the lengths."""
    if not found.medians.lengths[0] <= found.crossover <= found.longest:
        return
    axes.axvline(found.crossover, color=BLACK, linewidth=0.9, linestyle=":")
    axes.annotate(
        f"n* = {found.crossover:,.0f}",
        (found.crossover, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(3, -3),
        textcoords="offset points",
        va="top",
    )


def _draw_law(evidence: Evidence) -> Figure:
    figure, (axes,) = new_figure()
    whole = _plot(axes, evidence, "prefill", BLUE, "whole prompt")
    _plot(axes, evidence, "prefill_chunked", SKY, f"in chunks of {evidence.chunk}", marker="s")
    grid = _grid(whole)
    line = evidence.examined("prefill", 1).curve
    axes.plot(grid, 1e3 * line.at(grid), color=GREY, linestyle="--", linewidth=1.1, label="whole prompt, best line")
    shorter = fit.fit(whole.medians.without_longest(), 2)
    axes.plot(
        [whole.longest],
        1e3 * shorter.at([whole.longest]),
        "*",
        color=RED,
        markersize=11,
        markeredgecolor="white",
        label=f"foretold from the others, {whole.extrapolation_error:.1%} off",
    )
    _mark_crossover(axes, whole)
    both = np.concatenate([evidence.examined(each).medians.lengths for each in ("prefill", "prefill_chunked")])
    _tokens_axis(axes, both, "prompt, tokens")
    logarithmic_axis(axes, "prefill, ms")
    axes.legend(loc="lower right")
    return figure


def _caption_law(evidence: Evidence) -> str:
    whole, chunked = evidence.examined("prefill"), evidence.examined("prefill_chunked")
    text = "Server-side prefill at batch 1: every sample, medians, fits a + bn + cn² with 95 % bands. "
    text += f"BIC prefers the square to a line by {whole.bic[1] - whole.bic[2]:.0f} for whole prompts"
    text += f" and by {chunked.bic[1] - chunked.bic[2]:.0f} in chunks"
    if whole.curve.coefficients[2] > 0:
        ratio = chunked.curve.coefficients[2] / whole.curve.coefficients[2]
        text += f", whose c is {ratio:.2f} of the other: " + (
            "a whole prompt's pairs that the causal mask forbids are computed"
            if ratio < _SKIPS
            else "a kernel that skips what the causal mask forbids gains nothing from chunks"
        )
    return text + "."


def _draw_terms(evidence: Evidence) -> Figure:
    found = evidence.examined("prefill")
    grid = np.linspace(0.0, found.longest, 200)
    terms = [1e3 * found.curve.term_at(degree, grid) for degree in range(3)]
    figure, (axes,) = new_figure()
    labels = ("a, whatever the length", "b n, each token by itself", "c n², each token with each other")
    axes.stackplot(grid, *terms, labels=labels, colors=(GREY, ORANGE, BLUE), alpha=0.75, linewidth=0)
    axes.plot(found.medians.lengths, 1e3 * found.medians.seconds, "o", color=BLACK, markersize=4, label="measured")
    _mark_crossover(axes, found)
    _tokens_axis(axes, grid, "prompt, tokens", is_logarithmic=False)
    axes.set_ylabel("prefill, ms")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, found.longest * 1.02)
    axes.legend(loc="upper left", bbox_to_anchor=(0.25, 1.0), reverse=True)
    return figure


def _caption_terms(evidence: Evidence) -> str:
    found = evidence.examined("prefill")
    return (
        f"What a whole prompt's prefill is made of, by the fit. From n* = {_tokens(found.crossover)} on, attention "
        "takes more than what each token costs by itself; at "
        f"{found.longest:,.0f} tokens it takes {found.leading_share:.0%} of the time."
    )


def _draw_slope(evidence: Evidence) -> Figure:
    figure, (axes,) = new_figure()
    for series, colour, marker, label in (
        ("prefill", BLUE, "o", "attention, whole prompt"),
        ("prefill_chunked", SKY, "s", f"attention, chunks of {evidence.chunk}"),
        ("gru", RED, "^", "recurrent model of equal size"),
    ):
        found = evidence.examined(series)
        measured = fit.local_slopes(found)
        errors = np.clip([measured.slopes - measured.low, measured.high - measured.slopes], 0.0, None)
        axes.errorbar(
            measured.lengths,
            measured.slopes,
            errors,
            fmt=marker,
            color=colour,
            markersize=4.5,
            linewidth=0.9,
            label=label,
        )
        grid = _grid(found)
        axes.plot(grid, found.curve.local_slope_at(grid), color=colour, linewidth=1.3)
    for exponent, text in ((1.0, "linear"), (2.0, "quadratic")):
        axes.axhline(exponent, color=BLACK, linewidth=0.8, linestyle="--")
        axes.annotate(
            text, (0.01, exponent), xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points"
        )
    every = np.concatenate([evidence.examined(each).medians.lengths for each in ("prefill", "prefill_chunked", "gru")])
    _tokens_axis(axes, every, "prompt, tokens")
    axes.set_ylabel("local exponent, d ln t / d ln n")
    axes.set_ylim(0.0, 2.45)
    axes.legend(loc="lower right")
    return figure


def _caption_slope(evidence: Evidence) -> str:
    found = evidence.examined("prefill")
    return (
        "How many per cent longer one per cent more tokens takes: measured between neighbouring lengths, with 95 % "
        f"intervals, and the fitted curves' own exponent. It nears 2 only far beyond n* = {_tokens(found.crossover)}: "
        f"at {found.longest:,.0f} tokens that of whole prompts is {found.local_slope:.2f}."
    )


def _draw_residuals(evidence: Evidence) -> Figure:
    figure, (left, right) = new_figure(2)
    medians = evidence.examined("prefill").medians
    for degree, colour, line, label in (
        (1, GREY, "s--", "a + bn"),
        (2, BLUE, "o-", "a + bn + cn²"),
        (3, PINK, "^:", "a + bn + cn² + dn³"),
    ):
        off = 100 * (fit.fit(medians, degree).at(medians.lengths) / medians.seconds - 1.0)
        left.plot(medians.lengths, off, line, color=colour, markersize=4, linewidth=1.2, label=label)
    left.set_ylabel("fit over median, %")
    left.legend()
    found = evidence.examined("prefill")
    samples = evidence.samples("prefill")
    off = 100 * found.deviations(samples)
    lengths = [length for length, _ in samples]
    right.scatter(lengths, off, s=7, color=BLUE, alpha=0.35, linewidths=0)
    right.plot(
        medians.lengths, 100 * (medians.seconds / found.curve.at(medians.lengths) - 1.0), "o-", color=BLUE, markersize=4
    )
    # Strays would squeeze the rest: what lies beyond is told, not drawn.
    limit = max(10.0, 1.3 * float(np.quantile(np.abs(off), 0.95)))
    right.set_ylim(-limit, limit)
    if hidden := int(np.sum(np.abs(off) > limit)):
        right.set_title(f"{hidden} of {len(off)} samples lie beyond", loc="right", fontsize=9.0)
    right.set_ylabel("sample over fit, %")
    for axes in (left, right):
        axes.axhline(0.0, color=BLACK, linewidth=0.8)
        _tokens_axis(axes, medians.lengths, "prompt, tokens")
    return figure


def _caption_residuals(evidence: Evidence) -> str:
    found = evidence.examined("prefill")
    return (
        "Whole prompts. Left: how far polynomials of three degrees miss the medians; right: every sample beside the "
        f"square, and the medians. A cubic term would be {found.next_share:.1%} of the time at "
        f"{found.longest:,.0f} tokens; BIC of the cubic less that of the square is {found.bic[3] - found.bic[2]:+.1f}."
    )


def _draw_decode(evidence: Evidence) -> Figure:
    figure, (axes,) = new_figure()
    own = _plot(axes, evidence, "decode", GREEN, "context of a decoder-only model")
    cross = _plot(axes, evidence, "cross_attention", PINK, "source of an encoder-decoder", marker="s")
    _tokens_axis(axes, own.medians.lengths, "tokens attended to", is_logarithmic=False)
    axes.set_xlim(0, 1.02 * max(own.longest, cross.longest))
    axes.set_ylim(0, 1.12e3 * max(float(each.medians.seconds.max()) for each in (own, cross)))
    axes.set_ylabel("ms per token")
    axes.legend(loc="upper left")
    return figure


def _caption_decode(evidence: Evidence) -> str:
    found, cross = evidence.examined("decode"), evidence.examined("cross_attention")

    def growth(each: Examination) -> str:
        low, high = each.intervals[1].low, each.intervals[1].high
        return (
            f"{1e9 * each.curve.coefficients[1]:.1f} ns for each token attended to ({1e9 * low:.1f}…{1e9 * high:.1f})"
        )

    return (
        f"One more token with the cache, by the server: a line. It grows by {growth(found)} of the context, in an "
        f"encoder-decoder by {growth(cross)} of the source."
    )


def _draw_cache(evidence: Evidence) -> Figure:
    figure, (axes,) = new_figure()
    without = _plot(axes, evidence, "no_cache", RED, "without: the whole text again for each token", marker="s")
    found = _plot(axes, evidence, "decode", GREEN, "with the cache")
    _tokens_axis(axes, np.concatenate([without.medians.lengths, found.medians.lengths]), "context, tokens")
    logarithmic_axis(axes, "ms per token")
    longest = min(without.longest, found.longest)
    ends = 1e3 * float(found.curve.at(longest)), 1e3 * float(without.curve.at(longest))
    axes.annotate(
        "", (longest, ends[1]), (longest, ends[0]), arrowprops={"arrowstyle": "<->", "shrinkA": 4, "shrinkB": 4}
    )
    axes.annotate(
        f"{ends[1] / ends[0]:,.0f} times", (longest, (ends[0] * ends[1]) ** 0.5), xytext=(-5, 0),
        textcoords="offset points", ha="right", va="center",
    )  # fmt: skip
    axes.legend(loc="upper left")
    return figure


def _caption_cache(evidence: Evidence) -> str:
    same, asked = evidence.results["facts"]["same_tokens_without_cache"]
    return (
        "What the cache is for: a token that attends to what is there, beside one for which the text so far is "
        f"computed again, as a new prompt. Both ways gave the same tokens: {same} of {asked}."
    )


def _draw_encoder(evidence: Evidence) -> Figure:
    figure, (axes,) = new_figure()
    found = _plot(axes, evidence, "encoder", ORANGE, "encoding, and a first token")
    grid = _grid(found)
    line = evidence.examined("encoder", 1).curve
    axes.plot(grid, 1e3 * line.at(grid), color=GREY, linestyle="--", linewidth=1.1, label="best line")
    _mark_crossover(axes, found)
    _tokens_axis(axes, found.medians.lengths, "source, tokens")
    logarithmic_axis(axes, "encoding, ms")
    axes.legend(loc="lower right")
    return figure


def _caption_encoder(evidence: Evidence) -> str:
    found = evidence.examined("encoder")
    return (
        f"An encoder-decoder of the same sizes: every source token attends to every other, both ways. n* is "
        f"{_tokens(found.crossover)} tokens, BIC prefers the square to a line by {found.bic[1] - found.bic[2]:.0f}."
    )


def _draw_memory(evidence: Evidence) -> Figure:
    figure, (left, right) = new_figure(2)
    mebibyte = float(1 << 20)
    for axes, series, colour, marker, label in (
        (left, "memory_whole", BLUE, "o-", "whole prompt"),
        (left, "memory_chunked", SKY, "s-", f"chunks of {evidence.chunk}"),
        (left, "memory_source", ORANGE, "v-", "source of an encoder-decoder"),
        (right, "kv", GREEN, "^", "by the server"),
    ):
        if samples := evidence.samples(series):
            lengths, values = np.array(sorted(samples)).T
            axes.plot(lengths, values / mebibyte, marker, color=colour, markersize=5, label=label)
    ends = _ends(evidence.samples("kv"))
    lengths = np.linspace(*ends, 100)
    computed = [cost.kv_bytes(evidence.config, int(length)) / mebibyte for length in lengths]
    right.plot(lengths, computed, color=BLACK, linewidth=1.0, linestyle="--", zorder=0, label="by arithmetic")
    left.set_ylabel("process at its peak, MiB")
    right.set_ylabel("keys and values, MiB")
    for axes, label in ((left, "prompt, tokens"), (right, "tokens")):
        _tokens_axis(axes, lengths, label, is_logarithmic=False)
        axes.set_xlim(0, 1.04 * ends[1])
        axes.set_ylim(0.0, 1.1 * axes.get_ylim()[1])
        axes.legend(loc="best")
    return figure


def _caption_memory(evidence: Evidence) -> str:
    text = "Memory of a fresh server process for each length. Keys and values are linear, as arithmetic says"
    for name, what in (
        ("memory_whole", "whole prompts"),
        ("memory_chunked", "prompts in chunks"),
        ("memory_source", "sources"),
    ):
        if len(samples := sorted(evidence.samples(name))) > 1:
            (shortest, least), (longest, most) = samples[0], samples[-1]
            growth = (most - least) / 1024 / (longest - shortest)
            text += f"; for {what} the peak grows by {growth:.1f} KiB a token from {shortest:,.0f} to {longest:,.0f}"
            if name in (start := evidence.results["facts"].get("start_bytes", {})):
                text += f" ({start[name] / (1 << 20):,.0f} MiB before the prompt, the proof at the start included)"
    length = evidence.config.context
    held = 4 * evidence.config.num_heads * length**2 / (1 << 20)
    return (
        f"{text}. All scores of one layer at {length:,.0f} tokens would take {held:,.0f} MiB if they were held at once."
    )


def _draw_operations(evidence: Evidence) -> Figure:
    figure, (left, right) = new_figure(2)
    found = evidence.examined("prefill")
    grid = _grid(found)
    flops = [operations.prefill(evidence.config, int(length), evidence.config.context) for length in grid]
    attention, linear = (np.array([getattr(each, part) for each in flops]) for part in ("attention", "linear"))
    allowed = attention * (grid + 1) / (2 * grid)
    left.plot(
        grid, 100 * found.curve.term_at(2, grid) / found.curve.at(grid), color=BLUE, label="of the time, by the fit"
    )
    left.plot(grid, 100 * attention / (attention + linear), color=BLACK, linestyle="--", label="of all operations")
    left.plot(
        grid, 100 * allowed / (allowed + linear), color=GREY, linestyle="-.", label="of those that the mask allows"
    )
    left.set_ylabel("attention's share, %")
    left.set_ylim(0, 100)
    left.legend(loc="upper left")
    for series, colour, marker, label, chunk in (
        ("prefill", BLUE, "o-", "whole prompt", evidence.config.context),
        ("prefill_chunked", SKY, "s-", f"chunks of {evidence.chunk}", evidence.chunk),
    ):
        medians = evidence.examined(series).medians
        done = [operations.prefill(evidence.config, int(length), chunk).total for length in medians.lengths]
        right.plot(
            medians.lengths, np.array(done) / medians.seconds / 1e9, marker, color=colour, markersize=4, label=label
        )
    right.set_ylabel("GFLOP/s")
    right.set_ylim(bottom=0)
    right.legend(loc="lower right")
    _tokens_axis(left, grid, "prompt, tokens")
    both = np.concatenate([evidence.examined(each).medians.lengths for each in ("prefill", "prefill_chunked")])
    _tokens_axis(right, both, "prompt, tokens")
    return figure


def _caption_operations(evidence: Evidence) -> str:
    found, by_flops = evidence.examined("prefill"), operations.crossover(evidence.config)
    return (
        f"Time beside arithmetic, whole prompts. Attention takes half of all operations from {by_flops:,.0f} tokens "
        f"on, of those that the causal mask allows from {2 * by_flops:,.0f}; in time it overtakes the linear part at "
        f"{_tokens(found.crossover)}. Right: operations of matrix products a second, all pairs counted."
    )


def _draw_recurrence(evidence: Evidence) -> Figure:
    figure, (axes,) = new_figure()
    for series, colour, marker, label in (
        ("prefill", BLUE, "o", "attention, whole prompt"),
        ("gru_whole", ORANGE, "v", "recurrent model of equal size, whole text"),
        ("gru", RED, "^", f"the same, in chunks of {evidence.chunk}"),
    ):
        if not evidence.samples(series):
            continue
        found = evidence.examined(series)
        grid = _grid(found)
        low, high = found.bootstrap.band(grid)
        axes.fill_between(grid, 1e6 * low / grid, 1e6 * high / grid, color=colour, alpha=0.25, linewidth=0)
        axes.plot(grid, 1e6 * found.curve.at(grid) / grid, color=colour, linewidth=1.3)
        axes.plot(found.medians.lengths, 1e6 * _per_token(found), marker, color=colour, markersize=5, label=label)
    _tokens_axis(axes, evidence.examined("prefill").medians.lengths, "prompt, tokens")
    axes.set_ylabel("µs per token of the prompt")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    return figure


def _caption_recurrence(evidence: Evidence) -> str:
    facts, control = evidence.results["facts"]["gru"], evidence.results["controls"]

    def verdict(name: str) -> str:
        return "refuses it" if control[f"{name}_rejects_quadratic"] else "does not refuse it"

    def dearer(series: str) -> str:
        seconds = _per_token(evidence.examined(series))
        return f"where a token of the longest text costs {seconds[-1] / seconds.min():.2f} times one of the cheapest"

    text = (
        f"The linear baseline: a recurrent model of {facts['num_parameters']:,} parameters in the same runtime, beside "
        f"a transformer of {cost.num_parameters(evidence.config):,}: n² d operations against n d², as in table 1 of "
        f"Vaswani et al. (2017). What found the square there {verdict('gru')} here, read in chunks, {dearer('gru')}"
    )
    if evidence.samples("gru_whole"):
        text += f", and {verdict('gru_whole')} read in one run, {dearer('gru_whole')}"
    return f"{text}."


def _per_token(found: Examination) -> Array:
    """Seconds that each token of a text costs in the mean, by length."""
    seconds: Array = found.medians.seconds / found.medians.lengths
    return seconds


def _draw_end_to_end(evidence: Evidence) -> Figure:
    figure, (axes,) = new_figure()
    server = evidence.examined("prefill_chunked")
    client = _plot(axes, evidence, "end_to_end", PINK, "first token, by a plain client")
    grid = _grid(server)
    user = evidence.examined("locust").medians
    axes.plot(user.lengths, 1e3 * user.seconds, "x", color=BLACK, markersize=6, label="first token, by Locust's user")
    axes.plot(
        grid, 1e3 * server.curve.at(grid), color=SKY, linestyle="--", linewidth=1.4, label="prefill, by the server"
    )
    _tokens_axis(axes, client.medians.lengths, "prompt, tokens")
    logarithmic_axis(axes, "first token, ms")
    axes.legend(loc="lower right")
    return figure


def _caption_end_to_end(evidence: Evidence) -> str:
    client, server = evidence.examined("end_to_end"), evidence.examined("prefill_chunked")
    over = 1e3 * float(np.median(client.medians.seconds - server.medians.seconds))
    user = evidence.examined("locust")
    return (
        f"The same law from outside: time to the first token of a gRPC stream, one user, chunks of {evidence.chunk}. "
        f"Between the server's clock and a plain client's lie {over:.1f} ms in the median over the lengths. By "
        f"Locust's user n* is {_tokens(user.crossover)} tokens, by the server {_tokens(server.crossover)}."
    )


def _tokens(length: float) -> str:
    """A crossover for people."""
    return f"{length:,.0f}" if np.isfinite(length) else "infinity"


def _ends(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    lengths = [length for length, _ in samples]
    return min(lengths), max(lengths)


PICTURES = (
    Picture("law", "Prefill is quadratic", _caption_law, _draw_law),
    Picture("terms", "What prefill is made of", _caption_terms, _draw_terms),
    Picture("slope", "The local exponent", _caption_slope, _draw_slope),
    Picture("residuals", "What the fit leaves", _caption_residuals, _draw_residuals),
    Picture("decode", "With the cache a token is linear", _caption_decode, _draw_decode),
    Picture("cache", "Without it, quadratic", _caption_cache, _draw_cache),
    Picture("encoder", "The encoder", _caption_encoder, _draw_encoder),
    Picture("recurrence", "A network without attention", _caption_recurrence, _draw_recurrence),
    Picture("operations", "Time and operations", _caption_operations, _draw_operations),
    Picture("memory", "Memory", _caption_memory, _draw_memory),
    Picture("end-to-end", "From outside", _caption_end_to_end, _draw_end_to_end),
)
