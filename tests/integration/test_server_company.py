"""Several models of both families in one process, on real graphs: each answers and counts as if it were alone."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry

from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from service.app import App
from service.config import ServeConfig
from service.engine.engine import LastRun
from service.errors import StartupError
from service.repository import loading
from service.repository.loading import build_engines, load_models, share_memory
from service.repository.memory_plan import PROCESS_BYTES
from tests.artifacts import tiny_artifact
from tests.fakes import FakeRunner
from tests.servers import (
    MODEL,
    SLOTS,
    Running,
    connect,
    engine_for,
    eventually,
    generate_request,
    read,
    read_accepted,
    running,
    served_model,
    status_of,
)

WRITER = partial(tiny_artifact, "decoder-only")
OTHER_WRITER = partial(tiny_artifact, "decoder-only", d_ff=80)
TRANSLATOR = partial(tiny_artifact, "encoder-decoder")
ALL = {"writer": WRITER, "other": OTHER_WRITER, "translator": TRANSLATOR}
LOGPROBS = pb.ResponseOptions(logprobs=3)
BEAMS = pb.BeamSearchParams(beam_size=3, num_hypotheses=2)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def serving(folder: Path, artifacts: Mapping[str, Any], **changes: Any) -> AsyncIterator[Running]:
    """A server over these artifacts, by name."""
    for name, artifact in artifacts.items():
        shutil.copytree(artifact(), folder / name)
    given = {"max_batch_size": 4, "threads": 1, "spin": False, "prefill_chunk": 16, "calibrate": False, **changes}
    config = ServeConfig(models=folder, port=0, metrics=False, **given)
    models, last_run, registry = load_models(folder), LastRun(), CollectorRegistry()
    pool = share_memory(models, config)
    engines = build_engines(folder, models, config, last_run, pool.parts)
    app = App(config, models, engines, registry, last_run, pool=pool)
    async with app.listening() as endpoint, connect(app, endpoint, registry) as server:
        await app.verify_all()
        yield server


def asked_of(model: str) -> list[pb.GenerateRequest]:
    """Greedy and drawn, short and of several chunks, with scores, several outputs and beams."""
    drawn = {"response": LOGPROBS, "max_tokens": 20, "ignore_eos": True}
    return [
        generate_request("3 May", model=model, response=LOGPROBS, max_tokens=16, ignore_eos=True),
        generate_request("a longer text, of some chunks: 1969", model=model, response=LOGPROBS, max_tokens=12),
        *(
            generate_request(f"{seed} June", model=model, sampling=pb.SamplingParams(n=2, seed=seed), **drawn)
            for seed in (1, 2, 3)
        ),
        generate_request("7 July", model=model, max_tokens=8, sampling=None, beam_search=BEAMS),
    ]


async def answers(server: Running, requests: list[pb.GenerateRequest]) -> list[list[bytes]]:
    """All outputs, to the last bit of their scores; all requests at once."""
    found = await asyncio.gather(*(server.generation.Generate(request) for request in requests))
    return [[output.SerializeToString(deterministic=True) for output in each.outputs] for each in found]


async def health(server: Running, name: str) -> int:
    return (await server.health.Check(health_pb2.HealthCheckRequest(service=name))).status


async def memory(server: Running, name: str) -> tuple[int, int]:
    found = await server.models.GetModel(model_pb2.GetModelRequest(model=name))
    return found.limits.kv_memory_bytes, found.kv_memory_used_bytes


async def test_each_model_answers_among_others_what_it_answers_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Batch invariance over models: the same bits, with scores, whatever runs between two steps."""
    alone = {}
    for name, artifact in ALL.items():
        async with serving(tmp_path_factory.mktemp(name), {name: artifact}) as server:
            alone[name] = await answers(server, asked_of(name))
    async with serving(tmp_path_factory.mktemp("all"), ALL, time_shares=(("other", 3.0),)) as server:
        together = await asyncio.gather(*(answers(server, asked_of(name)) for name in ALL))
        for name, found in zip(ALL, together, strict=True):
            assert found == alone[name], name
        # Counted apart.
        for name in ALL:
            assert sum(server.ended(name).values()) == len(asked_of(name))
            assert server.metric("model_serving", model_name=name) == 1
            assert server.metric("parity_max_abs_error", model_name=name) > 0
            assert server.metric("engine_run_seconds_count", model_name=name) > 0
            assert server.metric("kv_memory_bytes", model_name=name) == (await memory(server, name))[0]
    assert alone["writer"] != alone["other"]


