"""Measures the cost of attention on the running service: `make scaling`.

    python -m loadtest scaling [--quick] [--docs] [--repeats 15] [--lengths 16] [--threads N] [--capacity FILE] …
    python -m loadtest scaling --samples build/scaling/scaling.json [--docs] [--capacity FILE]

Self-attention over n tokens costs n². The claims (`claims`):

    claim              time grows with
    prefill            the square of the prompt's length, whole and in chunks
    no_cache           the square of the context, for every token
    encoder            the square of the source's length
    decode             the context, for every token; where keys and values fill a processor's cache, the slope changes
    cross_attention    the source's length, for every token, in the same way
    controls           no square is found where there is none: synthetic times that are linear, or grow with n ln n or
                       n^1.5, and a recurrent model's. No line is found in synthetic times of a cached token that grow
                       with n ln n, n^1.5 or n²

The last stdout line is one JSON object. Report, pictures and raw samples go to `build/scaling`; `--docs` writes them to
`docs/results` too, if the law holds. No absolute time decides anything. `--quick` decides nothing: it takes too few
samples of too short texts. `--samples` measures nothing: it judges the raw samples of an earlier run again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loadtest import machine, provenance
from loadtest.document import DATA
from loadtest.scaling import report, study
from loadtest.scaling.judge import STABLE, drift, judge
from loadtest.scaling.study import Found, StudySettings

STATUSES = f"""Exit status:
  0  the law holds
  1  refused: a claim or a control fails, or a ratio differs by more than a factor of two from the stored baseline of
     the same processor
  2  the measurement failed, or an option is invalid
  3  inconclusive: other processes took more than {report.BUSY:.0%} of the machine, or more than {report.NOISY:.0%} and
     something is refused, or less than {STABLE:.0%} of the samples' resamples have the same verdict
"""
HOLDS, REFUSED, FAILED, INCONCLUSIVE = range(4)
BUILD = Path("build/scaling")
DOCS = Path("docs/results")
NOT_PRINTED = ("series",)
"""Keys of the results that the last line omits."""
MIN_LENGTHS, MIN_REPEATS = 10, 15
"""The fewest that decide anything."""
QUICK: Mapping[str, Any] = {
    "overrides": ("context=1024", "num_kv_heads=1"),
    "num_lengths": 6,
    "repeats": 3,
    "new": 9,
    "num_memory_lengths": 2,
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Samples and the conditions under which they were taken, as the report prints them."""

    found: Found
    settings: StudySettings
    conditions: Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, judges and reports; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    settings, options = _parse(arguments)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {line}", file=sys.stderr, flush=True)

    if options.samples is not None:
        measured = read_samples(options.samples)
        if measured.conditions["quick"] and options.docs:
            print(f"scaling: {options.samples} is of a quick run, which decides nothing", file=sys.stderr)
            return FAILED
        return conclude(measured, options, say)
    others = machine.watch_others()
    try:
        found = study.carry_out(settings, BUILD, say)
    except (RuntimeError, OSError) as error:
        print(f"scaling: {error}", file=sys.stderr)
        return FAILED
    found.facts["others_share"] = others()
    conditions = {
        "machine": machine.describe(),
        "versions": {name: version(name) for name in ("onward", "onnxruntime", "numpy", "scipy")},
        "command": shlex.join(["python", "-m", "loadtest", "scaling", *arguments]),
        **provenance.here(),
        "quick": options.quick,
        "seconds": round(time.monotonic() - began, 1),
        "capacity": None,
    }
    return conclude(Measured(found, settings, conditions), options, say)


def read_samples(path: Path) -> Measured:
    """Reads the raw samples and the conditions of an earlier run."""
    stored = _load(path)
    found = Found(facts=stored["facts"])
    found.series |= {name: [(length, value) for length, value in each] for name, each in stored["series"].items()}
    # Runs that do not record `settle` had none.
    settings = {"settle": 0, **stored["settings"]}
    names = ("machine", "versions", "command", "date", "commit", "quick", "seconds", "capacity")
    conditions = {name: stored.get(name) for name in names}
    return Measured(found, StudySettings(**{**settings, "overrides": tuple(settings["overrides"])}), conditions)


