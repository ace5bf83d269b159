"""`onward.v1.GenerationService`: protobuf at both ends of `Generator.run`.

A unary call collects the stream. Errors pass through; the interceptor maps them to statuses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from model.spec.tokenizer import Tokenizer
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceServicer
from service.access import current_caller
from service.config import RequestLimits
from service.errors import InvalidRequest
from service.explain.explainer import Explainer
from service.generator import Accepted, Finished, GenerateCall, Generator, Outcome, Part, Piece, PromptScores
from service.process.text_pool import LONG_BYTES, TextPool
from service.repository.entry import Models
from service.repository.models import ServedModel, check_ids, text_size
from service.transport import analysis_codec, codec
from service.transport.sending import Context


class GenerationServicer(GenerationServiceServicer):
    """Answers generation calls.

    Args:
        generator: runs them.
        explainer: answers `Explain`.
        models: what is served.
        limits: what one request may ask.
        texts: runs `Tokenize`, `Detokenize` and the encoding of large answers; not the generator's, whose prompts they
            would delay.
    """

    def __init__(
        self, generator: Generator, explainer: Explainer, models: Models, limits: RequestLimits, texts: TextPool
    ) -> None:
        self._generator = generator
        self._explainer = explainer
        self._models = models
        self._limits = limits
        self._texts = texts

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """Collects the stream into one answer."""
        response = pb.GenerateResponse()
        # Joined at the end: a message's text can only be replaced.
        texts: defaultdict[int, list[str]] = defaultdict(list)
        run = self._generator.run(self._decode(request), context.time_remaining(), is_streamed=False)
        del request  # may hold megabytes of unknown fields; only what was decoded waits and runs
        async with aclosing(run) as parts:
            async for part in parts:
                match part:
                    case Accepted():
                        response.request_id, response.model = part.request_id, part.model
                    case PromptScores():
                        response.prompt_logprobs.extend(map(codec.encode_logprobs, part.logprobs))
                    case Piece(index):
                        output = _output(response, index)
                        texts[index].append(part.text)
                        output.token_ids.extend(part.token_ids)
                        output.logprobs.extend(map(codec.encode_logprobs, part.logprobs))
                    case Finished(index):
                        _finish(_output(response, index), part)
                    case Outcome():
                        for output in response.outputs:
                            output.text = "".join(texts[output.index])
                        response.usage.CopyFrom(codec.encode_usage(part))
                        response.timings.CopyFrom(codec.encode_timings(part.timings))
                        if part.cost is not None:
                            response.cost.CopyFrom(codec.encode_cost(part.cost))
        return response

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """Sends each part as it comes; a slow client gets several tokens per message."""
        run = self._generator.run(self._decode(request), context.time_remaining())
        del request
        async with aclosing(run) as parts:
            async for part in parts:
                yield _event(part)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Tokenizes a text, with special tokens as `Generate` would, or without."""
        tokenizer = _tokenizer(self._models.resolve(request.model), request.side, pb.TEXT_SIDE_PROMPT)
        max_bytes, num_bytes = self._limits.max_tokenize_bytes, text_size(request.text)
        if num_bytes > max_bytes:
            raise InvalidRequest("text", num_bytes, f"must have at most {max_bytes} bytes")
        is_bare = request.HasField("add_special_tokens") and not request.add_special_tokens
        encode, text = tokenizer.encode_plain if is_bare else tokenizer.encode, request.text
        del request
        return await self._texts.run(current_caller().tenant, num_bytes, _tokenize, tokenizer, encode, text)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Detokenizes token ids as `Generate` would."""
        tokenizer = _tokenizer(self._models.resolve(request.model), request.side, pb.TEXT_SIDE_OUTPUT)
        most = self._limits.max_detokenize_tokens
        if len(request.token_ids) > most:
            raise InvalidRequest("token_ids", len(request.token_ids), f"must have at most {most} entries")
        token_ids = tuple(request.token_ids)
        del request
        return await self._texts.run(current_caller().tenant, len(token_ids), _detokenize, tokenizer, token_ids)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Scores a given text."""
        with self._generator.counting_refusal(request.model):
            call = analysis_codec.decode_score(request)
        del request
        return analysis_codec.encode_score(await self._generator.score(call, context.time_remaining()))

    async def Estimate(self, request: pb.EstimateRequest, context: Context) -> pb.EstimateResponse:
        """Predicts what a request would cost, without running it."""
        call = self._decode_call(request.request)
        del request
        return analysis_codec.encode_estimate(await self._generator.estimate(call))

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        """Computes attention weights, outside the engine; the answer is encoded off the event loop."""
        explaining = self._explainer.explain(analysis_codec.decode_explain(request), context.time_remaining())
        del request
        explanation = await explaining
        return await self._texts.run(
            current_caller().tenant, LONG_BYTES, analysis_codec.encode_explanation, explanation
        )

    def _decode(self, request: pb.GenerateRequest | pb.GenerateStreamRequest) -> GenerateCall:
        with self._generator.counting_refusal(request.model):
            return self._decode_call(request)

    def _decode_call(self, request: pb.GenerateRequest | pb.GenerateStreamRequest) -> GenerateCall:
        return codec.decode_generate(request, self._limits, self._models.defaults(request.model))


