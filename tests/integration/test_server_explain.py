"""`Explain` over real gRPC on fake models and a fake graph: answers, refusals, the queue, and streams beside it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2

from model.spec.artifact import EXPLAIN, FileEntry, GraphSpec, explain_signature
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from service import app
from service.config import RequestLimits
from service.engine.sessions import attention
from service.errors import NotServing
from service.explain.explainer import MAX_WAITING
from service.repository.models import Parity, ServedModel
from tests.fakes import BOS, CONTEXT, EOS, FakeRunner, Gate, expected_tokens, script, spell
from tests.identities import by, keys_file
from tests.servers import (
    SLOTS,
    TRUSTED,
    eventually,
    generate_request,
    read,
    read_accepted,
    rich_details,
    running,
    served_model,
    status_of,
    tokens_of,
)

LAYERS, ENCODER_LAYERS, HEADS = 2, 1, 2
ENCODER, DECODER, CROSS = pb.ATTENTION_KIND_ENCODER, pb.ATTENTION_KIND_DECODER, pb.ATTENTION_KIND_CROSS
FAMILIES = pytest.mark.parametrize("encoder_decoder", [False, True], ids=["decoder-only", "encoder-decoder"])


def explained_model(*, encoder_decoder: bool = False, context: int = CONTEXT) -> ServedModel:
    """A fake model whose manifest lists an explain graph."""
    model = served_model(encoder_decoder=encoder_decoder, context=context)
    layers = {"num_encoder_layers": ENCODER_LAYERS} if encoder_decoder else {}
    config = replace(model.manifest.config, num_layers=LAYERS, num_heads=HEADS, num_kv_heads=0, head_dim=0, **layers)
    graphs = {EXPLAIN: GraphSpec("explain.onnx", *explain_signature(config))}
    return replace(model, manifest=replace(model.manifest, config=config, graphs=graphs))


def weights_of(output: str, head: int, queries: Sequence[int], keys: Sequence[int]) -> np.ndarray:
    """What the fake graph answers: rows that sum to one and depend on output, head and every token."""
    seed = [sum(output.encode()), head, *queries, 0, *keys]
    return np.random.default_rng(seed).dirichlet(np.ones(len(keys)), len(queries)).astype(np.float32)


class FakeGraph:
    """An explain graph that knows no attention; `gate` holds runs, `running` is set while one waits."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.runs: list[tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.running = threading.Event()
        self.failure: Exception | None = None

    def load(self, folder: Any, manifest: Any, **_: Any) -> FakeGraph:
        self.loads.append(folder.name)
        if self.failure is not None:
            raise self.failure
        return self

    def run(self, decoder: tuple[int, ...], source: tuple[int, ...], outputs: tuple[str, ...]) -> list[np.ndarray]:
        self.runs.append((decoder, source, outputs))
        self.running.set()
        self.gate.wait()
        sides = {"encoder": (source, source), "decoder": (decoder, decoder), "cross": (decoder, source)}
        return [
            np.stack([weights_of(output, head, *sides[output.partition("_")[0]]) for head in range(HEADS)])
            for output in outputs
        ]


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGraph]:
    graph = FakeGraph()
    monkeypatch.setattr(app, "load_attention_graph", graph.load)
    yield graph
    # A worker that waited for ever would keep a failing test's process alive.
    graph.gate.set()


def matrices(answer: pb.ExplainResponse) -> dict[tuple[int, int, int], np.ndarray]:
    return {
        (each.kind, each.layer, each.head): np.array(each.weights, np.float32).reshape(each.rows, each.columns)
        for each in answer.attentions
    }


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("explain")]


