"""What importing a model of a real size takes: `python -m benchmarks.import_large [--rounds N] [--docs]`.

A GPT-2 of 124 million parameters in Hugging Face's layout, made by transformers with random weights, and with a
tokenizer of all its 50,257 tokens, trained on the standard library, goes the way of any model from elsewhere. Each step
is a process of its own, as people would run it:

    import      python -m model import
    export      python -m export, in float32 and, from the same checkpoint, in int8
    start       python -m service serve, from its first instruction to the line that says that its proof has passed

Of each step: seconds by the clock, and the most memory that was ever resident, as the system counts it; files that were
just written are in the page cache. Of several rounds the slowest and the largest count. Where there are more than two
cores, two are used.

The promise: import and export within 60 seconds and 4 GB, a start within 5 seconds. The last line of stdout is one JSON
object; exit status 1 says that the promise is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.frame import tables as marks
from loadtest.serving import serving

MAX_SECONDS = 60.0
MAX_BYTES = 4 * 10**9
MAX_START_SECONDS = 5.0
NUM_CORES = 2
PRECISIONS = ("fp32", "int8")

GPT2: Mapping[str, int] = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
QUICK: Mapping[str, int] = {"vocab_size": 600, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
"""Sizes by their names in transformers' configuration: the model of the promise, and one to try the program with."""

DOCUMENT = Path("docs/models.md")
BEGIN = "<!-- import-large: begin; written by python -m benchmarks.import_large, do not edit -->"
END = "<!-- import-large: end -->"

_END_OF_TEXT = "<|endoftext|>"
_TOLD_LINES = 20
_BYTES_PER_TOKEN = 200
"""Of the text that a tokenizer is trained on: for GPT-2's, all that the standard library has."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step, in one precision where that matters: how long it took, and the most memory that was resident."""

    name: str
    precision: str
    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Promise:
    """What was promised of a model's way in one precision, and what came of it; memory is that of the largest step."""

    precision: str
    seconds: float
    peak_bytes: int
    start_seconds: float

    @property
    def is_kept(self) -> bool:
        """Whether all of it was."""
        within = self.seconds <= MAX_SECONDS and self.peak_bytes <= MAX_BYTES
        return within and self.start_seconds <= MAX_START_SECONDS


