"""`python -m benchmarks.infra.clock_server [NUMBER]`: a server of `onward.v1` without a model, whose answers are times.

`scaling_out` puts proxies in front of it: the delay of a message is transport. A stream has `max_tokens` messages of
one token, one every `timeout_seconds`, or as fast as they are read; the text is the monotonic clock in nanoseconds,
which all processes of a Linux host share. It also listens at so many further loopback addresses, to look like as many
servers.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from loadtest.serving import Server, wait_served
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server

_MOST_ADDRESSES = 250 * 250


class ClockServicer(GenerationServiceServicer):
    """Unary and streaming."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:  # noqa: ARG002, N802
        """One output, at once."""
        return pb.GenerateResponse(outputs=[pb.GenerationOutput(text=_now())])

    async def GenerateStream(  # noqa: N802 (the contract's name)
        self,
        request: pb.GenerateStreamRequest,
        context: Any,  # noqa: ARG002
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """Each message is due at a time of its own, whenever the one before was sent."""
        message = pb.GenerateStreamResponse
        due = time.monotonic()
        for number in range(request.stopping.max_tokens):
            if request.timeout_seconds and (pause := due - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            due += request.timeout_seconds
            yield message(delta=message.Delta(text=_now(), token_ids=[number]))
        yield message(summary=message.Summary())


def _now() -> str:
    return str(time.monotonic_ns())


def addresses(number: int) -> list[str]:
    """Loopback addresses besides the usual one, always the same.

    Raises:
        ValueError: if there are fewer.
    """
    if number > _MOST_ADDRESSES:
        raise ValueError(f"there are {_MOST_ADDRESSES} addresses, {number} were asked for")
    return [f"127.1.{index // 250}.{index % 250 + 1}" for index in range(number)]


@contextmanager
def clock_server(num_addresses: int = 0) -> Iterator[Server]:
    """A clock server in a process of its own until the block ends."""
    command = [sys.executable, "-m", "benchmarks.infra.clock_server", str(num_addresses)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield wait_served(process)
        finally:
            process.terminate()


async def serve(num_addresses: int) -> None:
    """Serves on a free port of loopback addresses until SIGTERM; prints its address."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_GenerationServiceServicer_to_server(ClockServicer(), server)  # type: ignore[abstract]
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    for address in addresses(num_addresses):
        server.add_insecure_port(f"{address}:{port}")
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print(f"listening on 127.0.0.1:{port}", flush=True)
    await stop.wait()
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
    sys.exit(0)
