"""Python's arguments to the contract's messages. Checks nothing that the server checks: its limits are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from google.protobuf.message import Message

from onward.v1 import generation_pb2 as pb

Prompt: TypeAlias = str | Sequence[int] | pb.Chat
"""Text, token ids, or a conversation."""
Target: TypeAlias = str | Sequence[int]
"""Text or token ids."""


class CallOptions(TypedDict, total=False):
    """What any call can be told."""

    timeout_seconds: float | None
    """From now to the deadline, over all tries; None for ever. Default: the client's."""
    traceparent: str
    """W3C trace context: the span that this call belongs to, for a server that sends traces."""
    tracestate: str
    """W3C trace context: what tracing systems add to that."""


class GenerateOptions(CallOptions, total=False):
    """What a generation can be told, by the names of the contract, where each is described. None is as not said."""

    request_id: str | None
    model: str | None
    target_prefix: str | None
    priority: int | None
    partial_on_deadline: bool | None

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    n: int | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None

    max_tokens: int | None
    min_tokens: int | None
    stop: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_in_output: bool | None

    beam_size: int | None
    num_hypotheses: int | None
    length_penalty: float | None
    patience: float | None
    no_repeat_ngram_size: int | None

    logprobs: int | None
    prompt_logprobs: int | None
    cost: bool | None


GROUPS: Mapping[str, type[Message]] = {
    "sampling": pb.SamplingParams,
    "stopping": pb.StoppingParams,
    "beam_search": pb.BeamSearchParams,
    "response": pb.ResponseOptions,
}
"""The fields of a request that hold options; no two of them have one of the same name."""


def chat(*turns: tuple[str, str]) -> pb.Chat:
    """A conversation of turns (role, content), oldest first."""
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns])


def generate(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The request of a generation, without its deadline.

    Raises:
        TypeError: for a value that the field cannot hold, such as bytes for a prompt.
        ValueError: for an option that there is not, or a number that its field cannot hold.
    """
    given: dict[str, Any] = {
        name: value for name, value in options.items() if value is not None and name not in CallOptions.__annotations__
    }
    for group, message in GROUPS.items():
        own = {name: given.pop(name) for name in message.DESCRIPTOR.fields_by_name if name in given}
        # Not even empty: with beam search, what is not said of sampling must not be set either.
        if own:
            given[group] = message(**own)
    if isinstance(prompt, pb.Chat):
        return pb.GenerateRequest(chat=prompt, **given)
    return pb.GenerateRequest(**_either("prompt", prompt, "text", "token_ids"), **given)


def stream(prompt: Prompt, options: GenerateOptions) -> pb.GenerateStreamRequest:
    """The same, to be streamed: both messages have the same fields and numbers, and so the same bytes."""
    return pb.GenerateStreamRequest.FromString(generate(prompt, options).SerializeToString())


def score(prompt: Target, target: Target | None, model: str) -> pb.ScoreRequest:
    """Asks how probable the target is after the prompt, or the prompt by itself."""
    return pb.ScoreRequest(model=model, **_prompt_and_target(prompt, target))


def explain(
    prompt: Target,
    target: Target | None,
    *,
    model: str,
    layers: Sequence[int],
    heads: Sequence[int],
    kinds: Sequence[pb.AttentionKind.ValueType],
    max_tokens: int | None,
) -> pb.ExplainRequest:
    """Asks where the model looked."""
    return pb.ExplainRequest(
        model=model,
        layers=layers,
        heads=heads,
        kinds=kinds,
        max_tokens=max_tokens,
        **_prompt_and_target(prompt, target),
    )


def carry_deadline(request: Message, seconds: float | None) -> None:
    """Writes the deadline into a generation as well, for proxies that hide the call's own."""
    if seconds is not None and isinstance(request, pb.GenerateRequest | pb.GenerateStreamRequest):
        request.timeout_seconds = seconds


def request_id(request: Message) -> str | None:
    """The id that a generation was given."""
    if isinstance(request, pb.GenerateRequest | pb.GenerateStreamRequest):
        return request.request_id or None
    return None


def _prompt_and_target(prompt: Target, target: Target | None) -> dict[str, Any]:
    fields = _either("prompt", prompt, "text", "token_ids")
    if target is not None:
        fields |= _either("target", target, "target_text", "target_token_ids")
    return fields


def _either(name: str, value: Target, text: str, token_ids: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {text: value}
    if isinstance(value, bytes | bytearray | memoryview):
        # A sequence of integers too, but no tokens.
        raise TypeError(f"{name}: must be text or token ids, got {type(value).__name__}")
    return {token_ids: pb.TokenIds(ids=value)}