async def test_decoder_only_answer_has_every_matrix_over_prompt_and_output(graph: FakeGraph) -> None:
    async with running([explained_model()]) as server:
        answer = await server.generation.Explain(pb.ExplainRequest(text="ab", target_text="cd"))
    given = (BOS, *spell("abc"))
    outputs = tuple(f"decoder_attention_{layer}" for layer in range(LAYERS))
    assert graph.runs == [(given, (), outputs)]
    assert list(answer.prompt_tokens) == ["<bos>", "a", "b"]
    assert list(answer.target_tokens) == ["c", "d"]
    assert list(answer.decoder_tokens) == ["<bos>", "a", "b", "c"]
    expected = {(DECODER, layer, head) for layer in range(LAYERS) for head in range(HEADS)}
    found = matrices(answer)
    assert found.keys() == expected
    for (_, layer, head), matrix in found.items():
        np.testing.assert_array_equal(matrix, weights_of(outputs[layer], head, given, given))
        np.testing.assert_allclose(matrix.sum(axis=-1), 1.0, atol=1e-6)


async def test_encoder_decoder_answer_has_three_kinds_in_order(graph: FakeGraph) -> None:
    async with running([explained_model(encoder_decoder=True)]) as server:
        answer = await server.generation.Explain(pb.ExplainRequest(text="abc", target_text="de"))
    source, decoder = (*spell("abc"), EOS), (BOS, *spell("d"))
    assert list(answer.prompt_tokens) == ["a", "b", "c", "<eos>"]
    assert list(answer.target_tokens) == ["d", "e"]
    assert list(answer.decoder_tokens) == ["<bos>", "d"]
    layers = {ENCODER: range(ENCODER_LAYERS), DECODER: range(LAYERS), CROSS: range(LAYERS)}
    order = [(kind, layer, head) for kind in layers for layer in layers[kind] for head in range(HEADS)]
    found = matrices(answer)
    assert list(found) == order
    sides = {ENCODER: (source, source), DECODER: (decoder, decoder), CROSS: (decoder, source)}
    names = {ENCODER: "encoder", DECODER: "decoder", CROSS: "cross"}
    for (kind, layer, head), matrix in found.items():
        expected = weights_of(f"{names[kind]}_attention_{layer}", head, *sides[kind])
        np.testing.assert_array_equal(matrix, expected)


async def test_only_selected_matrices_are_computed_and_returned(graph: FakeGraph) -> None:
    asked = pb.ExplainRequest(text="ab", target_text="c", layers=[1, 1], heads=[1], kinds=[CROSS, ENCODER])
    async with running([explained_model(encoder_decoder=True)]) as server:
        answer = await server.generation.Explain(asked)
    # The encoder has no layer 1.
    assert graph.runs[0][2] == ("cross_attention_1",)
    assert list(matrices(answer)) == [(CROSS, 1, 1)]


@FAMILIES
async def test_without_a_target_the_greedy_output_is_explained_its_end_included(
    graph: FakeGraph, encoder_decoder: bool
) -> None:
    given = 1 if encoder_decoder else 3
    runner = FakeRunner(SLOTS, next_token=script("xyz", prompt_length=given))
    async with running([explained_model(encoder_decoder=encoder_decoder)], runner=runner, trust=True) as server:
        answer = await server.generation.Explain(pb.ExplainRequest(text="ab"))
        generated = await server.generation.Generate(generate_request("ab"))
        # It ran, and counts, as any other.
        assert await server.until_ended(2) == {"end_of_sequence": 2}
    assert list(generated.outputs[0].token_ids) == [*spell("xyz"), EOS]
    assert list(answer.target_tokens) == ["x", "y", "z", "<eos>"]
    decoder = (BOS, *spell("xyz")) if encoder_decoder else (BOS, *spell("abxyz"))
    source = (*spell("ab"), EOS) if encoder_decoder else ()
    assert graph.runs[0][:2] == (decoder, source)


async def test_greedy_output_is_as_long_as_asked_for(graph: FakeGraph) -> None:
    async with running([explained_model(context=200)]) as server:
        few = await server.generation.Explain(pb.ExplainRequest(text="ab", max_tokens=2))
        default = await server.generation.Explain(pb.ExplainRequest(text="ab", heads=[0]))
    assert (len(few.target_tokens), len(default.target_tokens)) == (2, 64)


async def test_greedy_output_is_cut_to_the_tokens_that_are_explained(graph: FakeGraph) -> None:
    limits = RequestLimits(max_explain_tokens=10)
    async with running([explained_model()], limits=limits) as server:
        answer = await server.generation.Explain(pb.ExplainRequest(text="ab"))
    assert len(answer.target_tokens) == 10 - 3
    assert graph.runs[0][0] == (BOS, *spell("ab"), *expected_tokens((BOS, *spell("ab")), 6))


