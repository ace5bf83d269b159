"""`/v1/responses` without state: nothing is stored, so a conversation is sent whole with each request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from model.spec.chat import ROLES
from onward.v1 import generation_pb2 as pb
from service.engine.types import FinishReason
from service.errors import InvalidRequest, UnsupportedFeature
from service.generator import Finished, Outcome, Part, Piece
from service.transport.http.answers import Answer, Values, content_logprobs, usage
from service.transport.http.fields import PATHS, refuse_others, set_field, set_fields, set_text, take
from service.transport.http.forms import VLLM, set_form
from service.transport.http.requests import LABELS, Asked, text_of

LOGPROBS = "message.output_text.logprobs"
"""What `include` may name."""
# A response has one output.
_NOT_OF_RESPONSES = (
    "n",
    "max_tokens",
    "cost",
    *(name for name, path in PATHS.items() if path.startswith("beam_search.")),
)
RESPONSE_PATHS = {
    **{name: path for name, path in PATHS.items() if name not in _NOT_OF_RESPONSES},
    "max_output_tokens": "stopping.max_tokens",
}
_OWN = ("input", "instructions", "stream", "stream_options", "include", "top_logprobs", "metadata", "text", *VLLM)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "background": (False,),
    "parallel_tool_calls": (True, False),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "truncation": ("disabled",),
}
_UNSUPPORTED = (
    "access_programs", "background_options", "context_management", "conversation", "image", "max_tool_calls",
    "moderation", "previous_response_id", "prompt", "prompt_cache_options", "prompt_cache_retention", "reasoning",
)  # fmt: skip
_TEXTS = ("input_text", "output_text", "text")
_MAX_METADATA = 16


def decode_response(values: Mapping[str, Any]) -> Asked:
    """A request for a response.

    Raises:
        InvalidRequest, UnsupportedFeature: naming the first field that is wrong.
    """
    refuse_others(values, {*RESPONSE_PATHS, *_OWN, *LABELS}, _NEUTRAL, _UNSUPPORTED)
    request = pb.GenerateRequest()
    if values.get("instructions") is not None:
        message = request.chat.messages.add(role="system")
        set_text(message, "content", values["instructions"], "instructions")
    _add_input(request, values.get("input"))
    num_top = _num_top(values)
    if num_top is not None:
        set_field(request, "response.logprobs", "top_logprobs", num_top)
    set_fields(request, values, RESPONSE_PATHS)
    for name in LABELS:
        take(values, name, str, "a string")
    is_streamed = take(values, "stream", bool, "true or false") or False
    options = take(values, "stream_options", dict, "an object") or {}
    refuse_others(options, (), {"include_obfuscation": (False,)}, (), "stream_options")
    text = take(values, "text", dict, "an object") or {}
    refuse_others(text, ("format",), {}, ("verbosity",), "text")
    names = set_form(request, values, "text.format", text.get("format"))
    return Asked(request=request, is_streamed=is_streamed, num_top=num_top, echoed=_echoed(values), names=names)


def _num_top(values: Mapping[str, Any]) -> int | None:
    include = take(values, "include", list, "a list") or []
    for each in include:
        if each != LOGPROBS:
            raise UnsupportedFeature("include", f"has {LOGPROBS} alone")
    num_top: int | None = take(values, "top_logprobs", int, "an integer")
    if num_top is not None and not include:
        raise InvalidRequest("top_logprobs", num_top, f"means nothing unless include has {LOGPROBS}")
    return (num_top or 0) if include else None


def _echoed(values: Mapping[str, Any]) -> Values:
    metadata = take(values, "metadata", dict, "an object") or {}
    if len(metadata) > _MAX_METADATA or not all(isinstance(each, str) for each in metadata.values()):
        raise InvalidRequest("metadata", metadata, f"must have at most {_MAX_METADATA} entries, all strings")
    names = ("instructions", "max_output_tokens", "temperature", "top_p", *LABELS)
    return {**{name: values.get(name) for name in names}, "metadata": metadata, **_text(values)}


def _text(values: Mapping[str, Any]) -> Values:
    """The form that was asked for."""
    return {"text": values["text"]} if (values.get("text") or {}).get("format") else {}


def _add_input(request: pb.GenerateRequest, value: Any) -> None:
    """A text, or messages."""
    if isinstance(value, str):
        set_text(request.chat.messages.add(role="user"), "content", value, "input")
        return
    if not isinstance(value, list) or not value:
        raise InvalidRequest("input", value, "must be a text, or a list of at least 1 message")
    for index, each in enumerate(value):
        place = f"input[{index}]"
        if not isinstance(each, dict):
            raise InvalidRequest(place, each, "must be an object")
        if each.get("type", "message") != "message":
            raise UnsupportedFeature(f"{place}.type", "must be message, no other is supported")
        # Answers come back as they were given.
        refuse_others(each, ("type", "role", "content", "id", "status"), {}, ("phase",), place)
        if each.get("role") not in ROLES:
            raise InvalidRequest(f"{place}.role", each.get("role"), f"must be one of {', '.join(ROLES)}")
        message = request.chat.messages.add(role=each["role"])
        set_text(message, "content", text_of(each.get("content"), f"{place}.content", _TEXTS), f"{place}.content")


class ResponseAnswer(Answer):
    """A response with one message; as a stream, its events."""

    prefix = "resp_"

    def chunks(self, part: Part) -> Iterator[Values]:
        """The events for one part; each has its number, and a name as its type."""
        for event in self._events(part):
            yield {**event, "sequence_number": self._num_events}
            self._num_events += 1

    def whole(self, parts: Sequence[Part]) -> Values:
        """The response from all parts of a request."""
        for part in parts:
            self._take(part)
        return self._response(self._status)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._num_events = 0
        self._texts: list[str] = []
        self._logprobs_so_far: list[Values] = []
        self._status = "in_progress"
        self._usage: Values | None = None

    def _take(self, part: Part) -> list[Values]:
        """Adds a part to the response; returns its new log-probabilities."""
        new: list[Values] = []
        match part:
            case Piece():
                self._texts.append(part.text)
                if part.logprobs:
                    new = content_logprobs(self._tokenizer, part.token_ids, part.logprobs)
                    self._logprobs_so_far += new
            case Finished():
                is_whole = part.finish_reason in (FinishReason.END_OF_SEQUENCE, FinishReason.STOP)
                self._status = "completed" if is_whole else "incomplete"
            case Outcome():
                counted = usage(part)
                self._usage = {
                    "input_tokens": counted["prompt_tokens"],
                    "input_tokens_details": counted["prompt_tokens_details"],
                    "output_tokens": counted["completion_tokens"],
                    "output_tokens_details": {"reasoning_tokens": 0},
                    "total_tokens": counted["total_tokens"],
                }
        return new

    def _events(self, part: Part) -> Iterator[Values]:
        at = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        if isinstance(part, Piece | Finished) and not self._begun:
            self._begun.add(0)
            yield {"type": "response.created", "response": self._response("in_progress")}
            yield {"type": "response.in_progress", "response": self._response("in_progress")}
            item = {**self._item("in_progress"), "content": []}
            yield {"type": "response.output_item.added", "output_index": 0, "item": item}
            yield {"type": "response.content_part.added", **at, "part": self._part()}
        new = self._take(part)
        match part:
            case Piece() if part.text or new:
                yield {"type": "response.output_text.delta", **at, "delta": part.text, "logprobs": new}
            case Finished():
                done = {"text": "".join(self._texts), "logprobs": self._logprobs_so_far}
                yield {"type": "response.output_text.done", **at, **done}
                yield {"type": "response.content_part.done", **at, "part": self._part()}
                item = self._item(self._status)
                yield {"type": "response.output_item.done", "output_index": 0, "item": item}
            case Outcome():
                yield {"type": f"response.{self._status}", "response": self._response(self._status)}

    @property
    def _item_id(self) -> str:
        return f"msg_{self.request_id}"

    def _part(self) -> Values:
        text, logprobs = "".join(self._texts), list(self._logprobs_so_far)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item(self, status: str) -> Values:
        content = [self._part()]
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str) -> Values:
        is_cut = status == "incomplete"
        return {
            "id": f"{self.prefix}{self.request_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self.model,
            "output": [] if status == "in_progress" else [self._item(status)],
            "usage": self._usage,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "previous_response_id": None,
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "store": False,
            **self._asked.echoed,
        }
