"""The law of attention, measured on the running service: `make scaling`.

    python -m loadtest scaling [--quick] [--docs] [--repeats 15] [--lengths 16] [--threads N] [--capacity FILE] …
    python -m loadtest scaling --samples build/scaling/scaling.json [--docs] [--capacity FILE]

Self-attention over n tokens costs n². `loadtest.study` asks the questions, `loadtest.fit` says what the answers come
to, this decides what they mean:

    claim              its time, or bytes, grow with
    prefill            the square of the prompt, whole and in chunks
    no_cache           the square of the context, for every token
    encoder            the square of the source
    decode             the context, for every token
    cross_attention    the source, for every token
    controls           no square where there is none: in made-up times that are linear, or grow with n ln n or with
                       n to the power of 1.5, and in a recurrent model's

The last stdout line is one JSON object; report, pictures and raw samples go to `build/scaling`, or with `--docs` to
`docs` too, unless the law is refused. Exit status 1 when a claim or a control fails, or when, on the processor of the
stored baseline, one of the ratios in `DRIFTING` differs from it by more than a factor of two. No absolute time decides
anything. With `--quick` nothing is decided: too few samples of too short texts, to see that it works. With `--samples`
nothing is measured: the raw samples of a run before are fitted and judged anew. Exit status 2: it could not be
measured.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from loadtest import fit, machine, operations, report, study
from loadtest.claims import CLAIMS, WITNESSES
from loadtest.fit import Curve, Examination, Interval, Samples
from loadtest.study import Found, Settings
from model.spec.config import ModelConfig

BUILD = report.BUILD
DOCS = report.DOCS
BASELINE = DOCS / report.RESULTS
UNTOLD = ("series",)
"""What the report has and the last line leaves out."""
MIN_LENGTHS, MIN_REPEATS = 10, 15
"""Fewer decide nothing."""
MAX_DRIFT = 2.0
DRIFTING = (
    ("prefill", "n_star"),
    ("prefill", "local_slope"),
    ("prefill_chunked", "n_star"),
    ("prefill_chunked", "local_slope"),
    ("decode", "crossover"),
)
"""What is compared with the baseline: lengths at which two terms are equal, and exponents. None is a time."""
COMPARABLE = ("preset", "overrides", "chunk", "threads")
"""Settings that those ratios depend on: with others there is nothing to compare."""
_TERMS = "abcd"
_DEGREES = ("constant", "linear", "quadratic", "cubic")
# Made-up times scatter as a noisy machine's do, with a stray now and then.
_NOISE, _STRAY_SHARE, _STRAY_FACTOR = 0.05, 0.02, 5.0
QUICK: Mapping[str, Any] = {
    "overrides": ("context=1024", "num_kv_heads=1"),
    "num_lengths": 6,
    "repeats": 3,
    "new": 9,
    "num_memory_lengths": 2,
}

Truth: TypeAlias = Callable[[float], fit.Array | float]
"""Seconds by length."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Samples, and the circumstances under which they were taken, as the report tells them."""

    found: Found
    settings: Settings
    circumstances: Mapping[str, Any]


def judge(found: Found, settings: Settings, *, draws: int = 2000) -> dict[str, Any]:
    """What the samples come to: figures for each claim, the controls, and every objection.

    Args:
        found: the samples of every series.
        settings: how they were taken.
        draws: of each bootstrap.
    """
    results: dict[str, Any] = {}
    objections = []
    for claim in CLAIMS:
        examined = fit.examine(
            found.series[claim.series],
            claim.degree,
            draws=draws,
            seed=settings.seed,
            tolerance=claim.tolerance,
            reach=claim.reach,
        )
        results[claim.series] = describe(examined)
        objections += [f"{claim.words}: {objection}" for objection in examined.objections]
    results["decode"]["linear"] = results["decode"]["holds"]
    results["no_cache"]["quadratic"] = results["no_cache"]["holds"]
    for witness in WITNESSES:
        examined = fit.examine(found.series[witness.series], witness.degree, draws=draws, seed=settings.seed)
        results[witness.series] = describe(examined)
    controls, failures = _control(found, settings, draws)
    results["controls"] = controls
    results["operations"] = _operations(found, settings)
    return {
        **results,
        "objections": [*objections, *failures],
        "law_holds": not objections and not failures,
        "facts": found.facts,
        "settings": asdict(settings),
        "draws": draws,
        "samples": found.series["prefill"],
        "series": found.series,
    }


