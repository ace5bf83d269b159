"""Everything that needs CUDA, checked and measured on the card that is there.

    python -m benchmarks.gpu_check [--only PART ...] [--quick] [--device cuda|cpu] [--out FOLDER] [--docs]
                                   [--artifacts FOLDER] [--corpus PATH] [--budget S] [--train-budget S] [--report]

    ceilings      the device's bandwidth and products, by torch
    parity        both families in fp16 and bf16 against PyTorch in float32 on the same card
    captured      captured decoding steps against eager ones, bit for bit
    batches       ragged, mixed, preempted and prefix-shared batches against the same requests alone
    speed         decode and prefill beside compiled transformers and plain torch, as shares of the roofline
    law           the quadratic fit of prompts up to 32k tokens
    translation   the recipe for English to German, trained and served, with BLEU

Runs in the interpreter that it is started with, installs nothing and asks no network. What a part lacks is said at the
start, and that part is not run, which counts as not passed. Results are in FOLDER/gpu-check.json as soon as they are
known, a document beside them at the end; parts that are in the file from earlier runs stay. `--report` runs nothing and
writes the document anew; `--docs` puts it and the data under docs/, which takes a full run on a card.

With `--device cpu` every part runs at sizes that say nothing, on graphs of standard operators, as does `--quick` on a
card on its own graphs: to see that all of it works. The last line on stdout is one JSON object. Exit status: 0 all that
was run holds, 1 not so, 2 the arguments are wrong.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu import needs, report
from benchmarks.gpu.places import CORPUS, SAMPLE
from benchmarks.gpu.results import RESULTS, Journal, Scribe, passed
from loadtest import machine
from model.artifact import Device

if TYPE_CHECKING:
    from benchmarks.gpu.bench import Bench
    from benchmarks.gpu.workshop import Workshop

BUILD = Path("build/gpu-check")
DOCS = Path("docs")
TRANSLATION = "translation"


def main(arguments: Sequence[str]) -> int:
    """Runs what was asked for, and says what came of it."""
    options = _parse(arguments)
    path = options.out / RESULTS
    try:
        journal = Journal(path)
    except ValueError as error:
        return _refuse(str(error))
    if not options.report:
        _run(options, journal)
    if not journal.parts:
        return _refuse(f"{path} has no results")
    folder = options.out
    if options.docs:
        if any(part["is_quick"] for part in journal.parts.values()):
            return _refuse("figures of a quick run, or of a CPU, are none for a document")
        folder = DOCS
        Journal(folder / RESULTS).replace(journal.parts)
    document = folder / report.DOCUMENT
    document.write_text(report.render(journal.parts), encoding="utf-8")
    verdicts = {name: passed(part) for name, part in journal.parts.items()}
    is_passed = all(verdicts[name] for name in (verdicts if options.report else _parts(options.only)))
    said = {"passed": is_passed, "parts": verdicts, "results": str(path), "document": str(document)}
    print(json.dumps(said))
    return 0 if is_passed else 1


def _run(options: argparse.Namespace, journal: Journal) -> None:
    """Every part that was asked for, one after the other."""
    parts = _parts(options.only)
    lacking = {part: needs.missing(part, options.device) for part in parts}
    for part, names in lacking.items():
        _tell(f"{part}: {'needs ' + ', '.join(names) if names else 'can be run'}")
    facts = {
        "machine": _machine(options.device),
        "device": str(options.device),
        "is_quick": options.quick or options.device is Device.CPU,
        "versions": needs.versions(),
    }
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="onward-gpu-check-") as folder:
        bench: Bench | None = None
        for part in parts:
            scribe = Scribe(part, journal, facts)
            if lacking[part]:
                scribe.leave_out(part, f"needs {', '.join(lacking[part])}")
                continue
            if bench is None:
                bench = _make_bench(options, journal, Path(folder))
            ends = (time.monotonic() + options.train_budget) if part == TRANSLATION else began + options.budget
            _run_part(part, bench.until(ends), scribe)


def _make_bench(options: argparse.Namespace, journal: Journal, folder: Path) -> Bench:
    # These need what the parts need: not before that is known to be there.
    from benchmarks.gpu.bench import Bench
    from benchmarks.gpu.plan import make_plan

    plan = make_plan(options.device, is_quick=options.quick)

    @cache
    def open_workshop() -> Workshop:
        from benchmarks.gpu.workshop import Workshop

        return Workshop(plan, folder / "graphs", options.artifacts, _tell)

    return Bench(plan, open_workshop, journal, folder, options.corpus.resolve(), ends=0.0)


def _run_part(name: str, bench: Bench, scribe: Scribe) -> None:
    """One part; what it fails with is written down, and the next one is run all the same."""
    if bench.seconds_left <= 0:
        scribe.leave_out(name, "the time is up")
        return
    try:
        importlib.import_module(f"benchmarks.gpu.{name}").run(bench, scribe)
    except Exception as error:
        traceback.print_exc()
        scribe.leave_out("the rest", f"{type(error).__name__}: {str(error).strip() or 'no message'}")
    else:
        scribe.end()
    gc.collect()


def _parts(only: Sequence[str]) -> list[str]:
    """What was asked for and what that is compared with, in order."""
    wanted = set(only)
    for part in only:
        wanted.update(needs.NEEDED_FIRST.get(part, ()))
    return [part for part in needs.MODULES if part in wanted]


def _machine(device: Device) -> str:
    """What the figures were taken on, for people."""
    host = machine.describe()
    name = f"{host['processor']}, {host['cores']} processors, Python {platform.python_version()}"
    if device is Device.CPU:
        return name
    try:
        import torch

        card = torch.cuda.get_device_properties(0)
    except (ImportError, RuntimeError, AssertionError):
        return name
    return f"{card.name}, {card.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}; {name}"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _refuse(problem: str) -> int:
    _tell(f"gpu_check: {problem}")
    return 2


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    names = list(needs.MODULES)
    parser.add_argument("--device", type=Device, choices=list(Device), default=Device.CUDA)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="sizes that say nothing: to see that it works")
    parser.add_argument("--out", type=Path, default=BUILD, help=f"folder for results (default: {BUILD})")
    parser.add_argument("--artifacts", type=Path, help="models exported before: NAME/checkpoint and NAME/PRECISION")
    parser.add_argument("--corpus", type=Path, default=None, help="gettext catalogs, English to German")
    parser.add_argument("--budget", type=float, default=470.0, help="seconds for all parts but the translation")
    parser.add_argument("--train-budget", type=float, default=540.0, help="seconds for the translation with its scores")
    parser.add_argument("--report", action="store_true", help="run nothing, write the document of what is there")
    parser.add_argument("--docs", action="store_true", help="write the document and the data into docs/")
    options = parser.parse_args(arguments)
    if options.corpus is None:
        options.corpus = CORPUS if CORPUS.is_dir() else SAMPLE
    for name in ("artifacts", "corpus"):
        if (path := getattr(options, name)) is not None and not path.exists():
            parser.error(f"--{name} is {path}, which is not there")
    for name in ("budget", "train_budget"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name):g}, must be above 0")
    return options


if __name__ == "__main__":
    # A library that looks something up would wait for a network that is not asked.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # noqa: TID251 (a library's own switch, not our configuration)
    sys.exit(main(sys.argv[1:]))
