"""Protobuf to values and back: requests validated field by field, answers put together. No protobuf goes further in.

An invalid field is named by its full path, with its value and its limit. What a later version will offer is refused by
name rather than ignored: a client must not believe in a penalty that nobody applied. Knows the operator's limits but no
model; what depends on one (token ids, lengths in tokens) is `service.models`' to check.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proto.onward.v1 import generation_pb2 as pb
from service.config import RequestLimits
from service.engine.types import FinishReason, RequestTimings, SamplingParams, StoppingParams, TokenLogprobs
from service.errors import InvalidRequest, UnsupportedFeature
from service.generator import GenerateCall

FINISH_REASONS: Mapping[FinishReason, pb.FinishReason.ValueType] = {
    FinishReason.END_OF_SEQUENCE: pb.FINISH_REASON_END_OF_SEQUENCE,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}

_DEFAULT_MAX_TOKENS = 256


def decode_generate(
    message: pb.GenerateRequest | pb.GenerateStreamRequest,
    limits: RequestLimits,
    draw_id: Callable[[], str] = lambda: uuid.uuid4().hex,
) -> GenerateCall:
    """Reads a request, stream or not; an empty id is drawn.

    Raises:
        InvalidRequest: naming the first field beyond its limit.
        UnsupportedFeature: naming the first field that asks for what is not offered.
    """
    _check_unsupported(message)
    _refuse_unsupported(message)
    return GenerateCall(
        request_id=_request_id(message.request_id, limits) or draw_id(),
        model=message.model,
        prompt=_prompt(message),
        sampling=_sampling(message.sampling),
        stopping=_stopping(message.stopping, limits),
        logprobs=_logprobs(message.response, limits),
        timeout_seconds=_timeout(message),
    )


def _check_unsupported(message: pb.GenerateRequest | pb.GenerateStreamRequest) -> None:
    """A bad value is the client's mistake even in a field that is not offered, and the more useful answer."""
    sampling, beams = message.sampling, message.beam_search
    repetition, number = _given(sampling, "repetition_penalty", 1.0), _given(sampling, "n", 1)
    _require("sampling.repetition_penalty", repetition, "must be above 0 and at most 2", valid=0 < repetition <= 2)
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(sampling, name)
        _require(f"sampling.{name}", penalty, "must be from -2 to 2", valid=-2 <= penalty <= 2)
    _require("sampling.n", number, "must be at least 1", valid=number >= 1)
    for token_id, bias in sampling.logit_bias.items():
        _require(f"sampling.logit_bias[{token_id}]", bias, "must be finite", valid=math.isfinite(bias))
    min_tokens, prompt_logprobs = message.stopping.min_tokens, message.response.prompt_logprobs
    _require("stopping.min_tokens", min_tokens, "must be at least 0", valid=min_tokens >= 0)
    _require("response.prompt_logprobs", prompt_logprobs, "must be at least 0", valid=prompt_logprobs >= 0)
    if message.HasField("beam_search"):
        _require("beam_search.beam_size", beams.beam_size, "must be at least 1", valid=beams.beam_size >= 1)


def _refuse_unsupported(message: pb.GenerateRequest | pb.GenerateStreamRequest) -> None:
    sampling = message.sampling
    asked = {
        "prompt.chat": message.HasField("chat"),
        "target_prefix": bool(message.target_prefix),
        "beam_search": message.HasField("beam_search"),
        "priority": message.priority != 0,
        "partial_on_deadline": message.partial_on_deadline,
        "sampling.repetition_penalty": _given(sampling, "repetition_penalty", 1.0) != 1.0,
        "sampling.presence_penalty": sampling.presence_penalty != 0.0,
        "sampling.frequency_penalty": sampling.frequency_penalty != 0.0,
        "sampling.n": _given(sampling, "n", 1) > 1,
        "sampling.logit_bias": bool(sampling.logit_bias),
        "sampling.allowed_token_ids": bool(sampling.allowed_token_ids),
        "stopping.min_tokens": message.stopping.min_tokens > 0,
        "response.prompt_logprobs": message.response.HasField("prompt_logprobs"),
        "response.cost": message.response.cost,
    }
    for field, is_asked in asked.items():
        if is_asked:
            raise UnsupportedFeature(field)


def _request_id(value: str, limits: RequestLimits) -> str:
    limit = limits.max_request_id_length
    if len(value) > limit or not value.isprintable():
        raise InvalidRequest("request_id", value, f"must have at most {limit} characters, all printable")
    return value


