"""Requests to a server, one at a time, with the server's timings and the client's.

Prompts are token ids. Answers are greedy and ignore end of sequence, so that the requested tokens are computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub

_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer with its times in seconds.

    `prefill` and `decode` are the server's (`onward.v1.Timings`): from scheduling to the first token, and from there to
    the last. `first_token` and `total` are this client's, from sending to receiving.
    """

    token_ids: tuple[int, ...]
    cached_tokens: int
    prefill: float
    decode: float
    first_token: float
    total: float

    @property
    def per_token(self) -> float:
        """Server-side seconds between two tokens; needs at least two tokens."""
        return self.decode / (len(self.token_ids) - 1)


class Probe:
    """A client of a server with one model."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = GenerationServiceStub(channel)

    def ask(self, prompt: Sequence[int], new: int) -> Answer:
        """Unary call for `new` tokens: no message before the last token disturbs the server.

        `first_token` equals `total`, because the client cannot see the first token.

        Raises:
            RuntimeError: if the call fails, or the answer has another length.
        """
        began = time.perf_counter()
        with _readable_errors():
            response = self._stub.Generate(
                pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=_GREEDY, stopping=_stopping(new)),
                timeout=_TIMEOUT_SECONDS,
            )
        total = time.perf_counter() - began
        return _answer(response.outputs[0].token_ids, response.usage, response.timings, new, total, total)

    def stream(self, prompt: Sequence[int], new: int) -> Answer:
        """Streaming call for `new` tokens.

        Raises:
            RuntimeError: if the call fails, or the answer is incomplete.
        """
        token_ids: list[int] = []
        summary, first = None, 0.0
        began = time.perf_counter()
        with _readable_errors():
            for event in self._stub.GenerateStream(_stream_request(prompt, new), timeout=_TIMEOUT_SECONDS):
                if event.delta.token_ids and not token_ids:
                    first = time.perf_counter() - began
                token_ids += event.delta.token_ids
                summary = event.summary if event.HasField("summary") else None
        total = time.perf_counter() - began
        if summary is None:
            raise RuntimeError("the stream ended without its summary")
        return _answer(token_ids, summary.usage, summary.timings, new, first, total)

    @contextmanager
    def holding(self, prompt: Sequence[int], new: int) -> Iterator[None]:
        """Keeps a request in decode for the duration of the block, then cancels it.

        Raises:
            RuntimeError: if the call fails before its first token.
        """
        call = self._stub.GenerateStream(_stream_request(prompt, new), timeout=_TIMEOUT_SECONDS)
        try:
            with _readable_errors():
                if not any(event.delta.token_ids for event in call):
                    raise RuntimeError("the stream ended without a token")
            yield
        finally:
            call.cancel()


@contextmanager
def probing(target: str) -> Iterator[Probe]:
    """A probe of the server at "host:port" over its own connection."""
    with grpc.insecure_channel(target) as channel:
        yield Probe(channel)


_GREEDY = pb.SamplingParams(temperature=0.0)


def _stopping(new: int) -> pb.StoppingParams:
    return pb.StoppingParams(max_tokens=new, ignore_eos=True)


def _stream_request(prompt: Sequence[int], new: int) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest(token_ids=pb.TokenIds(ids=prompt), sampling=_GREEDY, stopping=_stopping(new))


def _answer(
    token_ids: Sequence[int], usage: pb.Usage, timings: pb.Timings, new: int, first_token: float, total: float
) -> Answer:
    if len(token_ids) != new:
        raise RuntimeError(f"asked for {new} tokens, got {len(token_ids)}")
    return Answer(
        token_ids=tuple(token_ids),
        cached_tokens=usage.cached_tokens,
        prefill=timings.prefill,
        decode=timings.decode,
        first_token=first_token,
        total=total,
    )


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Turns a failed call into a RuntimeError with code and detail."""
    try:
        yield
    except grpc.RpcError as error:
        raise RuntimeError(f"the server answered {error.code()}: {error.details()}") from error
