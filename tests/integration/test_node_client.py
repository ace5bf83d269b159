"""The Node client of examples/clients/node against real servers: run as its page says, and judged by what it prints."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from onward.v1 import generation_pb2 as pb
from service.errors import DeadlineUnreachable, NotServing, Overloaded, RequestError
from tests.environment import ROOT
from tests.fakes import FakeRunner, Gate, expected_tokens, letters
from tests.identities import HOST, Identities
from tests.refusing import refusing
from tests.servers import MODEL, PROMPT, SLOTS, Running, running, served_model

PROGRAM = ROOT / "examples" / "clients" / "node" / "ask.mjs"
LIMIT_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Said:
    """What the program left behind."""

    code: int | None
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out.splitlines()[0]

    @property
    def facts(self) -> dict[str, Any]:
        """Its last line."""
        printed: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return printed


async def ask(node: str, target: str, *options: str, model: str = MODEL) -> Said:
    program = await asyncio.create_subprocess_exec(
        node,
        str(PROGRAM),
        model,
        "ab",
        "--target",
        target,
        *options,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(program.communicate(), LIMIT_SECONDS)
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    return Said(program.returncode, out.decode(), err.decode())


def target(server: Running) -> str:
    return f"{server.endpoint.host}:{server.endpoint.port}"


@pytest.mark.parametrize("options", [(), ("--stream",)], ids=["whole", "stream"])
async def test_answer_is_the_servers(node: str, options: tuple[str, ...]) -> None:
    async with running() as server:
        said = await ask(node, target(server), "--max-tokens", "6", *options)
        assert await server.until_ended(1) == {"length": 1}
    assert (said.code, said.err) == (0, "")
    assert said.text == letters(expected_tokens(PROMPT, 6))
    assert said.facts["finishReason"] == "FINISH_REASON_LENGTH"
    assert said.facts["usage"]["promptTokens"] == 3
    assert said.facts["usage"]["generatedTokens"] == 6
    assert said.facts["requestId"]


async def test_stream_that_is_left_frees_its_place(node: str) -> None:
    async with running([served_model(context=1 << 16)]) as server:
        said = await ask(node, target(server), "--stream", "--stop-after", "3", "--max-tokens", "60000")
        assert await server.until_ended(1) == {"cancelled": 1}
    assert (said.code, said.err) == (0, "")
    assert 0 < len(said.out) < 60_000


@pytest.mark.parametrize("options", [(), ("--stream",)], ids=["whole", "stream"])
async def test_deadline_ends_the_call_and_frees_its_place(node: str, options: tuple[str, ...]) -> None:
    gate = Gate()
    async with running(runner=FakeRunner(SLOTS, before_run=gate)) as server:
        with gate.closed():
            said = await ask(node, target(server), "--timeout-seconds", "1.5", *options)
        assert set(await server.until_ended(1)) <= {"deadline", "cancelled"}
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("DEADLINE_EXCEEDED: ")


DELAY = 0.02


@pytest.mark.parametrize("options", [(), ("--stream",)], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "refusals",
    [[Overloaded("m", 8, 8, DELAY), Overloaded("m", 8, 8, DELAY)], [NotServing("starting")]],
    ids=["refused with a delay", "unreachable"],
)
async def test_refused_call_comes_again(node: str, refusals: list[RequestError], options: tuple[str, ...]) -> None:
    async with refusing(*refusals) as server:
        said = await ask(node, server.target, *options)
    assert (said.code, said.err, said.text) == (0, "", "done")
    assert len(server.heard) == len(refusals) + 1
    if isinstance(refusals[0], Overloaded):
        assert min(later.at - sooner.at for sooner, later in itertools.pairwise(server.heard)) >= DELAY
    lefts = [heard.left_seconds for heard in server.heard]
    assert all(left is not None and left <= 60 for left in lefts)


HOPELESS = DeadlineUnreachable(
    queue_seconds=1, prefill_seconds=1, decode_seconds=1, left_seconds=1, retry_after_seconds=None
)


@pytest.mark.parametrize(
    ("refusal", "num_events"),
    [(HOPELESS, 0), (Overloaded("m", 8, 8, 3600.0), 0), (Overloaded("m", 8, 8, 0.0), 2)],
    ids=["never", "after the deadline", "after something was heard"],
)
async def test_refused_call_does_not_come_again_in_vain(node: str, refusal: RequestError, num_events: int) -> None:
    async with refusing(refusal, num_events=num_events) as server:
        said = await ask(node, server.target, "--stream")
    assert said.code == 1
    assert said.err.startswith("RESOURCE_EXHAUSTED: ")
    assert len(server.heard) == 1


async def test_tries_end_with_their_number(node: str) -> None:
    async with refusing(*[Overloaded("m", 8, 8, 0.0)] * 9) as server:
        said = await ask(node, server.target)
    assert said.code == 1
    assert len(server.heard) == 5


async def test_stream_without_summary_is_incomplete(node: str) -> None:
    async with refusing(has_summary=False) as server:
        said = await ask(node, server.target, "--stream")
    assert (said.code, said.err) == (1, "ERROR: the stream ended before the answer did\n")


async def test_request_has_the_fields_that_are_given(node: str) -> None:
    async with refusing() as server:
        await ask(node, server.target, "--max-tokens", "7")
    (heard,) = server.heard
    assert heard.request == pb.GenerateRequest(
        model=MODEL, text="ab", sampling=pb.SamplingParams(temperature=0), stopping=pb.StoppingParams(max_tokens=7)
    )


async def test_client_trusts_its_servers_authority_and_shows_its_key(node: str, tmp_path: Path) -> None:
    who = Identities.issue(tmp_path)
    async with running(**who.server(is_mutual=False)) as server:
        at = f"{HOST}:{server.endpoint.port}"
        over_tls = ("--ca-certificate", str(tmp_path / "ca.pem"))
        known = await ask(node, at, *over_tls, "--api-key-file", str(tmp_path / "api-key"), "--max-tokens", "2")
        unknown = await ask(node, at, *over_tls)
    assert (known.code, known.err) == (0, "")
    assert known.text == letters(expected_tokens(PROMPT, 2))
    assert (unknown.code, unknown.err.partition(":")[0]) == (1, "UNAUTHENTICATED")
