"""Serving on CUDA without a device: options, bindings and refusals.

Sessions are doubles (`tests.cuda_double`) that record how they are used and compute on the CPU provider, by graphs of
standard operators, as the CPU has no kernels for those of CUDA.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import shutil
import types
from pathlib import Path

import grpc
import numpy as np
import onnxruntime as ort
import pytest
from prometheus_client import CollectorRegistry

from export.__main__ import main
from model.spec import artifact, golden
from model.spec.artifact import (
    BLOCK_SIZE,
    DECODER,
    ENCODER,
    GOLDEN,
    MOVE,
    PARITY,
    Device,
    KVFormat,
    KVLayout,
    KVPrecision,
    Manifest,
    Precision,
)
from model.spec.config import Architecture
from onward.v1 import model_pb2
from service.app import App
from service.config import ServeConfig
from service.engine import factory
from service.engine.engine import LastRun
from service.engine.kv.budget import device_overhead_bytes, plan_kv_memory, step_bytes
from service.engine.kv.decode_sizes import decode_sizes
from service.engine.scheduler import EngineLimits
from service.engine.sessions import cuda_provider, session
from service.engine.sessions.cuda import CudaRuntime
from service.engine.sessions.cuda_provider import Cuda, DeviceLost, cuda_provider_options
from service.engine.sessions.device_memory import DeviceTensor
from service.engine.sessions.session import GraphSession, SessionOptions
from service.engine.types import Device as Wanted
from service.engine.types import GenerationRequest, SamplingParams, StoppingParams
from service.errors import EngineFailed, StartupError
from service.repository import loading
from service.repository.loading import load_model, settle_device
from tests.artifacts import paged_artifact, rehash, tiny_artifact, tiny_checkpoint, tiny_config
from tests.cuda_double import PROVIDER, HostLibrary, Recorded, SessionDouble, answers
from tests.fakes import drain
from tests.servers import connect, generate_request

THREADS = SessionOptions(intra_op_threads=1, allow_spinning=False)
DECODER_ONLY, ENCODER_DECODER = Architecture.DECODER_ONLY, Architecture.ENCODER_DECODER
LIMITS = EngineLimits(max_batch_size=4, prefill_chunk=16, max_prefill_tokens=32)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> HostLibrary:
    fake = HostLibrary(8 << 30)
    runtime = CudaRuntime(fake)
    monkeypatch.setattr(cuda_provider, "runtime", lambda: runtime)
    monkeypatch.setattr(cuda_provider, "find_cuda_problem", lambda: None)
    return fake


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, library: HostLibrary) -> Recorded:
    SessionDouble.recorded = Recorded()
    # Where the server sees it, and not the exporter.
    double = types.SimpleNamespace(**{**vars(ort), "InferenceSession": SessionDouble})
    for module in (session, cuda_provider):
        monkeypatch.setattr(module, "ort", double)
    return SessionDouble.recorded


def on_cuda(family: str) -> tuple[Path, Manifest]:
    """The stand-in's artifact, its manifest saying that it is for CUDA."""
    folder = paged_artifact(family)
    return folder, dataclasses.replace(artifact.load(folder), device=Device.CUDA)


# Sessions and runs


def test_provider_options_cap_the_arena_and_record_on_request() -> None:
    assert cuda_provider_options(Cuda(records=True, max_bytes=12_345)) == {
        "device_id": "0",
        "arena_extend_strategy": "kSameAsRequested",
        "enable_cuda_graph": "1",
        "gpu_mem_limit": "12345",
    }
    assert cuda_provider_options(Cuda(records=False)) == {
        "device_id": "0",
        "arena_extend_strategy": "kSameAsRequested",
        "enable_cuda_graph": "0",
    }


