"""What the pictures show: the results of a study, its series fitted again, and how a fitted series is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from loadtest.scaling import fit
from loadtest.scaling.claims import BASELINES, CLAIMS, WITNESSES
from loadtest.scaling.fit import Array, Examination
from loadtest.style import BLACK
from model.spec.config import ModelConfig

Results: TypeAlias = Mapping[str, Any]

_DEGREES: Mapping[str, int] = {claim.series: claim.degree for claim in (*CLAIMS, *WITNESSES, *BASELINES)}


class Evidence:
    """The results, and their series fitted again with the draws and the seed that judged them."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.config = ModelConfig.from_dict(results["facts"]["config"])
        self.chunk: int = results["settings"]["chunk"]
        self._examined: dict[tuple[str, int], Examination] = {}

    def examined(self, series: str, degree: int | None = None) -> Examination:
        """A series under the degree that is claimed for it, or another."""
        key = series, _DEGREES[series] if degree is None else degree
        if key not in self._examined:
            draws, seed = self.results["draws"], self.results["settings"]["seed"]
            knees = self.results.get(series, {}).get("knees", ()) if degree is None else ()
            self._examined[key] = fit.examine(self.samples(series), key[1], draws=draws, seed=seed, knees=knees)
        return self._examined[key]

    def samples(self, series: str) -> list[tuple[float, float]]:
        """The raw samples of a series; empty if it was not measured."""
        return [(length, value) for length, value in self.results["series"][series]]

    def lengths(self, *series: str) -> Array:
        """The lengths of these series, one after another."""
        return np.concatenate([self.examined(each).medians.lengths for each in series])


def tokens_axis(axes: Axes, lengths: Array, label: str, *, is_logarithmic: bool = True) -> None:
    """An x axis of lengths; a logarithmic one has ticks at powers of two."""
    axes.set_xlabel(label)
    axes.grid(visible=True, alpha=0.25)
    if is_logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_xlim(float(np.min(lengths)) / 1.12, float(np.max(lengths)) * 1.12)
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def grid_of(examined: Examination) -> Array:
    """The lengths at which a curve is drawn."""
    return np.geomspace(examined.medians.lengths[0], examined.longest, 200)


def plot_curve(axes: Axes, found: Examination, color: str, *, scale: float = 1e3, per_token: bool = False) -> None:
    """A fitted curve with its band, in milliseconds, or in another unit and divided by the length."""
    grid = grid_of(found)
    factors = scale / grid if per_token else np.full_like(grid, scale)
    low, high = found.bootstrap.band(grid)
    axes.fill_between(grid, factors * low, factors * high, color=color, alpha=0.25, linewidth=0)
    axes.plot(grid, factors * found.curve.at(grid), color=color, linewidth=1.3)


def plot_series(axes: Axes, evidence: Evidence, series: str, color: str, label: str, marker: str = "o") -> Examination:
    """Every sample, the medians, the fit and its band, in milliseconds."""
    found = evidence.examined(series)
    lengths, values = np.array(evidence.samples(series)).T
    axes.scatter(lengths, 1e3 * values, s=5, color=color, alpha=0.25, linewidths=0)
    plot_curve(axes, found, color)
    edge: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.6}
    medians = found.medians
    axes.plot(medians.lengths, 1e3 * medians.seconds, marker, color=color, markersize=4.5, label=label, **edge)
    return found


def mark_crossover(axes: Axes, found: Examination) -> None:
    """A line at n*, if n* lies among the lengths."""
    if not found.medians.lengths[0] <= found.crossover <= found.longest:
        return
    axes.axvline(found.crossover, color=BLACK, linewidth=0.9, linestyle=":")
    place: dict[str, Any] = {
        "xycoords": ("data", "axes fraction"),
        "xytext": (3, -3),
        "textcoords": "offset points",
        "va": "top",
    }
    axes.annotate(f"n* = {found.crossover:,.0f}", (found.crossover, 1.0), **place)
