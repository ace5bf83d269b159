"""Everything that needs CUDA, on the card that is there: correctness first (`tests/gpu`), then speed.

    python -m benchmarks.gpu_check [--only PART ...] [--quick] [--resume] [--device cuda|cpu] [--out FOLDER] [--budget
    S]

    parity     both families in fp16 and bf16 against PyTorch in float32 on the same card
    captured   eager decode steps against themselves, and captured ones against eager ones, bit for bit
    batches    ragged, mixed, preempted and prefix-shared batches against the same requests alone
    server     a server process: exports, proves, streams full batches, reloads under load, unloads, stops
    speed      the 1.1 B model's decode and prefill beside compiled transformers, as shares of the roofline
    law        the quadratic fit of prompts up to 32k tokens
    small      speed of the 110 M model, without promises

Every part is a process of its own with the present interpreter; nothing is installed and no network is used. A part
that fails or exceeds the remaining budget does not stop the next. A part with a skipped test fails: without a card
nothing was checked. `--quick` runs small sizes; `--device cpu` runs everything at small sizes without a card.
`--resume` keeps speed that was measured in FOLDER. The last line on stdout is one JSON object: `parts` says which
passed, `details` why not, in how many seconds, and what was found. Exit status: 0 if all parts passed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
BUILD = Path("build/gpu-check")
LARGE, TINY = "benchmarks/models/llama-1.1b.toml", "benchmarks/models/llama-tiny.toml"
SMALL = "llama-110m"
TESTED = ("parity", "captured", "batches", "server")
PARTS = (*TESTED, "speed", "law", "small")
DECODE_SHARE = 0.6
"""Of the roofline, decoding one sequence of the large model."""
PREFILL_SHARE, PREFILL_TOKENS = 0.4, 4096
"""Of the roofline, prefill of a prompt of the large model."""
_BATCHES = "1,8,32,128"
_LENGTHS = "512,1024,2048,4096,8192,16384"
_LAW_LENGTHS = f"{_LENGTHS},24576,32768"
_STOP_SECONDS = 10.0


def main(arguments: Sequence[str]) -> int:
    """Runs parts, prints the verdict."""
    options = _parse(arguments)
    ends = time.monotonic() + options.budget
    details = {}
    for part in [part for part in PARTS if not options.only or part in options.only]:
        _say(f"== {part}")
        details[part] = run_part(command_of(part, options), max(1.0, ends - time.monotonic()), _report(part, options))
        if part == "speed" and not _is_small(options):
            details[part]["promises"] = promises(details[part]["found"].get("rows", []))
            details[part]["passed"] &= all(details[part]["promises"].values())
    parts = {part: each["passed"] for part, each in details.items()}
    is_passed = all(parts.values())
    print(json.dumps({"passed": is_passed, "parts": parts, "details": details, "results": str(options.out)}))
    return 0 if is_passed else 1


def command_of(part: str, options: argparse.Namespace) -> list[str]:
    """What runs a part."""
    python, device = [sys.executable, "-X", "faulthandler", "-m"], options.device
    if part in TESTED:
        chosen = {"cpu": "not gpu", "cuda": "gpu and not slow" if options.quick else "gpu"}[device]
        flags = ["-m", chosen, "-q", "-n", "0", "-p", "no:randomly", f"--junitxml={_report(part, options)}"]
        return [*python, "pytest", f"tests/gpu/test_{part}.py", *flags]
    build, is_small = options.out / part, _is_small(options)
    precision = "fp32" if device == "cpu" else "bf16"
    model = TINY if is_small else SMALL if part == "small" else LARGE
    flags = ["--device", device, "--build", str(build), *(["--quick"] if is_small else [])]
    if part == "law":
        lengths = [] if is_small else ["--lengths", _LAW_LENGTHS]
        return [*python, "benchmarks", "run", "law", *flags, "--model", model, "--precision", precision, *lengths]
    flags += ["--models", model, "--precisions", precision, "--in-place"]
    flags += ["--prompts", "32"] if is_small else ["--batches", _BATCHES, "--prompts", _LENGTHS]
    flags += ["--resume"] if options.resume and (build / "bench.jsonl").exists() else []
    return [*python, "benchmarks", "run", "bench", *flags]


def run_part(command: Sequence[str], seconds: float, report: Path | None = None) -> dict[str, Any]:
    """Runs a command for so long at most: whether it passed, why not, and the JSON object on its last line.

    Where it is pytest, `report` is its JUnit XML.
    """
    began = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
            why = f"exit status {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                output, _ = process.communicate(timeout=_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
            why = f"not done in {seconds:.0f} s"
    if report and not why:
        why = unchecked(report)
    _say("\n".join([output.rstrip(), why]).rstrip())
    lines = output.strip().splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    # A quick run promises nothing; a row without a value is a failure.
    rows = found.get("rows", [])
    is_kept = found.get("is_quick", False) or found.get("passed", True)
    is_measured = bool(not why and is_kept and all(row["value"] is not None for row in rows))
    return {"passed": is_measured, "why": why, "seconds": round(time.monotonic() - began, 1), "found": found}


def unchecked(report: Path) -> str:
    """Why a run of pytest that exited with 0 checked too little, or ""."""
    found = ElementTree.parse(report)  # noqa: S314 (pytest wrote it)
    num_tests = len(list(found.iter("testcase")))
    skipped = [each.get("message", "") for each in found.iter("skipped")]
    if skipped:
        return f"{len(skipped)} of {num_tests} tests were skipped: {'; '.join(sorted(set(skipped)))}"
    return "" if num_tests else "no test ran"


def promises(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Promises about the large model's speed; what was not measured breaks them."""
    found = {(row["system"], row["metric"], row["batch"], row["prompt"]): row for row in rows}

    def share(metric: str, prompt: int, least: float) -> bool:
        row = found.get(("onward-engine", metric, 1, prompt), {})
        value, roof = row.get("value"), row.get("roofline")
        return bool(value and roof and value / roof >= least)

    kept = {
        f"one sequence decodes at {DECODE_SHARE:g} of the roofline or more": share("decode", 128, DECODE_SHARE),
        f"a prompt of {PREFILL_TOKENS} tokens is computed at {PREFILL_SHARE:g} of it or more": share(
            "prefill", PREFILL_TOKENS, PREFILL_SHARE
        ),
    }
    for batch in map(int, _BATCHES.split(",")):
        ours, theirs = (
            found.get((system, "decode", batch, 128), {}).get("value") for system in ("onward-engine", "transformers")
        )
        what = f"batch {batch} decodes faster than compiled transformers"
        kept[what] = bool(ours and theirs and ours > theirs)
    return kept


def _report(part: str, options: argparse.Namespace) -> Path | None:
    return ROOT / options.out / f"{part}.xml" if part in TESTED else None


def _is_small(options: argparse.Namespace) -> bool:
    return bool(options.quick or options.device == "cpu")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", default=[], choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works")
    parser.add_argument("--resume", action="store_true", help="keep speed that was measured before")
    parser.add_argument("--out", type=Path, default=BUILD, help=f"folder for weights and results (default: {BUILD})")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for all parts (default: 3600)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # A library that looks something up would wait for a network that is not there.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # noqa: TID251 (a library's own switch)
    sys.exit(main(sys.argv[1:]))