async def _unload(server: Running, name: str) -> None:
    await server.models.UnloadModel(model_pb2.UnloadModelRequest(model=name))


async def test_an_estimate_has_the_factor_of_other_models() -> None:
    models = [served_model("quick"), served_model("slow", context=4096)]
    seconds = {"quick": 0.003, "slow": 0.02}
    engines = {
        model.name: engine_for(model, FakeRunner(SLOTS, before_run=partial(_take, seconds[model.name])))
        for model in models
    }
    quick = generate_request(model="quick", max_tokens=20, ignore_eos=True)
    async with running(models, engines, time_shares=(("slow", 3.0),)) as server:
        for _ in range(4):
            await server.generation.Generate(quick)
        alone = await server.generation.Estimate(pb.EstimateRequest(request=quick))
        assert alone.sharing_factor == 1.0
        await server.generation.Generate(generate_request(model="slow", max_tokens=4, ignore_eos=True))
        call = await read_accepted(server.stream(model="slow", max_tokens=2000, ignore_eos=True))
        await call.read()
        beside = await server.generation.Estimate(pb.EstimateRequest(request=quick))
        # It has a minute of work left: while ours runs it takes three times as long as we do.
        assert beside.sharing_factor == pytest.approx(4.0)
        assert beside.finish_seconds == pytest.approx(4 * alone.finish_seconds)
        assert beside.finish_seconds == pytest.approx(beside.queue_seconds + beside.cost.predicted_seconds)
        call.cancel()


def _take(seconds: float, _: object) -> None:
    time.sleep(seconds)


# One budget for keys and values.

BUDGET = 1 << 20


async def test_the_budget_is_shared_by_weight_and_a_named_model_finds_its_part_kept(tmp_path: Path) -> None:
    shares = (("other", 1.0), ("translator", 2.0), ("later", 1.0))
    async with serving(tmp_path, ALL, kv_memory=BUDGET, kv_shares=shares) as server:
        parts = {name: await memory(server, name) for name in ALL}
        for name, weight in {"writer": 1, "other": 1, "translator": 2}.items():
            assert abs(parts[name][0] - weight * BUDGET / 5) < 1
            assert parts[name][1] == 0
        # Its part is reserved, and nothing is left for others.
        for name in ("later", "stranger"):
            shutil.copytree(WRITER(), tmp_path / name)
        await server.models.LoadModel(model_pb2.LoadModelRequest(model="later"))
        later, used = await memory(server, "later")
        assert (sum(part for part, _ in parts.values()) + later, used) == (BUDGET, 0)
        assert server.metric("kv_memory_bytes", model_name="later") == later
        error = await status_of(
            server.models.LoadModel(model_pb2.LoadModelRequest(model="stranger")), grpc.StatusCode.FAILED_PRECONDITION
        )
        left = BUDGET - sum([(await memory(server, name))[0] for name in (*ALL, "later")])
        assert str(error.details()).startswith(
            f"'stranger' cannot be served: kv_memory: stranger gets {left} of {BUDGET} bytes beside later "
        )


