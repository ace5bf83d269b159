"""Protobuf to values and back: validates requests field by field, and encodes answers.

An invalid field is named by its full path, with its value and its limit. Knows the operator's limits but no model:
`service.repository.models` checks what depends on one (token ids, lengths in tokens, the chat template).
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sized
from typing import Any, Literal

from model.spec.artifact import AttentionKind
from model.spec.chat import Message
from model.spec.generation import MAX_PATIENCE
from onward.v1 import generation_pb2 as pb
from service.config import RequestLimits
from service.engine.types import (
    BeamSearchParams,
    FinishReason,
    RequestTimings,
    SamplingParams,
    StoppingParams,
    TokenLogprobs,
)
from service.errors import InvalidRequest
from service.explain.explaining import ExplainCall, Explanation
from service.forecasting.costing import Cost
from service.forecasting.prediction import Estimate
from service.generator import GenerateCall, Outcome
from service.repository.models import Conversation
from service.scoring import Score, ScoreCall

FINISH_REASONS: Mapping[FinishReason, pb.FinishReason.ValueType] = {
    FinishReason.END_OF_SEQUENCE: pb.FINISH_REASON_END_OF_SEQUENCE,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}

ATTENTION_KINDS: Mapping[AttentionKind, pb.AttentionKind.ValueType] = {
    AttentionKind.ENCODER: pb.ATTENTION_KIND_ENCODER,
    AttentionKind.DECODER: pb.ATTENTION_KIND_DECODER,
    AttentionKind.CROSS: pb.ATTENTION_KIND_CROSS,
}

_DEFAULT_MAX_TOKENS = 256
_DEFAULT_EXPLAINED_TOKENS = 64
# As in OpenAI's API; vLLM clips larger ones silently.
_MAX_BIAS = 100.0
# Other servers take any number; a larger power of a length may overflow.
_MAX_LENGTH_PENALTY = 10.0

Generating = pb.GenerateRequest | pb.GenerateStreamRequest


def _draw_id() -> str:
    return uuid.uuid4().hex


def decode_generate(message: Generating, limits: RequestLimits, draw_id: Callable[[], str] = _draw_id) -> GenerateCall:
    """Decodes a request, streamed or not; draws an id for an empty one.

    Raises:
        InvalidRequest: naming the first field beyond its limit.
    """
    beam_search = _beam_search(message, limits) if message.HasField("beam_search") else None
    return GenerateCall(
        request_id=_request_id(message.request_id, limits) or draw_id(),
        model=message.model,
        prompt=_conversation(message) if message.WhichOneof("prompt") == "chat" else _prompt(message),
        target_prefix=message.target_prefix,
        sampling=_sampling(message.sampling, limits),
        stopping=_stopping(message.stopping, limits),
        beam_search=beam_search,
        logprobs=_logprobs(message.response, "logprobs", limits),
        prompt_logprobs=_logprobs(message.response, "prompt_logprobs", limits),
        wants_cost=message.response.cost,
        priority=message.priority,
        timeout_seconds=_timeout(message),
        partial_on_deadline=message.partial_on_deadline,
    )


def decode_score(message: pb.ScoreRequest, draw_id: Callable[[], str] = _draw_id) -> ScoreCall:
    """Decodes a request to score; draws an id for the log.

    Raises:
        InvalidRequest: naming the first field beyond its limit.
    """
    return ScoreCall(
        request_id=draw_id(), model=message.model, prompt=_prompt(message), target=_text_or_ids(message, "target")
    )


def decode_explain(message: pb.ExplainRequest, draw_id: Callable[[], str] = _draw_id) -> ExplainCall:
    """Decodes a request for attention; draws an id for what is generated.

    Raises:
        InvalidRequest: naming the first field beyond its limit.
    """
    kinds = {number: kind for kind, number in ATTENTION_KINDS.items()}
    _require_count("kinds", message.kinds, len(kinds))
    for index, number in enumerate(message.kinds):
        limit = f"must be one of {', '.join(map(pb.AttentionKind.Name, kinds))}"
        _require(f"kinds[{index}]", number, limit, valid=number in kinds)
    max_tokens = _given(message, "max_tokens", _DEFAULT_EXPLAINED_TOKENS)
    _require("max_tokens", max_tokens, "must be at least 1", valid=max_tokens >= 1)
    return ExplainCall(
        request_id=draw_id(),
        model=message.model,
        prompt=_prompt(message),
        target=_text_or_ids(message, "target"),
        kinds=tuple(kinds[number] for number in message.kinds),
        layers=tuple(message.layers),
        heads=tuple(message.heads),
        max_tokens=max_tokens,
    )


def _request_id(value: str, limits: RequestLimits) -> str:
    limit = limits.max_request_id_length
    if len(value) > limit or not value.isprintable():
        raise InvalidRequest("request_id", value, f"must have at most {limit} characters, all printable")
    return value


def _conversation(message: Generating) -> Conversation:
    messages = tuple(Message(each.role, each.content) for each in message.chat.messages)
    _require("prompt.chat.messages", [], "must have at least 1 message", valid=bool(messages))
    return Conversation(messages)


def _prompt(message: Generating | pb.ScoreRequest | pb.ExplainRequest) -> str | tuple[int, ...]:
    prompt = _text_or_ids(message, "prompt")
    if prompt is None:
        raise InvalidRequest("prompt", None, "must be set")
    return prompt


def _text_or_ids(message: Any, oneof: Literal["prompt", "target"]) -> str | tuple[int, ...] | None:
    """A text, or raw token ids; None where the oneof is not set."""
    name = message.WhichOneof(oneof)
    if name is None:
        return None
    given = getattr(message, name)
    is_text = isinstance(given, str)
    field, value = (name, given) if is_text else (f"{name}.ids", tuple(given.ids))
    _require(f"{oneof}.{field}", value, "must not be empty", valid=len(value) > 0)
    return value


def _sampling(message: pb.SamplingParams, limits: RequestLimits) -> SamplingParams:
    temperature = _given(message, "temperature", 1.0)
    top_p = _given(message, "top_p", 1.0)
    repetition = _given(message, "repetition_penalty", 1.0)
    _require("sampling.temperature", temperature, "must be finite and at least 0", valid=0 <= temperature < math.inf)
    _require("sampling.top_p", top_p, "must be above 0 and at most 1", valid=0 < top_p <= 1)
    _require("sampling.top_k", message.top_k, "must be at least 0 (0 is off)", valid=message.top_k >= 0)
    _require_range("sampling.min_p", message.min_p, 0, 1)
    _require("sampling.repetition_penalty", repetition, "must be above 0 and at most 2", valid=0 < repetition <= 2)
    _require_range("sampling.presence_penalty", message.presence_penalty, -2, 2)
    _require_range("sampling.frequency_penalty", message.frequency_penalty, -2, 2)
    num_outputs = _given(message, "n", 1)
    _require_range("sampling.n", num_outputs, 1, limits.max_outputs)
    _require_count("sampling.logit_bias", message.logit_bias, limits.max_logit_bias)
    for token_id, bias in message.logit_bias.items():
        _require_range(f"sampling.logit_bias[{token_id}]", bias, -_MAX_BIAS, _MAX_BIAS)
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=repetition,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=_given(message, "seed", None),
        n=num_outputs,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
    )


def _beam_search(message: Generating, limits: RequestLimits) -> BeamSearchParams:
    asked = message.beam_search
    for field, value in message.sampling.ListFields():
        raise InvalidRequest(f"sampling.{field.name}", value, "must not be set with beam_search")
    # A match ends an output for good, while a beam's text may still become another's.
    stop = message.stopping.stop
    _require("stopping.stop", list(stop), "must be empty with beam_search", valid=not stop)
    size, number = asked.beam_size, _given(asked, "num_hypotheses", 1)
    _require_range("beam_search.beam_size", size, 1, limits.max_beam_size)
    limit = f"must be from 1 to beam_search.beam_size, which is {size}"
    _require("beam_search.num_hypotheses", number, limit, valid=1 <= number <= size)
    penalty = _given(asked, "length_penalty", 1.0)
    _require_range("beam_search.length_penalty", penalty, -_MAX_LENGTH_PENALTY, _MAX_LENGTH_PENALTY)
    patience = _given(asked, "patience", None)
    if patience is not None:
        _require_range("beam_search.patience", patience, 0, MAX_PATIENCE)
    ngram = asked.no_repeat_ngram_size
    _require("beam_search.no_repeat_ngram_size", ngram, "must be at least 0 (0 is off)", valid=ngram >= 0)
    return BeamSearchParams(
        beam_size=size,
        num_hypotheses=number,
        length_penalty=penalty,
        patience=patience,
        no_repeat_ngram_size=ngram,
    )


def _stopping(message: pb.StoppingParams, limits: RequestLimits) -> StoppingParams:
    most = limits.max_generated_tokens
    # The default is at most what the operator allows.
    max_tokens = _given(message, "max_tokens", min(_DEFAULT_MAX_TOKENS, most))
    _require_range("stopping.max_tokens", max_tokens, 1, most)
    limit = f"must be from 0 to stopping.max_tokens, which is {max_tokens}"
    _require("stopping.min_tokens", message.min_tokens, limit, valid=0 <= message.min_tokens <= max_tokens)
    _require_count("stopping.stop", message.stop, limits.max_stop_strings)
    longest = limits.max_stop_string_length
    for index, text in enumerate(message.stop):
        limit = f"must have from 1 to {longest} characters"
        _require(f"stopping.stop[{index}]", text, limit, valid=1 <= len(text) <= longest)
    _require_count("stopping.stop_token_ids", message.stop_token_ids, limits.max_stop_token_ids)
    return StoppingParams(
        max_tokens=max_tokens,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop_in_output=message.include_stop_in_output,
    )


def _logprobs(
    message: pb.ResponseOptions, field: Literal["logprobs", "prompt_logprobs"], limits: RequestLimits
) -> int | None:
    num_top: int | None = _given(message, field, None)
    if num_top is not None:
        _require_range(f"response.{field}", num_top, 0, limits.max_logprobs)
    return num_top


def _timeout(message: Generating) -> float | None:
    timeout: float | None = _given(message, "timeout_seconds", None)
    if timeout is not None:
        _require("timeout_seconds", timeout, "must be finite and above 0", valid=0 < timeout < math.inf)
    return timeout


def _given(message: Any, field: str, default: Any) -> Any:
    """The value of an `optional` scalar, its default where it is absent."""
    return getattr(message, field) if message.HasField(field) else default


def _require(field: str, value: object, limit: str, *, valid: bool) -> None:
    if not valid:
        raise InvalidRequest(field, value, limit)


def _require_range(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        # No exponent for large integers.
        limits = [str(int(limit)) if limit == int(limit) else f"{limit:g}" for limit in (low, high)]
        raise InvalidRequest(field, value, f"must be from {limits[0]} to {limits[1]}")


def _require_count(field: str, values: Sized, most: int) -> None:
    _require(field, len(values), f"must have at most {most} entries", valid=len(values) <= most)


def encode_logprobs(values: TokenLogprobs) -> pb.TokenLogprobs:
    """One token's log-probabilities."""
    pairs = zip(values.top_token_ids, values.top_logprobs, strict=True)
    top = [pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in pairs]
    return pb.TokenLogprobs(logprob=values.logprob, top=top)


