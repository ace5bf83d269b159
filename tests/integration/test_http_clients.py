"""LangChain's and LiteLLM's clients, unmodified, against the HTTP transport: their sessions, streamed and not."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import openai as library
import pytest

from tests.http_calls import MESSAGES, serving, url
from tests.servers import MODEL, Running

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

# LiteLLM would fetch its table of prices from the network when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
TOKENS = 6
USAGE = {"prompt_tokens": 3, "completion_tokens": TOKENS, "total_tokens": 3 + TOKENS}


def chat_model(server: Running, **options: Any) -> ChatOpenAI:
    # Both libraries take seconds to import: in the process alone that runs these tests.
    from langchain_openai import ChatOpenAI

    given = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}, **options}
    return ChatOpenAI(base_url=f"{url(server)}/v1", api_key="none", max_retries=0, **given)


@pytest.fixture
async def litellm() -> AsyncIterator[Any]:
    """It keeps its connections, on the event loop that made them; those for responses it cannot close."""
    import litellm

    yield litellm
    await litellm.close_litellm_async_clients()
    litellm.in_memory_llm_clients_cache.flush_cache()
    gc.collect()


leaves_connections = pytest.mark.filterwarnings("ignore::ResourceWarning")


def lite(server: Running, **options: Any) -> dict[str, Any]:
    common = {"model": f"openai/{MODEL}", "api_base": f"{url(server)}/v1", "api_key": "none", "num_retries": 0}
    chosen = {"max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
    return {**common, **chosen, **options}


@pytest.mark.parametrize("uses_responses", [False, True])
async def test_langchain_has_the_same_text_and_usage_by_all_its_calls(*, uses_responses: bool) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

    async with serving() as server:
        model = chat_model(server, use_responses_api=uses_responses, stream_usage=True)
        answer = await model.ainvoke("ab")
        text = answer.text
        assert len(text) == TOKENS
        assert answer.usage_metadata is not None
        counted = ("input_tokens", "output_tokens", "total_tokens")
        assert tuple(answer.usage_metadata[name] for name in counted) == (3, TOKENS, 3 + TOKENS)
        whole = None
        async for chunk in model.astream("ab"):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        assert whole.text == text
        assert whole.usage_metadata == answer.usage_metadata
        ended = "status" if uses_responses else "finish_reason"
        assert whole.response_metadata[ended] == answer.response_metadata[ended] != "stop"

        def blocking() -> tuple[str, str, list[str]]:
            streamed = "".join(chunk.text for chunk in model.stream("ab"))
            return model.invoke("ab").text, streamed, [each.text for each in model.batch(["ab", "ab", "b"])]

        invoked, streamed, batch = await asyncio.to_thread(blocking)
        assert invoked == streamed == batch[0] == batch[1] == text != batch[2]
        # A conversation, with what was answered.
        history = [SystemMessage("c"), HumanMessage("ab"), answer, HumanMessage("ab")]
        retold = [SystemMessage("c"), HumanMessage("ab"), AIMessage(text), HumanMessage("ab")]
        assert (await model.ainvoke(history)).text == (await model.ainvoke(retold)).text != text


async def test_langchains_options_have_their_effect() -> None:
    from langchain_core.messages import HumanMessage

    async with serving() as server:
        model = chat_model(server)
        text = (await model.ainvoke("ab")).text
        stopped = await model.ainvoke("ab", stop=[text[2]])
        assert (stopped.text, stopped.response_metadata["finish_reason"]) == (text[:2], "stop")
        drawn = [(await chat_model(server, temperature=1, seed=seed).ainvoke("ab")).text for seed in (5, 5, 6)]
        assert drawn[0] == drawn[1] != drawn[2]
        described = await chat_model(server, logprobs=True, top_logprobs=2).ainvoke("ab")
        content = described.response_metadata["logprobs"]["content"]
        assert b"".join(bytes(each["bytes"]) for each in content).decode() == text
        assert all(len(each["top_logprobs"]) == 2 for each in content)
        outputs = (await chat_model(server, temperature=1, seed=5, n=3).agenerate([[HumanMessage("ab")]])).generations
        assert len({each.text for each in outputs[0]}) == 3


async def test_langchain_raises_what_is_refused() -> None:
    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.messages import HumanMessage

    async with serving() as server:
        model = chat_model(server)
        image = HumanMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}])
        with pytest.raises(library.BadRequestError, match=r"messages\[0\]\.content\[0\]\.type"):
            await model.ainvoke([image])
        with pytest.raises(ContextOverflowError, match="at most 255 tokens"):
            await model.ainvoke("a" * 5000)
        with pytest.raises(library.NotFoundError, match="nobody"):
            await chat_model(server, model="nobody").ainvoke("ab")


@leaves_connections
@pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning")  # LiteLLM's, of pydantic
async def test_litellm_has_the_same_text_and_usage_by_all_its_calls(litellm: Any) -> None:
    async with serving() as server:
        options = lite(server, messages=MESSAGES)
        answer = await litellm.acompletion(**options)
        text = answer.choices[0].message.content
        assert (len(text), answer.choices[0].finish_reason) == (TOKENS, "length")
        assert {name: answer.usage[name] for name in USAGE} == USAGE
        stream = await litellm.acompletion(stream=True, stream_options={"include_usage": True}, **options)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
        assert {name: chunks[-1].usage[name] for name in USAGE} == USAGE
        built = litellm.stream_chunk_builder(chunks)
        assert built.choices[0].message.content == text

        def blocking() -> list[Any]:
            streamed = litellm.completion(stream=True, **options)
            completion = lite(server, model=f"text-completion-openai/{MODEL}", prompt="ab")
            return [
                litellm.completion(**options).choices[0].message.content,
                "".join(chunk.choices[0].delta.content or "" for chunk in streamed),
                litellm.text_completion(**completion).choices[0].text,
            ]

        assert await asyncio.to_thread(blocking) == [text] * 3
        asked = lite(server, input="ab", max_output_tokens=TOKENS)
        del asked["max_tokens"]
        response = await litellm.aresponses(**asked)
        assert response.output[0].content[0].text == text
        events = [event async for event in await litellm.aresponses(stream=True, **asked)]
        assert "".join(getattr(event, "delta", "") for event in events) == text


@leaves_connections
async def test_litellms_options_have_their_effect_and_its_errors_are_its_own(litellm: Any) -> None:
    async with serving() as server:
        options = lite(server, messages=MESSAGES)
        text = (await litellm.acompletion(**options)).choices[0].message.content
        stopped = (await litellm.acompletion(stop=[text[2]], **options)).choices[0]
        assert (stopped.message.content, stopped.finish_reason) == (text[:2], "stop")
        described = await litellm.acompletion(logprobs=True, top_logprobs=1, **options)
        assert [each.token for each in described.choices[0].logprobs.content] == list(text)
        drawn = await litellm.acompletion(n=3, seed=5, **{**options, "temperature": 1})
        assert len({choice.message.content for choice in drawn.choices}) == 3
        with pytest.raises(litellm.ContextWindowExceededError):
            await litellm.acompletion(**{**options, "messages": [{"role": "user", "content": "a" * 5000}]})
        with pytest.raises(litellm.NotFoundError):
            await litellm.acompletion(**{**options, "model": "openai/nobody"})
