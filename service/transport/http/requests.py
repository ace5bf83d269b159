"""Bodies of `/v1/chat/completions` and `/v1/completions` to requests of ours; `fields` has what both have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from model.spec.chat import Message
from onward.v1 import generation_pb2 as pb
from service.errors import InvalidRequest, UnsupportedFeature
from service.transport.http.fields import BEAMS, PATHS, refuse_others, set_field, set_fields, set_text, take
from service.transport.http.forms import VLLM, set_form
from service.transport.http.thoughts import FIELD as THOUGHTS
from service.transport.http.thoughts import KWARGS, ThinkingSwitch, decode_thinking, with_thoughts
from service.transport.http.tools import FIELDS as TOOL_FIELDS
from service.transport.http.tools import Arguments, Tools, decode_calls, decode_tools
from service.transport.wire_limits import FREE

CHAT_PATHS = {**PATHS, "max_completion_tokens": "stopping.max_tokens"}
_OWN = ("stream", "stream_options", "return_token_ids", "logprobs", BEAMS, "response_format", *VLLM)
# Labels of a request for its sender: checked, and of no effect on the answer.
LABELS = ("user", "safety_identifier", "prompt_cache_key")
MAX_LABEL = 512
"""Characters of a label: a response keeps and repeats them."""
MAX_MESSAGES = FREE
"""Of a conversation, as over gRPC."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
_UNSUPPORTED = (
    "audio", "function_call", "functions", "metadata", "moderation", "prediction",
    "prompt_cache_options", "prompt_cache_retention", "verbosity", "web_search_options",
)  # fmt: skip
_EFFORT = "reasoning_effort"
_NOT_OF_COMPLETIONS = ("suffix", "prompt_logprobs", _EFFORT, *TOOL_FIELDS)
_FIELDS_OF_CALLS: Mapping[str, tuple[str, ...]] = {"assistant": ("tool_calls", THOUGHTS), "tool": ("tool_call_id",)}
_NOT_OF_MESSAGES = (
    "name", "audio", "function_call", "refusal", "tool_calls", "tool_call_id", "reasoning", "reasoning_content",
    "annotations",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as gRPC takes it, and what its answer looks like.

    `num_top` is the number of alternatives per token; `echoed` are fields that a response repeats; `names` are those
    of the structured output's fields, for errors. `messages` are those of a conversation that has more than gRPC's,
    empty where it has not.
    """

    request: pb.GenerateRequest
    is_streamed: bool = False
    includes_usage: bool = False
    continues_usage: bool = False
    returns_token_ids: bool = False
    num_top: int | None = None
    echoed: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    tools: Tools | None = None
    messages: tuple[Message, ...] = ()
    thinking: ThinkingSwitch | None = None

    @property
    def enable_thinking(self) -> bool | None:
        """The template's variable; None leaves it out."""
        return None if self.thinking is None else self.thinking.is_on


def decode_chat(values: Mapping[str, Any]) -> Asked:
    """A chat completion.

    Raises:
        InvalidRequest, UnsupportedFeature: naming the first field that is wrong.
    """
    known = {*CHAT_PATHS, *_OWN, *LABELS, *TOOL_FIELDS, "messages", "top_logprobs", KWARGS, _EFFORT}
    refuse_others(values, known, _NEUTRAL, _UNSUPPORTED)
    if values.get("max_tokens") is not None and values.get("max_completion_tokens") is not None:
        raise InvalidRequest("max_tokens", values["max_tokens"], "must not be set with max_completion_tokens")
    request = pb.GenerateRequest()
    messages = add_messages(request, values.get("messages"), "messages", has_calls=True)
    wants_logprobs = take(values, "logprobs", bool, "true or false") or False
    num_top: int | None = take(values, "top_logprobs", int, "an integer")
    if num_top is not None and not wants_logprobs:
        raise InvalidRequest("top_logprobs", num_top, "means nothing without logprobs")
    if wants_logprobs:
        num_top = num_top or 0
        set_field(request, "response.logprobs", "top_logprobs", num_top)
    asked = replace(
        _finish(request, values, CHAT_PATHS, num_top),
        tools=decode_tools(values, is_nested=True),
        thinking=decode_thinking(values, _EFFORT, values.get(_EFFORT)),
    )
    return with_tools(asked, messages)


def decode_completion(values: Mapping[str, Any]) -> Asked:
    """A completion of a prompt, or an encoder-decoder's transformation of it.

    Raises:
        InvalidRequest, UnsupportedFeature: naming the first field that is wrong.
    """
    neutral = {"echo": (False,), "best_of": (_count(values),)}
    refuse_others(values, {*PATHS, *_OWN, *LABELS, "prompt"}, neutral, (*_UNSUPPORTED, *_NOT_OF_COMPLETIONS))
    request = pb.GenerateRequest()
    _add_prompt(request, values.get("prompt"))
    num_top: int | None = take(values, "logprobs", int, "an integer")
    if num_top is not None:
        set_field(request, "response.logprobs", "logprobs", num_top)
    return _finish(request, values, PATHS, num_top)


def with_tools(asked: Asked, messages: tuple[Message, ...]) -> Asked:
    """The request with its tools, and its messages if these or their calls are more than gRPC's message has."""
    if asked.tools is not None:
        if asked.names:
            raise UnsupportedFeature(asked.names["structured_output"], "is not supported with tools that may be called")
        asked = replace(asked, names={"structured_output": "tools", "structured_output.grammar": "tools"})
    has_calls = any(message.tool_calls or message.tool_call_id for message in messages)
    has_more = has_calls or asked.tools is not None or asked.thinking is not None
    return replace(asked, messages=messages) if has_more else asked


def _count(values: Mapping[str, Any]) -> Any:
    return 1 if values.get("n") is None else values["n"]


def _finish(
    request: pb.GenerateRequest, values: Mapping[str, Any], paths: Mapping[str, str], num_top: int | None
) -> Asked:
    set_fields(request, values, paths)
    take_labels(values)
    is_streamed = take(values, "stream", bool, "true or false") or False
    options = take(values, "stream_options", dict, "an object") or {}
    if options and not is_streamed:
        raise InvalidRequest("stream_options", options, "means nothing without stream")
    # Padding against observers of lengths: none is sent.
    usages = ("include_usage", "continuous_usage_stats")
    refuse_others(options, usages, {"include_obfuscation": (False,)}, (), "stream_options")
    includes, continues = (take(options, name, bool, "true or false") or False for name in usages)
    if continues and not includes:
        raise InvalidRequest("stream_options.continuous_usage_stats", continues, "means nothing without include_usage")
    return Asked(
        request=request,
        is_streamed=is_streamed,
        includes_usage=includes,
        continues_usage=continues,
        returns_token_ids=take(values, "return_token_ids", bool, "true or false") or False,
        num_top=num_top,
        names=set_form(request, values, "response_format", values.get("response_format")),
    )


def check_count(messages: list[Any], name: str) -> None:
    """Raises InvalidRequest for more messages than a conversation may have."""
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(name, f"{len(messages)} entries", f"must have at most {MAX_MESSAGES}")


def take_labels(values: Mapping[str, Any]) -> None:
    """Checks the labels.

    Raises:
        InvalidRequest: naming the first that is wrong.
    """
    for name in LABELS:
        if len(take(values, name, str, "a string") or "") > MAX_LABEL:
            raise InvalidRequest(name, f"{len(values[name])} characters", f"must have at most {MAX_LABEL}")


def add_messages(request: pb.GenerateRequest, value: Any, name: str, *, has_calls: bool = False) -> tuple[Message, ...]:
    """Adds a conversation; each content is text, or parts of it that are joined by line breaks, as vLLM does.

    Returns:
        The messages with their calls of tools, if they may have any.
    """
    messages = []
    if not isinstance(value, list) or not value:
        raise InvalidRequest(name, value, "must be a list of at least 1 message")
    check_count(value, name)
    arguments = Arguments()
    for index, each in enumerate(value):
        place = f"{name}[{index}]"
        if not isinstance(each, dict):
            raise InvalidRequest(place, each, "must be an object")
        own = _FIELDS_OF_CALLS.get(str(each.get("role")), ()) if has_calls else ()
        refuse_others(each, ("role", "content", *own), {}, _NOT_OF_MESSAGES, place)
        calls = decode_calls(each, place, arguments) if "tool_calls" in own else ()
        message = request.chat.messages.add()
        set_text(message, "role", each.get("role"), f"{place}.role")
        content = text_of(each.get("content"), f"{place}.content")
        thoughts = take(each, THOUGHTS, str, "a string") if THOUGHTS in own else None
        if content is None and (calls or thoughts):
            content = ""
        if thoughts and isinstance(content, str):
            content = with_thoughts(thoughts, content)
        set_text(message, "content", content, f"{place}.content")
        call_id = (take(each, "tool_call_id", str, "a string") or "") if "tool_call_id" in own else ""
        messages.append(Message(message.role, message.content, calls, call_id))
    return tuple(messages)


def text_of(content: Any, place: str, kinds: tuple[str, ...] = ("text",)) -> Any:
    """The text of a message: itself, or its parts of these types."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        where = f"{place}[{index}]"
        if not isinstance(part, dict):
            raise InvalidRequest(where, part, "must be an object")
        if part.get("type") not in kinds:
            raise UnsupportedFeature(f"{where}.type", f"must be {' or '.join(kinds)}, no other is supported")
        # An answer comes back as it was given.
        own = ("type", "text", "logprobs") if part["type"] == "output_text" else ("type", "text")
        refuse_others(part, own, {"annotations": ([],), "logprobs": ([],)}, (), where)
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}.text", part.get("text"), "must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _add_prompt(request: pb.GenerateRequest, value: Any) -> None:
    """One text, or the ids of one; also as the only entry of a list."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        (value,) = value
    if isinstance(value, str):
        if not value:
            raise InvalidRequest("prompt", value, "must not be empty")
        set_text(request, "text", value, "prompt")
    elif isinstance(value, list) and value and isinstance(value[0], str | list):
        raise UnsupportedFeature("prompt", "must be one prompt, several are not supported: send a request for each")
    elif isinstance(value, list) and value:
        set_field(request, "token_ids.ids", "prompt", value)
    else:
        raise InvalidRequest("prompt", value, "must be a text or token ids, not empty")
