"""The memory plan: what fits stays whole, what does not gets less K/V, and what cannot fit is refused with numbers."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest

from model.spec.artifact import (
    CPU_PRECISIONS,
    DECODER,
    FileEntry,
    GraphSpec,
    KVPrecision,
    Manifest,
    Precision,
    read_manifest,
)
from service.commands.plan import plan
from service.config import PlanConfig, ServeConfig
from service.errors import StartupError
from service.repository import loading
from service.repository.loading import share_memory
from service.repository.memory_plan import PROCESS_BYTES, MemoryPlan, as_flag, expected_manifest, plan_memory
from tests.artifacts import tiny_artifact, tiny_checkpoint, tiny_config
from tests.servers import served_model

ROWS, CHUNK = 4, 64
WEIGHTS = 300 << 20
GIB = 1 << 30


def manifest(weights: int = WEIGHTS) -> Manifest:
    """64 KiB of K/V a token, 256 MiB a row."""
    config = tiny_config("decoder-only", num_layers=16, num_heads=8, num_kv_heads=8, head_dim=64, context=4096)
    return dataclasses.replace(
        read_manifest(tiny_artifact("decoder-only")),
        config=config,
        graphs={DECODER: GraphSpec("decoder.onnx", (), ())},
        files={"decoder.onnx.data": FileEntry("", weights)},
    )


def planned(memory: int | None, kv_memory: int | None = None, **models: Manifest) -> MemoryPlan:
    return plan_memory(models or {"m": manifest()}, ROWS, CHUNK, memory, kv_memory)


def refusal(memory: int, kv_memory: int | None = None) -> str:
    with pytest.raises(StartupError) as caught:
        planned(memory, kv_memory)
    (problem,) = caught.value.problems
    return problem


def test_kv_are_all_rows_at_full_length_where_that_fits_beside_the_reserve_and_otherwise_all_that_does() -> None:
    whole = planned(None)
    assert (whole.kv_bytes, whole.is_cut) == (ROWS * 256 << 20, False)
    enough = -(-whole.peak * 10 // 9)
    assert planned(enough) == dataclasses.replace(whole, memory=enough)
    for memory in (enough - (1 << 20), GIB, 800 << 20):
        cut = planned(memory)
        assert cut.is_cut
        # Whole but for the rounding of K/V to MiB, and of pre-faulted memory.
        assert 0 <= memory - cut.reserve - cut.peak < (9 << 17) + (1 << 10)


def test_every_use_is_counted_once() -> None:
    plan = planned(GIB)
    assert plan.besides > PROCESS_BYTES + WEIGHTS
    assert planned(GIB, m=manifest(WEIGHTS + 1000)).besides == plan.besides + 1000
    assert plan.peak == plan.besides + plan.kv_bytes + plan.prefaulted
    assert plan.prefaulted == plan.kv_bytes // 8


def test_a_model_whose_weights_leave_no_row_is_refused_with_the_memory_that_would_do() -> None:
    problem = refusal(700 << 20)
    for number in ("700 MiB of memory are too little", "weights 300 MiB", "must be at least 256 MiB", "--context"):
        assert number in problem
    needed = int(problem.partition("what helps: ")[2].partition(" MiB")[0])
    assert planned((needed + 1) << 20).kv_bytes >= 256 << 20
    with pytest.raises(StartupError):
        planned((needed - 1) << 20)


def test_what_the_operator_gives_is_kept_or_refused_with_what_fits() -> None:
    assert planned(GIB, 300 << 20).kv_bytes == 300 << 20
    problem = refusal(GIB, 600 << 20)
    fitting = int(problem.partition("--kv-memory ")[2].partition("MiB")[0])
    assert planned(GIB, fitting << 20).peak <= GIB
    assert "--kv-memory 256MiB fits" in refusal(750 << 20, 600 << 20)
    assert "no --kv-memory fits" in refusal(500 << 20, 600 << 20)


def test_the_server_takes_what_the_plan_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = dataclasses.replace(served_model("m"), manifest=manifest())
    config = ServeConfig(models=tmp_path, max_batch_size=ROWS, prefill_chunk=CHUNK)
    monkeypatch.setattr(loading, "available_memory", lambda: GIB)
    plan = planned(GIB)
    pool = share_memory([model], config)
    assert (pool.parts, PROCESS_BYTES + pool.promised) == ({"m": plan.kv_bytes}, plan.peak)
    assert 0 < plan.kv_bytes < plan.whole_kv
    monkeypatch.setattr(loading, "available_memory", lambda: 64 * GIB)
    assert share_memory([model], config).parts == {"m": plan.whole_kv}
    # Other processes may end; the machine does not grow.
    monkeypatch.setattr(loading, "available_memory", lambda: 1)
    given = dataclasses.replace(config, kv_memory=256 << 20)
    assert share_memory([model], given).parts == {"m": 256 << 20}
    monkeypatch.setattr(loading, "memory_limit", lambda: 500 << 20)
    with pytest.raises(StartupError, match="too little for 256 MiB of K/V"):
        share_memory([model], given)
    # What the operator says takes the place of both.
    for kv_memory in (None, plan.kv_bytes):
        told = dataclasses.replace(config, memory=GIB, kv_memory=kv_memory)
        assert share_memory([model], told).parts == {"m": plan.kv_bytes}
    with pytest.raises(StartupError, match="400 MiB of memory are too little"):
        share_memory([model], dataclasses.replace(config, memory=400 << 20))


def test_kv_for_less_than_a_row_are_refused_by_plan_and_server_alike(tmp_path: Path) -> None:
    artifact = tiny_artifact("decoder-only", Precision.INT8)
    model = dataclasses.replace(served_model(artifact.name), manifest=read_manifest(artifact))
    least = plan_memory({"m": model.manifest}, ROWS, CHUNK, None).least_kv
    config = ServeConfig(models=tmp_path, max_batch_size=ROWS, kv_memory=least - 1)
    shared = {"folder": str(artifact), "max_batch_size": ROWS}
    for refuse in (
        lambda: share_memory([model], config),
        lambda: plan(PlanConfig(**shared, kv_memory=least - 1), io.StringIO()),
    ):
        with pytest.raises(StartupError, match=rf"gets {least - 1} of {least - 1} bytes, must get at least {least}"):
            refuse()
    assert plan(PlanConfig(**shared, kv_memory=least), io.StringIO()) == 0


@pytest.mark.parametrize("family", ["decoder-only", "encoder-decoder"])
@pytest.mark.parametrize("precision", CPU_PRECISIONS)
@pytest.mark.sampled(1)
def test_weights_are_known_before_the_export(family: str, precision: Precision) -> None:
    sizes = {"vocab_size": 2048, "d_model": 256, "d_ff": 512}
    folder = tiny_artifact(family, precision, **sizes)
    expected = expected_manifest(tiny_config(family, **sizes), precision, KVPrecision.FP32)
    (made, ahead) = (plan_memory({"m": each}, ROWS, CHUNK, None) for each in (read_manifest(folder), expected))
    assert ahead.sum_of("weights") == pytest.approx(made.sum_of("weights"), rel=0.05)
    assert ahead.kv_bytes == made.kv_bytes


def test_the_command_plans_artifacts_and_checkpoints_alike(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "tiny", tiny_config("decoder-only"))
    artifact = tiny_artifact("decoder-only", Precision.INT8)
    for folder in (checkpoint, artifact, artifact.parent):
        out = io.StringIO()
        assert plan(PlanConfig(folder=str(folder), memory=GIB), out) == 0
        found = plan_memory({"m": read_manifest(artifact)}, 32, 128, GIB)
        assert out.getvalue().endswith(f"serve with: --kv-memory {as_flag(found.kv_bytes)} --max-batch-size 32\n")
    (checkpoint / "run.json").unlink()
    for folder in (checkpoint, tmp_path, tmp_path / "missing"):
        with pytest.raises(StartupError):
            plan(PlanConfig(folder=str(folder)), io.StringIO())
