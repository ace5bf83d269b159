"""Callers who keep whatever answers at an address busy, and what became of each of their calls."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Self

import grpc

from onward.v1.generation_pb2_grpc import GenerationServiceStub
from tests.environment import ROOT
from tests.faults.process import DECODER, greedy, streamed, until

TRITON_CLIENT = ROOT / "tests" / "integration" / "triton_client.py"
NUM_STREAMS, NUM_CALLERS = 6, 4
LONG, SHORT = greedy(DECODER, max_tokens=250), greedy(DECODER, max_tokens=8)
SECONDS = 120.0
# So long that no server thinks it out of reach, however slow it is.
DEADLINE_SECONDS = 3600.0
_RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "onward.v1.GenerationService", "method": "Generate"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.05s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


@dataclass(frozen=True, slots=True)
class Ended:
    """A call: when it began, its status' name or "incomplete", and the tokens that came."""

    begun: float
    code: str
    tokens: tuple[int, ...]


class Load:
    """Callers who ask one thing after the other, some for streams and some for whole answers, while the block lasts.

    Args:
        target: whom they ask.
        has_retries: whether gRPC asks again, for a whole answer, while no server is found (UNAVAILABLE).
    """

    def __init__(self, target: str, *, has_retries: bool = False) -> None:
        self.answers: list[Ended] = []
        self.streams: list[Ended] = []
        self._is_over = threading.Event()
        options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1)]
        if has_retries:
            options.append(("grpc.service_config", json.dumps(_RETRIES)))
        self._channel = grpc.insecure_channel(target, options)
        self._stub = GenerationServiceStub(self._channel)
        self._streaming = [threading.Thread(target=self._stream) for _ in range(NUM_STREAMS)]
        self._calling = [threading.Thread(target=self._call) for _ in range(NUM_CALLERS)]

    def __enter__(self) -> Self:
        """Streams first, and whole answers on top."""
        for thread in self._streaming:
            thread.start()
        return self

    def call(self) -> None:
        """Lets the others ask for whole answers, and waits until they have some."""
        for thread in self._calling:
            thread.start()
        self.until_answers(20)

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in (*self._streaming, *self._calling):
            if thread.ident is not None:
                thread.join(SECONDS)
        self._channel.close()

    def until_answers(self, more: int) -> None:
        """Waits for so many more answers."""
        goal = len(self.answers) + more
        until(lambda: len(self.answers) >= goal, "no call is answered", SECONDS)

    def _call(self) -> None:
        while not self._is_over.is_set():
            begun = time.monotonic()
            try:
                answer = self._stub.Generate(SHORT, timeout=DEADLINE_SECONDS)
            except grpc.RpcError as error:
                self.answers.append(Ended(begun, error.code().name, ()))
            else:
                self.answers.append(Ended(begun, "OK", tuple(answer.outputs[0].token_ids)))

    def _stream(self) -> None:
        while not self._is_over.is_set():
            begun, tokens, code = time.monotonic(), list[int](), "incomplete"
            try:
                for event in self._stub.GenerateStream(streamed(LONG), timeout=DEADLINE_SECONDS):
                    tokens += event.delta.token_ids
                    if event.HasField("summary"):
                        code = "OK"
            except grpc.RpcError as error:
                code = error.code().name
            self.streams.append(Ended(begun, code, tuple(tokens)))


def run(*words: str) -> str:
    """What a program of Python's prints, which must end well."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def last_json(out: str) -> dict[str, Any]:
    """The object on the last line."""
    found: dict[str, Any] = json.loads(out.strip().rpartition("\n")[2])
    return found
