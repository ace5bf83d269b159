"""Every attack at once beside honest streams: their answers, what they wait, the server's memory and its end."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import grpc
import numpy as np
import pytest

from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.app import _CLOSING_SECONDS, _ENGINE_SECONDS
from tests.artifacts import tiny_artifact
from tests.environment import ROOT
from tests.faults import bounds
from tests.faults.attackers import (
    ANSWER_BYTES,
    ATTACKS,
    HELD_CALLS,
    MAX_CALLS,
    MAX_CONNECTIONS,
    MAX_TEXTS,
    UNFINISHED_CALLS,
    Attacker,
    Settings,
    problems,
)
from tests.faults.process import DECODER, ServerProcess, serving
from tests.identities import key_table

MODEL = "besieged"
ATTACKERS = ("attacker", "uploader", "flooder")
NUM_STREAMS, NUM_KEYS, NUM_PROMPTS, MAX_BATCH_SIZE = 16, 4, 8, 32
PROMPT_TOKENS, NEW_TOKENS = 96, 96
# For each attack to meet an end that it must: `problems` names those that have not.
MAX_WAIT_SECONDS = 300.0
# Of what is in flight when the server stops: of a measurement, and else.
GRACE_SECONDS, SHORT_GRACE_SECONDS = 5, 2
# The grace, then what the app allows a step, gRPC and the last statuses.
MAX_STOP_SECONDS = GRACE_SECONDS + _ENGINE_SECONDS + 5 * _CLOSING_SECONDS
# From this length on a run is a measurement, on a machine that has nothing else to do.
MEASURED_SECONDS = 300.0
# Of the attackers where the time of others is measured: the server's cores are its own. On a crowded machine such a
# process hardly runs.
NICENESS = 19
SMALL = {"d_model": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "d_ff": 512, "context": 512}
# The layers of the preset llama-110m. Beside a small model's steps of 3 ms the 99th percentile is Python's alone.
LARGE = {"d_model": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 4, "d_ff": 2048, "context": 512}

Answer = tuple[tuple[int, ...], tuple[float, ...]]


@dataclass(slots=True)
class Observed:
    """What the honest clients observed: answers by prompt, and seconds until a first token and between two messages."""

    answers: dict[int, set[Answer]] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    num_answers: int = 0

    def percentile(self, share: float) -> float:
        """Of the seconds between two messages of a stream."""
        return float(np.percentile(self.between, share))


def request_of(prompt: int, request_id: str) -> pb.GenerateStreamRequest:
    """Half of the requests are greedy, half draw with a seed; all ask for log-probabilities."""
    text = "".join(chr(97 + (prompt * 31 + index * index) % 26) for index in range(PROMPT_TOKENS))
    return pb.GenerateStreamRequest(
        model=MODEL,
        text=text,
        request_id=request_id,
        sampling=pb.SamplingParams(temperature=prompt % 2, seed=prompt),
        stopping=pb.StoppingParams(max_tokens=NEW_TOKENS, ignore_eos=True),
        response=pb.ResponseOptions(logprobs=0),
    )


async def ask(
    channels: Sequence[grpc.aio.Channel], seconds: float, is_ready: Callable[[], bool] = lambda: True
) -> Observed:
    """A stream on each channel that asks one prompt after the other, for so long and until something is ready."""
    seen, until = Observed(), time.monotonic() + seconds

    async def stream(number: int, stub: GenerationServiceStub) -> None:
        metadata = [("authorization", f"Bearer honest{number % NUM_KEYS}")]
        prompt = number
        while time.monotonic() < until or not is_ready():
            prompt = (prompt + 1) % NUM_PROMPTS
            tokens, logprobs, last = list[int](), list[float](), time.monotonic()
            is_complete = False
            async for event in stub.GenerateStream(request_of(prompt, f"honest-{number}"), metadata=metadata):
                is_complete = event.HasField("summary")
                if not event.delta.token_ids:
                    continue
                now = time.monotonic()
                (seen.between if tokens else seen.first).append(now - last)
                last = now
                tokens += event.delta.token_ids
                logprobs += [each.logprob for each in event.delta.logprobs]
            assert is_complete
            seen.answers.setdefault(prompt, set()).add((tuple(tokens), tuple(logprobs)))
            seen.num_answers += 1

    async with asyncio.TaskGroup() as group:
        for number, channel in enumerate(channels):
            group.create_task(stream(number, GenerationServiceStub(channel)))
    return seen


class Attackers:
    """A process of theirs. One thread reads its output: two would take each other's lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._told = SimpleQueue[str]()
        threading.Thread(target=self._read, daemon=True).start()

    def has_told(self) -> bool:
        """Whether each attack was made or given up, or the process has ended."""
        return not self._told.empty()

    def ends(self) -> dict[str, dict[str, int]]:
        """The ends of each attack until now."""
        assert self._process.stdin is not None
        while self.has_told():
            assert self._told.get(), "the attackers have ended"
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        ends: dict[str, dict[str, int]] = json.loads(self._told.get())
        return ends

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._told.put(line)
        self._told.put("")  # it has ended


@contextmanager
def attacked(server: ServerProcess, niceness: int) -> Iterator[Attackers]:
    """The attackers, in a process of their own."""
    settings = {
        "target": server.target,
        "metrics": server.metrics_url.split("/")[2],
        "key": ATTACKERS[0],
        "upload_key": ATTACKERS[1],
        "flood_key": ATTACKERS[2],
        "model": MODEL,
        "niceness": niceness,
    }
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.attackers", json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            yield Attackers(process)
        finally:
            process.kill()


