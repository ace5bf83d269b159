"""The client that blocks. Its calls may come from any number of threads; a stream is read by one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message

import onward.requests as requests  # not `from onward`, which would ask the names of `onward.client`
from onward.answers import Chunk, Generation, generation
from onward.calls import DEFAULT_TIMEOUT_SECONDS, CallDefaults, StreamTries, Tries
from onward.connection import Connection
from onward.errors import call_error
from onward.requests import CallOptions, GenerateOptions, Prompt, Target
from onward.retries import DEFAULT_RETRIES, RetryPolicy
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from onward.v1.model_pb2_grpc import ModelServiceStub

_Request = TypeVar("_Request", bound=Message)
_Answer = TypeVar("_Answer")


class Client:
    """Asks a server and waits for what it says.

    Every method takes what `CallOptions` has, and raises:

    - `CallError`, of the class that belongs to the status, once trying again does not help or there is no time for it;
    - `TypeError` or `ValueError` before anything is sent, for what no message can hold.

    Args:
        connection: where to, and how; an address alone is in the clear and without a key.
        timeout_seconds: for calls that name none; None for ever.
        retries: how often calls are tried again, and how patiently.
    """

    def __init__(
        self,
        connection: Connection | str,
        *,
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        retries: RetryPolicy = DEFAULT_RETRIES,
    ) -> None:
        self._defaults = CallDefaults.of(connection, timeout_seconds, retries)
        self._channel = self._defaults.channel()
        self._generation = GenerationServiceStub(self._channel)
        self._models = ModelServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and with it every call that still runs."""
        self._channel.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Generates, and answers when every output has ended."""
        return generation(self._call(self._generation.Generate, requests.generate(prompt, options), options))

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """The same, told as it happens. Nothing is sent until the stream is read."""
        return Stream(self._generation.GenerateStream, requests.stream(prompt, options), self._defaults.begin(options))

    def score(
        self, prompt: Target, target: Target | None = None, *, model: str = "", **options: Unpack[CallOptions]
    ) -> pb.ScoreResponse:
        """How probable the target is after the prompt; without a target, the prompt by itself."""
        return self._call(self._generation.Score, requests.score(prompt, target, model), options)

    def estimate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> pb.EstimateResponse:
        """What `generate` would cost with the same arguments, and when it would end."""
        request = pb.EstimateRequest(request=requests.generate(prompt, options))
        return self._call(self._generation.Estimate, request, options)

    def explain(
        self,
        prompt: Target,
        target: Target | None = None,
        *,
        model: str = "",
        layers: Sequence[int] = (),
        heads: Sequence[int] = (),
        kinds: Sequence[pb.AttentionKind.ValueType] = (),
        max_tokens: int | None = None,
        **options: Unpack[CallOptions],
    ) -> pb.ExplainResponse:
        """Where the model looked: attention weights; of all layers, heads and kinds unless told."""
        request = requests.explain(
            prompt, target, model=model, layers=layers, heads=heads, kinds=kinds, max_tokens=max_tokens
        )
        return self._call(self._generation.Explain, request, options)

    def tokenize(
        self,
        text: str,
        *,
        model: str = "",
        side: pb.TextSide.ValueType = pb.TEXT_SIDE_UNSPECIFIED,
        add_special_tokens: bool | None = None,
        **options: Unpack[CallOptions],
    ) -> pb.TokenizeResponse:
        """A text's tokens."""
        request = pb.TokenizeRequest(model=model, text=text, side=side, add_special_tokens=add_special_tokens)
        return self._call(self._generation.Tokenize, request, options)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        side: pb.TextSide.ValueType = pb.TEXT_SIDE_UNSPECIFIED,
        **options: Unpack[CallOptions],
    ) -> str:
        """The text of tokens."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids, side=side)
        return self._call(self._generation.Detokenize, request, options).text

    def models(self, **options: Unpack[CallOptions]) -> Sequence[model_pb2.ListModelsResponse.Model]:
        """The served models, by name."""
        return tuple(self._call(self._models.ListModels, model_pb2.ListModelsRequest(), options).models)

    def model(self, name: str = "", **options: Unpack[CallOptions]) -> model_pb2.GetModelResponse:
        """All about one model; of the only one served, if none is named."""
        return self._call(self._models.GetModel, model_pb2.GetModelRequest(model=name), options)

    def verify_parity(self, name: str = "", **options: Unpack[CallOptions]) -> model_pb2.VerifyParityResponse:
        """Replays a model's golden cases. Requests wait meanwhile: if the server is too busy, it is not repeated."""
        request = model_pb2.VerifyParityRequest(model=name)
        return self._call(self._models.VerifyParity, request, options, is_repeatable=False)

    def load_model(self, name: str, **options: Unpack[CallOptions]) -> None:
        """Starts serving a model of the server's folder."""
        self._call(self._models.LoadModel, model_pb2.LoadModelRequest(model=name), options, is_repeatable=False)

    def unload_model(self, name: str, **options: Unpack[CallOptions]) -> None:
        """Stops serving a model, once its requests in flight have ended."""
        self._call(self._models.UnloadModel, model_pb2.UnloadModelRequest(model=name), options, is_repeatable=False)

    def reload_model(self, name: str, **options: Unpack[CallOptions]) -> None:
        """Replaces a served model by what its folder now holds."""
        self._call(self._models.ReloadModel, model_pb2.ReloadModelRequest(model=name), options, is_repeatable=False)

    def _call(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Answer],
        request: _Request,
        options: CallOptions,
        *,
        is_repeatable: bool = True,
    ) -> _Answer:
        tries = self._defaults.begin(options, is_repeatable=is_repeatable)
        while True:
            try:
                return method(request, timeout=tries.next_timeout(request), metadata=tries.metadata)
            except grpc.RpcError as error:
                pause = tries.attempts.pause_seconds(call_error(error, requests.request_id(request)))
            time.sleep(pause)


