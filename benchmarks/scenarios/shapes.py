"""Real sizes from import to serving, and the memory plan of each beside the measured peak.

    python -m benchmarks run shapes [--models opus-mt,smollm2-360m,qwen3-0.6b,llama-3.2-1b] [--precisions int8,int4]

Random weights in the true shapes of published models (`_shape_folders`). Each step is a process of its own, as users
run it: import, export, and a server with the flags that `python -m service plan --memory` proposes. Distinct prompts
fill its K/V; then requests decode, alone and together. What must hold: each plan, made before the export from the
checkpoint and after it from the artifact, is within a tenth of the server's peak resident memory.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.frame.rounds import say
from benchmarks.frame.scenario import Results, Run, Scenario, Settings, option
from benchmarks.frame.tables import conditions, table, verdict
from benchmarks.scenarios._import_large import Step, run_step
from benchmarks.scenarios._shape_folders import SHAPES
from loadtest.serving import serving
from model.spec.artifact import KVPrecision, Manifest, Precision, read_manifest
from model.spec.config import ModelConfig
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.repository.memory_plan import MemoryPlan, as_flag, expected_manifest, plan_memory

MAX_ERROR = 0.1
"""Of the peak, by which a plan may differ from it."""

_MODELS = ("opus-mt", "smollm2-360m", "qwen3-0.6b", "llama-3.2-1b")
_ROWS = 32
_CHUNK = 128
_PROMPT = 512
_SHORT = 16
_NEW = 64
_TOGETHER = 8
# More than the K/V hold, as a part of them is always on its way from one request to the next.
_FILL = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapesSettings(Settings):
    """What is measured."""

    precision: str = "int8"
    models: tuple[str, ...] = option(_MODELS, "shapes", choices=tuple(SHAPES), quick=("tiny",))
    precisions: tuple[str, ...] = option(("int8", "int4"), "of weights", choices=("fp32", "bf16", "int8", "int4"))
    memory: int = option(4096, "MiB for each server", least=256, quick=512)


def measure(settings: ShapesSettings, run: Run) -> dict[str, Any]:
    """Every model in every precision, except what the journal has."""
    journal = run.journal("shapes", {"settings": asdict(settings)})
    done = {(entry["model"], entry["precision"]): entry for entry in journal.entries}
    run.build.mkdir(parents=True, exist_ok=True)
    for model in settings.models:
        missing = [each for each in settings.precisions if (model, each) not in done]
        if not missing:
            continue
        with tempfile.TemporaryDirectory(prefix="shapes-", dir=run.build) as place:
            checkpoint, imported = _import(model, Path(place))
            for precision in missing:
                say(f"{model} in {precision}")
                row = _measure_one(model, precision, checkpoint, settings)
                journal.record({"model": model, "precision": precision, "import": asdict(imported), **row})
    rows = list(journal.entries)
    return {"rows": rows, "passed": all(is_close(row) for row in rows)}


def is_close(row: Mapping[str, Any]) -> bool:
    """Whether both plans are within `MAX_ERROR` of the peak."""
    return all(abs(row[plan] / row["peak_bytes"] - 1) <= MAX_ERROR for plan in ("planned_bytes", "expected_bytes"))


def render(results: Results) -> str:
    """The document."""
    rows = [
        (
            row["model"],
            row["precision"],
            _step(row["import"]),
            _step(row["export"]),
            f"{row['start_seconds']:.1f} s",
            f"{row['prefill_tokens_per_second']:.0f}",
            f"{row['decode_tokens_per_second']:.1f}",
            f"{row['decode_together_tokens_per_second']:.1f}",
            *(_mib(row[name]) for name in ("kv_bytes", "planned_bytes", "peak_bytes", "huge_bytes")),
            f"{row['planned_bytes'] / row['peak_bytes'] - 1:+.1%}",
            f"{row['expected_bytes'] / row['peak_bytes'] - 1:+.1%}",
        )
        for row in results["rows"]
    ]
    headings = (
        "shape|precision|import|export|start|prefill tokens/s|decode tokens/s|decode 8 rows|K/V MiB|plan MiB|peak MiB|"
        "of it huge pages|plan over peak|plan of the checkpoint"
    )
    lines = [
        "# Real sizes",
        "",
        f"Random weights in the true shapes; a server with {results['settings']['memory']} MiB and the flags of "
        f"`python -m service plan`; {conditions(results)}. Steps with their peak memory, without pages of files. "
        f"Prompts of up to {_PROMPT} tokens fill the K/V.",
        "",
        *table(headings, rows, text_columns=2),
        "",
        f"Each plan is within {MAX_ERROR:.0%} of the peak: {verdict(results['passed'])}.",
    ]
    return "\n".join(lines)


def _import(model: str, place: Path) -> tuple[Path, Step]:
    """Makes the folder and imports it."""
    theirs, ours = place / "theirs", place / "checkpoint" / model
    run_step("make", "", "benchmarks.scenarios._shape_folders", model, str(theirs))
    context = str(SHAPES[model].context)
    step = run_step("import", "", "model", "import", str(theirs), "--out", str(ours), "--context", context)
    shutil.rmtree(theirs)
    return ours, step


def _measure_one(model: str, precision: str, checkpoint: Path, settings: ShapesSettings) -> dict[str, Any]:
    """Exports and serves one checkpoint; the artifact is removed again."""
    with tempfile.TemporaryDirectory(prefix="artifact-", dir=checkpoint.parent) as place:
        folder = Path(place) / model
        step = run_step("export", precision, "export", str(checkpoint), "--out", str(folder), "--precision", precision)
        config = ModelConfig.from_dict(json.loads((checkpoint / "config.json").read_text(encoding="utf-8")))
        expected = expected_manifest(config, Precision(precision), KVPrecision.FP32)
        found = serve_as_planned(folder, expected, settings.memory << 20, settings.threads, settings.seed)
        return {"export": asdict(step), **found}


def serve_as_planned(folder: Path, expected: Manifest, memory: int, threads: int, seed: int = 0) -> dict[str, Any]:
    """Serves an artifact with the flags of its plan until its K/V have been full.

    Args:
        folder: the artifact, alone in its parent.
        expected: the manifest that was planned with before the export.
        memory: bytes for the server.
        threads: of the server.
        seed: of the prompts.

    Raises:
        StartupError: when the plan refuses the memory.
    """
    manifest = read_manifest(folder)
    plan = plan_memory({folder.name: manifest}, _ROWS, _CHUNK, memory)
    # With the same K/V, so that the difference is in all else.
    ahead = plan_memory({folder.name: expected}, _ROWS, _CHUNK, None, plan.kv_bytes)
    flags = ["--kv-memory", as_flag(plan.kv_bytes), "--max-batch-size", str(_ROWS), "--metrics-port", "0"]
    flags += ["--threads", str(threads), "--log-level", "warning"]
    began = time.monotonic()
    with serving(folder.parent, *flags) as server:
        found: dict[str, Any] = {"start_seconds": time.monotonic() - began}
        with grpc.insecure_channel(server.target) as channel:
            asking = _Asking(GenerationServiceStub(channel), manifest.config, seed)
            found |= asking.fill(plan) | asking.decode()
        found |= {"peak_bytes": server.peak_bytes() or 0, "huge_bytes": _huge_bytes(server.pid)}
    return {**found, "kv_bytes": plan.kv_bytes, "planned_bytes": plan.peak, "expected_bytes": ahead.peak}


class _Asking:
    """Requests of random tokens to the only model of a server."""

    def __init__(self, stub: GenerationServiceStub, config: ModelConfig, seed: int) -> None:
        self._stub = stub
        self._config = config
        self._random = random.Random(seed)  # noqa: S311 (not for secrets)

    def fill(self, plan: MemoryPlan) -> dict[str, float]:
        """Distinct prompts, as many rows at once as the server has, until K/V have been full."""
        config = self._config
        length = min(_PROMPT, (config.source_context or config.context) - _SHORT)
        token_bytes = plan.least_kv // plan.models[next(iter(plan.models))].context
        count = int(_FILL * plan.kv_bytes / (length * token_bytes)) + 1
        seconds = self._ask([(length, 1)] * count)
        return {"prefill_tokens_per_second": count * length / seconds}

    def decode(self) -> dict[str, float]:
        """Tokens of one row and of several, without their prompts."""
        new = min(_NEW, self._config.context - 2 * _SHORT)
        alone, together = (
            rows * (new - 1) / (self._ask([(_SHORT, new)] * rows) - self._ask([(_SHORT, 1)] * rows))
            for rows in (1, _TOGETHER)
        )
        return {"decode_tokens_per_second": alone, "decode_together_tokens_per_second": together}

    def _ask(self, lengths: Sequence[tuple[int, int]]) -> float:
        """Seconds of requests with these prompts and new tokens."""
        with ThreadPoolExecutor(_ROWS) as pool:
            began = time.monotonic()
            list(pool.map(self._stub.Generate, itertools.starmap(self._request, lengths)))
            return time.monotonic() - began

    def _request(self, length: int, new: int) -> pb.GenerateRequest:
        ids = [self._random.randrange(3, self._config.vocab_size - 1) for _ in range(length)]
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))
        request.stopping.max_tokens, request.stopping.ignore_eos = new, True
        return request


def _huge_bytes(pid: int) -> int:
    """Resident bytes in huge pages now."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


def _step(step: Mapping[str, Any]) -> str:
    return f"{step['seconds']:.0f} s, {step['peak_bytes'] / (1 << 30):.1f} GiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f}"


SCENARIO = Scenario(__name__, ShapesSettings, measure, render, must_hold=True, is_resumable=True)