@dataclass(frozen=True, slots=True)
class Siege:
    """What honest clients observed before and during it, each attack's ends, the server's growth in bytes, and how long
    it took to stop while it was attacked."""

    quiet: Observed
    besieged: Observed
    ends: Mapping[str, Mapping[str, int]]
    growth: int
    stop_seconds: float


async def besiege(server: ServerProcess, seconds: float, niceness: int) -> Siege:
    """Attacks a server beside honest clients, and ends it under attack."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    # Opened before an attack takes all connections that there may be.
    channels = [grpc.aio.insecure_channel(server.target, options=options) for _ in range(NUM_STREAMS)]
    # Each stream asks once at least, each prompt twice.
    quiet = await ask(channels, 60.0 if seconds >= MEASURED_SECONDS else 1.0)
    before = server.forget_peak()
    with attacked(server, niceness) as attackers:
        given_up = time.monotonic() + seconds + MAX_WAIT_SECONDS
        besieged = await ask(channels, seconds, lambda: attackers.has_told() or time.monotonic() > given_up)
        growth = (server.status("VmHWM") - before) << 10
        ends = attackers.ends()
        began = time.monotonic()
        assert server.stop() == 0
        stop_seconds = time.monotonic() - began
    for channel in channels:
        await channel.close()
    return Siege(quiet, besieged, ends, growth, stop_seconds)


def growth_terms(folder: Path) -> dict[str, int]:
    """What all attacks together may have the server grow by, in bytes; nothing else attacks it."""
    small_calls = bounds.calls(MAX_CALLS - 2 * UNFINISHED_CALLS, has_body=False)
    return {
        "messages that are read": bounds.messages(bounds.PLACES),
        "the message that is parsed": bounds.messages(1),
        "a message larger than the limit": bounds.flood(),
        "a stream whose answers are not read": bounds.stream(),
        "answers that are not taken": bounds.answers(HELD_CALLS, ANSWER_BYTES),
        "long texts": bounds.texts(MAX_TEXTS),
        "calls": bounds.calls(2 * UNFINISHED_CALLS) + small_calls,
        "connections": MAX_CONNECTIONS * bounds.CONNECTION_BYTES,
        "scrapes": bounds.scrapes(),
        **bounds.engine(folder, MAX_BATCH_SIZE),
        "allocator": bounds.ALLOCATOR_BYTES,
    }


@pytest.mark.whole
def test_every_attack_at_once_changes_no_bit_of_an_honest_answer_and_the_server_stops(
    tmp_path: Path, siege_seconds: float
) -> None:
    is_measured = siege_seconds >= MEASURED_SECONDS
    sizes = LARGE if is_measured else SMALL
    (tmp_path / "models").mkdir()
    folder = tmp_path / "models" / MODEL
    folder.symlink_to(tiny_artifact(DECODER, **sizes), target_is_directory=True)
    keys = tmp_path / "keys.toml"
    names = (*(f"honest{number}" for number in range(NUM_KEYS)), *ATTACKERS)
    keys.write_text("".join(map(key_table, names)))
    grace = GRACE_SECONDS if is_measured else SHORT_GRACE_SECONDS
    flags = ("--api-keys", str(keys), "--drain-grace-seconds", str(grace), "--max-stall-seconds", "3")
    flags += ("--calibrate", "--max-batch-size", str(MAX_BATCH_SIZE), "--max-connections", str(MAX_CONNECTIONS))
    with serving(tmp_path / "models", *flags) as server:
        siege = asyncio.run(besiege(server, siege_seconds, NICENESS if is_measured else 0))
    quiet, besieged = siege.quiet, siege.besieged
    terms = growth_terms(folder)
    figures = {
        "seconds": siege_seconds,
        "answers": besieged.num_answers,
        "growth_mib": siege.growth / bounds.MIB,
        "most_mib": {name: num_bytes / bounds.MIB for name, num_bytes in terms.items()},
        "stop_seconds": siege.stop_seconds,
        "quiet": {"p50": quiet.percentile(50), "p99": quiet.percentile(99)},
        "besieged": {"p50": besieged.percentile(50), "p99": besieged.percentile(99)},
        "attacks": siege.ends,
    }
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    assert {prompt: len(answers) for prompt, answers in quiet.answers.items()} == dict.fromkeys(range(NUM_PROMPTS), 1)
    assert besieged.answers == quiet.answers
    assert problems(siege.ends) == []
    assert siege.growth <= sum(terms.values())
    if is_measured:
        assert besieged.percentile(99) <= 2 * quiet.percentile(99)
        assert siege.stop_seconds <= MAX_STOP_SECONDS


@pytest.mark.whole
async def test_an_attack_that_met_a_closed_port_or_another_key_alone_was_not_made() -> None:
    # A port that refuses connections, and that no other process has meanwhile.
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{closed.getsockname()[1]}"
        attacker = Attacker(Settings(target, target, *ATTACKERS, MODEL))
        for name, attack in ATTACKS.items():
            attacker.ends[name].update(await attacker.attempt(attack))
    found = problems(attacker.ends)
    # Of each: it met what it may not meet, and nothing that it must meet.
    assert len(found) == 2 * len(ATTACKS)
    refused = {name: {"UNAUTHENTICATED": 1} for name in ATTACKS}
    assert len(problems(refused)) == 2 * (len(ATTACKS) - 1)
    assert problems({name: dict.fromkeys(attack.must, 1) for name, attack in ATTACKS.items()}) == []
