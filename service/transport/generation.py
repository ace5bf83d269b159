"""`onward.v1.GenerationService`: protobuf at both ends of `Generator.run`.

The unary call is the stream, put together. Errors pass through; the interceptor makes statuses of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Any, NoReturn

import grpc

from model.tokenizer import Tokenizer
from proto.onward.v1 import generation_pb2 as pb
from proto.onward.v1.generation_pb2_grpc import GenerationServiceServicer
from service.config import RequestLimits
from service.errors import InvalidRequest, UnsupportedFeature
from service.generator import Accepted, Generator, Outcome, Piece
from service.models import Models, ServedModel, check_ids
from service.transport import codec

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(GenerationServiceServicer):
    """Answers generation calls.

    Args:
        generator: runs them.
        models: what is served.
        limits: what one request may ask.
        executor: where text is tokenised.
    """

    def __init__(self, generator: Generator, models: Models, limits: RequestLimits, executor: Executor) -> None:
        self._generator = generator
        self._models = models
        self._limits = limits
        self._executor = executor

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """Collects the stream into one answer."""
        call = codec.decode_generate(request, self._limits)
        response = pb.GenerateResponse()
        output = response.outputs.add()
        async with aclosing(self._generator.run(call, context.time_remaining())) as parts:
            async for part in parts:
                match part:
                    case Accepted():
                        response.request_id, response.model = part.request_id, part.model
                    case Piece():
                        output.text += part.text
                        output.token_ids.extend(part.token_ids)
                        output.logprobs.extend(map(codec.encode_logprobs, part.logprobs))
                    case Outcome():
                        _finish(output, part)
                        response.usage.CopyFrom(codec.encode_usage(part.num_prompt_tokens, part.num_generated_tokens))
                        response.timings.CopyFrom(codec.encode_timings(part.timings))
        return response

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """Sends each part as it comes; a client that is behind gets several tokens in one message."""
        call = codec.decode_generate(request, self._limits)
        async with aclosing(self._generator.run(call, context.time_remaining())) as parts:
            async for part in parts:
                for event in _events(part):
                    yield event

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Splits a text as `Generate` would, or bare."""
        tokenizer = _tokenizer(self._models.resolve(request.model), request.side, pb.TEXT_SIDE_PROMPT)
        is_bare = request.HasField("add_special_tokens") and not request.add_special_tokens
        encode = tokenizer.encode_plain if is_bare else tokenizer.encode
        token_ids = await asyncio.get_running_loop().run_in_executor(self._executor, encode, request.text)
        return pb.TokenizeResponse(token_ids=token_ids, tokens=[tokenizer.token(each) or "" for each in token_ids])

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Joins tokens as an output's are joined."""
        tokenizer = _tokenizer(self._models.resolve(request.model), request.side, pb.TEXT_SIDE_OUTPUT)
        token_ids = list(request.token_ids)
        check_ids("token_ids", token_ids, tokenizer.vocab_size)
        text = await asyncio.get_running_loop().run_in_executor(self._executor, tokenizer.decode, token_ids)
        return pb.DetokenizeResponse(text=text)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Not offered."""
        _refuse("Score")

    async def Estimate(self, request: pb.EstimateRequest, context: Context) -> pb.EstimateResponse:
        """Not offered."""
        _refuse("Estimate")

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        """Not offered."""
        _refuse("Explain")


def _refuse(method: str) -> NoReturn:
    raise UnsupportedFeature(method, "is not offered by this server")


def _events(part: Accepted | Piece | Outcome) -> tuple[pb.GenerateStreamResponse, ...]:
    """A part as the stream tells it."""
    message = pb.GenerateStreamResponse
    match part:
        case Accepted():
            return (message(accepted=message.Accepted(request_id=part.request_id, model=part.model)),)
        case Piece():
            logprobs = map(codec.encode_logprobs, part.logprobs)
            return (message(delta=message.Delta(text=part.text, token_ids=part.token_ids, logprobs=logprobs)),)
        case Outcome():
            finished = message.Finished()
            _finish(finished, part)
            summary = message.Summary(
                usage=codec.encode_usage(part.num_prompt_tokens, part.num_generated_tokens),
                timings=codec.encode_timings(part.timings),
            )
            return message(finished=finished), message(summary=summary)


def _finish(message: pb.GenerationOutput | pb.GenerateStreamResponse.Finished, outcome: Outcome) -> None:
    message.finish_reason = codec.FINISH_REASONS[outcome.finish_reason]
    if (matched := codec.encode_matched_stop(outcome.matched_stop)) is not None:
        message.matched_stop.CopyFrom(matched)


def _tokenizer(model: ServedModel, side: pb.TextSide.ValueType, default: pb.TextSide.ValueType) -> Tokenizer:
    match side or default:
        case pb.TEXT_SIDE_PROMPT:
            return model.prompt_tokenizer
        case pb.TEXT_SIDE_OUTPUT:
            return model.output_tokenizer
        case _:
            raise InvalidRequest("side", side, "must be TEXT_SIDE_PROMPT or TEXT_SIDE_OUTPUT")
