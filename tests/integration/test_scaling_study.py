"""The scaling study on real servers of tiny models, its probe on a fake server, its recurrent baseline; no times."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from benchmarks.training import recurrence
from loadtest.scaling import judge, study
from loadtest.scaling.claims import CLAIMS
from loadtest.scaling.probe import Probe, probing
from loadtest.scaling.study import StudySettings
from loadtest.serving import Server
from model.spec import cost
from model.spec.config import ModelConfig
from model.training.presets import resolve
from onward.v1 import generation_pb2 as pb
from service.engine.batch import ScheduledBatch
from tests.artifacts import tiny_artifact, tiny_config
from tests.fakes import NUM_SPECIAL, VOCAB_SIZE, FakeRunner
from tests.servers import running, served_model

LAW = resolve("law").model
PROMPT = [NUM_SPECIAL + index % (VOCAB_SIZE - NUM_SPECIAL) for index in range(16)]


# The probe.


def delaying(prefill: float, decode: float, decodes: threading.Event | None = None) -> FakeRunner:
    """A model whose runs take at least these times, and which decodes only while `decodes` is set."""

    def wait(batch: ScheduledBatch) -> None:
        if decodes is not None and batch.decode:
            decodes.wait()
        time.sleep(prefill if batch.prefills or batch.prefill_groups else decode if batch.decode else 0.0)

    return FakeRunner(before_run=wait)


async def test_the_probe_separates_prefill_from_decode_and_server_from_client() -> None:
    decodes = threading.Event()
    decodes.set()

    def held(call: Iterator[pb.GenerateStreamResponse]) -> Iterator[pb.GenerateStreamResponse]:
        """Lets the model decode when the probe asks for its second message."""
        for event in call:
            yield event
            if event.delta.token_ids:
                decodes.set()

    async with running(runner=delaying(0.08, 0.02, decodes), trust=True) as server:
        with probing(f"{server.endpoint.host}:{server.endpoint.port}") as probe:
            at_once = await asyncio.to_thread(probe.ask, PROMPT, 4)
            decodes.clear()
            stream = probe._stub.GenerateStream
            probe._stub.GenerateStream = lambda *words, **more: held(stream(*words, **more))  # type: ignore[method-assign]
            streamed = await asyncio.to_thread(probe.stream, list(reversed(PROMPT)), 16)
    for answer, count in ((at_once, 4), (streamed, 16)):
        assert len(answer.token_ids) == count
        assert answer.cached_tokens == 0
        # Sixteen tokens are two chunks of this server's.
        assert 0.08 <= answer.prefill <= answer.first_token
        assert answer.per_token >= 0.02
        assert answer.per_token == pytest.approx(answer.decode / (count - 1))
        assert answer.prefill + answer.decode <= answer.total
    assert at_once.first_token == at_once.total
    # Fifteen steps later.
    assert streamed.first_token + 15 * 0.02 <= streamed.total


async def test_the_probe_reports_cache_hits_and_the_study_refuses_them() -> None:
    async with running(trust=True) as server:
        with probing(f"{server.endpoint.host}:{server.endpoint.port}") as probe:
            first = await asyncio.to_thread(probe.ask, PROMPT, 1)
            again = await asyncio.to_thread(probe.stream, PROMPT, 1)
    assert study._fresh(first) is first
    assert again.cached_tokens > 0
    with pytest.raises(RuntimeError, match=f"{again.cached_tokens} tokens of a new prompt were cached"):
        study._fresh(again)


async def test_a_request_that_is_held_is_running_and_then_cancelled() -> None:
    def hold(probe: Probe, seen: list[float]) -> None:
        with probe.holding(PROMPT, 4000):
            seen.append(server.metric("num_requests_running", model_name="fake"))

    async with running([served_model(context=8192)], runner=delaying(0.0, 0.02), trust=True) as server:
        with probing(f"{server.endpoint.host}:{server.endpoint.port}") as probe:
            seen: list[float] = []
            await asyncio.to_thread(hold, probe, seen)
            assert await server.until_ended(1) == {"cancelled": 1}
    assert seen == [1.0]


async def test_a_call_that_fails_says_what_the_server_said() -> None:
    async with running(trust=True) as server:
        with (
            probing(f"{server.endpoint.host}:{server.endpoint.port}") as probe,
            pytest.raises(RuntimeError, match=r"StatusCode\.INVALID_ARGUMENT: .*token_ids"),
        ):
            await asyncio.to_thread(probe.ask, [VOCAB_SIZE + 1], 1)


def test_an_answer_of_another_length_is_no_answer() -> None:
    class Stub:
        def Generate(self, request: Any, timeout: float) -> Any:  # noqa: N802
            return pb.GenerateResponse(outputs=[pb.GenerationOutput(token_ids=[1, 2])])

    probe = Probe(grpc.insecure_channel("127.0.0.1:1"))
    probe._stub = Stub()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="asked for 3 tokens, got 2"):
        probe.ask(PROMPT, 3)


# The baseline.


def by_hand(weights: dict[str, Any], shape: recurrence.RecurrentShape, token_ids: Sequence[int]) -> Any:
    """The recurrence of the paper, with the reset gate behind the product."""

    def sigmoid(x: Any) -> Any:
        return 1.0 / (1.0 + np.exp(-x))

    inputs = weights["embedding"][list(token_ids)].astype(np.float64)
    for layer in range(shape.num_layers):
        w, r, b = (weights[f"{name}_{layer}"][0].astype(np.float64) for name in "wrb")
        of_input, of_state = b[: 3 * shape.units], b[3 * shape.units :]
        state, outputs = np.zeros(shape.units), []
        for x in inputs:
            z_x, r_x, h_x = np.split(w @ x + of_input, 3)
            z_h, r_h, h_h = np.split(r @ state + of_state, 3)
            update, reset = sigmoid(z_x + z_h), sigmoid(r_x + r_h)
            state = (1.0 - update) * np.tanh(h_x + reset * h_h) + update * state
            outputs.append(state)
        inputs = np.array(outputs)
    return inputs[-1] @ weights["projection"] @ weights["embedding"].T


def test_the_recurrent_graph_computes_the_recurrence() -> None:
    shape = recurrence.RecurrentShape(vocab_size=11, d_model=6, num_layers=3, units=5)
    weights = recurrence.make_weights(shape, seed=1)
    session = recurrence.open_session(recurrence.make_graph(shape, weights), threads=1)
    for token_ids in ([3], [1, 10, 4, 4, 7, 0, 2]):
        expected = by_hand(weights, shape, token_ids)
        for chunk in (1, 3, 100):
            logits = recurrence.read(session, shape, np.array(token_ids, np.int64), chunk)
            assert logits == pytest.approx(expected, abs=1e-5)


def test_the_recurrent_model_is_as_large_as_the_transformer() -> None:
    shape = recurrence.equal_size(LAW)
    assert shape.num_parameters == pytest.approx(cost.num_parameters(LAW), rel=0.01)
    weights = recurrence.make_weights(shape, seed=0)
    assert sum(array.size for array in weights.values()) == shape.num_parameters
    assert (shape.vocab_size, shape.d_model, shape.num_layers) == (LAW.vocab_size, LAW.d_model, LAW.num_layers)
    with pytest.raises(ValueError, match="decoder-only"):
        recurrence.equal_size(tiny_config("encoder-decoder"))


# The study.


def take_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the study's models by tiny exported ones."""

    def make(folder: Path, recipe: str, overrides: Sequence[str], say: study.Say) -> ModelConfig:
        sizes: dict[str, Any] = {"context": 512}
        if recipe.endswith(".json"):
            wanted, tiny = json.loads(Path(recipe).read_text())["model"], tiny_config("decoder-only")
            assert ModelConfig.from_dict(wanted).is_encoder_decoder
            assert (wanted["num_encoder_layers"], wanted["d_model"]) == (tiny.num_layers, tiny.d_model)
            sizes = {"context": wanted["context"], "source_context": wanted["source_context"]}
            assert sizes == {"context": 12, "source_context": 256}
        family = "encoder-decoder" if recipe.endswith(".json") else "decoder-only"
        place = folder / "models" / "model"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(tiny_artifact(family, **sizes), target_is_directory=True)
        return tiny_config(family, **sizes)

    monkeypatch.setattr(study, "_make_artifact", make)