@pytest.mark.parametrize("family", [DECODER_ONLY, ENCODER_DECODER])
def test_factory_builds_an_engine_on_cuda_that_gives_the_tokens_of_slots(
    family: str, recorded: Recorded, library: HostLibrary
) -> None:
    folder, manifest = on_cuda(family)
    budget = plan_kv_memory(manifest, LIMITS.max_batch_size, None).num_bytes
    limits = dataclasses.replace(LIMITS, kv_memory_bytes=budget)
    engine = factory.build_engine(folder, manifest, lambda _: "", limits, THREADS, LastRun(), device=Wanted.CUDA)
    names = {"decoder.onnx", "move.onnx", *(["encoder.onnx"] if family == ENCODER_DECODER else [])}
    assert recorded.providers.keys() == names
    assert {graph.file for graph in manifest.graphs.values()} == names
    for graph, spec in manifest.graphs.items():
        name = spec.file
        weights = sum(path.stat().st_size for path in folder.glob(f"{name}*"))
        assert weights > (0 if graph == MOVE else 10_000)
        cap = weights + step_bytes(manifest, LIMITS.max_batch_size, LIMITS.max_prefill_tokens)
        options = cuda_provider_options(Cuda(records=graph == DECODER, max_bytes=cap))
        assert recorded.providers[name] == [(PROVIDER, options)], "and no other provider to fall back on"
        assert recorded.fallbacks[name] == 0
        assert not recorded.settings[name].enable_mem_pattern
        entry = recorded.settings[name].get_session_config_entry
        assert entry("session.use_device_allocator_for_initializers") == "1"
        fallback = "disable_cpu_ep_fallback" if graph == DECODER else "record_ep_graph_assignment_info"
        assert entry(f"session.{fallback}") == "1"
    # K/V take the budget and a scratch block, allocated at once.
    kv_bytes = budget + manifest.kv_cache.block_size * plan_kv_memory(manifest, 1, None).token_bytes
    caches = [len(block) for block in library.taken.values() if len(block) * 2 * manifest.config.num_layers == kv_bytes]
    assert len(caches) == 2 * manifest.config.num_layers

    golden_cases = golden.load(folder / GOLDEN)
    tolerance = golden.tolerance_of(manifest.precision, manifest.kv_cache.precision)
    assert all(result.passed for result in engine.verify_golden(golden_cases, tolerance))
    assert recorded.num_recorded == len(decode_sizes(LIMITS.max_batch_size, manifest.config.context))
    recorded.numbers.clear()
    mine = answers(engine, manifest)
    assert recorded.num_recorded == len(decode_sizes(LIMITS.max_batch_size, manifest.config.context)), (
        "none amid streams"
    )
    runs = {int(number) for name, number in recorded.numbers if name == "decoder.onnx"}
    # Steps of single tokens have a number by which they are recorded, the others none: they are run as they come.
    assert len({number for number in runs if number > 0}) >= 2
    assert {number for number in runs if number <= 0} == ({-1} if family == DECODER_ONLY else set())
    assert {number for name, number in recorded.numbers if name != "decoder.onnx"} <= {"none"}
    caches_bound = {name for name in recorded.bound["decoder.onnx"] if "_cache_" in name}
    assert len(caches_bound) == 4 * manifest.config.num_layers
    assert "attention_metadata" not in recorded.bound["decoder.onnx"], "the operator reads it on the host"
    slots = tiny_artifact(family)
    theirs = factory.build_engine(slots, artifact.load(slots), lambda _: "", LIMITS, THREADS, LastRun())
    assert mine == answers(theirs, manifest)


def test_a_decoding_step_takes_one_copy_in_and_one_out(recorded: Recorded, library: HostLibrary) -> None:
    folder, manifest = on_cuda(DECODER_ONLY)
    engine = factory.build_engine(folder, manifest, lambda _: "", LIMITS, THREADS, LastRun())
    engine.add_request(
        GenerationRequest(
            request_id="r",
            model="tiny",
            prompt_token_ids=(5, 6),
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(max_tokens=20, ignore_eos=True),
        )
    )
    copies = []
    while engine.has_work:
        before = len(library.copies)
        engine.step()
        copies.append(len(library.copies) - before)
    assert set(copies[2:]) == {2}


def test_a_session_that_onnx_runtime_makes_on_another_provider_is_refused(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SessionDouble, "get_providers", lambda _: ["CPUExecutionProvider"])
    folder, manifest = on_cuda(DECODER_ONLY)
    with pytest.raises(StartupError, match=r"move\.onnx: CUDAExecutionProvider does not start"):
        GraphSession(folder, manifest.graphs[MOVE], THREADS, cuda=Cuda(records=False))


@pytest.mark.parametrize(("graph", "lacking"), [(ENCODER, "LayerNormalization"), (MOVE, "ScatterND")])
@pytest.mark.sampled(1)
def test_a_graph_that_onnx_runtime_would_leave_in_part_to_the_processor_is_refused(
    graph: str, lacking: str, recorded: Recorded
) -> None:
    folder, manifest = on_cuda(ENCODER_DECODER)
    GraphSession(folder, manifest.graphs[graph], THREADS, cuda=Cuda(records=False))
    recorded.lacking = frozenset({lacking})
    with pytest.raises(StartupError, match=rf"{graph}\.onnx: CUDAExecutionProvider has no kernel for {lacking}$"):
        GraphSession(folder, manifest.graphs[graph], THREADS, cuda=Cuda(records=False))