def make_folder(folder: Path, size: Mapping[str, int]) -> None:
    """Saves a GPT-2 with random weights from seed 0 and its tokenizer, as transformers saves them.

    Raises:
        RuntimeError: when the standard library has too little text for so many tokens.
    """
    import torch
    import transformers

    tokenizer = _make_tokenizer(size["vocab_size"])
    torch.manual_seed(0)
    end = size["vocab_size"] - 1
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=end, eos_token_id=end))
    model.save_pretrained(folder)
    special = {"bos_token": _END_OF_TEXT, "eos_token": _END_OF_TEXT, "unk_token": _END_OF_TEXT}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def _make_tokenizer(vocab_size: int) -> Any:
    """As GPT-2's: 256 bytes, merges, and one control token behind them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    from model.data import stdlib

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    texts = [file.text for file in stdlib.split().training]
    ends = accumulate(map(len, texts))
    inner.train_from_iterator(texts[: 1 + sum(end < _BYTES_PER_TOKEN * vocab_size for end in ends)], trainer)
    inner.add_special_tokens([_END_OF_TEXT])
    if inner.get_vocab_size() != vocab_size:
        raise RuntimeError(f"{stdlib.SOURCE} makes {inner.get_vocab_size()} tokens, {vocab_size} are wanted")
    return inner


def measure(workshop: Path, size: Mapping[str, int], rounds: int) -> list[Step]:
    """Goes all the way `rounds` times; each step's slowest seconds and largest memory.

    Raises:
        RuntimeError: with the last lines of a step that failed.
    """
    theirs, ours = workshop / "theirs", workshop / "ours"
    run_step("make", "", "benchmarks.import_large", "--make", str(theirs), "--size", json.dumps(dict(size)))
    found: dict[tuple[str, str], list[Step]] = {}
    for _ in range(rounds):
        steps = [run_step("import", "", "model", "import", str(theirs), "--out", str(ours))]
        for precision in PRECISIONS:
            out = workshop / precision / "gpt2"
            steps.append(
                run_step("export", precision, "export", str(ours), "--out", str(out), "--precision", precision)
            )
        steps += [_start(workshop / precision, precision) for precision in PRECISIONS]
        for step in steps:
            found.setdefault((step.name, step.precision), []).append(step)
    return [
        Step(name, precision, max(step.seconds for step in steps), max(step.peak_bytes for step in steps))
        for (name, precision), steps in found.items()
    ]


def run_step(name: str, precision: str, *arguments: str) -> Step:
    """Runs `python -m` with these arguments to its end.

    The kernel counts a child's memory from the fork on, when it is still this process: which therefore imports nothing
    large itself.

    Raises:
        RuntimeError: with its last lines, when it fails.
    """
    with tempfile.TemporaryFile("w+") as said:
        began = time.monotonic()
        with subprocess.Popen([sys.executable, "-m", *arguments], stdout=said, stderr=subprocess.STDOUT) as process:
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.monotonic() - began
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            said.seek(0)
            last = "".join(said.readlines()[-_TOLD_LINES:])
            raise RuntimeError(f"python -m {' '.join(arguments)} ended with {process.returncode}:\n{last}")
    return Step(name, precision, seconds, usage.ru_maxrss * 1024)


def _start(models: Path, precision: str) -> Step:
    """A server of one model, from nothing to the line that says that it answers."""
    began = time.monotonic()
    with serving(models, "--metrics-port", "0", "--log-level", "warning") as server:
        return Step("start", precision, time.monotonic() - began, server.peak_bytes() or 0)


def promises(steps: Iterable[Step]) -> list[Promise]:
    """What came of the promise in each precision."""
    by_name = {(step.name, step.precision): step for step in steps}
    imported = by_name["import", ""]
    made = []
    for precision in PRECISIONS:
        exported, start = by_name["export", precision], by_name["start", precision]
        peak = max(imported.peak_bytes, exported.peak_bytes)
        made.append(Promise(precision, imported.seconds + exported.seconds, peak, start.seconds))
    return made


_COMMANDS = {"import": "`python -m model import`", "export": "`python -m export`", "start": "`python -m service serve`"}


def table(steps: Sequence[Step]) -> str:
    """Markdown: a line for each step, and what came of the promise."""
    lines = ["| step | precision | seconds | peak memory, MB |", "|---|---|---:|---:|"]
    for step in steps:
        cells = (_COMMANDS[step.name], step.precision, f"{step.seconds:.1f}", f"{step.peak_bytes / 1e6:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for each in promises(steps):
        verdict = "kept" if each.is_kept else "**broken**"
        lines.append(
            f"Import and export in {each.precision}: {each.seconds:.1f} s of {MAX_SECONDS:.0f}, "
            f"{each.peak_bytes / 1e9:.1f} GB of {MAX_BYTES / 1e9:.0f}; start: {each.start_seconds:.1f} s of "
            f"{MAX_START_SECONDS:.0f}; {verdict}."
        )
    return "\n".join(lines)


def _use_cores(count: int) -> int:
    """Leaves this process and its children so many cores at most; how many they have."""
    cores = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, cores)
    return len(cores)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and writes the table if told to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.import_large", description="What importing a model of a real size takes."
    )
    parser.add_argument("--rounds", type=int, default=1, help="the slowest and the largest of so many count")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to try the program; says nothing")
    parser.add_argument("--build", type=Path, default=Path("build/bench"), help="2 GB are written, and removed, here")
    parser.add_argument("--docs", action="store_true", help=f"replace the table in {DOCUMENT}")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.make is not None:
        make_folder(options.make, options.size)
        return 0
    num_cores = _use_cores(NUM_CORES)
    options.build.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="import-large-", dir=options.build) as workshop:
            steps = measure(Path(workshop), QUICK if options.quick else GPT2, options.rounds)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    made = table(steps)
    print(made, file=sys.stderr)
    if options.docs:
        document = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(marks.replace(document, BEGIN, END, made), encoding="utf-8")
    came = promises(steps)
    told = {"steps": list(map(asdict, steps)), "promises": [{**asdict(each), "kept": each.is_kept} for each in came]}
    print(json.dumps({"quick": options.quick, "rounds": options.rounds, "cores": num_cores, **told}))
    return 0 if all(each.is_kept for each in came) else 1


if __name__ == "__main__":
    sys.exit(main())
