"""The Open Inference Protocol v2 at both ends of `Generator.run`, and its repository calls at `Library`.

A unary answer has the whole text, each streamed answer a piece. Streamed answers carry their request's id, so that many
requests may run at once; an error ends its own request alone, as text beside the id. A request's last answer is marked
`triton_final_response`: it has no outputs for clients that ask for that, an empty text for others.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from onward.inference import open_inference_pb2 as oip
from onward.inference.open_inference_pb2_grpc import GRPCInferenceServiceServicer
from service.config import RequestLimits
from service.errors import InvalidRequest, RequestError, UnknownModel
from service.generator import Accepted, Finished, Generator, Outcome, Piece
from service.repository.entry import Models
from service.repository.library import Library
from service.repository.models import ModelState
from service.transport import codec
from service.transport.oip_codec import (
    EMPTY_FINAL,
    FINAL,
    InferCall,
    check_version,
    decode_infer,
    encode_infer,
    finish_reasons,
    metadata,
    renamed,
)
from service.transport.sending import Context
from service.transport.status import to_status
from service.transport.streams import each_request

SERVER_NAME = "onward"
EXTENSIONS = ("model_repository", EMPTY_FINAL)
_READY = "READY"
_UNAVAILABLE = "UNAVAILABLE"
# Requests of one stream.
_MAX_IN_FLIGHT = 64


class InferenceServicer(GRPCInferenceServiceServicer):
    """Answers clients of the protocol.

    Args:
        generator: runs requests.
        models: what is served.
        library: what can be loaded.
        limits: what one request may ask.
        max_message_bytes: a stream is not read on while its unanswered requests have so many bytes.
    """

    def __init__(
        self, generator: Generator, models: Models, library: Library, limits: RequestLimits, max_message_bytes: int
    ) -> None:
        self._generator = generator
        self._models = models
        self._library = library
        self._limits = limits
        self._max_message_bytes = max_message_bytes

    async def ServerLive(self, request: oip.ServerLiveRequest, context: Context) -> oip.ServerLiveResponse:
        """Always live: it answers."""
        return oip.ServerLiveResponse(live=True)

    async def ServerReady(self, request: oip.ServerReadyRequest, context: Context) -> oip.ServerReadyResponse:
        """Whether every model serves."""
        states = [self._models.state(name) for name in self._models.names]
        return oip.ServerReadyResponse(ready=all(state is ModelState.SERVING for state in states))

    async def ModelReady(self, request: oip.ModelReadyRequest, context: Context) -> oip.ModelReadyResponse:
        """Whether one model serves; false for an unknown one."""
        check_version(request.version)
        try:
            name = self._models.resolve(request.name).name
        except UnknownModel:
            return oip.ModelReadyResponse(ready=False)
        return oip.ModelReadyResponse(ready=self._models.state(name) is ModelState.SERVING)

    async def ServerMetadata(self, request: oip.ServerMetadataRequest, context: Context) -> oip.ServerMetadataResponse:
        """Name, version, extensions."""
        return oip.ServerMetadataResponse(name=SERVER_NAME, version=version("onward"), extensions=EXTENSIONS)

    async def ModelMetadata(self, request: oip.ModelMetadataRequest, context: Context) -> oip.ModelMetadataResponse:
        """The tensors of a model."""
        check_version(request.version)
        return metadata(self._models.resolve(request.name).name)

    async def ModelInfer(self, request: oip.ModelInferRequest, context: Context) -> oip.ModelInferResponse:
        """The whole text at once."""
        call = self._decode(request)
        model, parameters = request.model_name, {}
        # It may hold megabytes of unknown fields.
        del request
        texts: defaultdict[int, list[str]] = defaultdict(list)
        ends: list[Finished] = []
        try:
            async with aclosing(self._run(call, context.time_remaining(), is_streamed=False)) as parts:
                async for part in parts:
                    match part:
                        case Accepted():
                            model = part.model
                        case Piece():
                            texts[part.output_index].append(part.text)
                        case Finished():
                            ends.append(part)
                        case Outcome():
                            parameters = _usage(part)
        except InvalidRequest as error:
            raise renamed(error) from error
        ends.sort(key=lambda end: end.output_index)
        parameters |= {"finish_reason": finish_reasons(end.finish_reason for end in ends)}
        return encode_infer(model, call.id, ("".join(texts[end.output_index]) for end in ends), parameters)

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[oip.ModelInferRequest], context: Context
    ) -> AsyncGenerator[oip.ModelStreamInferResponse, None]:
        """Answers of all requests of the stream, as they come; ends with the client's last request."""
        # A full queue delays its requests, as a client that reads nothing does.
        answers: asyncio.Queue[oip.ModelStreamInferResponse | None] = asyncio.Queue(_MAX_IN_FLIGHT)
        in_flight = _InFlight(self._max_message_bytes)

        async def take_in() -> None:
            garbage: RequestError | None = None
            async with asyncio.TaskGroup() as group:
                try:
                    async for request in request_iterator:
                        task = group.create_task(self._stream(request, context, answers))
                        in_flight.add(task, request.ByteSize())
                        del request, task
                        await in_flight.wait_for_room()
                except RequestError as error:
                    # Raised outside the group, which would cancel the earlier requests and wrap the error.
                    garbage = error
            if garbage is not None:
                raise garbage
            await answers.put(None)

        taking = asyncio.create_task(take_in())
        try:
            while True:
                getting = asyncio.create_task(answers.get())
                await asyncio.wait((getting, taking), return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    getting.cancel()
                    await taking  # it failed, or there would be an answer
                    continue
                response = getting.result()
                if response is None:
                    return
                yield response
        finally:
            for each in (taking, getting):
                each.cancel()
            # Requests are tasks of their own, and release what they hold before this stream ends.
            await asyncio.gather(taking, getting, return_exceptions=True)

    async def RepositoryIndex(
        self, request: oip.RepositoryIndexRequest, context: Context
    ) -> oip.RepositoryIndexResponse:
        """Models that are served, and those that can be loaded."""
        _check_repository(request.repository_name)
        response = oip.RepositoryIndexResponse()
        for name in sorted({*self._models.names, *await self._library.names()}):
            state = self._models.state(name) if name in self._models.names else None
            if state is ModelState.SERVING:
                response.models.add(name=name, version="1", state=_READY)
            elif not request.ready:
                response.models.add(
                    name=name, version="1", state=_UNAVAILABLE, reason=str(state) if state else "not loaded"
                )
        return response

    async def RepositoryModelLoad(
        self, request: oip.RepositoryModelLoadRequest, context: Context
    ) -> oip.RepositoryModelLoadResponse:
        """Loads a model, or reloads a served one, as clients of the protocol expect."""
        _check_repository(request.repository_name)
        _check_no_parameters(request.parameters)
        if request.model_name in self._models.names:
            await self._library.reload(request.model_name)
        else:
            await self._library.load(request.model_name)
        return oip.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: oip.RepositoryModelUnloadRequest, context: Context
    ) -> oip.RepositoryModelUnloadResponse:
        """Unloads a model."""
        _check_repository(request.repository_name)
        # Triton's clients send `unload_dependents`; our models have none.
        _check_no_parameters({name: value for name, value in request.parameters.items() if name != "unload_dependents"})
        await self._library.unload(request.model_name)
        return oip.RepositoryModelUnloadResponse()

    def _decode(self, request: oip.ModelInferRequest) -> InferCall:
        with self._generator.counting_refusal(request.model_name):
            check_version(request.model_version)
            return decode_infer(request, self._limits)

    def _run(self, call: InferCall, time_remaining: float | None, *, is_streamed: bool) -> AsyncGenerator[Any, None]:
        with self._generator.counting_refusal(call.request.model):
            decoded = codec.decode_generate(call.request, self._limits, self._models.defaults(call.request.model))
        return self._generator.run(decoded, time_remaining, is_streamed=is_streamed)

    async def _stream(
        self,
        request: oip.ModelInferRequest,
        context: Context,
        answers: asyncio.Queue[oip.ModelStreamInferResponse | None],
    ) -> None:
        """Queues one request's answers, or its error."""
        # Bounds an error's answer.
        most = self._limits.max_request_id_length
        names = _Names(request.model_name[:most], request.id[:most])
        parts = self._answers(request, names, context)
        del request
        try:
            async with aclosing(parts):
                async for answer in parts:
                    await answers.put(oip.ModelStreamInferResponse(infer_response=answer))
            return
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of an extension module is no Exception, and would end the others
            status = to_status(renamed(error) if isinstance(error, InvalidRequest) else error)
        # After the handler: the error's traceback holds the request.
        text = f"[{status.code.name}] {status.message}"
        final = encode_infer(names.model, names.id, (), {FINAL: True})
        await answers.put(oip.ModelStreamInferResponse(error_message=text, infer_response=final))

    async def _answers(
        self, request: oip.ModelInferRequest, names: _Names, context: Context
    ) -> AsyncGenerator[oip.ModelInferResponse, None]:
        """One request's answers, the last of them marked final. Releases the request once it is decoded."""
        with each_request():
            call = self._decode(request)
            wants_empty_final = call.wants_empty_final
            parts = self._run(call, context.time_remaining(), is_streamed=True)
            del request, call
            reasons: dict[int, str] = {}
            async with aclosing(parts):
                async for part in parts:
                    match part:
                        case Accepted():
                            names.model = part.model
                        case Piece() if part.text:
                            place = {"output_index": part.output_index, FINAL: False}
                            yield encode_infer(names.model, names.id, (part.text,), place)
                        case Finished():
                            reasons[part.output_index] = str(part.finish_reason)
                        case Outcome():
                            ended = ",".join(reason for _, reason in sorted(reasons.items()))
                            texts = () if wants_empty_final else ("",)
                            last = {**_usage(part), "finish_reason": ended, FINAL: True}
                            yield encode_infer(names.model, names.id, texts, last)


