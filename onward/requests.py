"""Python arguments → protobuf messages. Validation beyond types is the server's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from google.protobuf.message import Message

from onward.v1 import generation_pb2 as pb

Prompt: TypeAlias = str | Sequence[int] | pb.Chat
"""Text, token ids, or a conversation."""
Target: TypeAlias = str | Sequence[int]
"""Text or token ids."""


class CallOptions(TypedDict, total=False):
    """Options of every call."""

    timeout_seconds: float | None
    """Until the deadline, over all attempts; None for no deadline. Default: the client's."""
    traceparent: str
    """W3C trace context: the parent span, for a server that exports traces."""
    tracestate: str
    """W3C trace context: vendors' additions to `traceparent`."""


class GenerateOptions(CallOptions, total=False):
    """Options of a generation, named and described as in the .proto file. None means not set."""

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

    json_schema: str | Mapping[str, Any] | None
    """JSON text, or what `json.dumps` makes such text of. At most one of these five is given."""
    json: bool | None
    regex: str | None
    grammar: str | None
    choice: Sequence[str] | None

    logprobs: int | None
    prompt_logprobs: int | None
    cost: bool | None


GROUPS: Mapping[str, type[Message]] = {
    "sampling": pb.SamplingParams,
    "stopping": pb.StoppingParams,
    "beam_search": pb.BeamSearchParams,
    "structured_output": pb.StructuredOutput,
    "response": pb.ResponseOptions,
}
"""Fields of a request that group options. Option names are unique over all groups."""


def chat(*turns: tuple[str, str]) -> pb.Chat:
    """A conversation of turns (role, content), oldest first."""
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns])


def generate(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """A generation's request, without its deadline.

    Raises:
        TypeError: a value of a type that the field cannot hold, such as bytes for a prompt.
        ValueError: an unknown option, a number out of its field's range, or several forms of a structured output.
    """
    given: dict[str, Any] = {
        name: value for name, value in options.items() if value is not None and name not in CallOptions.__annotations__
    }
    schema, choice = given.get("json_schema"), given.get("choice")
    if isinstance(schema, Mapping):
        given["json_schema"] = json.dumps(schema)
    if isinstance(choice, str):
        raise TypeError("choice: must be a sequence of texts, got one text")
    if choice is not None:
        given["choice"] = pb.Choices(texts=choice)
    if len(forms := given.keys() & pb.StructuredOutput.DESCRIPTOR.fields_by_name.keys()) > 1:
        raise ValueError(f"only one form of a structured output may be given, got {', '.join(sorted(forms))}")
    for group, message in GROUPS.items():
        own = {name: given.pop(name) for name in message.DESCRIPTOR.fields_by_name if name in given}
        # Absent if empty: beam search refuses a request whose `sampling` is set.
        if own:
            given[group] = message(**own)
    if isinstance(prompt, pb.Chat):
        return pb.GenerateRequest(chat=prompt, **given)
    return pb.GenerateRequest(**_either("prompt", prompt, "text", "token_ids"), **given)


def stream(prompt: Prompt, options: GenerateOptions) -> pb.GenerateStreamRequest:
    """The streaming request. Both messages have the same fields and numbers, so the same bytes."""
    return pb.GenerateStreamRequest.FromString(generate(prompt, options).SerializeToString())


def score(prompt: Target, target: Target | None, model: str) -> pb.ScoreRequest:
    """Scores the target after the prompt, or the prompt itself."""
    return pb.ScoreRequest(model=model, **prompt_and_target(prompt, target))


def carry_deadline(request: Message, seconds: float | None) -> float | None:
    """Writes the deadline into a generation's request, for proxies that hide the call's own; returns the seconds."""
    if seconds is not None and isinstance(request, pb.GenerateRequest | pb.GenerateStreamRequest):
        request.timeout_seconds = seconds
    return seconds


def request_id(request: Message) -> str | None:
    """The id that the caller gave a generation."""
    if isinstance(request, pb.GenerateRequest | pb.GenerateStreamRequest):
        return request.request_id or None
    return None


def prompt_and_target(prompt: Target, target: Target | None) -> dict[str, Any]:
    """The fields of a prompt and an optional target."""
    fields = _either("prompt", prompt, "text", "token_ids")
    if target is not None:
        fields |= _either("target", target, "target_text", "target_token_ids")
    return fields


def _either(name: str, value: Target, text: str, token_ids: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {text: value}
    if isinstance(value, bytes | bytearray | memoryview):
        # Also a sequence of integers.
        raise TypeError(f"{name}: must be text or token ids, got {type(value).__name__}")
    return {token_ids: pb.TokenIds(ids=value)}