def _tokenize(tokenizer: Tokenizer, encode: Callable[[str], Sequence[int]], text: str) -> pb.TokenizeResponse:
    token_ids = encode(text)
    return pb.TokenizeResponse(token_ids=token_ids, tokens=[tokenizer.token(each) or "" for each in token_ids])


def _detokenize(tokenizer: Tokenizer, token_ids: Sequence[int]) -> pb.DetokenizeResponse:
    check_ids("token_ids", token_ids, tokenizer.vocab_size)
    return pb.DetokenizeResponse(text=tokenizer.decode(token_ids))


def _output(response: pb.GenerateResponse, index: int) -> pb.GenerationOutput:
    """The output at `index`; adds those before it, too, since any output may be the first with a part."""
    while len(response.outputs) <= index:
        response.outputs.add(index=len(response.outputs))
    return response.outputs[index]


def _event(part: Part) -> pb.GenerateStreamResponse:
    """A part as an event of the stream."""
    message = pb.GenerateStreamResponse
    event = message()
    match part:
        case Accepted():
            event.accepted.CopyFrom(message.Accepted(request_id=part.request_id, model=part.model))
        case PromptScores():
            event.prompt.logprobs.extend(map(codec.encode_logprobs, part.logprobs))
        case Piece():
            # Field by field, which takes less than half the time of nested constructors: this runs for every token.
            delta = event.delta
            delta.output_index, delta.text = part.output_index, part.text
            delta.token_ids.extend(part.token_ids)
            if part.logprobs:
                delta.logprobs.extend(map(codec.encode_logprobs, part.logprobs))
        case Finished():
            event.finished.output_index = part.output_index
            _finish(event.finished, part)
        case Outcome():
            event.summary.usage.CopyFrom(codec.encode_usage(part))
            event.summary.timings.CopyFrom(codec.encode_timings(part.timings))
            if part.cost is not None:
                event.summary.cost.CopyFrom(codec.encode_cost(part.cost))
    return event


def _finish(message: pb.GenerationOutput | pb.GenerateStreamResponse.Finished, end: Finished) -> None:
    message.finish_reason = codec.FINISH_REASONS[end.finish_reason]
    if (matched := codec.encode_matched_stop(end.matched_stop)) is not None:
        message.matched_stop.CopyFrom(matched)
    if end.score is not None:
        message.score = end.score


def _tokenizer(model: ServedModel, side: pb.TextSide.ValueType, default: pb.TextSide.ValueType) -> Tokenizer:
    match side or default:
        case pb.TEXT_SIDE_PROMPT:
            return model.prompt_tokenizer
        case pb.TEXT_SIDE_OUTPUT:
            return model.output_tokenizer
        case _:
            raise InvalidRequest("side", side, "must be TEXT_SIDE_PROMPT or TEXT_SIDE_OUTPUT")