def _prompt(message: pb.GenerateRequest | pb.GenerateStreamRequest) -> str | tuple[int, ...]:
    prompt: str | tuple[int, ...]
    match message.WhichOneof("prompt"):
        case "text":
            field, prompt = "prompt.text", message.text
        case "token_ids":
            field, prompt = "prompt.token_ids.ids", tuple(message.token_ids.ids)
        case _:
            raise InvalidRequest("prompt", None, "must be set")
    if not prompt:
        raise InvalidRequest(field, prompt, "must not be empty")
    return prompt


def _sampling(message: pb.SamplingParams) -> SamplingParams:
    temperature = _given(message, "temperature", 1.0)
    top_p = _given(message, "top_p", 1.0)
    _require("sampling.temperature", temperature, "must be finite and at least 0", valid=0 <= temperature < math.inf)
    _require("sampling.top_p", top_p, "must be above 0 and at most 1", valid=0 < top_p <= 1)
    _require("sampling.top_k", message.top_k, "must be at least 0 (0 is off)", valid=message.top_k >= 0)
    _require("sampling.min_p", message.min_p, "must be from 0 to 1", valid=0 <= message.min_p <= 1)
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=_given(message, "seed", None),
    )


def _stopping(message: pb.StoppingParams, limits: RequestLimits) -> StoppingParams:
    max_tokens, most = _given(message, "max_tokens", _DEFAULT_MAX_TOKENS), limits.max_generated_tokens
    # The default is not the client's mistake where an operator allows less.
    max_tokens = max_tokens if message.HasField("max_tokens") else min(max_tokens, most)
    _require("stopping.max_tokens", max_tokens, f"must be from 1 to {most}", valid=1 <= max_tokens <= most)
    _require_count("stopping.stop", message.stop, limits.max_stop_strings)
    longest = limits.max_stop_string_length
    for index, text in enumerate(message.stop):
        limit = f"must have from 1 to {longest} characters"
        _require(f"stopping.stop[{index}]", text, limit, valid=1 <= len(text) <= longest)
    _require_count("stopping.stop_token_ids", message.stop_token_ids, limits.max_stop_token_ids)
    return StoppingParams(
        max_tokens=max_tokens,
        stop=tuple(message.stop),
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop_in_output=message.include_stop_in_output,
    )


def _logprobs(message: pb.ResponseOptions, limits: RequestLimits) -> int | None:
    if not message.HasField("logprobs"):
        return None
    most = limits.max_logprobs
    _require("response.logprobs", message.logprobs, f"must be from 0 to {most}", valid=0 <= message.logprobs <= most)
    return message.logprobs


def _timeout(message: pb.GenerateRequest | pb.GenerateStreamRequest) -> float | None:
    if not message.HasField("timeout_seconds"):
        return None
    timeout = message.timeout_seconds
    _require("timeout_seconds", timeout, "must be finite and above 0", valid=0 < timeout < math.inf)
    return timeout


def _given(message: Any, field: str, default: Any) -> Any:
    """The value of an `optional` scalar, its default where it is absent."""
    return getattr(message, field) if message.HasField(field) else default


def _require(field: str, value: object, limit: str, *, valid: bool) -> None:
    if not valid:
        raise InvalidRequest(field, value, limit)


def _require_count(field: str, values: Sequence[object], most: int) -> None:
    _require(field, len(values), f"must have at most {most} entries", valid=len(values) <= most)


def encode_logprobs(values: TokenLogprobs) -> pb.TokenLogprobs:
    """One token's log-probabilities."""
    pairs = zip(values.top_token_ids, values.top_logprobs, strict=True)
    top = [pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in pairs]
    return pb.TokenLogprobs(logprob=values.logprob, top=top)


def encode_matched_stop(matched: str | int | None) -> pb.MatchedStop | None:
    """What ended an output; None where no stop did."""
    match matched:
        case None:
            return None
        case str():
            return pb.MatchedStop(text=matched)
        case int():
            return pb.MatchedStop(token_id=matched)


def encode_timings(timings: RequestTimings) -> pb.Timings:
    """Moments to durations; a phase that was never reached took no time."""
    arrived, finished = timings.arrival_time, timings.finished_time
    scheduled = finished if timings.scheduled_time is None else timings.scheduled_time
    first = finished if timings.first_token_time is None else timings.first_token_time
    message = pb.Timings(
        queue=scheduled - arrived, prefill=first - scheduled, decode=finished - first, total=finished - arrived
    )
    if timings.first_token_time is not None:
        message.time_to_first_token = first - arrived
    return message


def encode_usage(num_prompt_tokens: int, num_generated_tokens: int) -> pb.Usage:
    """Tokens used; nothing is cached between requests."""
    return pb.Usage(prompt_tokens=num_prompt_tokens, generated_tokens=num_generated_tokens)