async def test_greedy_output_is_cut_to_the_largest_message(graph: FakeGraph) -> None:
    async with running([explained_model()], max_message_bytes=4096) as server:
        answer = await server.generation.Explain(pb.ExplainRequest(text="ab"))
        one = await server.generation.Explain(pb.ExplainRequest(text="ab", layers=[0], heads=[0]))
    # Four matrices of n² weights of four bytes, and a little besides.
    assert 10 <= len(answer.decoder_tokens) <= 16
    assert answer.ByteSize() <= 4096
    assert len(one.decoder_tokens) > 1.7 * len(answer.decoder_tokens)
    assert one.ByteSize() <= 4096


async def test_an_answer_that_no_message_holds_is_refused_before_it_is_computed(graph: FakeGraph) -> None:
    request = pb.ExplainRequest(text="a" * 20, target_text="b" * 20)
    async with running([explained_model()], max_message_bytes=4096) as server:
        error = await status_of(server.generation.Explain(request))
        prompt = await status_of(server.generation.Explain(pb.ExplainRequest(text="a" * 40)))
    assert error.code() is grpc.StatusCode.OUT_OF_RANGE
    num_bytes = 4 * LAYERS * HEADS * 40**2
    assert f"{num_bytes} bytes, a message has at most 4096; ask for fewer layers, heads or kinds" in error.details()
    assert prompt.code() is grpc.StatusCode.OUT_OF_RANGE
    assert prompt.details().startswith("prompt.text: must leave room for an answer of 4096 bytes")
    assert graph.loads == []


INVALID, TOO_LONG = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE
UNKNOWN_ID = pb.TokenIds(ids=[5, 99])
BAD = [
    (pb.ExplainRequest(), INVALID, "prompt: must be set"),
    (pb.ExplainRequest(model="x", text="a"), grpc.StatusCode.NOT_FOUND, "model: 'x' is not served"),
    (
        pb.ExplainRequest(text="a", target_token_ids=UNKNOWN_ID),
        INVALID,
        "target.target_token_ids.ids[1]: must be below",
    ),
    (pb.ExplainRequest(text="a" * 20, target_text="b"), TOO_LONG, "prompt.text: must have at most 20 tokens, got 21"),
    (pb.ExplainRequest(text="a", target_text="b", layers=[1], kinds=[ENCODER]), INVALID, "layers[0]: must be below 1"),
    (pb.ExplainRequest(text="a", kinds=[0]), INVALID, "kinds[0]: must be one of ATTENTION_KIND_ENCODER"),
]


async def test_bad_requests_are_refused_by_their_field_value_and_limit(graph: FakeGraph) -> None:
    model = explained_model(encoder_decoder=True)
    async with running([model], limits=RequestLimits(max_explain_tokens=20)) as server:
        for request, code, words in BAD:
            error = await status_of(server.generation.Explain(request), code)
            assert str(error.details()).startswith(words)
        longest = pb.ExplainRequest(text="a" * 19, target_text="b" * 20)
        assert len((await server.generation.Explain(longest)).decoder_tokens) == 20
    assert len(graph.runs) == 1


async def test_a_model_without_the_graph_says_so_and_how_to_get_it(graph: FakeGraph) -> None:
    async with running() as server:
        error = await status_of(server.generation.Explain(pb.ExplainRequest(text="a", target_text="b")))
        described = await server.models.GetModel(model_pb2.GetModelRequest())
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error.details() == "Explain: is not offered for fake, which was exported without --explain-graph"
    assert not described.capabilities.explain
    assert described.limits.max_explain_tokens == 0
    async with running([explained_model()]) as server:
        described = await server.models.GetModel(model_pb2.GetModelRequest())
    assert described.capabilities.explain
    assert described.limits.max_explain_tokens == 256


