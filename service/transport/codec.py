"""Protobuf to values and back for generation: validates requests field by field, and encodes answers.

An invalid field is named by its full path, with its value and its limit. Knows the operator's limits and a model's
defaults but no model: `service.repository.models` checks what depends on one (token ids, lengths in tokens, the chat
template).
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sized
from typing import Any, Literal

from model.spec.chat import Message
from model.spec.generation import MAX_LENGTH_PENALTY, MAX_PATIENCE, WIRE_DEFAULTS, GenerationDefaults
from onward.v1 import generation_pb2 as pb
from service.config import RequestLimits
from service.engine.types import (
    BeamSearchParams,
    FinishReason,
    RequestTimings,
    SamplingParams,
    StoppingParams,
    StructuredOutput,
    StructureKind,
    TokenLogprobs,
)
from service.errors import InvalidRequest
from service.forecasting.costing import Cost
from service.generator import GenerateCall, Outcome
from service.repository.models import Conversation

FINISH_REASONS: Mapping[FinishReason, pb.FinishReason.ValueType] = {
    FinishReason.END_OF_SEQUENCE: pb.FINISH_REASON_END_OF_SEQUENCE,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}

# As in OpenAI's API; vLLM clips larger ones silently.
_MAX_BIAS = 100.0

Generating = pb.GenerateRequest | pb.GenerateStreamRequest


def draw_id() -> str:
    """An id for a request without one."""
    return uuid.uuid4().hex


def decode_generate(
    message: Generating,
    limits: RequestLimits,
    defaults: GenerationDefaults = WIRE_DEFAULTS,
    new_id: Callable[[], str] = draw_id,
) -> GenerateCall:
    """Decodes a request, streamed or not; draws an id for an empty one.

    Args:
        message: the request.
        limits: the operator's.
        defaults: of its model, for fields that are absent.
        new_id: draws an id.

    Raises:
        InvalidRequest: naming the first field beyond its limit.
    """
    beam_search = _beam_search(message, limits, defaults) if message.HasField("beam_search") else None
    structured_output = _structured_output(message, limits) if message.HasField("structured_output") else None
    return GenerateCall(
        request_id=_request_id(message.request_id, limits) or new_id(),
        model=message.model,
        prompt=conversation(message) if message.WhichOneof("prompt") == "chat" else decode_prompt(message),
        target_prefix=message.target_prefix,
        # A beam search samples nothing, and has no penalties.
        sampling=_sampling(message.sampling, limits, defaults if beam_search is None else WIRE_DEFAULTS),
        stopping=_stopping(message.stopping, limits, defaults),
        beam_search=beam_search,
        logprobs=_logprobs(message.response, "logprobs", limits),
        prompt_logprobs=_logprobs(message.response, "prompt_logprobs", limits),
        wants_cost=message.response.cost,
        priority=message.priority,
        timeout_seconds=_timeout(message),
        partial_on_deadline=message.partial_on_deadline,
        structured_output=structured_output,
    )


def _request_id(value: str, limits: RequestLimits) -> str:
    limit = limits.max_request_id_length
    if len(value) > limit or not value.isprintable():
        raise InvalidRequest("request_id", value, f"must have at most {limit} characters, all printable")
    return value


def conversation(message: Generating) -> Conversation:
    """A prompt of messages."""
    messages = tuple(Message(each.role, each.content) for each in message.chat.messages)
    require("prompt.chat.messages", [], "must have at least 1 message", valid=bool(messages))
    return Conversation(messages)


def decode_prompt(message: Generating | pb.ScoreRequest | pb.ExplainRequest) -> str | tuple[int, ...]:
    """A prompt as text or raw token ids."""
    prompt = text_or_ids(message, "prompt")
    if prompt is None:
        raise InvalidRequest("prompt", None, "must be set")
    return prompt


def text_or_ids(message: Any, oneof: Literal["prompt", "target"]) -> str | tuple[int, ...] | None:
    """A text, or raw token ids; None where the oneof is not set."""
    name = message.WhichOneof(oneof)
    if name is None:
        return None
    set_value = getattr(message, name)
    is_text = isinstance(set_value, str)
    field, value = (name, set_value) if is_text else (f"{name}.ids", tuple(set_value.ids))
    require(f"{oneof}.{field}", value, "must not be empty", valid=len(value) > 0)
    return value


def _sampling(message: pb.SamplingParams, limits: RequestLimits, defaults: GenerationDefaults) -> SamplingParams:
    temperature = given(message, "temperature", defaults.temperature)
    top_p = given(message, "top_p", defaults.top_p)
    top_k = given(message, "top_k", defaults.top_k)
    min_p = given(message, "min_p", defaults.min_p)
    repetition = given(message, "repetition_penalty", defaults.repetition_penalty)
    require("sampling.temperature", temperature, "must be finite and at least 0", valid=0 <= temperature < math.inf)
    require("sampling.top_p", top_p, "must be above 0 and at most 1", valid=0 < top_p <= 1)
    require("sampling.top_k", top_k, "must be at least 0 (0 is off)", valid=top_k >= 0)
    require_range("sampling.min_p", min_p, 0, 1)
    require("sampling.repetition_penalty", repetition, "must be above 0 and at most 2", valid=0 < repetition <= 2)
    require_range("sampling.presence_penalty", message.presence_penalty, -2, 2)
    require_range("sampling.frequency_penalty", message.frequency_penalty, -2, 2)
    num_outputs = given(message, "n", 1)
    require_range("sampling.n", num_outputs, 1, limits.max_outputs)
    require_count("sampling.logit_bias", message.logit_bias, limits.max_logit_bias)
    for token_id, bias in message.logit_bias.items():
        require_range(f"sampling.logit_bias[{token_id}]", bias, -_MAX_BIAS, _MAX_BIAS)
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=given(message, "seed", None),
        n=num_outputs,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
    )


def _beam_search(message: Generating, limits: RequestLimits, defaults: GenerationDefaults) -> BeamSearchParams:
    asked = message.beam_search
    for field, value in message.sampling.ListFields():
        raise InvalidRequest(f"sampling.{field.name}", value, "must not be set with beam_search")
    # A match ends an output for good, while a beam's text may still become another's.
    stop = message.stopping.stop
    require("stopping.stop", list(stop), "must be empty with beam_search", valid=not stop)
    size, number = asked.beam_size, given(asked, "num_hypotheses", 1)
    require_range("beam_search.beam_size", size, 1, limits.max_beam_size)
    limit = f"must be from 1 to beam_search.beam_size, which is {size}"
    require("beam_search.num_hypotheses", number, limit, valid=1 <= number <= size)
    penalty = given(asked, "length_penalty", defaults.length_penalty)
    require_range("beam_search.length_penalty", penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    patience = given(asked, "patience", None)
    if patience is not None:
        require_range("beam_search.patience", patience, 0, MAX_PATIENCE)
    ngram = given(asked, "no_repeat_ngram_size", defaults.no_repeat_ngram_size)
    require("beam_search.no_repeat_ngram_size", ngram, "must be at least 0 (0 is off)", valid=ngram >= 0)
    return BeamSearchParams(
        beam_size=size,
        num_hypotheses=number,
        length_penalty=penalty,
        patience=patience,
        no_repeat_ngram_size=ngram,
    )


def _stopping(message: pb.StoppingParams, limits: RequestLimits, defaults: GenerationDefaults) -> StoppingParams:
    most = limits.max_generated_tokens
    # The default is at most what the operator allows.
    max_tokens = given(message, "max_tokens", min(defaults.max_tokens, most))
    require_range("stopping.max_tokens", max_tokens, 1, most)
    limit = f"must be from 0 to stopping.max_tokens, which is {max_tokens}"
    require("stopping.min_tokens", message.min_tokens, limit, valid=0 <= message.min_tokens <= max_tokens)
    require_count("stopping.stop", message.stop, limits.max_stop_strings)
    longest = limits.max_stop_string_length
    for index, text in enumerate(message.stop):
        limit = f"must have from 1 to {longest} characters"
        require(f"stopping.stop[{index}]", text, limit, valid=1 <= len(text) <= longest)
    require_count("stopping.stop_token_ids", message.stop_token_ids, limits.max_stop_token_ids)
    return StoppingParams(
        max_tokens=max_tokens,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop_in_output=message.include_stop_in_output,
    )


def _structured_output(message: Generating, limits: RequestLimits) -> StructuredOutput:
    asked, most = message.structured_output, limits.max_structured_output_bytes
    form = asked.WhichOneof("form")
    if form is None:
        raise InvalidRequest("structured_output", None, "must have one of its fields set")
    kind = StructureKind(form)
    field = f"structured_output.{kind}"
    value: str | tuple[str, ...] = ""
    if kind is StructureKind.JSON:
        require(field, asked.json, "must be true where it is set", valid=asked.json)
    elif kind is StructureKind.CHOICE:
        value = tuple(asked.choice.texts)
        require(f"{field}.texts", [], "must have at least 1 text", valid=bool(value))
        for index, text in enumerate(value):
            require(f"{field}.texts[{index}]", text, "must not be empty", valid=bool(text))
    else:
        value = getattr(asked, form)
        require(field, value, "must not be empty", valid=bool(value))
    num_bytes = asked.ByteSize()
    require(field, f"{num_bytes} bytes", f"must have at most {most} bytes", valid=num_bytes <= most)
    if message.HasField("beam_search"):
        ignores = message.stopping.ignore_eos
        limit = "must not be set with beam_search and structured_output"
        require("stopping.ignore_eos", ignores, limit, valid=not ignores)
    return StructuredOutput(kind, value)


def _logprobs(
    message: pb.ResponseOptions, field: Literal["logprobs", "prompt_logprobs"], limits: RequestLimits
) -> int | None:
    num_top: int | None = given(message, field, None)
    if num_top is not None:
        require_range(f"response.{field}", num_top, 0, limits.max_logprobs)
    return num_top


def _timeout(message: Generating) -> float | None:
    timeout: float | None = given(message, "timeout_seconds", None)
    if timeout is not None:
        require("timeout_seconds", timeout, "must be finite and above 0", valid=0 < timeout < math.inf)
    return timeout


def given(message: Any, field: str, default: Any) -> Any:
    """The value of an `optional` scalar, its default where it is absent."""
    return getattr(message, field) if message.HasField(field) else default


def require(field: str, value: object, limit: str, *, valid: bool) -> None:
    """Raises `InvalidRequest` unless the value is valid."""
    if not valid:
        raise InvalidRequest(field, value, limit)


def require_range(field: str, value: float, low: float, high: float) -> None:
    """Raises `InvalidRequest` unless the value is from `low` to `high`."""
    if not low <= value <= high:
        # No exponent for large integers.
        limits = [str(int(limit)) if limit == int(limit) else f"{limit:g}" for limit in (low, high)]
        raise InvalidRequest(field, value, f"must be from {limits[0]} to {limits[1]}")


def require_count(field: str, values: Sized, most: int) -> None:
    """Raises `InvalidRequest` for too many entries."""
    require(field, len(values), f"must have at most {most} entries", valid=len(values) <= most)


def encode_logprobs(values: TokenLogprobs) -> pb.TokenLogprobs:
    """One token's log-probabilities."""
    pairs = zip(values.top_token_ids, values.top_logprobs, strict=True)
    top = [pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in pairs]
    return pb.TokenLogprobs(logprob=values.logprob, top=top)


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


def encode_usage(outcome: Outcome) -> pb.Usage:
    """Tokens used."""
    return pb.Usage(
        prompt_tokens=outcome.num_prompt_tokens,
        cached_tokens=outcome.num_cached_tokens,
        generated_tokens=outcome.num_generated_tokens,
    )
