"""`python -m benchmarks.infra.ray_clock --port P --http-port H`: clock servers as replicas on Ray Serve.

With the ingress of `deploy.ray`, which `scaling_out` measures without a model. Runs in Ray's own environment.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
from collections.abc import AsyncGenerator
from typing import Any

from benchmarks.infra.clock_server import ClockServicer
from deploy.ray import ingress
from onward.v1 import generation_pb2 as pb

_HOST = "127.0.0.1"
_MAX_MESSAGE_BYTES = 4 << 20
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Clock:
    """The clock server's methods as Ray calls them, with serialized requests."""

    def __init__(self) -> None:
        self._servicer = ClockServicer()  # type: ignore[abstract]

    async def Generate(self, request: bytes, grpc_context: Any) -> pb.GenerateResponse:  # noqa: N802 (the contract's)
        """As `ClockServicer`."""
        return await self._servicer.Generate(pb.GenerateRequest.FromString(request), grpc_context)

    async def GenerateStream(  # noqa: N802 (the contract's)
        self, request: bytes, grpc_context: Any
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """As `ClockServicer`."""
        asked = pb.GenerateStreamRequest.FromString(request)
        async for message in self._servicer.GenerateStream(asked, grpc_context):
            yield message


def main() -> int:
    """Serves until SIGTERM; prints its address."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.infra.ray_clock")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--http-port", type=int, required=True)
    parser.add_argument("--replicas", type=int, default=2)
    given = parser.parse_args()
    os.environ |= ingress.environment(_MAX_MESSAGE_BYTES, by_key=False)  # noqa: TID251 (Ray's, not the server's)
    ingress.start(_HOST, given.port, given.http_port, has_reflection=False)
    from ray import serve  # late: only once its variables are set

    replicas = serve.deployment(Clock).options(
        num_replicas=given.replicas, max_ongoing_requests=ingress.MAX_STREAMS, ray_actor_options={"num_cpus": 0.5}
    )
    ingress.run(replicas.bind())
    received: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda number, _: received.put(number))
    print(f"listening on {_HOST}:{given.port}", flush=True)
    received.get()
    ingress.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
