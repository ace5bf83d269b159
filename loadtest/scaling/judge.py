"""Decides what the samples of a study mean: which claims hold, whether the controls work, what drifted.

Knows samples and statistics; nothing of servers, files or the command line.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np

from loadtest.scaling import fit, operations
from loadtest.scaling.claims import CACHE_TOLERANCE, CLAIMS, WITNESSES
from loadtest.scaling.fit import Curve, Examination, Interval, Regimes, Samples
from loadtest.scaling.study import Found, StudySettings
from model.spec.config import ModelConfig

MAX_DRIFT = 2.0
DRIFTING = (
    ("prefill", "n_star"),
    ("prefill", "local_slope"),
    ("prefill_chunked", "n_star"),
    ("prefill_chunked", "local_slope"),
    ("decode", "crossover"),
)
"""Figures compared with the baseline: lengths at which two terms are equal, and exponents. None is a time."""
COMPARABLE = ("preset", "overrides", "chunk", "threads")
"""StudySettings that change those figures: runs that differ in one of them are not compared."""
STABLE = 0.9
"""A verdict that a smaller share of the samples' resamples has is inconclusive."""
_LEAST_LENGTHS = 3
"""A regime needs that many lengths."""
_TERMS = "abcd"
_DEGREES = ("constant", "linear", "quadratic", "cubic")
# Synthetic times scatter like those of a noisy machine, with a few outliers.
_NOISE, _OUTLIER_SHARE, _OUTLIER_FACTOR = 0.05, 0.02, 5.0

Truth: TypeAlias = Callable[[float], fit.Array | float]
"""Seconds by length."""


