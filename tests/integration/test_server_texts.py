"""Texts too long to be tokenized, texts that wait to be, and a tokenizer that panics, over real gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers

from model.spec.chat import Chat, ChatSettings
from model.spec.tokenizer import LOSSY_TOKEN_BYTES, Tokenizer
from onward.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from onward.v1 import generation_pb2 as pb
from service.process.text_pool import TextPool
from service.repository.models import ServedModel
from tests.fakes import BOS, CONTEXT, FakeRunner, spell
from tests.identities import by, keys_file
from tests.servers import (
    MODEL,
    SLOTS,
    Running,
    eventually,
    generate_request,
    infer_request,
    letter_tokenizer,
    read,
    running,
    served_model,
    status_of,
    stream_request,
)

Code = grpc.StatusCode

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
# More than the context holds, and as many characters as a message may have.
FITTING = LOSSY_TOKEN_BYTES * (CONTEXT - 2)
LONG = "a " * 1_900_000
QUEUE = 4


class Watched(Tokenizer):
    """Notes the length of each text; waits while `goes_on` is cleared."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        super().__init__(inner)
        self.sizes: list[int] = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def _clean(self, text: str) -> str:
        self.sizes.append(len(text.encode()))
        self.goes_on.wait()
        return super()._clean(text)


def watched_model(**options: Any) -> tuple[ServedModel, Watched]:
    tokenizer = Watched(letter_tokenizer()._inner)
    chat = Chat(ChatSettings(TEMPLATE), tokenizer)
    model = served_model(**options)
    return dataclasses.replace(model, prompt_tokenizer=tokenizer, output_tokenizer=tokenizer, chat=chat), tokenizer


def chat(*contents: str) -> dict[str, Any]:
    messages = [pb.ChatMessage(role="user", content=content) for content in contents]
    return {"text": None, "chat": pb.Chat(messages=messages)}


