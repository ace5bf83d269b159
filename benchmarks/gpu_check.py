"""Everything that needs CUDA, checked and measured on the card that is there.

    python -m benchmarks.gpu_check [--only NAME ...] [--quick] [--resume] [--device cuda|cpu] [--out FOLDER] [--docs]
                                   [--work FOLDER] [--artifacts FOLDER] [--corpus PATH] [--budget S] [--train-budget S]
                                   [--report]

    ceilings      the device's bandwidth and products, by torch
    parity        both families in fp16 and bf16 against PyTorch in float32 on the same card
    captured      captured decoding steps against eager ones, bit for bit
    speed         the large model's decode and prefill beside compiled transformers, as shares of the roofline
    batches       ragged, mixed, preempted and prefix-shared batches against the same requests alone
    law           the quadratic fit of prompts up to 32k tokens
    small         speed of the small model, of which nothing is promised
    translation   the recipe for English to German, trained and served, with BLEU

Parts are run in this order, each in stages (`benchmarks.gpu.stages`): a process for each model, and for each system
whose speed is measured. One that fails, takes its device down with it or exceeds its time is noted, and the next one is
run. NAME is a part or a stage, such as speed/llama-1.1b/onward.

Runs with the interpreter that it is started with, installs nothing and asks no network. What a part lacks is said at
the start, and that part is not run, which counts as not passed. Results are in FOLDER/gpu-check.json as soon as they
are known, a document of all there is beside them after every stage; stages that are in the file from earlier runs stay.
--resume runs those alone that are not there whole, so that the same command again goes on where the time was up. --work
keeps graphs from one run to the next. --report runs nothing and writes the document anew; --docs puts it and the data
under docs/, which takes a full run on a card.

With `--device cpu` every part runs at sizes that say nothing, on graphs of standard operators, as does `--quick` on a
card on its own graphs: to see that all of it works. The last line on stdout is one JSON object. Exit status: 0 all that
was asked for holds, 1 not so, 2 the arguments are wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import promises, report
from benchmarks.gpu.launch import Order, Processes, Subprocesses
from benchmarks.gpu.places import CORPUS, SAMPLE
from benchmarks.gpu.plan import make_plan
from benchmarks.gpu.results import REST, RESULTS, Journal, Scribe, by_part, is_whole, passed
from benchmarks.gpu.stages import PARTS, TRANSLATION, Stage, brought_models, make_stages, select
from model.spec.artifact import Device

if TYPE_CHECKING:
    from benchmarks.gpu.plan import Plan

BUILD = Path("build/gpu-check")
DOCS = Path("docs")
JUDGED = "speed"
"""The part whose promises are about several stages together, and so are judged when all of them are over."""
PROMISES = f"{JUDGED}/promises"

_LEAST_SECONDS = 5.0


def main(arguments: Sequence[str], processes: Processes | None = None) -> int:
    """Runs what was asked for, and says what came of it; each stage in a process of its own unless told otherwise."""
    options = _parse(arguments)
    path = options.out / RESULTS
    plan = make_plan(options.device, is_quick=options.quick)
    every = make_stages(plan, brought_models(options.artifacts, plan), options.train_budget)
    try:
        stages = select(every, options.only)
        journal = Journal(path)
    except ValueError as error:
        return _refuse(str(error))
    if not options.report:
        _Run(options, plan, journal, processes or Subprocesses()).run(stages, every)
    if not journal.stages:
        return _refuse(f"{path} has no results")
    folder = options.out
    if options.docs:
        if any(stage["is_quick"] for stage in journal.stages.values()):
            return _refuse("figures of a quick run, or of a CPU, are none for a document")
        folder = DOCS
        Journal(folder / RESULTS).replace(journal.stages)
    document = _write_document(folder, journal, every)
    _tell(document.read_text(encoding="utf-8"))
    verdicts = {name: passed(part) for name, part in by_part(journal.stages).items()}
    asked = verdicts if options.report else dict.fromkeys(stage.part for stage in stages)
    is_passed = all(verdicts.get(name, False) for name in asked)
    said = {"passed": is_passed, "parts": verdicts, "results": str(path), "document": str(document)}
    print(json.dumps(said))
    return 0 if is_passed else 1


class _Run:
    """Stages, one after the other, within the time that there is."""

    def __init__(self, options: argparse.Namespace, plan: Plan, journal: Journal, processes: Processes) -> None:
        self._options = options
        self._plan = plan
        self._journal = journal
        self._processes = processes

    def run(self, stages: Sequence[Stage], every: Sequence[Stage]) -> None:
        """All of them that can be run; `every` are those that there could be."""
        options, journal = self._options, self._journal
        began = time.monotonic()
        judged = [stage for stage in stages if stage.part == JUDGED]
        parts = list(dict.fromkeys(stage.part for stage in stages))
        try:
            around = self._processes.look(options.device, parts)
        except RuntimeError as error:
            _tell(f"gpu_check: {error}")
            around = None
        facts = {
            "machine": "unknown" if around is None else around.machine,
            "device": str(options.device),
            "is_quick": self._plan.is_quick,
            "versions": {} if around is None else around.versions,
        }
        lacking = {part: ["a device that answers"] if around is None else around.lacking[part] for part in parts}
        for part, names in lacking.items():
            _tell(f"{part}: {'needs ' + ', '.join(names) if names else 'can be run'}")
        with ExitStack() as held:
            work = Path(options.work or held.enter_context(tempfile.TemporaryDirectory(prefix="onward-gpu-check-")))
            work.mkdir(parents=True, exist_ok=True)
            for stage in stages:
                ends = time.monotonic() + options.train_budget if stage.part == TRANSLATION else began + options.budget
                if options.resume and _is_known(journal.stages.get(stage.name), facts):
                    _tell(f"{stage.name}: is there already")
                elif names := lacking[stage.part]:
                    Scribe(stage.name, journal, facts).leave_out(stage.name, f"needs {', '.join(names)}")
                else:
                    self._run_stage(stage, Scribe(stage.name, journal, facts), ends, work.resolve())
                if stage in judged[-1:] and not self._plan.is_quick:
                    self._judge(facts)
                try:
                    _write_document(options.out, journal, every)
                except Exception:
                    # The figures are there; what is still to be run matters more.
                    traceback.print_exc()

    def _run_stage(self, stage: Stage, scribe: Scribe, ends: float, work: Path) -> None:
        """One stage; how it ended badly is written down where it could not do that itself."""
        options, journal = self._options, self._journal
        began = time.monotonic()
        ends = min(ends, began + stage.seconds)
        if ends - began < _LEAST_SECONDS:
            scribe.leave_out(stage.name, "the time is up")
            return
        order = Order(
            stage=stage,
            ends=ends,
            device=options.device,
            is_quick=self._plan.is_quick,
            results=journal.path.resolve(),
            work=work,
            artifacts=None if options.artifacts is None else options.artifacts.resolve(),
            corpus=options.corpus.resolve(),
        )
        why = self._processes.run(order)
        journal.reload()
        found = journal.stages[stage.name]
        # From the outside: a process takes seconds to begin.
        found["seconds"] = round(time.monotonic() - began, 1)
        journal.put(stage.name, found)
        # One that came to its end may still fall on its way out, as libraries do; its figures are none the worse.
        is_told = found["is_complete"] or any(each["what"] == REST for each in found["left_out"])
        if why and not is_told:
            Scribe.resume(stage.name, journal).leave_out(REST, why)
        elif why:
            _tell(f"{stage.name}: {why}")

    def _judge(self, facts: Mapping[str, Any]) -> None:
        """What the stages of a part come to together."""
        names = [name for name in self._journal.stages if name.startswith(f"{JUDGED}/")]
        rows = [row for name in names for row in self._journal.stages[name]["figures"].get("rows", [])]
        scribe = Scribe(PROMISES, self._journal, facts)
        promises.judge(scribe, rows, self._plan)
        scribe.end()


def _is_known(found: Mapping[str, Any] | None, facts: Mapping[str, Any]) -> bool:
    """Whether a stage was run whole before, on what there is now."""
    return found is not None and is_whole(found) and all(found[name] == value for name, value in facts.items())


def _write_document(folder: Path, journal: Journal, every: Sequence[Stage]) -> Path:
    document = folder / report.DOCUMENT
    missing = [stage.name for stage in every if stage.name not in journal.stages]
    document.write_text(report.render(journal.stages, missing), encoding="utf-8")
    return document


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _refuse(problem: str) -> int:
    _tell(f"gpu_check: {problem}")
    return 2


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--device", type=Device, choices=list(Device), default=Device.CUDA)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"parts or stages: {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="sizes that say nothing: to see that it works")
    parser.add_argument("--resume", action="store_true", help="run what is not in the results whole")
    parser.add_argument("--out", type=Path, default=BUILD, help=f"folder for results (default: {BUILD})")
    parser.add_argument("--work", type=Path, help="folder for graphs, for the next run to find (default: none is kept)")
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


def _end(*_: object) -> None:
    """What runs is ended on the way out."""
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    # A library that looks something up would wait for a network that is not asked.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # noqa: TID251 (a library's own switch, not our configuration)
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main(sys.argv[1:]))
