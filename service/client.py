"""A small client for people: asks a server once and prints the text. Uses the wire contract alone."""

from __future__ import annotations

import sys
from typing import TextIO

import grpc

from proto.onward.v1 import generation_pb2 as pb
from proto.onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.config import AskConfig

_FAILED = 1
# As shells report a command that SIGINT ended.
_INTERRUPTED = 130


def ask(config: AskConfig, out: TextIO = sys.stdout, err: TextIO = sys.stderr) -> int:
    """Prints the answer's text to `out`, or the status to `err`; the exit status."""
    request = pb.GenerateRequest(
        model=config.model,
        text=config.text,
        sampling=pb.SamplingParams(temperature=config.temperature, seed=config.seed),
        stopping=pb.StoppingParams(max_tokens=config.max_tokens),
    )
    try:
        with grpc.insecure_channel(config.target) as channel:
            stub = GenerationServiceStub(channel)
            if config.stream:
                is_complete = _print_stream(stub, request, config.timeout_seconds, out)
            else:
                response = stub.Generate(request, timeout=config.timeout_seconds)
                out.write("".join(output.text for output in response.outputs) + "\n")
                is_complete = True
    except grpc.RpcError as error:
        err.write(f"{error.code().name}: {error.details()}\n")
        return _FAILED
    except KeyboardInterrupt:
        err.write("\n")
        return _INTERRUPTED
    if not is_complete:
        err.write("the stream ended before the answer did\n")
        return _FAILED
    return 0


def _print_stream(
    stub: GenerationServiceStub, request: pb.GenerateRequest, timeout_seconds: float | None, out: TextIO
) -> bool:
    """Prints a stream as it comes; whether it came to its end, which its summary is."""
    # The two requests have the same fields and numbers, and so the same bytes.
    streamed = pb.GenerateStreamRequest.FromString(request.SerializeToString())
    is_complete = False
    for event in stub.GenerateStream(streamed, timeout=timeout_seconds):
        out.write(event.delta.text)
        out.flush()
        is_complete = event.HasField("summary")
    out.write("\n")
    return is_complete
