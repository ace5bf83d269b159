"""LiteLLM's proxy, unmodified, in front of the HTTP transport: its clients get what the server itself answers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai as library
import pytest
from openai import AsyncOpenAI

from tests.http_calls import MESSAGES, openai, serving, url
from tests.ports import free_port
from tests.servers import MODEL, Running

PROXY = Path(__file__).parents[2] / "build/litellm-venv/bin/litellm"
TOKENS = 6
SECONDS = 120.0

pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="LiteLLM's proxy is not installed: make litellm")


@asynccontextmanager
async def proxied(server: Running, folder: Path) -> AsyncIterator[AsyncOpenAI]:
    """A client of a proxy in front of the server; "chat" and "text" are its names of the model."""
    common = {"api_base": f"{url(server)}/v1", "api_key": "none", "max_retries": 0}
    models = {"chat": f"openai/{MODEL}", "text": f"text-completion-openai/{MODEL}"}
    config = {
        "model_list": [
            {"model_name": name, "litellm_params": {"model": model, **common}} for name, model in models.items()
        ]
    }
    path = folder / "proxy.yaml"
    path.write_text(json.dumps(config))
    port = free_port()
    arguments = ("--config", str(path), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False")
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    with (folder / "proxy.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            PROXY, *arguments, cwd=folder, env=environment, stdout=log, stderr=log
        )
    try:
        await asyncio.wait_for(_answers(f"http://127.0.0.1:{port}/health/liveliness", process), SECONDS)
        async with AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=SECONDS
        ) as client:
            yield client
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _answers(address: str, process: asyncio.subprocess.Process) -> None:
    async with httpx.AsyncClient() as client:
        while process.returncode is None:
            try:
                if (await client.get(address)).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
    raise RuntimeError(f"the proxy ended with {process.returncode}")


async def test_a_proxys_clients_have_the_servers_answers_and_its_refusals(tmp_path: Path) -> None:
    options: Any = {"max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
    async with serving() as server, openai(server) as direct, proxied(server, tmp_path) as client:
        expected = await direct.chat.completions.create(model=MODEL, messages=MESSAGES, **options)
        text = expected.choices[0].message.content
        assert expected.usage is not None
        assert len(text or "") == TOKENS
        answers = await asyncio.gather(
            *(client.chat.completions.create(model="chat", messages=MESSAGES, **options) for _ in range(8))
        )
        for answer in answers:
            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "length")
            assert answer.usage is not None
            assert answer.usage.total_tokens == expected.usage.total_tokens
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="chat", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **options
            )
        ]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == expected.usage.total_tokens

        completions = [
            await each.completions.create(model=model, prompt="ab", **options)
            for each, model in ((direct, MODEL), (client, "text"))
        ]
        assert completions[0].choices[0].text == completions[1].choices[0].text

        asked: Any = {"input": "ab", "max_output_tokens": TOKENS, "temperature": 0}
        response = await direct.responses.create(model=MODEL, **asked)
        assert (await client.responses.create(model="chat", **asked)).output_text == response.output_text
        events = [event async for event in await client.responses.create(model="chat", stream=True, **asked)]
        assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == (
            response.output_text
        )

        # Its letters write no JSON.
        form: Any = {"type": "json_schema", "json_schema": {"name": "form", "schema": {"type": "object"}}}
        with pytest.raises(library.BadRequestError, match="matches nothing"):
            await client.chat.completions.create(model="chat", messages=MESSAGES, response_format=form)
        with pytest.raises(library.BadRequestError, match="at most"):
            await client.chat.completions.create(
                model="chat", messages=[{"role": "user", "content": "a" * 5000}], **options
            )
        with pytest.raises(library.BadRequestError, match="temperature"):
            await client.chat.completions.create(model="chat", messages=MESSAGES, temperature=-1)