def encode_score(score: Score) -> pb.ScoreResponse:
    """Scored tokens and their totals."""
    pairs = zip(score.token_ids, score.logprobs, strict=True)
    return pb.ScoreResponse(
        tokens=[pb.ScoreResponse.TokenScore(token_id=token_id, logprob=logprob) for token_id, logprob in pairs],
        total_logprob=score.total_logprob,
        perplexity=score.perplexity,
        bits_per_byte=score.bits_per_byte,
    )


def encode_explanation(explanation: Explanation) -> pb.ExplainResponse:
    """Tokens and matrices, up to megabytes: call this off the event loop."""
    response = pb.ExplainResponse(
        prompt_tokens=explanation.prompt_tokens,
        target_tokens=explanation.target_tokens,
        decoder_tokens=explanation.decoder_tokens,
    )
    for matrix in explanation.matrices:
        rows, columns = matrix.weights.shape
        response.attentions.add(
            kind=ATTENTION_KINDS[matrix.kind],
            layer=matrix.layer,
            head=matrix.head,
            rows=rows,
            columns=columns,
            weights=matrix.weights.ravel().tolist(),
        )
    return response


def encode_matched_stop(matched: str | int | None) -> pb.MatchedStop | None:
    """The stop that ended an output, if one did."""
    match matched:
        case None:
            return None
        case str():
            return pb.MatchedStop(text=matched)
        case int():
            return pb.MatchedStop(token_id=matched)