@dataclass(slots=True)
class _Names:
    """Model and id in a request's answers."""

    model: str
    id: str


class _InFlight:
    """The unanswered requests of a stream; another is read while they have less than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_requests = self._num_bytes = 0
        self._ended = asyncio.Event()

    def add(self, task: asyncio.Task[None], num_bytes: int) -> None:
        """Counts a request until its task has ended."""
        self._num_requests += 1
        self._num_bytes += num_bytes
        task.add_done_callback(lambda _: self._end(num_bytes))

    async def wait_for_room(self) -> None:
        """Waits until another request may be read."""
        while self._num_requests >= _MAX_IN_FLIGHT or self._num_bytes >= self._max_bytes:
            self._ended.clear()
            await self._ended.wait()

    def _end(self, num_bytes: int) -> None:
        self._num_requests -= 1
        self._num_bytes -= num_bytes
        self._ended.set()


def _usage(outcome: Outcome) -> dict[str, str | int | bool]:
    return {
        "prompt_tokens": outcome.num_prompt_tokens,
        "cached_tokens": outcome.num_cached_tokens,
        "generated_tokens": outcome.num_generated_tokens,
    }


def _check_repository(name: str) -> None:
    if name:
        raise InvalidRequest("repository_name", name, "must be empty: there is one")


def _check_no_parameters(parameters: Any) -> None:
    for name in parameters:
        raise InvalidRequest(f"parameters.{name}", name, "is not known here: a model is what its folder holds")
