"""Ours behind gRPC as a system under test: `python -m benchmarks.peers.onward --folder CHECKPOINT --work DIR`.

Tokens are received in streams, as users receive them; `onward_unary` receives whole answers.
The artifact is exported from the checkpoint; a precision that the exporter refuses fails with its words. `-kv8` behind
a precision quantizes keys and values to eight bits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import grpc

from benchmarks.frame.models import artifact_folder, export, version
from benchmarks.frame.servers import serving
from benchmarks.frame.streams import connected, gathered, greedy
from benchmarks.peers.protocol import Options, System, Window, main
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub


class Onward(System):
    """A server in a process of its own on a loopback port, one stream for each prompt."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._resources = ExitStack()
        self._target = ""
        self._stub: Any = None

    def prepare(self) -> None:
        """Exports."""
        export(self._options.folder, self._options.work, self._options.precision)

    def load(self) -> str:
        """Starts the server; returns once its proof has passed."""
        flags = ("--threads", str(self._options.threads), "--max-batch-size", str(self._options.max_batch))
        models = artifact_folder(self._options.work, self._options.precision).parent
        self._target = self._resources.enter_context(serving(models, *flags, "--no-metrics"))
        self._stub = GenerationServiceStub(self._resources.enter_context(grpc.insecure_channel(self._target)))
        return version()

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """All streams at once."""
        return asyncio.run(self._stream(prompts, new))

    async def _stream(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        async with connected(self._target) as stub:

            async def one(prompt: Sequence[int]) -> list[int]:
                stream = stub.GenerateStream(greedy(pb.GenerateStreamRequest, prompt, new))
                return [token async for event in stream for token in event.delta.token_ids]

            return await gathered(map(one, prompts), len(prompts))

    def translate(
        self, sources: Sequence[Sequence[int]], lengths: Sequence[int], _: Mapping[str, Any], in_flight: int
    ) -> list[list[int]]:
        """A call for each source, so many at a time; the server batches continuously."""
        gate, calls = threading.Semaphore(in_flight), []
        for source, length in zip(sources, lengths, strict=True):
            gate.acquire()
            calls.append(self._stub.Generate.future(greedy(pb.GenerateRequest, source, length)))
            calls[-1].add_done_callback(lambda _: gate.release())
        return [list(call.result().outputs[0].token_ids) for call in calls]

    def score(self, windows: Sequence[Window]) -> float:
        """A `Score` call for each window."""
        total = 0.0
        for ids, scored in windows:
            request = pb.ScoreRequest(
                token_ids=pb.TokenIds(ids=ids[:-scored]), target_token_ids=pb.TokenIds(ids=ids[-scored:])
            )
            total += self._stub.Score(request).total_logprob
        return -total

    def close(self) -> None:
        """Stops the server."""
        self._resources.close()


if __name__ == "__main__":
    main(Onward)
