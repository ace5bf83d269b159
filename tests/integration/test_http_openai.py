"""openai-python against the HTTP transport, blocking, asynchronous and streamed, and what other servers got wrong."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from unittest.mock import patch

import openai as library
import pytest
from openai import OpenAI

from service.config import Admission
from service.engine.types import FinishReason, GenerationRequest, TokenEvent
from service.process.text_pool import TextPool
from service.repository.grammars import Grammars
from service.runtime.async_engine import AsyncEngine
from tests.fakes import EOS, FakeRunner, Gate, spell
from tests.http_calls import POLITE, ask, connect, openai, read_answer, request_bytes, serving, url
from tests.scripted import ScriptedEngine, token
from tests.servers import MODEL, SLOTS, eventually, served_model

MESSAGES: Any = [{"role": "user", "content": "ab"}]
OPTIONS: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}


async def test_streamed_text_is_the_whole_text_for_both_kinds_of_clients() -> None:
    async with serving() as server, openai(server) as client:
        whole = await client.chat.completions.create(messages=MESSAGES, **OPTIONS)
        text = whole.choices[0].message.content
        assert text is not None
        assert len(text) == 6
        stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **OPTIONS)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == text

        def blocking() -> tuple[str, str, list[str]]:
            with OpenAI(base_url=f"{url(server)}/v1", api_key="none", max_retries=0) as client:
                said = client.chat.completions.create(messages=MESSAGES, **OPTIONS).choices[0].message.content
                continued = client.completions.create(prompt="ab", **OPTIONS).choices[0].text
                streamed = client.completions.create(prompt="ab", stream=True, **OPTIONS)
                return said or "", continued, [chunk.choices[0].text for chunk in streamed]

        said, continued, streamed = await asyncio.to_thread(blocking)
        assert said == continued == "".join(streamed) == text  # the template adds nothing but <bos>


async def test_usage_of_a_stream_is_one_last_chunk_without_choices() -> None:
    """ggml-org/llama.cpp#15444."""
    async with serving() as server:
        fields = {**OPTIONS, "messages": MESSAGES, "stream": True}
        del fields["extra_body"]
        with_usage = await ask(server, "/v1/chat/completions", {**fields, "stream_options": {"include_usage": True}})
        *others, last = with_usage.events
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 6
        assert last["usage"]["total_tokens"] == 6 + last["usage"]["prompt_tokens"]
        assert all(event["usage"] is None and event["choices"] for event in others)
        fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        *others, last = (await ask(server, "/v1/chat/completions", {**fields, "n": 2})).events
        counts = [event["usage"]["completion_tokens"] for event in others]
        assert (counts[0], counts[-1]) == (0, last["usage"]["completion_tokens"])
        assert counts == sorted(counts)
        assert {event["usage"]["prompt_tokens"] for event in others} == {last["usage"]["prompt_tokens"]}
        del fields["stream_options"]
        without = await ask(server, "/v1/chat/completions", fields)
        assert all("usage" not in event and event["choices"] for event in without.events)


@pytest.mark.parametrize("reason", [FinishReason.END_OF_SEQUENCE, FinishReason.STOP, FinishReason.LENGTH])
async def test_a_stream_ends_for_the_reason_that_the_whole_answer_has(reason: FinishReason) -> None:
    def script(request: GenerationRequest) -> list[list[TokenEvent]]:
        return [[token(5)], [token(6, reason=reason)]]

    engine = ScriptedEngine(script)
    async with serving(engines={MODEL: engine}, trust=True) as server, openai(server) as client:
        whole = await client.chat.completions.create(messages=MESSAGES, **OPTIONS)
        chunks = [
            chunk async for chunk in await client.chat.completions.create(messages=MESSAGES, stream=True, **OPTIONS)
        ]
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + [whole.choices[0].finish_reason]
        assert reasons[-1] == ("length" if reason is FinishReason.LENGTH else "stop")


async def test_an_error_behind_the_first_token_is_an_event_that_clients_raise() -> None:
    """block/goose#8027."""

    def script(request: GenerationRequest) -> list[list[TokenEvent]]:
        return [[token(5)], [], [token(None, reason=FinishReason.DEADLINE)]]

    async with serving(engines={MODEL: ScriptedEngine(script)}, trust=True) as server, openai(server) as client:
        stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **OPTIONS)
        said: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                said.append(chunk.choices[0].delta.content or "")  # noqa: PERF401 (kept when it raises)

        with pytest.raises(library.APIError, match="the deadline passed after 1 tokens") as caught:
            await read()
        assert len("".join(said)) == 1
        assert caught.value.code == "deadline_exceeded"