def encode_timings(timings: RequestTimings) -> pb.Timings:
    """Points in time to durations; a phase that was never reached took no time."""
    arrived, finished = timings.arrival_time, timings.finished_time
    scheduled = finished if timings.scheduled_time is None else timings.scheduled_time
    first = finished if timings.first_token_time is None else timings.first_token_time
    message = pb.Timings(
        queue=scheduled - arrived, prefill=first - scheduled, decode=finished - first, total=finished - arrived
    )
    if timings.first_token_time is not None:
        message.time_to_first_token = first - arrived
    return message


def encode_cost(cost: Cost) -> pb.Cost:
    """Counts, and the known seconds."""
    counts = cost.counts
    return pb.Cost(
        attended_pairs=counts.attended_pairs,
        padded_pairs=counts.padded_pairs,
        linear_flops=counts.linear_flops,
        attention_flops=counts.attention_flops,
        kv_byte_steps=counts.kv_byte_steps,
        predicted_seconds=cost.predicted_seconds,
        measured_seconds=cost.measured_seconds,
    )


def encode_estimate(estimate: Estimate) -> pb.EstimateResponse:
    """The predicted cost and times of a request."""
    message = pb.EstimateResponse(cost=encode_cost(estimate.cost))
    if estimate.prediction is not None:
        message.queue_seconds = estimate.prediction.queue_seconds
        message.finish_seconds = estimate.prediction.finish_seconds
        message.sharing_factor = estimate.prediction.sharing_factor
    return message


def encode_usage(outcome: Outcome) -> pb.Usage:
    """Tokens used."""
    return pb.Usage(
        prompt_tokens=outcome.num_prompt_tokens,
        cached_tokens=outcome.num_cached_tokens,
        generated_tokens=outcome.num_generated_tokens,
    )
