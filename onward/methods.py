"""The unary methods of both clients, each written once: the request it sends and what it returns.

A method's body returns a `Call`, a description. `Client` runs it and returns the result; `AsyncClient` returns a
coroutine of the result. `_method` gives the method these two types, with the arguments of the body.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

import grpc
from google.protobuf.message import Message

import onward.requests as requests  # not `from onward`, which would import all of `onward.client`
from onward.answers import Generation, generation
from onward.connection import Connection
from onward.requests import CallOptions, GenerateOptions, Prompt, Target
from onward.retries import DEFAULT_RETRIES, Attempts, RetryPolicy
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from onward.v1.model_pb2_grpc import ModelServiceStub

if TYPE_CHECKING:
    from onward.asynchronous import AsyncClient
    from onward.blocking import Client

DEFAULT_TIMEOUT_SECONDS = 60.0

_Arguments = ParamSpec("_Arguments")
_Request = TypeVar("_Request", bound=Message)
_Answer = TypeVar("_Answer")
_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Call(Generic[_Result]):
    """A unary call that is still to be made.

    Attributes:
        method: the stub's, of the client's own kind: blocking or asyncio.
        request: the message to send.
        options: of this call.
        read: the result, from the answer's message.
        is_repeatable: whether it may be retried when it is unknown how far it came.
    """

    method: Any
    request: Message
    options: CallOptions
    read: Callable[[Any], _Result]
    is_repeatable: bool


class _Method(Protocol[_Arguments, _Result_co]):
    """A method that blocks on a `Client` and is awaited on an `AsyncClient`."""

    @overload
    def __get__(self, client: Client, kind: type[Client]) -> Callable[_Arguments, _Result_co]: ...
    @overload
    def __get__(
        self, client: AsyncClient, kind: type[AsyncClient]
    ) -> Callable[_Arguments, Coroutine[Any, Any, _Result_co]]: ...
    @overload
    def __get__(self, client: None, kind: type[Methods]) -> Callable[..., Any]: ...


def _method(describe: Callable[Concatenate[Any, _Arguments], Call[_Result]]) -> _Method[_Arguments, _Result]:
    @functools.wraps(describe)
    def run(client: Methods, *args: _Arguments.args, **options: _Arguments.kwargs) -> Any:
        return client._run(describe(client, *args, **options))

    return cast("_Method[_Arguments, _Result]", run)


def _call(
    method: grpc.UnaryUnaryMultiCallable[_Request, _Answer],
    request: _Request,
    options: CallOptions,
    read: Callable[[_Answer], _Result],
    *,
    is_repeatable: bool = True,
) -> Call[_Result]:
    return Call(method, request, options, read, is_repeatable)


def _itself(answer: _Answer) -> _Answer:
    return answer


def _nothing(_: Message) -> None:
    return None


class Methods:
    """What `Client` and `AsyncClient` have in common.

    Every method takes the options of `CallOptions` and raises:

    - `CallError`, of the class of the status, if retrying does not help or the deadline leaves no time for it;
    - `TypeError` or `ValueError` before anything is sent, for arguments that no message can hold.

    Args:
        connection: the server; an address alone means no TLS and no API key.
        timeout_seconds: for calls without their own; None for no deadline.
        retries: how often calls are retried, and after what pauses.
    """

    def __init__(
        self,
        connection: Connection | str,
        *,
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        retries: RetryPolicy = DEFAULT_RETRIES,
    ) -> None:
        self._connection = Connection(connection) if isinstance(connection, str) else connection
        self._timeout_seconds = timeout_seconds
        self._retries = retries
        # On an asyncio channel the stubs' methods return awaitables: each client's `_run` knows its own kind.
        self._channel = self._open()
        self._generation = GenerationServiceStub(self._channel)
        self._models = ModelServiceStub(self._channel)

    def _open(self) -> Any:
        raise NotImplementedError

    def _run(self, call: Call[Any]) -> Any:
        raise NotImplementedError

    def _begin(self, options: CallOptions, *, is_repeatable: bool = True) -> Attempts:
        """The attempts of a call whose deadline counts from now.

        Raises:
            ValueError: the timeout is not finite or not positive.
        """
        metadata = self._connection.metadata
        if "traceparent" in options:
            metadata += (("traceparent", options["traceparent"]),)
        if "tracestate" in options:
            metadata += (("tracestate", options["tracestate"]),)
        timeout = options.get("timeout_seconds", self._timeout_seconds)
        return Attempts(self._retries, timeout, is_repeatable=is_repeatable, metadata=metadata)

    @_method
    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Call[Generation]:
        """Generates, and returns when every output has ended."""
        return _call(self._generation.Generate, requests.generate(prompt, options), options, generation)

    @_method
    def score(
        self, prompt: Target, target: Target | None = None, *, model: str = "", **options: Unpack[CallOptions]
    ) -> Call[pb.ScoreResponse]:
        """Log-probabilities of the target after the prompt; without a target, of the prompt itself."""
        return _call(self._generation.Score, requests.score(prompt, target, model), options, _itself)

    @_method
    def estimate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Call[pb.EstimateResponse]:
        """Predicts the cost and the time of `generate` with the same arguments."""
        request = pb.EstimateRequest(request=requests.generate(prompt, options))
        return _call(self._generation.Estimate, request, options, _itself)

    @_method
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
    ) -> Call[pb.ExplainResponse]:
        """Attention weights, by default of all layers, heads and kinds."""
        request = pb.ExplainRequest(
            model=model,
            layers=layers,
            heads=heads,
            kinds=kinds,
            max_tokens=max_tokens,
            **requests.prompt_and_target(prompt, target),
        )
        return _call(self._generation.Explain, request, options, _itself)

    @_method
    def tokenize(
        self,
        text: str,
        *,
        model: str = "",
        side: pb.TextSide.ValueType = pb.TEXT_SIDE_UNSPECIFIED,
        add_special_tokens: bool | None = None,
        **options: Unpack[CallOptions],
    ) -> Call[pb.TokenizeResponse]:
        """The tokens of a text."""
        request = pb.TokenizeRequest(model=model, text=text, side=side, add_special_tokens=add_special_tokens)
        return _call(self._generation.Tokenize, request, options, _itself)

    @_method
    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        side: pb.TextSide.ValueType = pb.TEXT_SIDE_UNSPECIFIED,
        **options: Unpack[CallOptions],
    ) -> Call[str]:
        """The text of tokens."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids, side=side)
        return _call(self._generation.Detokenize, request, options, lambda answer: answer.text)

    @_method
    def models(self, **options: Unpack[CallOptions]) -> Call[Sequence[model_pb2.ListModelsResponse.Model]]:
        """The served models, by name."""
        return _call(
            self._models.ListModels, model_pb2.ListModelsRequest(), options, lambda answer: tuple(answer.models)
        )

    @_method
    def model(self, name: str = "", **options: Unpack[CallOptions]) -> Call[model_pb2.GetModelResponse]:
        """Describes one model; by default the only one served."""
        return _call(self._models.GetModel, model_pb2.GetModelRequest(model=name), options, _itself)

    @_method
    def verify_parity(self, name: str = "", **options: Unpack[CallOptions]) -> Call[model_pb2.VerifyParityResponse]:
        """Replays a model's golden cases while its requests wait. Not retried if the server is too busy."""
        request = model_pb2.VerifyParityRequest(model=name)
        return _call(self._models.VerifyParity, request, options, _itself, is_repeatable=False)

    @_method
    def load_model(self, name: str, **options: Unpack[CallOptions]) -> Call[None]:
        """Starts serving a model of the server's models folder."""
        request = model_pb2.LoadModelRequest(model=name)
        return _call(self._models.LoadModel, request, options, _nothing, is_repeatable=False)

    @_method
    def unload_model(self, name: str, **options: Unpack[CallOptions]) -> Call[None]:
        """Stops serving a model, once its requests in flight have ended."""
        request = model_pb2.UnloadModelRequest(model=name)
        return _call(self._models.UnloadModel, request, options, _nothing, is_repeatable=False)

    @_method
    def reload_model(self, name: str, **options: Unpack[CallOptions]) -> Call[None]:
        """Replaces a served model by what its folder now holds."""
        request = model_pb2.ReloadModelRequest(model=name)
        return _call(self._models.ReloadModel, request, options, _nothing, is_repeatable=False)