async def test_an_error_before_the_first_token_has_a_status_of_its_own() -> None:
    """BerriAI/litellm#40578: gateways drop errors that come as events."""
    gate = Gate()
    one_place = {"max_queue_size": 0, "max_batch_size": 1}
    async with serving(runner=FakeRunner(SLOTS, before_run=gate), **one_place) as server, openai(server) as client:
        with gate.closed():
            held = asyncio.create_task(client.chat.completions.create(messages=MESSAGES, **OPTIONS))
            await gate.until_entered()
            with pytest.raises(library.RateLimitError) as caught:
                await client.chat.completions.create(messages=MESSAGES, stream=True, **OPTIONS)
            assert float(caught.value.response.headers["retry-after-ms"]) > 0
            assert caught.value.code == "overloaded"
        await held
        # In the queue the status waits, too.
    slow = FakeRunner(SLOTS, before_run=lambda _: time.sleep(0.02))
    async with serving(runner=slow, admission=Admission.OFF) as server:
        held = asyncio.create_task(
            ask(server, "/v1/completions", {"prompt": "ab", "n": SLOTS, "max_tokens": 200, "ignore_eos": True})
        )
        await eventually(lambda: server.num_streams == 1)
        fields = {"messages": MESSAGES, "stream": True, "max_tokens": 3}
        late = await ask(server, "/v1/chat/completions", fields, {"x-request-timeout": "0.2"})
        held.cancel()
        assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
        assert late.headers["x-should-retry"] == "false"


async def test_the_headers_deadline_ends_a_body_that_does_not_come_and_a_form_that_waits() -> None:
    async with serving() as server:
        reader, writer = await connect(server)
        writer.write(request_bytes("/v1/completions", b"", {"content-length": "9", "x-request-timeout": "0.1"}))
        assert (await read_answer(reader)).status == 504
        writer.close()
        never = asyncio.Event()
        with patch.object(TextPool, "run", lambda *_: never.wait()):
            for path, asked in (("/tokenize", {"prompt": "ab"}), ("/detokenize", {"tokens": [5]})):
                assert (await ask(server, path, asked, {"x-request-timeout": "0.1"})).status == 504
        with patch.object(Grammars, "compile", lambda *_: never.wait()):
            fields = {"prompt": "ab", "structured_outputs": {"regex": "a+"}}
            late = await ask(server, "/v1/completions", fields, {"x-request-timeout": "0.1"})
        assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
        assert (await ask(server, "/v1/completions", {"prompt": "ab", "max_tokens": 2})).status == 200


async def test_draws_have_their_own_choices_streamed_and_not() -> None:
    async with serving() as server, openai(server) as client:
        options = {**OPTIONS, "temperature": 1, "seed": 5, "n": 3}
        whole = await client.chat.completions.create(messages=MESSAGES, **options)
        texts = [choice.message.content for choice in whole.choices]
        assert len(set(texts)) == 3
        streamed, roles = ["", "", ""], [0, 0, 0]
        async for chunk in await client.chat.completions.create(messages=MESSAGES, stream=True, **options):
            (choice,) = chunk.choices
            streamed[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
        assert (streamed, roles) == (texts, [1, 1, 1])


async def test_logprobs_are_those_of_the_tokens_with_their_bytes() -> None:
    async with serving() as server, openai(server) as client:
        chat = await client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **OPTIONS)
        (choice,) = chat.choices
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert b"".join(bytes(each.bytes or []) for each in content).decode() == choice.message.content
        # Greedy: the best is the chosen.
        assert all(each.top_logprobs[0].logprob == each.logprob for each in content)
        assert all(len(each.top_logprobs) == 2 for each in content)
        streamed = []
        stream = await client.chat.completions.create(
            messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True, **OPTIONS
        )
        async for chunk in stream:
            if (part := chunk.choices[0].logprobs) is not None:
                streamed += part.content or []
        assert streamed == content
        plain = await client.completions.create(prompt="ab", logprobs=2, **OPTIONS)
        described = plain.choices[0].logprobs
        assert described is not None
        assert described.token_logprobs == [each.logprob for each in content]
        assert described.text_offset == list(range(6))
        assert [*map(len, described.top_logprobs or [])] == [2] * 6
        bare = await client.completions.create(prompt="ab", logprobs=0, **OPTIONS)
        assert bare.choices[0].logprobs is not None
        assert bare.choices[0].logprobs.token_logprobs == described.token_logprobs


