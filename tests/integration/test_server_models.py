"""Models that come and go while others answer: load, unload, reload, and a model whose steps fail."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import re
import shutil
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry

from model.spec.artifact import read_manifest
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from service.app import App
from service.config import ServeConfig
from service.engine.engine import LastRun
from service.engine.types import Device
from service.process import garbage
from service.repository import library, load_check, loading, startup
from service.repository.loading import build_engines, load_models, needs_of
from service.repository.memory_plan import PROCESS_BYTES
from service.repository.models import ModelState
from tests.artifacts import tiny_artifact
from tests.fakes import FakeRunner, Gate
from tests.servers import (
    MODEL,
    SLOTS,
    Running,
    connect,
    eventually,
    generate_request,
    read,
    read_accepted,
    running,
    status_of,
    stream_request,
    tokens_of,
)

# gRPC's poller holds on to every event loop it has met: one for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

OLD = partial(tiny_artifact, "decoder-only")
NEW = partial(tiny_artifact, "decoder-only", d_ff=80)
OTHER = partial(tiny_artifact, "encoder-decoder")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True, slots=True)
class Shelf:
    """A folder of models, and a server that began with what was there."""

    folder: Path
    server: Running
    config: ServeConfig

    def put(self, name: str, artifact: Path) -> None:
        """A new artifact in the place of any other, moved in whole."""
        staged = self.folder / f".{name}"
        shutil.copytree(artifact, staged)
        shutil.rmtree(self.folder / name, ignore_errors=True)
        staged.rename(self.folder / name)

    async def load(self, name: str) -> None:
        await self.server.models.LoadModel(model_pb2.LoadModelRequest(model=name))

    def state(self, name: str) -> list[float | None]:
        """Whether it serves and has passed its golden cases, as the metrics tell; None where they say nothing."""
        samples = self.server.registry.get_sample_value
        return [samples(f"onward_{metric}", {"model_name": name}) for metric in ("model_serving", "parity_passed")]

    async def unload(self, name: str) -> None:
        await self.server.models.UnloadModel(model_pb2.UnloadModelRequest(model=name))

    async def reload(self, name: str) -> None:
        await self.server.models.ReloadModel(model_pb2.ReloadModelRequest(model=name))

    async def names(self) -> list[str]:
        return [model.name for model in (await self.server.models.ListModels(model_pb2.ListModelsRequest())).models]

    async def health(self, name: str) -> int:
        return (await self.server.health.Check(health_pb2.HealthCheckRequest(service=name))).status

    async def tokens(self, model: str, text: str = "3 May") -> list[int]:
        request = generate_request(text, model=model, max_tokens=12, ignore_eos=True)
        return list((await self.server.generation.Generate(request)).outputs[0].token_ids)


@asynccontextmanager
async def shelf(folder: Path, artifact: Callable[[], Path] = OLD, **changes: Any) -> AsyncIterator[Shelf]:
    """A server over an artifact as "a", on real graphs."""
    shutil.copytree(artifact(), folder / "a")
    config = ServeConfig(
        models=folder,
        port=0,
        metrics=False,
        max_batch_size=4,
        threads=1,
        spin=False,
        prefill_chunk=16,
        **{"calibrate": False, **changes},
    )
    models, last_run = load_models(folder), LastRun()
    registry = CollectorRegistry()
    app = App(config, models, build_engines(folder, models, config, last_run), registry, last_run)
    async with app.listening() as endpoint, connect(app, endpoint, registry) as server:
        await app.verify_all()
        yield Shelf(folder, server, config)


async def test_a_model_is_loaded_beside_another_and_answers_as_if_it_had_always_been_there(tmp_path: Path) -> None:
    async with shelf(tmp_path) as shelved:
        before = await shelved.tokens("a")
        shelved.put("b", NEW())
        shelved.put("c", OTHER())
        await asyncio.gather(shelved.load("b"), shelved.load("c"))
        assert await shelved.names() == ["a", "b", "c"]
        assert [await shelved.health(name) for name in ("", "a", "b", "c")] == [SERVING] * 4
        assert await shelved.tokens("a") == before
        assert await shelved.tokens("b") != before
        assert len(await shelved.tokens("c")) == 12
        await shelved.load("b")  # there already
        assert shelved.server.metric("parity_max_abs_error", model_name="b") > 0
        for name in ("a", "b"):
            drafts = shelved.server.registry.get_sample_value(
                "onward_spec_decode_max_draft_tokens", {"model_name": name}
            )
            assert drafts == 0, "as nobody asked for guesses"


async def test_a_loaded_model_is_predicted_from_the_start_if_nobody_was_served_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.engine.proof.calibration.MAX_SECONDS", 2.0)
    async with shelf(tmp_path, calibrate=True) as shelved:

        def knows(name: str) -> bool:
            return shelved.server.metric("cost_model_coefficient", model_name=name, term="decode_step_4") > 0

        assert knows("a")
        shelved.put("b", NEW())
        shelved.put("c", OTHER())
        await shelved.load("b")
        assert knows("b")
        request = generate_request("3 May", model="b", max_tokens=12)
        estimate = await shelved.server.generation.Estimate(pb.EstimateRequest(request=request))
        assert estimate.finish_seconds > 0
        hold = threading.Event()
        monkeypatch.setattr(startup, "prove", lambda *given: hold.wait(30) and _prove(*given))
        loading = asyncio.create_task(shelved.load("c"))
        with shelved.server.app._engine.admit("a", "somebody"):
            hold.set()
            await loading
        assert not knows("c"), "its steps would have stood in others' way, and others in theirs"
        assert len(await shelved.tokens("c")) == 12
        before = shelved.server.app.models.find("b").queue.predictor
        await shelved.reload("b")
        assert shelved.server.app.models.find("b").queue.predictor is not before
        assert knows("b")


_prove = startup.prove


async def test_a_reloaded_model_answers_as_one_that_was_there_from_the_start(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with shelf(tmp_path_factory.mktemp("reloaded")) as shelved:
        shelved.put("a", NEW())
        await shelved.reload("a")
        tokens = await shelved.tokens("a")
    async with shelf(tmp_path_factory.mktemp("begun"), NEW) as shelved:
        assert await shelved.tokens("a") == tokens


async def test_a_reload_collects_what_it_replaced_once_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It was set aside as the server began to serve, where no other collection would find a cycle that holds it.
    collected: list[list[str]] = []
    async with shelf(tmp_path) as shelved:
        models = shelved.server.app.models
        monkeypatch.setattr(garbage, "collect", lambda: collected.append(list(models.names)))
        await shelved.reload("a")
        await eventually(lambda: bool(collected))
    assert collected == [["a"]]


async def test_what_is_no_model_of_the_folder_is_not_found(tmp_path: Path) -> None:
    async with shelf(tmp_path) as shelved:
        shutil.copytree(OLD(), tmp_path / ".hidden")
        for name in ("b", "../a", "a/../a", "/etc", "", ".", "..", "a\x00", ".hidden"):
            error = await status_of(shelved.load(name))
            assert error.code() is grpc.StatusCode.NOT_FOUND, name
            assert str(tmp_path) not in str(error.details())
        assert await shelved.names() == ["a"]


async def test_an_unfit_model_is_refused_by_what_is_wrong_and_harms_nobody(tmp_path: Path) -> None:
    async with shelf(tmp_path) as shelved:
        before = await shelved.tokens("a")
        shelved.put("b", NEW())
        (tmp_path / "b" / "golden.npz").write_bytes(b"garbage")
        error = await status_of(shelved.load("b"))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "golden.npz" in str(error.details())
        assert str(tmp_path) not in str(error.details())
        shutil.rmtree(tmp_path / "a")
        shelved.put("a", NEW())
        (tmp_path / "a" / "decoder.onnx").unlink()
        assert (await status_of(shelved.reload("a"))).code() is grpc.StatusCode.FAILED_PRECONDITION
        assert await shelved.names() == ["a"]
        assert await shelved.health("a") == SERVING
        assert await shelved.tokens("a") == before


@pytest.mark.parametrize("resident", [10 << 30, 0], ids=["resident", "promised"])
async def test_a_model_whose_weights_have_no_room_twice_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: int
) -> None:
    """Beside what is resident, or what the K/V of those served may still come to."""
    monkeypatch.setattr(library, "MIN_BYTES", 0)
    limit, tried = 0, []
    monkeypatch.setattr(load_check.LoadCheck, "run", lambda *given: tried.append(given[2]))
    async with shelf(tmp_path) as shelved:
        shelved.put("b", NEW())
        files = [*NEW().glob("decoder.onnx*")]
        assert len(files) == 2
        served, needs = (needs_of(read_manifest(folder), shelved.config) for folder in (OLD(), NEW()))
        a, b = (each.besides + each.prefaulted(each.whole) + each.whole for each in (served, needs))
        copied = sum(file.stat().st_size for file in files)
        monkeypatch.setattr(loading, "resident_bytes", lambda: resident)
        monkeypatch.setattr(loading, "memory_limit", lambda: limit)
        # A reload has the part of its K/V already.
        for change, promised, needed in (
            (shelved.load, a, copied + b),
            (shelved.reload, a + b, copied + b - needs.whole),
        ):
            taken = max(resident, PROCESS_BYTES + promised)
            limit = taken + needed - 1
            error = await status_of(change("b"))
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert f"needs up to {needed} bytes of memory, of {limit} there are {needed - 1} left" in str(error)
            assert ("with 1 bytes fewer of K/V (--kv-memory) has room" in str(error)) == (resident == 0)
            assert tried == []
            limit += 1
            await change("b")
            assert tried == ["b"]
            tried.clear()


@pytest.mark.parametrize("is_fit", [True, False])
async def test_a_large_model_is_checked_in_a_child_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_fit: bool
) -> None:
    monkeypatch.setattr(library, "MIN_BYTES", 0)
    loaded = []
    monkeypatch.setattr(library, "load_model", lambda *given: loaded.append(given) or _load_model(*given))
    async with shelf(tmp_path) as shelved:
        shelved.put("b", NEW())
        if not is_fit:
            (tmp_path / "b" / "tokenizer.json").write_text("{}")
        if is_fit:
            await shelved.load("b")
            assert len(await shelved.tokens("b")) == 12
            return
        error = await status_of(shelved.load("b"))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "tokenizer.json" in str(error.details())
        assert loaded == [], "this process never touched it"


_load_model = library.load_model


async def test_a_load_check_that_a_signal_ends_makes_the_model_unfit_and_the_next_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "MIN_BYTES", 0)
    dying = tmp_path / "dying"
    dying.write_text("#!/bin/sh\nkill -SEGV $$\n")
    dying.chmod(0o700)
    (tmp_path / "models").mkdir()
    async with shelf(tmp_path / "models") as shelved:
        shelved.put("b", NEW())
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", str(dying))
            error = await status_of(shelved.load("b"))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "ended with SIGSEGV" in str(error.details())
        await shelved.load("b")


async def test_a_load_check_has_no_more_address_space_than_its_model_needs(tmp_path: Path) -> None:
    """Which ends with the model's refusal, not with the machine's memory."""
    (tmp_path / "a").symlink_to(OLD(), target_is_directory=True)
    greedy = (
        "import sys, numpy; from service.repository import load_check;"
        "load_check.load_model = lambda *given: numpy.zeros(12 << 30, numpy.uint8);"
        "sys.exit(load_check.main(sys.argv[1:]))"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", greedy, "a"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(pickle.dumps(ServeConfig(models=tmp_path, device=Device.CPU)))
    assert process.returncode == 0, err
    (problem,) = json.loads(out)["problems"]
    assert problem.startswith("it needs more memory than its manifest implies")


async def test_a_disk_that_does_not_answer_keeps_no_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()

    def load(folder: Path, *given: Any) -> Any:
        if folder.name == "stuck":
            stuck.wait()
        return _load_model(folder, *given)

    monkeypatch.setattr(library, "load_model", load)
    async with shelf(tmp_path) as shelved:
        shelved.put("stuck", NEW())
        shelved.put("b", NEW())
        try:
            with monkeypatch.context() as patched:
                patched.setattr(library, "_MAX_READ_SECONDS", 0.1)
                error = await status_of(shelved.load("stuck"))
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "could not be read in 0.1 s" in str(error.details())
            await shelved.load("b")
        finally:
            stuck.set()


async def test_a_model_whose_files_change_after_they_were_checked_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_and_replace(folder: Path, *given: Any) -> Any:
        model = _load_model(folder, *given)
        (folder / "decoder.onnx.data").write_bytes((folder / "decoder.onnx.data").read_bytes())
        return model

    monkeypatch.setattr(library, "load_model", load_and_replace)
    async with shelf(tmp_path) as shelved:
        shelved.put("b", NEW())
        error = await status_of(shelved.load("b"))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "have changed while it was loaded" in str(error.details())


async def test_reloading_under_load_loses_no_request_and_mixes_no_answer(tmp_path: Path) -> None:
    async with shelf(tmp_path) as shelved:
        old = await shelved.tokens("a")
        answers: list[list[int]] = []
        is_over = asyncio.Event()

        async def ask_on() -> None:
            while not is_over.is_set():
                answers.append(await shelved.tokens("a"))

        asking = [asyncio.create_task(ask_on()) for _ in range(6)]
        await eventually(lambda: len(answers) > 12)
        shelved.put("a", NEW())
        await shelved.reload("a")
        num_before = len(answers)
        await eventually(lambda: len(answers) > num_before + 24)
        is_over.set()
        await asyncio.gather(*asking)
        new = await shelved.tokens("a")
        assert new != old
        assert {tuple(answer) for answer in answers} == {tuple(old), tuple(new)}
        assert answers[-1] == new
        ended = shelved.server.ended("a")
        assert ended == {"length": len(answers) + 2}
        await eventually(lambda: shelved.server.metric("num_requests_running", model_name="a") == 0)


async def test_unloading_lets_requests_end_and_then_gives_the_memory_back(tmp_path: Path) -> None:
    async with shelf(tmp_path) as shelved:
        shelved.put("b", NEW())
        built: list[weakref.ref[Any]] = []
        install = shelved.server.app._engine.open  # what else would hold the engine

        def note(model: str, engine: Any, *others: Any) -> Any:
            built.append(weakref.ref(engine))
            return install(model, engine, *others)

        shelved.server.app._engine.open = note  # type: ignore[method-assign]
        await shelved.load("b")
        del note
        assert shelved.state("b") == [1, 1]
        call = shelved.server.generation.GenerateStream(stream_request("ab", model="b", max_tokens=60, ignore_eos=True))
        await read_accepted(call)
        events, _ = await asyncio.gather(read(call), shelved.unload("b"))
        assert len(tokens_of(events)) == 60
        assert await shelved.names() == ["a"]
        assert await shelved.health("b") == NOT_SERVING
        assert await shelved.health("") == SERVING
        assert (await status_of(shelved.server.generation.Generate(generate_request("ab", model="b")))).code() is (
            grpc.StatusCode.NOT_FOUND
        )
        assert shelved.server.metric("kv_cache_usage_ratio", model_name="b") == 0
        # Nobody is to be woken because a model that was taken away does not answer.
        assert shelved.state("b") == [None, None]
        await shelved.tokens("a")  # the thread goes round once more
        await eventually(lambda: gc.collect() >= 0 and built[0]() is None)
        assert (await status_of(shelved.unload("b"))).code() is grpc.StatusCode.NOT_FOUND
        await shelved.load("b")
        assert len(await shelved.tokens("b")) == 12
        assert shelved.state("b") == [1, 1]


async def test_a_change_that_has_begun_is_brought_to_its_end_though_nobody_waits_for_it() -> None:
    gate = Gate()
    async with running(runner=FakeRunner(SLOTS, before_run=gate)) as server:
        with gate.closed():
            call = await read_accepted(server.stream(max_tokens=7))
            unloading = server.models.UnloadModel(model_pb2.UnloadModelRequest(model=MODEL))
            await eventually(lambda: server.app.models.state(MODEL) is ModelState.DRAINING)
            unloading.cancel()
            cancelled = {"grpc_method": "UnloadModel", "grpc_code": "CANCELLED"}
            await eventually(lambda: server.metric("grpc_server_handled_total", **cancelled) == 1)
        assert len(tokens_of(await read(call))) == 7
        await eventually(lambda: server.app.models.names == ())


@pytest.mark.parametrize("at_its_end", [True, False])
async def test_a_stall_is_seen_wherever_in_the_block_it_was(at_its_end: bool) -> None:
    async with library._stall() as stall:
        await asyncio.sleep(0.02)
        time.sleep(0.3)  # noqa: ASYNC251 (it is a stall)
        if not at_its_end:
            await asyncio.sleep(0.02)
    assert stall() > 0.25


async def test_unloading_ends_what_outlives_the_grace_with_a_status() -> None:
    entered = threading.Event()
    release = threading.Event()

    def hold(_: object) -> None:
        entered.set()
        release.wait()

    async with running(
        runner=FakeRunner(SLOTS, before_run=hold), verify=False, trust=True, drain_grace_seconds=0.0
    ) as server:
        call = await read_accepted(server.stream())
        await asyncio.to_thread(entered.wait)
        unloading = asyncio.create_task(_unload(server))
        error = await status_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        release.set()
        await unloading
        assert (await status_of(server.generation.Generate(generate_request()))).code() is grpc.StatusCode.NOT_FOUND


async def _unload(server: Running) -> None:
    await server.models.UnloadModel(model_pb2.UnloadModelRequest(model=MODEL))


async def _verified(server: Running) -> bool:
    call = server.models.VerifyParity(model_pb2.VerifyParityRequest())
    code = await call.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.INTERNAL)
    return code is grpc.StatusCode.OK


async def test_a_model_whose_steps_fail_one_after_the_other_is_not_asked_until_it_is_proven_again() -> None:
    is_broken = threading.Event()

    def fail(_: object) -> None:
        if is_broken.is_set():
            raise RuntimeError("a secret of the graph")

    async with running(runner=FakeRunner(SLOTS, before_run=fail)) as server:
        is_broken.set()
        for _ in range(3):
            error = await status_of(server.generation.Generate(generate_request()))
            assert error.code() is grpc.StatusCode.INTERNAL
            assert "secret" not in str(error.details())
        await eventually(lambda: server.app.models.state(MODEL) is ModelState.FAILED)
        for name in ("", MODEL):
            watch = server.health.Watch(health_pb2.HealthCheckRequest(service=name))
            while (await watch.read()).status != NOT_SERVING:
                pass
            watch.cancel()
        assert (await status_of(server.generation.Generate(generate_request()))).code() is grpc.StatusCode.UNAVAILABLE
        is_broken.clear()
        # The server's own replay, begun while steps failed, may be under way still: who asks meanwhile shares its end.
        while not await _verified(server):
            pass
        answer = await server.generation.Generate(generate_request(max_tokens=2))
        assert isinstance(answer, pb.GenerateResponse)
        assert (await server.health.Check(health_pb2.HealthCheckRequest(service=MODEL))).status == SERVING


async def test_failed_steps_between_good_ones_leave_the_model_serving() -> None:
    is_broken = threading.Event()

    def fail(_: object) -> None:
        if is_broken.is_set():
            raise RuntimeError("/secret/path of a graph")

    async with running(runner=FakeRunner(SLOTS, before_run=fail)) as server:
        for _ in range(4):
            is_broken.set()
            error = await status_of(server.generation.Generate(generate_request()))
            assert error.code() is grpc.StatusCode.INTERNAL
            assert re.fullmatch(r"internal error [0-9a-f]+", str(error.details()))
            is_broken.clear()
            await server.generation.Generate(generate_request(max_tokens=1))
        assert (await server.health.Check(health_pb2.HealthCheckRequest(service=MODEL))).status == SERVING