def describe(examined: Examination) -> dict[str, Any]:
    """An examination in plain figures, as JSON has them: what is infinite is null."""
    figures: dict[str, Any] = {}
    for degree, (value, between) in enumerate(zip(examined.curve.coefficients, examined.intervals, strict=True)):
        name = _TERMS[degree]
        figures |= {name: value, f"{name}_low": between.low, f"{name}_high": between.high}
    crossover = {"": examined.crossover, **_ends(examined.crossover_interval)}
    name = "n_star" if examined.degree == 2 else "crossover"
    figures |= {name + suffix: _finite(value) for suffix, value in crossover.items()}
    if examined.degree == 1:
        slope = {"": examined.curve.coefficients[1], **_ends(examined.intervals[1])}
        figures |= {"slope" + suffix: value for suffix, value in slope.items()}
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
        "medians": [[length, seconds] for length, seconds in zip(*_columns(examined), strict=True)],
        "objections": list(examined.objections),
        "holds": examined.holds,
    }


def drift(results: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """How the ratios compare with those of a run before, on the same kind of processor and of the same thing.

    Returns:
        `compared`: the new value over the old one by name, None where there is nothing to compare; `reason`: why not;
        `objections`: what differs by more than `MAX_DRIFT`.
    """
    if (reason := _incomparable(results, baseline)) is not None:
        return {"compared": None, "reason": reason, "objections": []}
    compared: dict[str, float | None] = {}
    objections = []
    for series, figure in DRIFTING:
        now, before = results[series][figure], baseline[series][figure]
        name = f"{series}.{figure}"
        if now is None or before is None or not before:
            compared[name] = None
            if now != before:
                objections.append(f"{name} is {now}, the baseline's is {before}")
            continue
        compared[name] = ratio = now / before
        if not 1 / MAX_DRIFT <= ratio <= MAX_DRIFT:
            objections.append(f"{name} is {now:.4g}, {ratio:.2f} times the baseline's")
    return {"compared": compared, "reason": None, "objections": objections}


def _incomparable(results: Mapping[str, Any], baseline: Mapping[str, Any]) -> str | None:
    """Why a run says nothing about another; None where it does."""
    now, before = results["machine"]["processor"], baseline["machine"]["processor"]
    if not now or now != before:
        return f"the baseline's processor is {before or 'unknown'!r}, this one is {now or 'unknown'!r}"
    for name in COMPARABLE:
        # As JSON has it, where tuples are lists.
        now, before = (json.loads(json.dumps(each["settings"][name])) for each in (results, baseline))
        if now != before:
            return f"{name} was {before!r} for the baseline, and is {now!r}"
    return None


def synthetic(truth: Truth, lengths: Sequence[float], repeats: int, seed: int) -> Samples:
    """Made-up times along a curve, that scatter as a noisy machine's do."""
    rng = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        factors = np.maximum(0.1, 1.0 + _NOISE * rng.standard_normal(repeats))
        factors[rng.random(repeats) < _STRAY_SHARE] *= _STRAY_FACTOR
        samples += [(float(length), float(truth(length)) * float(factor)) for factor in factors]
    return samples


def rivals(line: Curve, longest: float) -> dict[str, Truth]:
    """Laws that a square must not be found in: name to seconds by length, as long as the line at the longest."""
    seconds = float(line.at(longest))
    return {
        "linear": line.at,
        "linearithmic": lambda length: seconds * length * math.log(length) / (longest * math.log(longest)),
        "three_halves": lambda length: seconds * (length / longest) ** 1.5,
    }


def _control(found: Found, settings: Settings, draws: int) -> tuple[dict[str, Any], list[str]]:
    """Whether the procedure says no where it must, and yes where it must; figures, and what went wrong."""
    prefill = fit.medians_of(found.series["prefill"])
    lengths = [float(length) for length in prefill.lengths]
    line = fit.fit(prefill, 1)
    controls: dict[str, Any] = {}
    failures = []

    def examine(samples: Samples) -> Examination:
        return fit.examine(samples, 2, draws=draws, seed=settings.seed)

    def must_be_refused(name: str, samples: Samples, what: str) -> Examination:
        examined = examine(samples)
        controls[f"{name}_rejects_quadratic"] = not examined.holds
        controls[f"{name}_objections"] = list(examined.objections)
        if examined.holds:
            failures.append(f"control: a quadratic was found in {what}")
        return examined

    for name, truth in rivals(line, lengths[-1]).items():
        samples = synthetic(truth, lengths, settings.repeats, settings.seed)
        must_be_refused(name, samples, f"made-up {name} times")
    # A square like the one that is to be found, but known: n* a fifth of the longest length.
    square = Curve((line.coefficients[0], line.coefficients[1], line.coefficients[1] * 5 / lengths[-1]))
    quadratic = examine(synthetic(square.at, lengths, settings.repeats, settings.seed))
    controls["quadratic_accepted"] = quadratic.holds
    if not quadratic.holds:
        failures.append(f"control: a made-up quadratic was refused: {'; '.join(quadratic.objections)}")
    for name, how in (("gru", "in chunks"), ("gru_whole", "in one run")):
        # Runs of before there was the second one have no samples of it.
        if samples := found.series[name]:
            examined = must_be_refused(name, samples, f"the recurrent model's times, read {how}")
            controls[name] = describe(examined)
    return controls, failures


def _operations(found: Found, settings: Settings) -> dict[str, Any]:
    """Arithmetic beside time: from where on attention takes half of it, and lengths with operations and seconds."""
    config = ModelConfig.from_dict(found.facts["config"])
    figures: dict[str, Any] = {"n_star": operations.crossover(config)}
    for series, chunk in (("prefill", config.context), ("prefill_chunked", settings.chunk)):
        medians = fit.medians_of(found.series[series])
        figures[series] = [
            [length, (flops := operations.prefill(config, int(length), chunk)).linear, flops.attention, seconds]
            for length, seconds in zip(medians.lengths.tolist(), medians.seconds.tolist(), strict=True)
        ]
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, judges and reports; returns the exit status."""
    settings, options = _parse(sys.argv[1:] if arguments is None else arguments)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {line}", file=sys.stderr, flush=True)

    if options.samples is not None:
        measured = read_samples(options.samples)
        if measured.circumstances["quick"] and options.docs:
            print(f"scaling: {options.samples} is of a quick run, which decides nothing", file=sys.stderr)
            return 2
        return conclude(measured, options, say)
    others = machine.watch_others()
    try:
        found = study.carry_out(settings, BUILD, say)
    except (RuntimeError, OSError) as error:
        print(f"scaling: {error}", file=sys.stderr)
        return 2
    found.facts["others_share"] = others()
    circumstances = {
        "machine": machine.describe(),
        "versions": _versions(),
        "date": time.strftime("%Y-%m-%d"),
        "quick": options.quick,
        "seconds": round(time.monotonic() - began, 1),
        "capacity": None,
    }
    return conclude(Measured(found, settings, circumstances), options, say)


def read_samples(path: Path) -> Measured:
    """The raw samples of a run before, and the circumstances under which they were taken."""
    stored = _load(path)
    found = Found(facts=stored["facts"])
    found.series |= {name: [(length, value) for length, value in each] for name, each in stored["series"].items()}
    # A run that does not say how it settled did not.
    settings = {"settle": 0, **stored["settings"]}
    circumstances = {name: stored[name] for name in ("machine", "versions", "date", "quick", "seconds", "capacity")}
    return Measured(found, Settings(**{**settings, "overrides": tuple(settings["overrides"])}), circumstances)


def conclude(measured: Measured, options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Judges, compares, writes the report and prints the last line; returns the exit status."""
    is_quick = measured.circumstances["quick"]
    results = {**measured.circumstances, **judge(measured.found, measured.settings)}
    results["drift"] = _drift(results, options)
    if is_quick:
        results["law_holds"] = None
    if options.capacity is not None:
        results["capacity"] = _load(options.capacity)
    say("drawing")
    results["report"] = str(BUILD / report.PAGE)
    report.write(results, BUILD)
    objections = [] if is_quick else [*results["objections"], *results["drift"]["objections"]]
    for objection in objections:
        print(f"scaling: {objection}", file=sys.stderr)
    if objections and (share := measured.found.facts["others_share"] or 0.0) > report.NOISY:
        print(f"scaling: others took {share:.0%} of the machine meanwhile, it may be their doing", file=sys.stderr)
    if results["drift"]["compared"] is None:
        say(f"not compared with a baseline: {results['drift']['reason']}")
    if options.docs and objections:
        print(f"scaling: {DOCS}/ is as it was: what is refused is no baseline", file=sys.stderr)
    elif options.docs:
        report.write_document(results, DOCS)
    print(json.dumps({key: value for key, value in results.items() if key not in UNTOLD}, allow_nan=False))
    return 1 if objections else 0


def _drift(results: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The comparison with the stored baseline, or why there is none."""
    reason = "there is no baseline"
    if results["quick"]:
        reason = "a quick run decides nothing"
    elif options.docs:
        reason = "this run is the new baseline"
    elif (baseline := _load(options.baseline)) is not None:
        return drift(results, baseline)
    return {"compared": None, "reason": reason, "objections": []}


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m loadtest scaling", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--lengths", type=int, default=defaults.num_lengths, help="how many, of each series")
    parser.add_argument("--repeats", type=int, default=defaults.repeats, help="samples of each length")
    parser.add_argument("--chunk", type=int, default=defaults.chunk, help="tokens, where prompts come in chunks")
    parser.add_argument("--threads", type=int, default=defaults.threads, help="of every graph")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of prompts, orders and bootstraps")
    parser.add_argument("--quick", action="store_true", help="a small model and few samples, to see that it works")
    parser.add_argument(
        "--samples", type=Path, metavar="FILE", help="results of a run before: judge its samples anew, measure nothing"
    )
    parser.add_argument("--docs", action="store_true", help=f"write the report into {DOCS}/, as the new baseline")
    parser.add_argument("--baseline", type=Path, default=BASELINE, metavar="FILE", help="results to compare with")
    parser.add_argument("--capacity", type=Path, metavar="FILE", help="results of a capacity sweep, for the report")
    return parser


def _parse(arguments: Sequence[str]) -> tuple[Settings, argparse.Namespace]:
    parser = make_parser()
    options = parser.parse_args(arguments)
    for name, least in (("lengths", MIN_LENGTHS), ("repeats", MIN_REPEATS), ("chunk", 1), ("threads", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}, must be at least {least}")
    if options.quick and (options.docs or options.samples is not None):
        parser.error("--quick measures, and has no figures for --docs")
    for name in ("samples", "capacity"):
        if getattr(options, name) is not None and not getattr(options, name).is_file():
            parser.error(f"--{name} is {getattr(options, name)}, must be a file")
    settings = replace(
        Settings(),
        num_lengths=options.lengths,
        repeats=options.repeats,
        chunk=options.chunk,
        threads=options.threads,
        seed=options.seed,
    )
    return replace(settings, **QUICK) if options.quick else settings, options


def _load(path: Path | None) -> Any:
    return None if path is None or not path.is_file() else json.loads(path.read_text(encoding="utf-8"))


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("onward", "onnxruntime", "numpy", "scipy")}


def _columns(examined: Examination) -> tuple[list[float], list[float]]:
    return examined.medians.lengths.tolist(), examined.medians.seconds.tolist()


def _ends(interval: Interval) -> dict[str, float]:
    return {"_low": interval.low, "_high": interval.high}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    sys.exit(main())
