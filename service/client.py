"""A small client for people and for probes: asks a server once and prints what it says. Uses the wire contract alone.

Several answers are printed one after the other, each with its number.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TextIO

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from proto.onward.v1 import generation_pb2 as pb
from proto.onward.v1.generation_pb2_grpc import GenerationServiceStub
from service.config import AskConfig, HealthConfig
from service.connection import connect

_FAILED = 1
# As shells report a command that SIGINT ended.
_INTERRUPTED = 130


def ask(config: AskConfig, out: TextIO = sys.stdout, err: TextIO = sys.stderr) -> int:
    """Prints the answer's text to `out`, or the status to `err`; the exit status."""
    request = pb.GenerateRequest(
        model=config.model,
        text=config.text,
        # With beams, what is not said must not be set either: the two exclude each other.
        sampling=pb.SamplingParams(
            temperature=config.temperature, seed=config.seed, n=None if config.beam_size else config.n
        ),
        stopping=pb.StoppingParams(max_tokens=config.max_tokens),
        partial_on_deadline=config.partial_on_deadline,
    )
    if config.beam_size:
        request.beam_search.CopyFrom(pb.BeamSearchParams(beam_size=config.beam_size, num_hypotheses=config.n))
    is_numbered = (config.n or 1) > 1
    try:
        with connect(config) as channel:
            stub = GenerationServiceStub(channel)
            if config.stream:
                is_complete = _print_stream(stub, request, config.timeout_seconds, out, is_numbered=is_numbered)
            else:
                response = stub.Generate(request, timeout=config.timeout_seconds)
                for output in response.outputs:
                    _print_answer(out, output.index, output.text, is_numbered=is_numbered)
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


def health(config: HealthConfig, out: TextIO = sys.stdout, err: TextIO = sys.stderr) -> int:
    """Prints what the server says of itself; 0 if that is SERVING. What a container's probe runs."""
    try:
        with connect(config) as channel:
            question = health_pb2.HealthCheckRequest(service=config.service)
            status = HealthStub(channel).Check(question, timeout=config.timeout_seconds).status
    except grpc.RpcError as error:
        err.write(f"{error.code().name}: {error.details()}\n")
        return _FAILED
    out.write(f"{health_pb2.HealthCheckResponse.ServingStatus.Name(status)}\n")
    return 0 if status == health_pb2.HealthCheckResponse.SERVING else _FAILED


def _print_stream(
    stub: GenerationServiceStub,
    request: pb.GenerateRequest,
    timeout_seconds: float | None,
    out: TextIO,
    *,
    is_numbered: bool,
) -> bool:
    """Prints a stream as it comes; whether it came to its end, which its summary is.

    Of several answers, which grow together, each is printed when it is whole.
    """
    # The two requests have the same fields and numbers, and so the same bytes.
    streamed = pb.GenerateStreamRequest.FromString(request.SerializeToString())
    is_complete = False
    texts: defaultdict[int, str] = defaultdict(str)
    for event in stub.GenerateStream(streamed, timeout=timeout_seconds):
        if not is_numbered:
            out.write(event.delta.text)
        elif event.HasField("finished"):
            index = event.finished.output_index
            _print_answer(out, index, texts.pop(index, ""), is_numbered=True)
        else:
            texts[event.delta.output_index] += event.delta.text
        out.flush()
        is_complete = event.HasField("summary")
    if not is_numbered:
        out.write("\n")
    return is_complete


def _print_answer(out: TextIO, index: int, text: str, *, is_numbered: bool) -> None:
    out.write(f"[{index}] {text}\n" if is_numbered else f"{text}\n")
