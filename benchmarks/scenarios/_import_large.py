"""Resources of importing GPT-2, 124 million parameters: `python -m benchmarks.scenarios._import_large SIZE ROUNDS DIR`.

Transformers makes the folder with random weights, and a tokenizer of 50,257 tokens trained on the standard library.
Each step is a process of its own, as users run it:

    import      python -m model import
    export      python -m export, in float32 and, from the same checkpoint, in int8
    start       python -m service serve, until its proof has passed

Of each step: wall seconds, and the peak of memory that is no file's, looked at a hundred times a second. Of several
rounds the slowest and the largest count, on at most two cores. Promise: import and export within 60 seconds and 4 GB, a
start within 5 seconds. Prints one JSON object. Imports nothing large, since a child's memory is counted from the fork
on.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from loadtest.child import run_module
from loadtest.serving import serving

MAX_SECONDS = 60.0
MAX_BYTES = 4 * 10**9
MAX_START_SECONDS = 5.0
NUM_CORES = 2
PRECISIONS = ("fp32", "int8")

SIZES: Mapping[str, Mapping[str, int]] = {
    "gpt2-124m": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12},
    "tiny": {"vocab_size": 600, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4},
}
"""By transformers' names: the model of the promise, and one to try the program with."""


_MODULE = "benchmarks.scenarios._import_large"
_END_OF_TEXT = "<|endoftext|>"
_MAX_LINES = 20
_SAMPLE_SECONDS = 0.01
_BYTES_PER_TOKEN = 200
"""Of the text that a tokenizer is trained on."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: wall seconds, and the peak of its memory, but for pages of files."""

    name: str
    precision: str
    seconds: float
    peak_bytes: int


def make_folder(folder: Path, size: Mapping[str, int]) -> None:
    """Saves a GPT-2 with random weights from seed 0 and its tokenizer, as transformers saves them.

    Raises:
        RuntimeError: if the standard library has too little text.
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


def import_random(size: str, work: Path) -> Path:
    """A checkpoint of `make_folder`'s model, made anew in the emptied folder `work`: the importer may have changed.

    Raises:
        RuntimeError: with a step's last words.
    """
    shutil.rmtree(work, ignore_errors=True)
    theirs, ours = work / "theirs", work / "checkpoint"
    run_module(_MODULE, "make", str(theirs), size)
    run_module("model", "import", str(theirs), "--out", str(ours))
    return ours


def measure(workshop: Path, size: str, rounds: int) -> list[Step]:
    """Each step's slowest seconds and largest memory over the rounds."""
    theirs, ours = workshop / "theirs", workshop / "ours"
    run_step("make", "", _MODULE, "make", str(theirs), size)
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

    Raises:
        RuntimeError: with its last lines, if it fails.
    """
    with tempfile.TemporaryFile("w+") as said:
        began = time.monotonic()
        with subprocess.Popen([sys.executable, "-m", *arguments], stdout=said, stderr=subprocess.STDOUT) as process:
            peak_bytes = 0
            while process.poll() is None:
                peak_bytes = max(peak_bytes, _own_bytes(process.pid))
                time.sleep(_SAMPLE_SECONDS)
            seconds = time.monotonic() - began
        if process.returncode != 0:
            said.seek(0)
            last = "".join(said.readlines()[-_MAX_LINES:])
            raise RuntimeError(f"python -m {' '.join(arguments)} ended with {process.returncode}:\n{last}")
    return Step(name, precision, seconds, peak_bytes)


def _own_bytes(pid: int) -> int:
    """Resident memory of a process that is no file's: what a memory limit must have room for. 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))


def _start(models: Path, precision: str) -> Step:
    """A server of one model, until it is ready."""
    began = time.monotonic()
    with serving(models, "--metrics-port", "0", "--log-level", "warning") as server:
        return Step("start", precision, time.monotonic() - began, server.peak_bytes() or 0)


def promises(steps: Iterable[Step]) -> list[dict[str, Any]]:
    """The promise in each precision, and whether it is kept."""
    by_name = {(step.name, step.precision): step for step in steps}
    imported, made = by_name["import", ""], []
    for precision in PRECISIONS:
        exported, start = by_name["export", precision], by_name["start", precision].seconds
        seconds = imported.seconds + exported.seconds
        peak = max(imported.peak_bytes, exported.peak_bytes)
        text = (
            f"Import and export in {precision}: {seconds:.1f} s of {MAX_SECONDS:.0f}, {peak / 1e9:.1f} GB of "
            f"{MAX_BYTES / 1e9:.0f}; start: {start:.1f} s of {MAX_START_SECONDS:.0f}"
        )
        kept = seconds <= MAX_SECONDS and peak <= MAX_BYTES and start <= MAX_START_SECONDS
        made.append({"precision": precision, "text": text, "kept": kept})
    return made


def main(arguments: Sequence[str]) -> None:
    """Measures and prints; with `make FOLDER SIZE` it only makes the folder."""
    if arguments[0] == "make":
        make_folder(Path(arguments[1]), SIZES[arguments[2]])
        return
    size, rounds, build = arguments
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    Path(build).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="import-large-", dir=build) as workshop:
        steps = measure(Path(workshop), size, int(rounds))
    print(json.dumps({"steps": list(map(asdict, steps)), "promises": promises(steps)}))


if __name__ == "__main__":
    main(sys.argv[1:])