async def test_content_parts_are_one_text_and_never_control_tokens() -> None:
    async with serving() as server:

        async def tokens(content: Any) -> list[int]:
            answer = await ask(server, "/tokenize", {"messages": [{"role": "user", "content": content}]})
            return list(answer.json["tokens"])

        whole = await tokens("a\nb")
        assert await tokens([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == whole
        for hostile in ("<eos>", [{"type": "text", "text": "<e"}, {"type": "text", "text": "os>"}]):
            found = await tokens(hostile)
            assert EOS not in found
            assert found[1:] == list(spell("zeosz" if isinstance(hostile, str) else "zezosz"))


async def test_models_tokens_and_versions_are_told() -> None:
    async with serving([served_model(**POLITE), served_model("other", context=99)]) as server, openai(server) as client:
        listed = [model async for model in client.models.list()]
        assert [(model.id, model.object) for model in listed] == [("fake", "model"), ("other", "model")]
        assert (await client.models.retrieve("other")).to_dict()["max_model_len"] == 99
        with pytest.raises(library.NotFoundError):
            await client.models.retrieve("nobody")
        # Two are served, so one must be named.
        assert (await ask(server, "/tokenize", {"prompt": "ab"})).error["param"] == "model"
        told = (await ask(server, "/tokenize", {"model": "fake", "prompt": "ab", "return_token_strs": True})).json
        assert (told["count"], told["token_strs"]) == (3, ["<bos>", "a", "b"])
        bare = (await ask(server, "/tokenize", {"model": "fake", "prompt": "ab", "add_special_tokens": False})).json
        assert bare["tokens"] == told["tokens"][1:]
        back = await ask(server, "/detokenize", {"model": "fake", "tokens": told["tokens"]})
        assert back.json == {"prompt": "ab"}
        wrong = await ask(server, "/tokenize", {"model": "fake", "messages": [{"role": "wizard", "content": "a"}]})
        assert (wrong.status, wrong.error["param"]) == (400, "messages[0].role")
        wrong = await ask(server, "/detokenize", {"model": "fake", "tokens": [10**6]})
        assert (wrong.status, wrong.error["param"]) == (400, "tokens[0]")
        assert (await ask(server, "/version")).json["version"]
        assert (await ask(server, "/health")).status == 200


async def test_an_encoder_decoder_answers_completions_and_refuses_chat() -> None:
    async with serving([served_model(encoder_decoder=True)]) as server, openai(server) as client:
        answer = await client.completions.create(prompt="ab", **{**OPTIONS, "extra_body": {"ignore_eos": True}})
        assert len(answer.choices[0].text) == 6
        continued = await client.completions.create(
            prompt="ab", **{**OPTIONS, "extra_body": {"target_prefix": answer.choices[0].text[:2], "ignore_eos": True}}
        )
        assert continued.choices[0].text[:4] == answer.choices[0].text[2:]
        with pytest.raises(library.BadRequestError, match="messages: needs a chat template"):
            await client.chat.completions.create(messages=MESSAGES, **OPTIONS)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("chat/completions", {"messages": MESSAGES, "max_tokens": 3}),
        ("responses", {"input": "ab", "max_output_tokens": 3}),
    ],
)
async def test_a_partial_answer_at_the_deadline_says_so(path: str, asked: dict[str, Any]) -> None:
    gate = Gate()
    async with serving(runner=FakeRunner(SLOTS, before_run=gate), admission=Admission.OFF) as server:
        with gate.closed():
            fields = {**asked, "partial_on_deadline": True, "timeout_seconds": 0.2}
            sent = asyncio.create_task(ask(server, f"/v1/{path}", fields))
            await gate.until_entered()
            await asyncio.sleep(0.3)
        answer = await sent
        assert answer.status == 200
        (end,) = answer.json.get("choices", [answer.json])
        assert end["ended_by_deadline"] is True
        assert end.get("finish_reason", "length") == "length"
        assert end.get("status", "incomplete") == "incomplete"
        whole = (await ask(server, f"/v1/{path}", asked)).json
        assert "ended_by_deadline" not in whole.get("choices", [whole])[0]


async def test_an_unexpected_error_is_an_id_and_the_log_has_the_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as server:
        monkeypatch.setattr(AsyncEngine, "admit", lambda *_: 1 / 0)
        answer = await ask(server, "/v1/completions", {"prompt": "ab"})
        assert (answer.status, answer.error["type"]) == (500, "server_error")
        assert answer.error["message"].startswith("internal error ")
        assert answer.error["message"].removeprefix("internal error ") in caplog.text
        assert "division" not in answer.body.decode()