async def test_the_used_part_of_a_models_memory_is_reported() -> None:
    permits = threading.Semaphore(1)
    runner = FakeRunner(SLOTS, before_run=lambda _: permits.acquire())
    async with running(runner=runner, verify=False, trust=True) as server:
        assert (await memory(server, MODEL))[1] == 0
        call = await read_accepted(server.stream(max_tokens=9, ignore_eos=True))
        await call.read()  # the next step waits
        part, used = await memory(server, MODEL)
        assert 0 < used < part
        assert used == round(server.metric("kv_cache_usage_ratio", model_name=MODEL) * part)
        permits.release(100)
        await read(call)
        await server.until_ended(1)
        assert await memory(server, MODEL) == (part, 0)


async def test_unloading_gives_memory_back_and_a_failed_load_keeps_none(tmp_path: Path) -> None:
    async with serving(tmp_path, {"writer": WRITER, "other": OTHER_WRITER}, kv_memory=BUDGET) as server:
        assert [await memory(server, name) for name in ("writer", "other")] == [(BUDGET // 2, 0)] * 2
        shutil.copytree(TRANSLATOR(), tmp_path / "translator")
        load = partial(server.models.LoadModel, model_pb2.LoadModelRequest(model="translator"))
        error = await status_of(load())
        assert "translator gets 0 of 1048576 bytes beside other 524288, writer 524288, must get at least" in str(
            error.details()
        )
        # At once, with a request of the other model in every step.
        asking = asyncio.create_task(answers(server, asked_of("writer")))
        await _unload(server, "other")
        golden = (tmp_path / "translator" / "golden.npz").read_bytes()
        (tmp_path / "translator" / "golden.npz").write_bytes(b"garbage")
        assert "golden.npz" in str((await status_of(load())).details())
        (tmp_path / "translator" / "golden.npz").write_bytes(golden)
        await load()
        assert 0 < (await memory(server, "translator"))[0] <= BUDGET // 2
        await asking
        assert await health(server, "translator") == SERVING


async def test_a_model_is_reloaded_within_its_part_though_that_holds_one_sequence(tmp_path: Path) -> None:
    """The new engine gets memory only when the old one has ended; no request is lost."""
    least = loading.needs_of(load_models_of(tmp_path / "sizes")[0].manifest, ServeConfig(models=tmp_path)).least
    folder = tmp_path / "served"
    folder.mkdir()
    async with serving(folder, {"writer": WRITER}, kv_memory=least) as server:
        asked = generate_request("3 May", model="writer", max_tokens=60, ignore_eos=True, response=LOGPROBS)
        found = asyncio.create_task(answers(server, [asked] * 6))
        await eventually(lambda: server.metric("num_requests_running", model_name="writer") > 0)
        await server.models.ReloadModel(model_pb2.ReloadModelRequest(model="writer"))
        late = await answers(server, [asked] * 3)
        assert len({tuple(each) for each in (*await found, *late)}) == 1
        assert await memory(server, "writer") == (least, 0)
        assert server.ended("writer") == {"length": 9}


def load_models_of(folder: Path) -> Any:
    folder.mkdir()
    shutil.copytree(WRITER(), folder / "writer")
    return load_models(folder)


async def test_models_that_do_not_fit_into_memory_together_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [served_model("a"), served_model("b", encoder_decoder=True)]
    config = ServeConfig(models=tmp_path, max_batch_size=4)
    needs = [loading.needs_of(model.manifest, config) for model in models]
    whole = sum(need.whole + need.besides + need.prefaulted(need.whole) for need in needs)
    monkeypatch.setattr(loading, "available_memory", lambda: None)
    monkeypatch.setattr(loading, "memory_limit", lambda: PROCESS_BYTES + whole)
    assert share_memory(models, config).parts == {"a": needs[0].whole, "b": needs[1].whole}
    monkeypatch.setattr(loading, "memory_limit", lambda: PROCESS_BYTES + whole - 1)
    with pytest.raises(StartupError, match=f"all models need {whole} bytes, there are {whole - 1}"):
        share_memory(models, config)
