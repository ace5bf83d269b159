"""A server of `onward.v1` without a model, with planned delays and a log of its actions.

    python -m tests.load.fake_server '{"ttft": [0.08, 0.12], "itl": [0.03, 0.05], "log": "/tmp/log.jsonl"}'

It runs as a process on a free loopback port. The log has a line for each request, with times on the monotonic clock,
which all processes of a Linux host share, so that tests can compare them with a client's. It reports
healthy, for proxies.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from benchmarks.infra.envoy import balancing
from onward.v1 import generation_pb2 as pb
from onward.v1 import generation_pb2_grpc, model_pb2_grpc
from onward.v1 import model_pb2 as models
from tests.environment import ROOT, environment

MODEL = "fake"
VOCAB_SIZE = 1000
_READY = "listening on "


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The server's behavior. A pair is the range from which a request's delay is drawn, by the number in its id.

    Args:
        ttft: seconds from taking a slot to the first token.
        itl: seconds from one token to the next.
        slots: maximum of running requests; 0 for no limit.
        queue: maximum of waiting requests; more are refused.
        refuse_every: refuses each n-th request; 0 for none.
        break_every: ends each n-th with OK, but without its summary.
        fail_every: ends each n-th with INTERNAL after its second token.
        endless: numbers of requests that never get their last token.
        stall_at: seconds from the first request to a stall of the whole server.
        stall_seconds: duration of the stall; 0 for none.
        log: file of the log.
    """

    ttft: tuple[float, float] = (0.0, 0.0)
    itl: tuple[float, float] = (0.0, 0.0)
    slots: int = 0
    queue: int = 1_000_000
    refuse_every: int = 0
    break_every: int = 0
    fail_every: int = 0
    endless: tuple[int, ...] = ()
    stall_at: float = 0.0
    stall_seconds: float = 0.0
    log: str = ""

    def delays(self, number: int) -> tuple[float, float]:
        """A request's seconds to its first token, and between tokens."""
        source = random.Random(number)
        return source.uniform(*self.ttft), source.uniform(*self.itl)


class Service(generation_pb2_grpc.GenerationServiceServicer, model_pb2_grpc.ModelServiceServicer):
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._places = asyncio.Semaphore(plan.slots or 1_000_000)
        self._waiting = 0
        self._has_begun = False

    async def GetModel(  # noqa: N802 (the contract's name)
        self, request: models.GetModelRequest, context: Any
    ) -> models.GetModelResponse:
        if request.model not in {"", MODEL}:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.model}")
        return models.GetModelResponse(
            model=MODEL,
            architecture=models.ModelArchitecture(vocab_size=VOCAB_SIZE),
            limits=models.ModelLimits(max_batch_size=self._plan.slots),
        )

    async def GenerateStream(  # noqa: N802
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        plan, number = self._plan, int(request.request_id.rpartition("-")[2])
        done: dict[str, Any] = {
            "request_id": request.request_id,
            "prompt": list(request.token_ids.ids),
            "max_tokens": request.stopping.max_tokens,
            "peer": context.peer(),
            "arrived": time.monotonic(),
            "sent": [],
            "end": "cancelled",
        }
        self._begin()
        try:
            if _is_last_of(plan.refuse_every, number) or self._waiting > plan.queue:
                done["end"] = "refused"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
            self._waiting += 1
            try:
                await self._places.acquire()
            finally:
                self._waiting -= 1
            try:
                yield pb.GenerateStreamResponse(accepted=pb.GenerateStreamResponse.Accepted(model=MODEL))
                ttft, itl = plan.delays(number)
                due = time.monotonic() + ttft
                for token in range(request.stopping.max_tokens):
                    if token == 2 and _is_last_of(plan.fail_every, number):
                        done["end"] = "failed"
                        await context.abort(grpc.StatusCode.INTERNAL, "it broke")
                    if token + 1 == request.stopping.max_tokens and number in plan.endless:
                        await asyncio.Event().wait()
                    await asyncio.sleep(due - time.monotonic())
                    due += itl
                    done["sent"].append(time.monotonic())
                    yield pb.GenerateStreamResponse(delta=pb.GenerateStreamResponse.Delta(token_ids=[token]))
                if _is_last_of(plan.break_every, number):
                    done["end"] = "broken"
                    return
                usage = pb.Usage(prompt_tokens=len(request.token_ids.ids), generated_tokens=len(done["sent"]))
                yield pb.GenerateStreamResponse(summary=pb.GenerateStreamResponse.Summary(usage=usage))
                done["end"] = "finished"
            finally:
                self._places.release()
        finally:
            if plan.log:
                _write(Path(plan.log), done)

    def _begin(self) -> None:
        if not self._has_begun and self._plan.stall_seconds:
            # Blocks the loop: the server neither receives nor sends.
            asyncio.get_running_loop().call_later(self._plan.stall_at, time.sleep, self._plan.stall_seconds)
        self._has_begun = True


def _write(log: Path, done: dict[str, Any]) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(done) + "\n")


def _is_last_of(every: int, number: int) -> bool:
    return every > 0 and number % every == every - 1


async def serve(plan: Plan) -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    service = Service(plan)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(service, server)
    healthy = health.aio.HealthServicer()
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print(f"{_READY}127.0.0.1:{port}", flush=True)
    await stop.wait()
    await server.stop(None)


@contextmanager
def fake_server(**plan: Any) -> Iterator[str]:
    """Runs the server for the duration of the block; yields its host:port."""
    command = [sys.executable, "-m", "tests.load.fake_server", json.dumps(asdict(Plan(**plan)))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment()) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            assert line.startswith(_READY), f"the fake server did not start, exit code {process.wait()}"
            yield line.removeprefix(_READY)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@contextmanager
def fake_servers(way: str, folder: Path, **plan: Any) -> Iterator[str]:
    """The target of a way: "direct" is one server, "envoy" an Envoy in front of two that share a log."""
    if way == "direct":
        with fake_server(**plan) as target:
            yield target
        return
    with fake_server(**plan) as one, fake_server(**plan) as other, balancing([one, other], folder) as envoy:
        yield envoy.target


def read_log(path: Path) -> dict[str, dict[str, Any]]:
    """The log by request id. Cancelled requests may appear a moment after their client has ended."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    # The last line may be incomplete.
    lines = text[: text.rfind("\n") + 1].splitlines()
    return {done["request_id"]: done for done in map(json.loads, lines)}


if __name__ == "__main__":
    asyncio.run(serve(Plan(**json.loads(sys.argv[1]))))