async def test_before_the_first_call_there_is_no_graph_and_no_thread_and_then_one_of_each(graph: FakeGraph) -> None:
    request = pb.ExplainRequest(text="ab", target_text="c")
    async with running([explained_model()]) as server:
        await server.generation.Generate(generate_request(max_tokens=3))
        assert graph.loads == []
        assert workers() == []
        await asyncio.gather(*(server.generation.Explain(request) for _ in range(5)))
        assert graph.loads == ["fake"]
        assert len(workers()) == 1
    await eventually(lambda: workers() == [])


async def test_calls_are_computed_one_at_a_time_and_refused_above_the_queue_limit(graph: FakeGraph) -> None:
    def ask(text: str) -> Any:
        return server.generation.Explain(pb.ExplainRequest(text=text, target_text="z"))

    async with running([explained_model()]) as server:
        graph.gate.clear()
        first = ask("a")
        await asyncio.to_thread(graph.running.wait)
        waiting = [ask("b" * (1 + index)) for index in range(MAX_WAITING)]
        explainer = server.app._explainer
        await eventually(lambda: explainer._places.num_taken == 1 + MAX_WAITING)
        error = await status_of(ask("c"), grpc.StatusCode.RESOURCE_EXHAUSTED)
        retry = error_details_pb2.RetryInfo()
        assert rich_details(error)[0].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() > 0
        assert len(graph.runs) == 1
        # A canceled call frees its slot at once and is never computed.
        waiting.pop(0).cancel()
        await eventually(lambda: explainer._places.num_taken == MAX_WAITING)
        waiting.append(ask("d" * 20))
        graph.gate.set()
        await asyncio.gather(first, *waiting)
    lengths = [len(decoder) for decoder, _, _ in graph.runs]
    assert lengths[0] == 2
    assert sorted(lengths[1:]) == [*range(3, 2 + MAX_WAITING), 21]


async def test_keys_take_turns_and_one_has_half_of_the_places(graph: FakeGraph, tmp_path: Path) -> None:
    def ask(key: str, target: str) -> Any:
        return server.generation.Explain(pb.ExplainRequest(text="a", target_text=target), **by(key))

    def num_waiting(key: str) -> int:
        return len(server.app._explainer._queue._waiting.get(key, ()))

    half = (1 + MAX_WAITING) // 2
    async with running([explained_model()], api_keys=keys_file(tmp_path, a="", b="")) as server:
        graph.gate.clear()
        calls = [ask("a", "y")]
        await asyncio.to_thread(graph.running.wait)
        for index in range(1, half):
            calls.append(ask("a", "y" * (1 + index)))
            await eventually(lambda count=index: num_waiting("a") == count)
        error = await status_of(ask("a", "y"), grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert str(error.details()).startswith(f"{half} requests of Explain with this API key run or wait")
        calls.append(ask("b", "z" * 10))
        await eventually(lambda: num_waiting("b") == 1)
        graph.gate.set()
        await asyncio.gather(*calls)
    # One call of the first key ran and one was the next when the second key came.
    assert [len(decoder) - 1 for decoder, _, _ in graph.runs] == [1, 2, 10, 3, 4]


async def test_a_call_canceled_while_it_runs_frees_its_slot(graph: FakeGraph) -> None:
    async with running([explained_model()]) as server:
        graph.gate.clear()
        call = server.generation.Explain(pb.ExplainRequest(text="a", target_text="z"))
        await asyncio.to_thread(graph.running.wait)
        call.cancel()
        await eventually(lambda: server.app._explainer._places.num_taken == 0)
        waiting = server.generation.Explain(pb.ExplainRequest(text="b", target_text="z"))
        await eventually(lambda: server.app._explainer._places.num_taken == 1)
        waiting.cancel()
        await eventually(lambda: server.app._explainer._places.num_taken == 0)
        graph.gate.set()
        answer = await server.generation.Explain(pb.ExplainRequest(text="c", target_text="z"))
        assert list(answer.prompt_tokens) == ["<bos>", "c"]
    assert [decoder for decoder, _, _ in graph.runs] == [(BOS, *spell("a")), (BOS, *spell("c"))]


async def test_streams_go_on_while_attention_is_computed(graph: FakeGraph) -> None:
    async with running([explained_model()]) as server:
        graph.gate.clear()
        explained = server.generation.Explain(pb.ExplainRequest(text="a", target_text="z"))
        await asyncio.to_thread(graph.running.wait)
        events = await read(await read_accepted(server.stream("ab", max_tokens=40)))
        assert len(tokens_of(events)) == 40
        assert not explained.done()
        graph.gate.set()
        await explained


async def test_a_graph_that_fails_its_check_is_not_used_and_is_loaded_again(graph: FakeGraph) -> None:
    request = pb.ExplainRequest(text="a", target_text="z")
    async with running([explained_model()]) as server:
        graph.failure = NotServing("the explain graph of fake does not answer as its golden cases say")
        error = await status_of(server.generation.Explain(request))
        assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, str(graph.failure))
        graph.failure = OSError("/secret/path")
        error = await status_of(server.generation.Explain(request), grpc.StatusCode.INTERNAL)
        assert "secret" not in str(error.details())
        graph.failure = None
        assert (await server.generation.Explain(request)).attentions
    assert graph.loads == ["fake"] * 3