def judge(found: Found, settings: StudySettings, *, draws: int = 2000) -> dict[str, Any]:
    """Examines every claim and control; `draws` is the size of each bootstrap, half of which is judged, too.

    Returns:
        Figures by series, controls, every objection and the samples, as plain values for JSON. `agreement` is the
        share of resamples of the samples that have the same verdict.
    """
    results: dict[str, Any] = {}
    objections = []
    # Draws of different series must not be paired: all have one seed.
    refused, order = np.zeros(draws // 2, bool), np.random.default_rng(settings.seed)
    for claim in (*CLAIMS, *WITNESSES):
        examine = functools.partial(
            fit.examine,
            found.series[claim.series],
            claim.degree,
            draws=draws,
            seed=settings.seed,
            tolerance=claim.tolerance,
        )
        knees = knees_of(found, claim.series) if claim.by_regime else None
        examined = examine(judged=draws // 2, reach=claim.reach, knees=knees)
        results[claim.series] = describe(examined)
        if claim.by_regime:
            single, law = examine(), _DEGREES[claim.degree]
            results[claim.series] |= {law: single.holds, f"{law}_objections": list(single.objections)}
        if claim in CLAIMS:
            objections += [f"{claim.words}: {objection}" for objection in examined.objections]
            refused |= order.permutation(examined.refused)
    results["controls"], failures = _control(found, settings, draws)
    results["operations"] = _operations(found, settings)
    objections += failures
    return {
        **results,
        "objections": objections,
        "law_holds": not objections,
        "agreement": 1.0 if failures else float(np.mean(refused == bool(objections))),
        "facts": found.facts,
        "settings": asdict(settings),
        "draws": draws,
        "samples": found.series["prefill"],
        "series": found.series,
    }


def describe(examined: Examination) -> dict[str, Any]:
    """An examination as plain values for JSON; an infinite figure is null."""
    coefficients, intervals = examined.coefficients, examined.intervals
    figures: dict[str, Any] = {}
    for name, value, interval in zip(_TERMS, coefficients, intervals, strict=False):
        figures |= _with_interval(name, value, interval)
    name = "n_star" if examined.degree == 2 else "crossover"
    figures |= _with_interval(name, examined.crossover, examined.crossover_interval)
    if examined.degree == 1:
        figures |= _with_interval("slope", coefficients[1], intervals[1])
    by_regime = list(examined.curve.coefficients[examined.degree :])
    figures |= {"slopes" if examined.degree == 1 else "c_by_regime": by_regime}
    figures |= {"knees": list(examined.curve.regimes.knees), "bic_rivals": dict(examined.rivals)}
    figures |= {f"bic_{word}": value for word, value in zip(_DEGREES, examined.bic, strict=True)}
    return {
        **figures,
        "degree": examined.degree,
        "local_slope": examined.local_slope,
        "leading_share": examined.leading_share,
        "next_share": examined.next_share,
        "misfit": examined.misfit,
        "leave_longest_out_error": examined.extrapolation_error,
        "longest": examined.longest,
        "reach": _finite(examined.longest / examined.crossover) if examined.crossover else None,
        "medians": np.column_stack([examined.medians.lengths, examined.medians.seconds]).tolist(),
        "objections": list(examined.objections),
        "holds": examined.holds,
    }


def knees_of(found: Found, series: str) -> list[float]:
    """Lengths at which keys and values fill one of the processor's caches, if enough were measured on both sides.

    Until they fill it, each token also displaces weights from it, which are then read from the next one. Beyond, keys
    and values are read from the next one themselves.
    """
    bytes_per_token = ModelConfig.from_dict(found.facts["config"]).kv_bytes_per_token
    lengths = sorted({length for length, _ in found.series[series]})
    knees: list[float] = []
    for capacity in found.facts.get("caches", ()):
        knee = capacity / bytes_per_token
        below = sum((knees[-1] if knees else 0.0) < length <= knee for length in lengths)
        if min(below, sum(length > knee for length in lengths)) >= _LEAST_LENGTHS:
            knees.append(knee)
    return knees


def drift(results: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Compares the figures in `DRIFTING` with those of an earlier run on the same processor with the same settings.

    Returns:
        `compared`: new value over old by name, or None if the runs cannot be compared; `reason`: why not;
        `objections`: figures that differ by more than `MAX_DRIFT`.
    """
    if (reason := _incomparable(results, baseline)) is not None:
        return {"compared": None, "reason": reason, "objections": []}
    compared: dict[str, float | None] = {}
    objections = []
    for series, figure in DRIFTING:
        now, before = results[series][figure], baseline[series][figure]
        name = f"{series}.{figure}"
        if now is None or not before:
            compared[name] = None
            if now != before:
                objections.append(f"{name} is {now}, the baseline's is {before}")
            continue
        compared[name] = ratio = now / before
        if not 1 / MAX_DRIFT <= ratio <= MAX_DRIFT:
            objections.append(f"{name} is {now:.4g}, {ratio:.2f} times the baseline's")
    return {"compared": compared, "reason": None, "objections": objections}


def _incomparable(results: Mapping[str, Any], baseline: Mapping[str, Any]) -> str | None:
    """Why two runs cannot be compared, or None if they can."""
    now, before = results["machine"]["processor"], baseline["machine"]["processor"]
    if not now or now != before:
        return f"the baseline's processor is {before or 'unknown'!r}, this one is {now or 'unknown'!r}"
    for name in COMPARABLE:
        # JSON turns tuples into lists.
        now, before = (json.loads(json.dumps(each["settings"][name])) for each in (results, baseline))
        if now != before:
            return f"{name} was {before!r} for the baseline, and is {now!r}"
    return None


def synthetic(truth: Truth, lengths: Sequence[float], repeats: int, seed: int) -> Samples:
    """Synthetic times along a curve, with the noise and outliers of a real machine."""
    rng = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        factors = np.maximum(0.1, 1.0 + _NOISE * rng.standard_normal(repeats))
        factors[rng.random(repeats) < _OUTLIER_SHARE] *= _OUTLIER_FACTOR
        samples += [(float(length), float(truth(length)) * float(factor)) for factor in factors]
    return samples


def rivals(line: Curve, longest: float) -> dict[str, Truth]:
    """Laws that must not pass as quadratic, by name. All take as long as the line at the longest length."""
    seconds = float(line.at(longest))
    return {
        "linear": line.at,
        "linearithmic": lambda length: seconds * length * math.log(length) / (longest * math.log(longest)),
        "three_halves": lambda length: seconds * (length / longest) ** 1.5,
    }


def cached_rivals(line: Curve, longest: float) -> dict[str, Truth]:
    """Laws that must not pass as a cached token's, by name; "square" keeps the line's constant, as a token would."""
    constant, seconds = line.coefficients[0], float(line.at(longest))
    others = rivals(line, longest)
    del others["linear"]
    return {
        **others,
        "quadratic": lambda length: seconds * (length / longest) ** 2,
        "square": lambda length: constant + (seconds - constant) * (length / longest) ** 2,
    }


def _control(found: Found, settings: StudySettings, draws: int) -> tuple[dict[str, Any], list[str]]:
    """Checks that the procedure rejects and accepts what it must; returns figures and failures."""
    prefill = fit.medians_of(found.series["prefill"])
    lengths = [float(length) for length in prefill.lengths]
    line = fit.fit(prefill, 1)
    controls: dict[str, Any] = {}
    failures = []

    def make(truth: Truth, lengths: Sequence[float]) -> Samples:
        return synthetic(truth, lengths, settings.repeats, settings.seed)

    knees = knees_of(found, "prefill")

    def examine(samples: Samples) -> Examination:
        return fit.examine(samples, 2, draws=draws, seed=settings.seed, knees=knees)

    def must_be_refused(name: str, examined: Examination, what: str, law: str = "quadratic") -> None:
        controls[f"{name}_rejects_{law}"] = not examined.holds
        controls[f"{name}_objections"] = list(examined.objections)
        if examined.holds:
            failures.append(f"control: {law} growth was found in {what}")

    def must_hold(law: str, examined: Examination) -> None:
        controls[f"{law}_accepted"] = examined.holds
        if not examined.holds:
            failures.append(f"control: synthetic {law} times were refused: {'; '.join(examined.objections)}")

    for name, truth in rivals(line, lengths[-1]).items():
        must_be_refused(name, examine(make(truth, lengths)), f"synthetic {name} times")
    # A known quadratic like the expected one: n* is at most a fifth of the longest length, and each regime's
    # coefficient half as much again as the one before.
    regimes = Regimes(2, tuple(knees))
    leading = [line.coefficients[1] * 5 / lengths[-1] * 1.5**each for each in range(len(knees) + 1)]
    square = Curve((line.coefficients[0], line.coefficients[1], *leading), regimes)
    must_hold("quadratic", examine(make(square.at, lengths)))
    cube = Curve((*square.coefficients[:2], 0.0, float(square.term_at(2, lengths[-1])) / lengths[-1] ** 3))
    must_be_refused("cube", examine(make(cube.at, lengths)), "synthetic times with a cube")
    for name, how in (("gru", "in chunks"), ("gru_whole", "in one run")):
        # Older runs lack the second series.
        if gru_samples := found.series[name]:
            examined = examine(gru_samples)
            must_be_refused(name, examined, f"the recurrent model's times, read {how}")
            controls[name] = describe(examined)
    knees = knees_of(found, "decode")
    contexts = [float(length) for length in fit.medians_of(found.series["decode"]).lengths]

    def examine_cached(truth: Truth) -> Examination:
        samples = make(truth, contexts)
        return fit.examine(samples, 1, draws=draws, seed=settings.seed, tolerance=CACHE_TOLERANCE, knees=knees)

    cached = fit.fit(fit.medians_of(found.series["decode"]), 1)
    for name, truth in cached_rivals(cached, contexts[-1]).items():
        must_be_refused(f"cached_{name}", examine_cached(truth), f"synthetic {name} times of a cached token", "linear")
    # A known line: two thirds of the time at the longest length, and half the slope in each regime.
    bends = Curve((0.0, *(0.5**each for each in range(len(knees) + 1))), Regimes(1, tuple(knees)))
    seconds = float(cached.at(contexts[-1]))
    slopes = np.array(bends.coefficients) * 2 / 3 * seconds / float(bends.at(contexts[-1]))
    must_hold("cached_linear", examine_cached(Curve((seconds / 3, *slopes[1:]), bends.regimes).at))
    return controls, failures


def _operations(found: Found, settings: StudySettings) -> dict[str, Any]:
    """FLOPs beside seconds by length, and the length at which attention takes half of the FLOPs."""
    config = ModelConfig.from_dict(found.facts["config"])
    figures: dict[str, Any] = {"n_star": operations.crossover(config)}
    for series, chunk in (("prefill", config.context), ("prefill_chunked", settings.chunk)):
        medians = fit.medians_of(found.series[series])
        figures[series] = [
            [length, (flops := operations.prefill(config, int(length), chunk)).linear, flops.attention, seconds]
            for length, seconds in zip(medians.lengths.tolist(), medians.seconds.tolist(), strict=True)
        ]
    return figures


def _with_interval(name: str, value: float, interval: Interval) -> dict[str, float | None]:
    return {name: _finite(value), f"{name}_low": _finite(interval.low), f"{name}_high": _finite(interval.high)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
