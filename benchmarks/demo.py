"""The main job, end to end: train two real models, export them, prove the export, serve them, ask them over gRPC.

    dates    encoder-decoder   "vendredi 20 novembre 2026" → "2026-11-20", scored by exact match on held-out days
    stdlib   decoder-only      continues Python source, scored in bits per byte on held-out modules beside xz

What people read goes to stderr; the last line of stdout is one JSON object. Every figure is measured in this run.

    python -m benchmarks.demo [--build DIR] [--quick]

`--quick` trains `dates` alone and for a quarter of its steps, in less than a minute; what is missing is null.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.frame.servers import serving
from benchmarks.frame.streams import connected, gathered
from model.data import dates
from onward.v1 import generation_pb2 as pb

MODELS = ("dates", "stdlib")
HELD_OUT_DATES = 500
CONCURRENCY = 32
QUICK_STEPS = 250
SAMPLE_TOKENS = 120
SAMPLE_PROMPTS = (
    'class Queue:\n    """A first-in first-out queue."""\n\n    def __init__(self',
    "class Reader:\n    def close(self):",
    "def read_lines(path",
)
STEP_SECONDS = 1800


def main() -> None:
    """Runs everything and prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=Path("build"), help="where models go (default: build)")
    parser.add_argument("--quick", action="store_true", help="train one model for less than a minute")
    options = parser.parse_args()
    build: Path = options.build
    names: Sequence[str] = MODELS
    shorter: list[str] = []
    if options.quick:
        names, shorter = MODELS[:1], ["--set", f"steps={QUICK_STEPS}"]
        _say(f"quick: {names[0]} in {QUICK_STEPS} steps, which gets many dates wrong; {MODELS[1]} is left out")
    started = time.monotonic()
    checkpoints_folder, models_folder = build / "checkpoints", build / "models"

    training = {}
    for name in names:
        _say(f"training {name}")
        training[name] = _run("model", "train", name, *shorter, "--overwrite", "--out", str(checkpoints_folder / name))
    for name in names:
        _say(f"exporting {name}")
        _run("export", str(checkpoints_folder / name), "--out", str(models_folder / name), "--explain-graph")
    parity = [_run("export", "verify", str(models_folder / name)) for name in names]

    with serving(models_folder, "--log-level", "warning", "--metrics-port", "0") as target:
        _say(f"asking {', '.join(names)} at {target}")
        exact_match = asyncio.run(_score_dates(target))
        for sample in [] if options.quick else asyncio.run(_sample_stdlib(target)):
            _say(sample, heading=False)
    compressed = {} if options.quick else training["stdlib"]
    print(
        json.dumps(
            {
                "dates_exact_match": exact_match,
                "stdlib_bits_per_byte": compressed.get("bits_per_byte"),
                "xz_bits_per_byte": compressed.get("xz_bits_per_byte"),
                "xz_primed_bits_per_byte": compressed.get("xz_primed_bits_per_byte"),
                "parity_max_abs_error": max(report["max_abs_error"] for report in parity),
                "train_seconds": round(sum(report["train_seconds"] for report in training.values()), 1),
                "total_seconds": round(time.monotonic() - started, 1),
                "artefacts": [str(models_folder / name) for name in names],
            }
        )
    )


async def _score_dates(target: str) -> float:
    """Asks for every held-out date, many at once; the fraction answered exactly."""
    examples = dates.held_out(HELD_OUT_DATES, seed=0)
    requests = [
        pb.GenerateRequest(model="dates", text=example.text, sampling=pb.SamplingParams(temperature=0.0))
        for example in examples
    ]
    answers = [response.outputs[0].text for response in await _generate(target, requests)]
    right = 0
    for shown, (example, answer) in enumerate(zip(examples, answers, strict=True)):
        right += answer == example.iso
        if shown < len(dates.LOCALES):
            mark = "✓" if answer == example.iso else f"✗ ({example.iso})"
            _say(f"  {example.locale}  {example.text}  →  {answer}  {mark}", heading=False)
    _say(f"{right} of {len(examples)} held-out dates exact", heading=False)
    return right / len(examples)


async def _sample_stdlib(target: str) -> list[str]:
    """Three continuations of Python source; seeded, so the same model writes the same text."""
    requests = [
        pb.GenerateRequest(
            model="stdlib",
            text=prompt,
            sampling=pb.SamplingParams(temperature=0.7, top_p=0.95, seed=seed),
            stopping=pb.StoppingParams(max_tokens=SAMPLE_TOKENS),
        )
        for seed, prompt in enumerate(SAMPLE_PROMPTS)
    ]
    responses = await _generate(target, requests)
    return [
        f"--- {prompt}┃{response.outputs[0].text}" for prompt, response in zip(SAMPLE_PROMPTS, responses, strict=True)
    ]


async def _generate(target: str, requests: Sequence[pb.GenerateRequest]) -> list[pb.GenerateResponse]:
    async with connected(target) as stub:

        async def one(request: pb.GenerateRequest) -> pb.GenerateResponse:
            return await stub.Generate(request)

        return await gathered(map(one, requests), CONCURRENCY)


def _run(*arguments: str) -> dict[str, Any]:
    """Runs one of the project's commands, its progress passed through; its last line of stdout, parsed."""
    command = [sys.executable, "-m", *arguments]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=STEP_SECONDS, check=False)
    if finished.returncode != 0:
        sys.exit(f"{' '.join(command[1:])} failed with exit code {finished.returncode}\n{finished.stdout}")
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result


def _say(text: str, *, heading: bool = True) -> None:
    print(f"\n== {text}" if heading else text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