@pytest.mark.whole
def test_a_study_of_tiny_models_asks_every_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_tiny(monkeypatch)
    settings = StudySettings(
        num_lengths=6,
        repeats=2,
        shortest=16,
        new=6,
        new_without_cache=3,
        chunk=16,
        source_context=256,
        num_memory_lengths=1,
        threads=1,
    )
    said: list[str] = []
    found = study.carry_out(settings, tmp_path, said.append)
    for series, samples in found.series.items():
        assert all(value > 0 for _, value in samples), series
        lengths = {length for length, _ in samples}
        if series == "locust":
            assert (len(samples), len(lengths)) == (60, 6)
        elif not series.startswith(("memory", "kv")):
            # Short prompts, here all, and sources have two turns in each of two repeats; some turns give three samples.
            turns = {"decode": 16, "cross_attention": 12, "prefill": 4, "no_cache": 4, "encoder": 4}.get(series, 2)
            assert (len(samples), len(lengths)) == (turns * 6, 6), series
            # Every repeat has every length.
            assert {length for length, _ in samples[: len(samples) // 2]} == lengths
    assert [length for length, _ in found.series["gru"]] != [length for length, _ in found.series["prefill"]]
    assert {length for length, _ in found.series["gru"]} == {length for length, _ in found.series["prefill"]}
    shifts = {name: min(found.series[name])[0] - min(found.series["prefill"])[0] for name in ("decode", "no_cache")}
    assert shifts == {"decode": 3.0, "no_cache": 1.0}
    # Greedy tokens are the same however they are computed, ties in a random model aside.
    same, asked = found.facts["same_tokens_without_cache"]
    assert asked == 72
    assert same >= 64
    config = tiny_config("decoder-only", context=512)
    page = 4096 // (4 * config.head_dim) * config.kv_bytes_per_token
    assert [length for length, _ in found.series["kv"]] == [510]
    for length, kv_bytes in found.series["kv"]:
        assert cost.kv_bytes(config, int(length)) <= kv_bytes < cost.kv_bytes(config, int(length)) + page
    assert found.series["memory_whole"][0][1] > 1 << 20
    assert "gru: 6 of 12" in said
    judged = judge.judge(found, settings, draws=20)
    assert {claim.series for claim in CLAIMS} <= judged.keys()
    json.dumps(judged, allow_nan=False)


def test_a_failed_command_is_reported_with_its_stderr(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"model exited with 2: .*nonesuch"):
        study.carry_out(StudySettings(preset="nonesuch"), tmp_path, lambda _: None)


def test_a_recurrent_model_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder_decoder = tiny_config("encoder-decoder")
    with (
        pytest.raises(RuntimeError, match="the recurrent model's process ended, exit code 1"),
        study._recurrence(encoder_decoder, StudySettings(threads=1), 8),
    ):
        pass


def test_memory_is_the_process_own_peak() -> None:
    peak = Server("127.0.0.1:1", "", os.getpid()).peak_bytes()
    assert peak == pytest.approx(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, rel=0.05)
    assert Server("127.0.0.1:1", "", 1 << 30).peak_bytes() is None