def conclude(measured: Measured, options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Judges, compares, writes the report and prints the last line; returns the exit status."""
    is_quick = measured.conditions["quick"]
    results = {**measured.conditions, **judge(measured.found, measured.settings)}
    results["drift"] = _drift(results, options)
    objections = [] if is_quick else [*results["objections"], *results["drift"]["objections"]]
    results["doubt"] = doubt = None if is_quick else _doubt(results, is_refused=bool(objections))
    if is_quick or doubt is not None:
        results["law_holds"] = None
    if options.capacity is not None:
        results["capacity"] = _load(options.capacity)
    say("drawing")
    results["report"] = str(BUILD / report.PAGE)
    report.write(results, BUILD)
    for objection in objections:
        print(f"scaling: {objection}", file=sys.stderr)
    if doubt is not None:
        print(f"scaling: inconclusive: {doubt}", file=sys.stderr)
    if results["drift"]["compared"] is None:
        say(f"not compared with a baseline: {results['drift']['reason']}")
    if options.docs and (objections or doubt is not None):
        print(f"scaling: {DOCS}/ is unchanged: only a run in which the law holds is a baseline", file=sys.stderr)
    elif options.docs:
        report.write_document(results, DOCS)
    print(json.dumps({key: value for key, value in results.items() if key not in NOT_PRINTED}, allow_nan=False))
    return INCONCLUSIVE if doubt is not None else REFUSED if objections else HOLDS


def _doubt(results: Mapping[str, Any], *, is_refused: bool) -> str | None:
    """Why the samples decide neither way, or None if they do."""
    share, agreement = results["facts"]["others_share"] or 0.0, results["agreement"]
    if share > report.BUSY or (is_refused and share > report.NOISY):
        return f"other processes took {share:.0%} of the machine"
    if agreement < STABLE:
        return f"only {agreement:.0%} of {results['draws'] // 2:,} resamples of the samples have one verdict"
    return None


def _drift(results: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The comparison with the stored baseline, or the reason why there is none."""
    if results["quick"]:
        reason = "a quick run decides nothing"
    elif options.docs:
        reason = "this run is the new baseline"
    elif options.baseline.is_file():
        return drift(results, _load(options.baseline))
    else:
        reason = "there is no baseline"
    return {"compared": None, "reason": reason, "objections": []}


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    defaults = StudySettings()
    parser = argparse.ArgumentParser(
        prog="python -m loadtest scaling",
        description=(__doc__ or "").splitlines()[0],
        epilog=STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--lengths", type=int, default=defaults.num_lengths, help="number of lengths of each series")
    add("--repeats", type=int, default=defaults.repeats, help="samples of each length")
    add("--chunk", type=int, default=defaults.chunk, help="prefill chunk in tokens")
    add("--threads", type=int, default=defaults.threads, help="threads of every graph")
    add("--seed", type=int, default=defaults.seed, help="seed of prompts, orders and bootstraps")
    add("--quick", action="store_true", help="a small model and few samples, as a smoke test")
    add("--samples", type=Path, metavar="FILE", help="judge the samples of an earlier run again, measure nothing")
    add("--docs", action="store_true", help=f"write the report into {DOCS}/, as the new baseline")
    add("--baseline", type=Path, default=DOCS / DATA / report.RESULTS, metavar="FILE", help="results to compare with")
    add("--capacity", type=Path, metavar="FILE", help="results of a capacity sweep to show in the report")
    return parser


def _parse(arguments: Sequence[str]) -> tuple[StudySettings, argparse.Namespace]:
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
    settings = StudySettings(
        num_lengths=options.lengths,
        repeats=options.repeats,
        chunk=options.chunk,
        threads=options.threads,
        seed=options.seed,
    )
    return replace(settings, **QUICK) if options.quick else settings, options


def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