async def test_a_graph_whose_weights_do_not_fit_twice_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    resident, needed = 10 << 30, 2 * (3 << 30)
    model = explained_model()
    files = {"decoder.onnx.data": 3 << 30, "prefill.onnx.data": 9 << 30}
    graphs = {name: GraphSpec(f"{name}.onnx", (), ()) for name in ("decoder", "prefill")}
    manifest = replace(
        model.manifest,
        graphs={**model.manifest.graphs, **graphs},
        files={name: FileEntry("", num_bytes) for name, num_bytes in files.items()},
    )
    monkeypatch.setattr(attention, "resident_bytes", lambda: resident)
    limits = iter((resident + needed - 1, resident + needed))
    monkeypatch.setattr(attention, "memory_limit", lambda: next(limits))
    async with running([replace(model, manifest=manifest)]) as server:
        for refusal in (f"needs up to {needed} bytes", "has changed on the disk"):
            error = await status_of(
                server.generation.Explain(pb.ExplainRequest(text="a", target_text="z")), grpc.StatusCode.UNAVAILABLE
            )
            assert refusal in str(error.details())


async def test_unloading_a_model_releases_its_graph(graph: FakeGraph) -> None:
    request = pb.ExplainRequest(model="fake", text="a", target_text="z")
    first, other = explained_model(), served_model("other")
    async with running([first, other]) as server:
        await server.generation.Explain(request)
        server.app._show_health("fake")
        await server.generation.Explain(request)
        assert len(graph.loads) == 1
        # Another of the same name, as after a reload.
        server.app.models.reloaded(explained_model(), Parity((TRUSTED,)))
        await server.generation.Explain(request)
        assert len(graph.loads) == 2
        server.app.models.remove("fake")
        await eventually(lambda: server.app._explainer._graphs == {})
        await status_of(server.generation.Explain(request), grpc.StatusCode.NOT_FOUND)


async def test_a_call_is_repeated_if_its_model_was_replaced_meanwhile(graph: FakeGraph) -> None:
    gate = Gate()
    runner = FakeRunner(SLOTS, before_run=gate)
    async with running([explained_model()], runner=runner) as server:
        with gate.closed():
            call = server.generation.Explain(pb.ExplainRequest(text="ab", max_tokens=4))
            await gate.until_entered()
            server.app.models.reloaded(explained_model(), Parity((TRUSTED,)))
        answer = await call
        assert await server.until_ended(2) == {"length": 2}
    assert len(answer.target_tokens) == 4
    assert len(graph.runs) == 1


async def test_a_model_that_does_not_serve_does_not_explain(graph: FakeGraph) -> None:
    request = pb.ExplainRequest(text="a", target_text="z")
    async with running([explained_model()], verify=False) as server:
        starting = await status_of(server.generation.Explain(request))
    async with running([explained_model()], trust=True) as server:
        server.app.models.drain()
        draining = await status_of(server.generation.Explain(request))
    for error, words in ((starting, "starting"), (draining, "draining")):
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert words in str(error.details())
    assert graph.loads == []