class _Cancellable(Protocol):
    def cancel(self) -> bool: ...


class Stream(StreamTries, Iterator[Chunk]):
    """A generation under way: an iterator of chunks, and what `StreamFacts` has of the whole.

    Leaving its `with` block, or `close`, gives up what still runs, and the server frees what it held at the model's
    next step. So does dropping the last reference to it, which a `for` loop over a stream without a name does when it
    is left.

    Raises, while it is read:
        CallError: of the class that belongs to the status; chunks that came before are good.
        IncompleteStream: when it ends before its summary.
    """

    def __init__(
        self,
        method: grpc.UnaryStreamMultiCallable[pb.GenerateStreamRequest, pb.GenerateStreamResponse],
        request: pb.GenerateStreamRequest,
        tries: Tries,
    ) -> None:
        super().__init__(request, tries)
        self._method = method
        self._call: _Cancellable | None = None
        self._events: Iterator[pb.GenerateStreamResponse] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        while not self._is_over:
            event = self._next_event()
            if event is None:
                self._end()
            elif (chunk := self._take(event)) is not None:
                return chunk
        raise StopIteration

    def close(self) -> None:
        """Gives up what still runs; nothing more comes. Another thread that waits for the next chunk gets the end."""
        self._is_over = True
        if self._call is not None:
            self._call.cancel()

    def _next_event(self) -> pb.GenerateStreamResponse | None:
        """The next event; None after the last, or once the stream is closed."""
        while not self._was_closed():
            try:
                if self._call is None:
                    timeout = self._tries.next_timeout(self._request)
                    call = self._method(self._request, timeout=timeout, metadata=self._tries.metadata)
                    self._call, self._events = call, iter(call)
                return next(self._events, None)
            except grpc.RpcError as error:
                if self._was_closed():
                    return None
                self._call = None
                pause = self._pause_seconds(call_error(error, self.request_id))
            time.sleep(pause)
        return None
