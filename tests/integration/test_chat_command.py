"""The `chat` command against a real server: what it sends, prints and keeps, and what Ctrl-C does."""

from __future__ import annotations

import asyncio
import io
import signal
import sys
import threading
from typing import Any

from onward.v1 import generation_pb2 as pb
from service.commands.chat import chat
from service.config import ChatConfig
from service.engine.batch import ScheduledBatch
from tests.fakes import FakeRunner
from tests.integration.test_server_chat import TEMPLATE
from tests.servers import SLOTS, Running, eventually, running, served_model

POLITE = {"chat": TEMPLATE, "context": 256}
OPTIONS: dict[str, Any] = {"model": "fake", "temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


async def talk(server: Running, lines: str, **options: Any) -> tuple[int, list[str], str]:
    """Exit status, answers and errors for piped lines."""
    target = f"{server.endpoint.host}:{server.endpoint.port}"
    out, err = io.StringIO(), io.StringIO()
    config = ChatConfig(target=target, **OPTIONS | options)
    status = await asyncio.to_thread(chat, config, io.StringIO(lines), out, err)
    return status, out.getvalue().splitlines(), err.getvalue()


async def answer(server: Running, *turns: tuple[str, str], max_tokens: int = 6) -> str:
    """What the server answers to a conversation."""
    request = pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns]),
        sampling=pb.SamplingParams(temperature=0),
        stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )
    return (await server.generation.Generate(request)).outputs[0].text


async def test_every_line_is_answered_after_all_before_it_until_they_are_cleared() -> None:
    async with running([served_model(**POLITE)]) as server:
        first = await answer(server, ("system", "s"), ("user", "ab"))
        history = (("system", "s"), ("user", "ab"), ("assistant", first))
        second = await answer(server, *history, ("user", "c"))
        assert second != await answer(server, ("system", "s"), ("user", "c"))
        status, said, errors = await talk(server, "ab\n\nc\n/clear\nab", system="s")
        assert (status, errors) == (0, "")
        assert said == [first, second, first]


async def test_error_ends_a_script() -> None:
    async with running([served_model(context=256)]) as server:
        status, said, errors = await talk(server, "ab\nc\n")
        assert (status, said) == (1, [])
        assert errors.count("prompt.chat") == 1


class Pause:
    """Holds the engine after some steps, until it is opened."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.held, self.open = threading.Event(), threading.Event()

    def __call__(self, batch: ScheduledBatch) -> None:
        self.left -= 1
        if self.left < 0 and not self.open.is_set():
            self.held.set()
            self.open.wait()


async def test_ctrl_c_stops_the_answer_and_keeps_what_was_said() -> None:
    pause = Pause(steps=5)
    async with running([served_model(**POLITE)], runner=FakeRunner(SLOTS, before_run=pause), trust=True) as server:
        target = f"{server.endpoint.host}:{server.endpoint.port}"
        flags = ["--target", target, "--temperature", "0", "--max-tokens", "100", "--ignore-eos"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "service", "chat", "fake", *flags),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(b"ab\n")
            # The server holds its next step, and the client waits for it.
            printed = await process.stdout.read(1)
            await asyncio.to_thread(pause.held.wait)
            process.send_signal(signal.SIGINT)
            said = (printed + await process.stdout.readline()).decode().rstrip("\n")
            await eventually(lambda: server.app._open_calls.num_open == 0)
            pause.open.set()
            assert await server.until_ended(1) == {"cancelled": 1}
            whole = await answer(server, ("user", "ab"), max_tokens=100)
            assert said
            assert whole.startswith(said)
            rest, _ = await process.communicate(b"c\n")
            history = (("user", "ab"), ("assistant", said), ("user", "c"))
            assert rest.decode() == await answer(server, *history, max_tokens=100) + "\n"
            assert process.returncode == 0
        finally:
            pause.open.set()
            if process.returncode is None:
                process.kill()
