"""The protocol of systems under test: one JSON object a line, a question on stdin, its answer on stdout.

    {"do": "prepare"}                                    → {"ok": true, "seconds"}      converts the weights, once
    {"do": "load"}                                       → {"ok": true, "seconds", "version"}
    {"do": "generate", "prompts": [[ids]], "new": n}     → {"ok": true, "seconds", "noise", "tokens": [[ids]]}
    {"do": "score", "windows": [[[ids], n]]}             → {"ok": true, "seconds", "noise", "nats"}
    {"do": "translate", "sources": [[ids]], "lengths": [n], "batching": {…}, "in_flight": n}           → the same
    anything that fails                                  → {"ok": false, "error"}

The end of stdin ends the program. The clock runs here, beside the call, so that the protocol costs no system anything.
What libraries print goes to stderr. Standard library only: it is imported in environments without our dependencies.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

Window = tuple[Sequence[int], int]
"""Token ids, and how many of the last are scored; at least one is not."""
_CLOCK_TICK_SECONDS = 0.03
"""/proc counts in hundredths of a second, for the machine and for the process: this much may be mere rounding."""


@dataclass(frozen=True)
class Options:
    """A system's command line: the Hugging Face folder, a folder of its own for conversions, and how to run.

    `folder` is the checkpoint's folder for our own systems. `threads` is per process; a call has at most `max_batch`
    prompts, and none is longer, with what it generates, than `context` tokens.
    """

    folder: Path
    work: Path
    precision: str
    threads: int
    max_batch: int
    context: int
    device: str = "cpu"


class System:
    """Generates. Constructed before anything is loaded; `prepare` may run in an earlier process."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def prepare(self) -> None:
        """Converts the weights into the system's own format, unless that was done before."""

    def load(self) -> str:
        """Loads the model; returns the system's version."""
        raise NotImplementedError

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """Exactly `new` greedy ids for each of some equally long prompts, all of them in flight together."""
        raise NotImplementedError

    def score(self, windows: Sequence[Window]) -> float:
        """-Σ ln p over the scored tokens of windows, each token given all before it in its window.

        A window has fewer tokens than the context.
        """
        raise NotImplementedError("it gives no log-probabilities of given tokens")

    def translate(
        self, sources: Sequence[Sequence[int]], lengths: Sequence[int], batching: Mapping[str, Any], in_flight: int
    ) -> list[list[int]]:
        """A greedy output of its own length for each source, of which only `in_flight` are unanswered at a time.

        Of encoder-decoders; `batching` is specific to the system.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Ends whatever would outlive this process."""


def parse(arguments: Sequence[str]) -> Options:
    """The command line that every system has."""
    parser = argparse.ArgumentParser(description="Answers the questions of benchmarks/peers/protocol.py on stdin.")
    parser.add_argument("--folder", type=Path, required=True, help="the weights, as a Hugging Face folder")
    parser.add_argument("--work", type=Path, required=True, help="folder for what the weights are converted to")
    parser.add_argument("--precision", default="fp32", help="the system's own name of it")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    return Options(**vars(parser.parse_args(arguments)))


def main(make: Callable[[Options], System]) -> None:
    """Answers questions until stdin ends."""
    options = parse(sys.argv[1:])
    options.work.mkdir(parents=True, exist_ok=True)
    with take_stdout() as answers:
        system = make(options)
        try:
            serve(system, sys.stdin, answers)
        finally:
            system.close()


def take_stdout() -> TextIO:
    """The real stdout for answers; from here on whatever else is printed, by child processes too, goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def serve(system: System, questions: TextIO, answers: TextIO) -> None:
    """Answers each line of `questions` with one line in `answers`."""
    for line in questions:
        try:
            answer = {"ok": True, **_answer(system, json.loads(line))}
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(system: System, question: dict[str, Any]) -> dict[str, Any]:
    match question["do"]:
        case "prepare":
            return {"seconds": _timed(system.prepare)[1]}
        case "load":
            version, seconds, _ = _timed(system.load)
            return {"version": version, "seconds": seconds}
        case "generate":
            prompts, new = question["prompts"], question["new"]
            tokens, seconds, noise = _timed(lambda: system.generate(prompts, new))
            if [len(row) for row in tokens] != [new] * len(prompts):
                raise RuntimeError(f"asked for {len(prompts)} x {new} tokens, got {[len(row) for row in tokens]}")
            return {"seconds": seconds, "noise": noise, "tokens": tokens}
        case "score":
            windows = [(ids, scored) for ids, scored in question["windows"]]
            nats, seconds, noise = _timed(lambda: system.score(windows))
            if not math.isfinite(nats):
                raise RuntimeError(f"the log-probabilities add up to {-nats}")
            return {"seconds": seconds, "noise": noise, "nats": nats}
        case "translate":
            sources, lengths = question["sources"], question["lengths"]
            batching, in_flight = question["batching"], question["in_flight"]
            tokens, seconds, noise = _timed(lambda: system.translate(sources, lengths, batching, in_flight))
            if [len(row) for row in tokens] != lengths:
                raise RuntimeError(f"asked for outputs of {lengths} tokens, got {[len(row) for row in tokens]}")
            return {"seconds": seconds, "noise": noise, "tokens": tokens}
        case other:
            raise ValueError(f"unknown question {other!r}")


def nats_of(logits: Any, ids: Sequence[int], scored: int) -> float:
    """-Σ ln p of a window's scored tokens, from the logits of one system.

    Args:
        logits: `[T, V]` after tokens of the window, the last of them after its last but one; float, or its log-softmax.
        ids: the window.
        scored: how many of its last tokens.
    """
    import numpy as np

    wanted = np.asarray(logits)[-scored:].astype(np.float64)
    peaks = wanted.max(axis=-1, keepdims=True)
    totals = peaks[:, 0] + np.log(np.exp(wanted - peaks).sum(axis=-1))
    return float((totals - wanted[np.arange(scored), np.asarray(ids[-scored:])]).sum())


def _timed(call: Callable[[], Any]) -> tuple[Any, float, float | None]:
    """A call's result, its seconds, and the share of the machine that other processes took meanwhile."""
    before, began = _cpu_seconds(), time.perf_counter()
    result = call()
    seconds, after = time.perf_counter() - began, _cpu_seconds()
    if before is None or after is None:
        return result, seconds, None
    others = (after[0] - before[0]) - (after[1] - before[1]) - _CLOCK_TICK_SECONDS
    return result, seconds, round(max(0.0, others) / (seconds * (os.cpu_count() or 1)), 4)


def _cpu_seconds() -> tuple[float, float] | None:
    """CPU time of the whole machine, and of this process and its descendants; None without /proc."""
    try:
        machine = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    own, pending = 0, [os.getpid()]
    while pending:
        process = Path("/proc") / str(pending.pop())
        try:
            # utime, stime and those of waited-for children stand 14th to 17th, 12th to 15th after the name.
            own += sum(int(value) for value in (process / "stat").read_text().rsplit(")", 1)[1].split()[11:15])
            for task in (process / "task").iterdir():
                pending += [int(child) for child in (task / "children").read_text().split()]
        except (OSError, ValueError):
            continue  # it ended while being looked at
    busy = sum(machine) - machine[3] - machine[4]  # all but idle and waiting for disks
    tick = os.sysconf("SC_CLK_TCK")
    return busy / tick, own / tick