@pytest.mark.parametrize("family", [DECODER_ONLY, ENCODER_DECODER])
def test_warm_up_runs_the_largest_step_first_and_writes_no_kv(
    family: str, recorded: Recorded, library: HostLibrary
) -> None:
    folder, manifest = on_cuda(family)
    config = manifest.config
    runner = factory.build_paged_runner(folder, manifest, LIMITS, THREADS)
    block = manifest.kv_cache.block_size
    for cache in runner.memory.caches:
        assert isinstance(cache, DeviceTensor)
        cache.write(np.full(cache.shape, 0.25, np.float32))
    runner.warm_up()
    first, shapes = recorded.shapes[0]
    if family == ENCODER_DECODER:
        rows = max(1, LIMITS.max_prefill_tokens // config.source_context)
        assert (first, shapes["source_ids"]) == ("encoder.onnx", (rows, config.source_context))
    else:
        # 32 tokens of one prompt, and a token in each of the three other rows.
        assert (first, shapes["input_ids"], shapes["past_seqlens"]) == ("decoder.onnx", (35,), (4,))
        assert shapes["block_table"] == (4, -(-config.context // block))
        assert shapes["logits"] == (35, config.vocab_size)
    sizes = [shapes["input_ids"][0] for name, shapes in recorded.shapes[1:]]
    assert sizes == [4, 2, 1], "the largest first"
    for cache in runner.memory.caches:
        assert (cache.read()[1:] == 0.25).all(), "only the scratch block is written"
    assert runner.kv.num_free_blocks == runner.memory.num_blocks


def test_a_failed_step_ends_its_requests_and_a_lost_device_ends_the_engine(
    recorded: Recorded, library: HostLibrary
) -> None:
    folder, manifest = on_cuda(DECODER_ONLY)
    engine = factory.build_engine(folder, manifest, lambda _: "", LIMITS, THREADS, LastRun())

    def ask(name: str) -> None:
        engine.add_request(
            GenerationRequest(
                request_id=name,
                model="tiny",
                prompt_token_ids=(5, 6),
                sampling=SamplingParams(temperature=0.0),
                stopping=StoppingParams(max_tokens=3, ignore_eos=True),
            )
        )

    ask("a")
    recorded.complaint = "CUDA failure 2: out of memory"
    assert [type(event.error) for event in engine.step().events] == [EngineFailed]
    recorded.complaint = ""
    ask("b")
    assert {event.error for output in drain(engine) for event in output.events} == {None}
    ask("c")
    recorded.complaint, library.health = "CUDA failure 700", 700
    with pytest.raises(DeviceLost, match="an illegal memory access was encountered; it failed with: CUDA failure 700"):
        engine.step()


def test_a_released_engine_frees_device_memory_at_once(recorded: Recorded, library: HostLibrary) -> None:
    """On the thread that releases it, without the garbage collector, which runs on any thread."""
    folder, manifest = on_cuda(ENCODER_DECODER)
    gc.collect()
    gc.disable()
    try:
        engine = factory.build_engine(folder, manifest, lambda _: "", LIMITS, THREADS, LastRun())
        engine.verify_golden(golden.load(folder / GOLDEN), golden.Tolerance(absolute=1.0))
        assert library.taken
        del engine
        assert not library.taken
    finally:
        gc.enable()


async def test_models_are_loaded_and_unloaded_on_a_device_by_the_engine_thread_alone(
    recorded: Recorded, library: HostLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The stand-in computes in float32, which no artifact for CUDA does.
    monkeypatch.setattr(artifact.checks, "CUDA_PRECISIONS", (*artifact.CUDA_PRECISIONS, Precision.FP32))
    for name in ("a", "b"):
        shutil.copytree(paged_artifact(DECODER_ONLY), tmp_path / name)
        text = dataclasses.replace(artifact.read_manifest(tmp_path / name), device=Device.CUDA).to_json()
        (tmp_path / name / artifact.MANIFEST).write_text(text, encoding="utf-8")
        rehash(tmp_path / name)
    shutil.move(tmp_path / "b", tmp_path / ".b")
    config = ServeConfig(
        models=tmp_path,
        port=0,
        metrics=False,
        max_batch_size=2,
        threads=1,
        prefill_chunk=16,
        device=Wanted.CUDA,
        calibrate=False,
    )
    models, last_run = loading.load_models(tmp_path, device=Wanted.CUDA), LastRun()
    app = App(config, models, loading.build_engines(tmp_path, models, config, last_run), last_run=last_run)
    held = len(library.taken)
    assert held
    async with app.listening() as endpoint, connect(app, endpoint, CollectorRegistry()) as server:
        recorded.threads.clear()
        library.threads.clear()
        await app.verify_all()
        shutil.move(tmp_path / ".b", tmp_path / "b")
        await server.models.LoadModel(model_pb2.LoadModelRequest(model="b"))
        await server.models.ReloadModel(model_pb2.ReloadModelRequest(model="a"))
        # An artifact that fails its proof frees its memory.
        with monkeypatch.context() as patch:
            patch.setattr("service.repository.startup.tolerance_of", lambda *_: golden.Tolerance(absolute=0.0))
            with pytest.raises(grpc.aio.AioRpcError, match="golden cases failed"):
                await server.models.ReloadModel(model_pb2.ReloadModelRequest(model="a"))
        await server.models.UnloadModel(model_pb2.UnloadModelRequest(model="b"))
        request = generate_request("3 May", model="a", max_tokens=4, ignore_eos=True)
        assert len((await server.generation.Generate(request)).outputs[0].token_ids) == 4
        assert recorded.threads == library.threads == {"engine"}


def test_factory_refuses_what_the_device_has_no_room_for(recorded: Recorded, library: HostLibrary) -> None:
    folder, manifest = on_cuda(DECODER_ONLY)
    needed = plan_kv_memory(manifest, LIMITS.max_batch_size, None).num_bytes
    besides = device_overhead_bytes(manifest, LIMITS.max_batch_size, LIMITS.max_prefill_tokens)
    library.num_bytes = needed + besides - 1
    with pytest.raises(StartupError, match=f"K/V need {needed} bytes and steps {besides}, the device has"):
        factory.build_engine(folder, manifest, lambda _: "", LIMITS, THREADS, LastRun())
    assert not library.taken, "and has taken nothing"
    library.num_bytes += 1
    factory.build_engine(folder, manifest, lambda _: "", LIMITS, THREADS, LastRun())


def test_factory_refuses_an_artifact_for_another_device() -> None:
    folder = tiny_artifact(DECODER_ONLY)
    with pytest.raises(StartupError, match="device is cuda, the artifact is for cpu"):
        factory.build_engine(
            folder, artifact.load(folder), lambda _: "", LIMITS, THREADS, LastRun(), device=Wanted.CUDA
        )


# From a checkpoint to a server that has no GPU


@pytest.mark.parametrize(("family", "precision"), [(DECODER_ONLY, Precision.BF16), (ENCODER_DECODER, Precision.FP16)])
@pytest.mark.sampled(1)
def test_a_cuda_artifact_is_written_checked_and_refused_where_there_is_no_device(
    family: str,
    precision: Precision,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", tiny_config(family, num_layers=1))
    models = tmp_path / "models"
    out = models / "tiny" / "cuda"
    assert main([str(checkpoint), "--out", str(out), "--device", "cuda", "--precision", precision]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["verdict"] == "not_run"
    assert "nothing is proven" in printed.err
    parity = json.loads((out / PARITY).read_text(encoding="utf-8"))
    assert (parity["verdict"], parity["cases"]) == ("not_run", [])
    assert not list(models.rglob("twin")), "what proved it is thrown away"
    assert main(["verify", str(out)]) == 2
    manifest = artifact.load(out, devices=[Device.CUDA])
    assert (manifest.device, manifest.precision) == (Device.CUDA, precision)
    assert manifest.kv_cache == KVFormat(KVPrecision(precision), layout=KVLayout.PAGED, block_size=BLOCK_SIZE)
    assert set(manifest.graphs) == {DECODER, MOVE, *([ENCODER] if family == ENCODER_DECODER else [])}
    # A server reads all of it but the graphs, and knows what it would take.
    model = load_model(models / "tiny", Wanted.CUDA)
    assert (model.name, model.manifest) == ("tiny", manifest)
    assert model.golden_cases
    config = ServeConfig(models=models)
    needs = loading.needs_of(manifest, config)
    assert needs.whole == 32 * needs.least
    missing = f"this onnxruntime has no {PROVIDER}: install the extra `gpu` in the place of `cpu`"
    with pytest.raises(StartupError) as caught:
        settle_device(dataclasses.replace(config, device=Wanted.CUDA))
    assert caught.value.problems == (f"device is cuda: {missing}",)
    with pytest.raises(StartupError) as caught:
        settle_device(config)
    assert caught.value.problems == (f"device is auto: tiny is exported for cuda alone, and {missing}",)
    # The same model for the processor beside it, and the server computes there, and says why.
    assert main([str(checkpoint), "--out", str(models / "tiny" / "cpu")]) == 0
    with caplog.at_level(logging.WARNING, "service.repository.devices"):
        settled = settle_device(config)
    assert settled.device is Wanted.CPU
    messages = [record.message for record in caplog.records if record.name == "service.repository.devices"]
    assert messages == [f"computing on the CPU, as CUDA does not work: {missing}"]
    assert load_model(models / "tiny", settled.device).manifest.device is Device.CPU
    engine = loading.build_engines(models, loading.load_models(models, device=settled.device), settled)["tiny"]
    assert engine.kv_memory_bytes == loading.needs_of(artifact.load(models / "tiny" / "cpu"), settled).whole