def calls(server: Running, text: str, **options: Any) -> dict[str, Any]:
    """Every way to have a text tokenized for a model's context."""
    generation = server.generation
    chats = [generate_request(**chat("a", text)), generate_request(**chat(*[text[: len(text) // 4]] * 4))]
    return {
        "prompt.text": generation.Generate(generate_request(text), **options),
        "prompt.text ": generation.GenerateStream(stream_request(text), **options),
        "prompt.text  ": generation.Estimate(pb.EstimateRequest(request=generate_request(text)), **options),
        "prompt.text   ": generation.Score(pb.ScoreRequest(text=text, target_text="a"), **options),
        "target.target_text": generation.Score(pb.ScoreRequest(text="a", target_text=text), **options),
        "prompt.chat.messages": generation.Generate(chats[0], **options),
        "prompt.chat.messages ": generation.Generate(chats[1], **options),
        "text_input": GRPCInferenceServiceStub(server.channel).ModelInfer(infer_request(text), **options),
    }


async def test_text_of_more_bytes_than_the_context_holds_is_never_tokenized() -> None:
    model, tokenizer = watched_model()
    async with running([model], max_queue_size=20) as server:
        for field, call in calls(server, LONG).items():
            error = await status_of(call)
            assert error.code() is Code.OUT_OF_RANGE, f"{field}: {error.details()}"
            assert str(error.details()).startswith(f"{field.strip()}: must have at most ")
            # The target's own prompt is a letter.
            assert max(tokenizer.sizes, default=0) <= 1, f"{field}: {max(tokenizer.sizes)} bytes were tokenized"
        # What may fit is: only its tokens tell.
        error = await status_of(server.generation.Generate(generate_request("a" * FITTING)))
        assert "must have at most 63 tokens, got" in str(error.details())
        assert max(tokenizer.sizes) == FITTING
        assert (await server.generation.Generate(generate_request(max_tokens=1))).outputs


async def test_target_prefix_of_more_bytes_than_the_context_holds_is_never_tokenized() -> None:
    model, tokenizer = watched_model(encoder_decoder=True)
    async with running([model]) as server:
        error = await status_of(
            server.generation.Generate(generate_request("a", target_prefix=LONG)), Code.OUT_OF_RANGE
        )
        assert str(error.details()).startswith("target_prefix: must have at most 62 tokens, which hold at most")
        assert max(tokenizer.sizes) == 1


async def test_text_beyond_the_limit_of_tokenize_waits_for_no_thread() -> None:
    model, tokenizer = watched_model()
    async with running([model]) as server:
        tokenizer.goes_on.clear()
        waiting = server.generation.Tokenize(pb.TokenizeRequest(text="a"))
        await eventually(lambda: tokenizer.sizes == [1])
        await status_of(server.generation.Tokenize(pb.TokenizeRequest(text=LONG)), Code.INVALID_ARGUMENT)
        await status_of(
            server.generation.Detokenize(pb.DetokenizeRequest(token_ids=[3] * 65_537)), Code.INVALID_ARGUMENT
        )
        tokenizer.goes_on.set()
        await waiting
        assert tokenizer.sizes == [1]


async def test_estimates_hold_places_while_they_are_tokenized() -> None:
    model, tokenizer = watched_model()
    async with running([model], max_queue_size=QUEUE) as server:
        estimate = pb.EstimateRequest(request=generate_request())
        tokenizer.goes_on.clear()
        waiting = [server.generation.Estimate(estimate) for _ in range(SLOTS + QUEUE)]
        # Each has its place before it is tokenized, and there is no other.
        lane = server.app.models.find(MODEL).queue
        await eventually(lambda: lane._taken.total() == SLOTS + QUEUE)
        for call in (server.generation.Estimate(estimate), server.generation.Generate(generate_request())):
            error = await status_of(call, Code.RESOURCE_EXHAUSTED)
            assert str(error.details()).startswith(f"{SLOTS + QUEUE} requests of {MODEL} run or wait")
        waiting.pop().cancel()
        await eventually(lambda: lane._taken.total() == SLOTS + QUEUE - 1)
        tokenizer.goes_on.set()
        await asyncio.gather(*waiting)
        assert (await server.generation.Generate(generate_request(max_tokens=1))).outputs
        # What was estimated is no request, and counted as none.
        assert server.ended() == {"overloaded": 1, "length": 1}


async def test_texts_of_every_method_wait_for_their_keys_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How tenants take turns is tests/unit/service/process/test_text_pool.py's."""
    tenants: list[str] = []
    run = TextPool.run

    async def noted(pool: TextPool, tenant: str, *work: Any) -> Any:
        tenants.append(tenant)
        return await run(pool, tenant, *work)

    monkeypatch.setattr(TextPool, "run", noted)
    model, _ = watched_model()
    async with running([model], api_keys=keys_file(tmp_path, a="")) as server:
        asked = calls(server, "abcd", **by("a"))
        for call in asked.values():
            await (read(call) if isinstance(call, grpc.aio.UnaryStreamCall) else call)
        assert len(tenants) >= len(asked)
        before = len(tenants)
        await server.generation.Tokenize(pb.TokenizeRequest(text="ab"), **by("a"))
        assert len(tenants) == before + 1
    assert set(tenants) == {"a"}


class PanickingIn:
    """Models whose tokenizer panics, as the library itself does, of the letter "q" alone."""

    @staticmethod
    def encode() -> ServedModel:
        described = json.loads(letter_tokenizer().to_json())
        cuts = pre_tokenizers.FixedLength(length=1)
        described["pre_tokenizer"] = {**json.loads(cuts.__getstate__()), "length": 0}
        broken = Tokenizer.from_json(json.dumps(described))
        return dataclasses.replace(served_model(), prompt_tokenizer=broken)

    @staticmethod
    def decode() -> ServedModel:
        inner = letter_tokenizer()._inner
        # It strips two letters "q" of a token that has one.
        inner.decoder = decoders.Sequence([decoders.Strip(content="q", left=0, right=2), decoders.Fuse()])
        tokenizer = Tokenizer(inner)
        return dataclasses.replace(served_model(), prompt_tokenizer=tokenizer, output_tokenizer=tokenizer)


def writes_its_prompt(source: Sequence[int], tokens: Sequence[int]) -> int:
    """A model that repeats the first letter of its prompt."""
    return tokens[1] if tokens[0] == BOS and len(tokens) > 1 else spell("a")[0]


async def test_panic_while_a_prompt_is_tokenized_is_internal_and_the_next_request_served() -> None:
    good = served_model("good")
    bad = dataclasses.replace(PanickingIn.encode(), name="bad")
    async with running([good, bad]) as server:
        asked = generate_request(model="bad")
        for call in (
            server.generation.Generate(asked),
            server.generation.GenerateStream(stream_request(model="bad")),
            server.generation.Estimate(pb.EstimateRequest(request=asked)),
            server.generation.Score(pb.ScoreRequest(model="bad", text="ab")),
            server.generation.Tokenize(pb.TokenizeRequest(model="bad", text="ab")),
        ):
            async with asyncio.timeout(30):
                error = await status_of(call)
            assert error.code() is Code.INTERNAL
            assert str(error.details()).startswith("internal error ")
        assert (await server.generation.Generate(generate_request(model="good", max_tokens=1))).outputs
        assert server.num_streams == 0


@pytest.mark.parametrize("stop", [(), ("xyz",)], ids=["text of the event loop", "text of the engine"])
async def test_panic_while_an_answer_becomes_text_ends_that_request_alone(stop: tuple[str, ...]) -> None:
    runner = FakeRunner(SLOTS, next_token=writes_its_prompt)
    async with running([PanickingIn.decode()], runner=runner, verify=False, trust=True) as server:
        beside = [server.stream("b", max_tokens=20, ignore_eos=True, stop=stop) for _ in range(2)]
        bad = server.generation.Generate(generate_request("q", max_tokens=20, ignore_eos=True, stop=stop))
        streamed = server.stream("q", max_tokens=20, ignore_eos=True, stop=stop)
        async with asyncio.timeout(30):
            assert {(await status_of(call)).code() for call in (bad, streamed)} == {Code.INTERNAL}
            texts = ["".join(event.delta.text for event in await read(call)) for call in beside]
        assert texts == ["b" * 20] * 2
        assert (await server.generation.Generate(generate_request("c", max_tokens=1))).outputs[0].text == "c"
        await server.until_idle()


async def test_panic_of_one_request_of_a_stream_ends_that_request_alone() -> None:
    runner = FakeRunner(SLOTS, next_token=writes_its_prompt)
    async with running([PanickingIn.decode()], runner=runner, verify=False, trust=True) as server:
        call = GRPCInferenceServiceStub(server.channel).ModelStreamInfer()
        for request_id, text in (("good", "b"), ("bad", "q"), ("better", "c")):
            await call.write(infer_request(text, request_id, max_tokens=3))
        await call.done_writing()
        texts: dict[str, str] = {}
        errors = []
        while (answer := await call.read()) is not grpc.aio.EOF:
            found = answer.infer_response
            errors += [(found.id, answer.error_message)] if answer.error_message else []
            for data in found.raw_output_contents:
                texts[found.id] = texts.get(found.id, "") + data[4:].decode()
        ((bad, words),) = errors
        assert bad == "bad"
        assert words.startswith("[INTERNAL] internal error ")
        assert {name: texts[name] for name in ("good", "better")} == {"good": "bbb", "better": "ccc"}
