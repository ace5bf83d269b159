"""`/v1/responses` without state: nothing is stored, so a conversation is sent whole with each request."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from model.spec.chat import ROLES, Message
from onward.v1 import generation_pb2 as pb
from service.engine.types import FinishReason
from service.errors import InvalidRequest, UnsupportedFeature
from service.generator import Finished, Outcome, Part, Piece
from service.transport.http.answers import Answer, Values, content_logprobs, usage
from service.transport.http.exchange import encode
from service.transport.http.fields import PATHS, refuse_others, set_field, set_fields, set_text, take
from service.transport.http.forms import VLLM, set_form
from service.transport.http.requests import LABELS, MAX_LABEL, Asked, check_count, take_labels, text_of, with_tools
from service.transport.http.thoughts import KWARGS, decode_thinking
from service.transport.http.tools import FIELDS as TOOL_FIELDS
from service.transport.http.tools import Arguments, CallParser, decode_tools, described_call
from service.transport.http.turns import Turns

LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""What `include` may name. Thoughts come back to us as the text that they are: nothing is encrypted."""
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
_OWN = (
    "client_metadata",
    "input",
    "instructions",
    "stream",
    "stream_options",
    "include",
    "top_logprobs",
    "metadata",
    "text",
    "reasoning",
    KWARGS,
    *VLLM,
    *TOOL_FIELDS,
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "truncation": ("disabled",),
}
_UNSUPPORTED = (
    "access_programs", "background_options", "context_management", "conversation", "image", "max_tool_calls",
    "moderation", "previous_response_id", "prompt", "prompt_cache_options", "prompt_cache_retention",
)  # fmt: skip
_TEXTS = ("input_text", "output_text", "text")
_THOUGHTS = "reasoning_text"
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
    messages = _add_input(request, values.get("input"))
    if values.get("instructions") is not None:
        messages.insert(0, Message("system", values["instructions"]))
    num_top = _num_top(values)
    if num_top is not None:
        set_field(request, "response.logprobs", "top_logprobs", num_top)
    set_fields(request, values, RESPONSE_PATHS)
    take_labels(values)
    take(values, "client_metadata", dict, "an object")  # Codex's labels
    is_streamed = take(values, "stream", bool, "true or false") or False
    options = take(values, "stream_options", dict, "an object") or {}
    refuse_others(options, (), {"include_obfuscation": (False,)}, (), "stream_options")
    text = take(values, "text", dict, "an object") or {}
    refuse_others(text, ("format",), {}, ("verbosity",), "text")
    names = set_form(request, values, "text.format", text.get("format"))
    reasoning = take(values, "reasoning", dict, "an object") or {}
    refuse_others(reasoning, ("effort",), {"summary": ("auto",)}, ("generate_summary",), "reasoning")
    asked = Asked(
        request=request,
        is_streamed=is_streamed,
        num_top=num_top,
        echoed=_echoed(values),
        names=names,
        tools=decode_tools(values, is_nested=False),
        thinking=decode_thinking(values, "reasoning.effort", reasoning.get("effort")),
    )
    return with_tools(asked, tuple(messages))


def _num_top(values: Mapping[str, Any]) -> int | None:
    include = take(values, "include", list, "a list") or []
    for each in include:
        if each not in _INCLUDED:
            raise UnsupportedFeature("include", f"has {' and '.join(_INCLUDED)} alone")
    num_top: int | None = take(values, "top_logprobs", int, "an integer")
    if num_top is not None and LOGPROBS not in include:
        raise InvalidRequest("top_logprobs", num_top, f"means nothing unless include has {LOGPROBS}")
    return (num_top or 0) if LOGPROBS in include else None


def _echoed(values: Mapping[str, Any]) -> Values:
    metadata = take(values, "metadata", dict, "an object") or {}
    texts = [*metadata, *metadata.values()]
    if len(metadata) > _MAX_METADATA or not all(isinstance(each, str) and len(each) <= MAX_LABEL for each in texts):
        limit = f"must have at most {_MAX_METADATA} entries, all strings of at most {MAX_LABEL} characters"
        raise InvalidRequest("metadata", metadata, limit)
    names = ("instructions", "max_output_tokens", "reasoning", *LABELS)
    return {**{name: values.get(name) for name in names}, "metadata": metadata, **_forms(values)}


def _forms(values: Mapping[str, Any]) -> Values:
    """The form and the tools that were asked for."""
    text = {"text": values["text"]} if (values.get("text") or {}).get("format") else {}
    if not values.get("tools"):
        return text
    defaults = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    return text | {name: default if values.get(name) is None else values[name] for name, default in defaults.items()}


def _add_input(request: pb.GenerateRequest, value: Any) -> list[Message]:
    """A text, or messages, thoughts, calls of tools and their results; returns them all as messages."""
    if isinstance(value, str):
        set_text(request.chat.messages.add(role="user"), "content", value, "input")
        return [Message("user", value)]
    if not isinstance(value, list) or not value:
        raise InvalidRequest("input", value, "must be a text, or a list of at least 1 message")
    check_count(value, "input")
    turns, arguments = Turns(request), Arguments()
    for index, each in enumerate(value):
        place = f"input[{index}]"
        if not isinstance(each, dict):
            raise InvalidRequest(place, each, "must be an object")
        kind = "message" if each.get("type") is None else each["type"]
        if kind == "reasoning":
            refuse_others(each, ("type", "id", "content", "status"), {"summary": ([],)}, ("encrypted_content",), place)
            thoughts = "" if each.get("content") is None else text_of(each["content"], f"{place}.content", (_THOUGHTS,))
            message = pb.ChatMessage()
            set_text(message, "content", thoughts, f"{place}.content")
            turns.add_thoughts(message.content)
            continue
        if kind == "function_call":
            refuse_others(each, ("type", "id", "call_id", "name", "arguments", "status"), {}, (), place)
            turns.add_call(described_call(each.get("call_id"), each, place, place, arguments))
            continue
        if kind == "function_call_output":
            refuse_others(each, ("type", "id", "call_id", "output", "status"), {}, (), place)
            message = pb.ChatMessage(role="tool")
            set_text(message, "content", text_of(each.get("output"), f"{place}.output", _TEXTS), f"{place}.output")
            turns.add(message, take(each, "call_id", str, "a string") or "")
            continue
        if kind != "message":
            kinds = "message, reasoning, function_call or function_call_output"
            raise UnsupportedFeature(f"{place}.type", f"must be {kinds}")
        # Answers come back as they were given.
        refuse_others(each, ("type", "role", "content", "id", "status"), {}, ("phase",), place)
        if each.get("role") not in ROLES:
            raise InvalidRequest(f"{place}.role", each.get("role"), f"must be one of {', '.join(ROLES)}")
        message = pb.ChatMessage(role=each["role"])
        set_text(message, "content", text_of(each.get("content"), f"{place}.content", _TEXTS), f"{place}.content")
        turns.add(message)
    return turns.messages()


class ResponseAnswer(Answer):
    """A response: thoughts, a message and calls of tools, each if there are any; as a stream, its events."""

    prefix, describes_text_alone = "resp_", True

    def chunks(self, part: Part) -> Iterator[Values]:
        """The events for one part; each has its number, and a name as its type."""
        for event in self._events(part):
            yield {**event, "sequence_number": self._num_events}
            self._num_events += 1

    def encode(self, value: Values) -> bytes:
        """Log-probabilities, which up to four events have, are encoded once."""
        data = super().encode(value)
        return data.replace(encode(self._mark), b"[%s]" % b",".join(self._marked)) if self._marked else data

    def failed(self, error: Mapping[str, Any]) -> Iterator[Values]:
        """The last event of a stream that an error ends: Codex reads none without a type."""
        described = {name: error[name] for name in ("code", "message")}
        response = {**self._response("failed"), "error": described}
        yield {"type": "response.failed", "response": response, "sequence_number": self._num_events}

    def whole(self, parts: Sequence[Part]) -> Values:
        """The response from all parts of a request."""
        for part in parts:
            self._take(part)
        return self._response(self._status)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._num_events = self._num_dropped = self._num_sent = 0
        self._thought_texts: list[str] = []
        self._texts: list[str] = []
        # Of the text's tokens, encoded; of all tokens until it is known which these are.
        self._text_logprobs: list[bytes] = []
        # What stands for those of an event until it is encoded: no client can write it.
        self._mark, self._marked = uuid4().hex, list[bytes]()
        self._status = "in_progress"
        self._ended_by_deadline = False
        self._usage: Values | None = None
        self._parser: CallParser | None = None
        self._calls: list[Values] = []
        # Whether the events of thoughts and of a message have begun; those of calls follow them.
        self._has_thoughts = self._is_thinking = self._has_message = False

    def _take(self, part: Part) -> None:
        """Adds a part to the response."""
        match part:
            case Piece():
                num_before = len(self._text_logprobs)
                self._count(0, part.token_ids)
                if self._may_think and self._thinking(0).is_counting and self._thinking(0).num_tokens:
                    self._num_dropped += len(self._text_logprobs) + len(part.logprobs)
                    self._text_logprobs.clear()
                elif part.logprobs and not self._calls:
                    self._text_logprobs += map(encode, content_logprobs(self._tokenizer, part.token_ids, part.logprobs))
                self.num_repeated_bytes += len(part.text) + sum(map(len, self._text_logprobs[num_before:]))
                self._add(part.text)
            case Finished():
                self._add("", is_last=True)
                self._ended_by_deadline = part.finish_reason is FinishReason.DEADLINE
                is_whole = part.finish_reason in (FinishReason.END_OF_SEQUENCE, FinishReason.STOP)
                # A stop text may have cut the last call.
                is_whole = is_whole and not (self._parser is not None and self._parser.is_cut)
                self._status = "completed" if is_whole else "incomplete"
            case Outcome():
                counted = usage(part)
                self._usage = {
                    "input_tokens": counted["prompt_tokens"],
                    "input_tokens_details": counted["prompt_tokens_details"],
                    "output_tokens": counted["completion_tokens"],
                    "output_tokens_details": self._thinking_usage(),
                    "total_tokens": counted["total_tokens"],
                }

    def _add(self, text: str, *, is_last: bool = False) -> None:
        """Adds an output's next part to its thoughts, its text and its calls."""
        if self._may_think:
            thoughts, text = self._thinking(0).take(text, is_last=is_last)
            self._thought_texts.append(thoughts)
        if self._asked.tools is not None:
            text = self._take_calls(text, is_last=is_last)
        self._texts.append(text)

    def _take_calls(self, text: str, *, is_last: bool) -> str:
        """Adds calls to those so far; returns the rest."""
        if self._parser is None:
            self._parser = CallParser(is_tagged=self._has_tagged_calls, call_id=f"call_{self.request_id}")
        content, deltas = self._parser.take(text, is_last=is_last)
        for delta in deltas:
            function = delta["function"]
            if delta["index"] == len(self._calls):
                item_id = f"fc_{self.request_id}_{delta['index']}"
                self._calls.append({"id": item_id, "type": "function_call", "call_id": delta["id"], **function})
            else:
                self._calls[-1]["arguments"] += function["arguments"]
        return content

    def _events(self, part: Part) -> Iterator[Values]:
        if isinstance(part, Piece | Finished) and not self._begun:
            self._begun.add(0)
            yield {"type": "response.created", "response": self._response("in_progress")}
            yield {"type": "response.in_progress", "response": self._response("in_progress")}
        num_thoughts, num_texts = len(self._thought_texts), len(self._texts)
        lengths = [len(call["arguments"]) for call in self._calls]
        self._take(part)
        thoughts, text = "".join(self._thought_texts[num_thoughts:]), "".join(self._texts[num_texts:])
        if thoughts:
            yield from self._thought_events(thoughts)
        is_end = isinstance(part, Finished)
        if self._is_thinking and (text or len(self._calls) > len(lengths) or is_end):
            yield from self._thoughts_done()
        has_text = text or (self._asked.tools is None and not self._may_think)
        is_empty = is_end and not self._calls and not self._has_thoughts
        if isinstance(part, Piece | Finished) and (has_text or is_empty) and not self._has_message:
            self._has_message = True
            empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._item_begun(self._item("in_progress"), int(self._has_thoughts), empty)
        new = self._new_logprobs() if self._has_message else []
        if text or new:
            at = {"item_id": self._item_id, "output_index": int(self._has_thoughts), "content_index": 0}
            yield {"type": "response.output_text.delta", **at, "delta": text, "logprobs": new}
        for index in range(max(len(lengths) - 1, 0), len(self._calls)):
            yield from self._call_events(index, lengths[index] if index < len(lengths) else None)
        match part:
            case Finished():
                if self._calls:
                    yield from self._call_done(len(self._calls) - 1)
                elif self._has_message:
                    yield from self._message_done(self._status)
            case Outcome():
                yield {"type": f"response.{self._status}", "response": self._response(self._status)}

    def _item_begun(self, item: Values, index: int, empty: Values) -> Iterator[Values]:
        """An item of one part, which is empty so far."""
        yield {"type": "response.output_item.added", "output_index": index, "item": {**item, "content": []}}
        at = {"item_id": item["id"], "output_index": index, "content_index": 0}
        yield {"type": "response.content_part.added", **at, "part": empty}

    def _thought_events(self, thoughts: str) -> Iterator[Values]:
        if not self._has_thoughts:
            self._has_thoughts = self._is_thinking = True
            yield from self._item_begun(self._thought_item("in_progress"), 0, {"type": _THOUGHTS, "text": ""})
        at = {"item_id": self._thought_id, "output_index": 0, "content_index": 0}
        yield {"type": "response.reasoning_text.delta", **at, "delta": thoughts}

    def _thoughts_done(self) -> Iterator[Values]:
        self._is_thinking = False
        item = self._thought_item(self._status_of_thoughts)
        at, (part,) = {"item_id": self._thought_id, "output_index": 0, "content_index": 0}, item["content"]
        yield {"type": "response.reasoning_text.done", **at, "text": part["text"]}
        yield {"type": "response.content_part.done", **at, "part": part}
        yield {"type": "response.output_item.done", "output_index": 0, "item": item}

    @property
    def _status_of_thoughts(self) -> str:
        return "completed" if self._thinking(0).has_ended else self._status

    @property
    def _thought_id(self) -> str:
        return f"rs_{self.request_id}"

    def _thought_item(self, status: str) -> Values:
        content = [{"type": _THOUGHTS, "text": "".join(self._thought_texts)}]
        return {"id": self._thought_id, "type": "reasoning", "summary": [], "content": content, "status": status}

    def _new_logprobs(self) -> str | list[bytes]:
        """Those of the text's tokens that were not sent."""
        begin, self._num_sent = max(self._num_sent, self._num_thought_tokens), len(self._text_logprobs)
        return self._marking(begin)

    def _marking(self, begin: int) -> str | list[bytes]:
        """The mark of the text's log-probabilities from there on; empty if there are none."""
        self._marked = self._text_logprobs[begin:]
        return self._mark if self._marked else []

    @property
    def _num_thought_tokens(self) -> int:
        return max(self._thinking(0).num_tokens - self._num_dropped, 0) if self._may_think else 0

    def _call_events(self, index: int, length: int | None) -> Iterator[Values]:
        """What is new of a call, of whose arguments `length` characters were sent; None of a new one."""
        if length is None:
            if index:
                yield from self._call_done(index - 1)
            elif self._has_message:
                yield from self._message_done("completed")
            item = {**self._calls[index], "arguments": "", "status": "in_progress"}
            yield {"type": "response.output_item.added", "output_index": self._place(index), "item": item}
        if delta := self._calls[index]["arguments"][length or 0 :]:
            at = {"item_id": self._calls[index]["id"], "output_index": self._place(index)}
            yield {"type": "response.function_call_arguments.delta", **at, "delta": delta}

    def _call_done(self, index: int) -> Iterator[Values]:
        call, at = self._call_items()[index], self._place(index)
        done = {"item_id": call["id"], "output_index": at, "name": call["name"], "arguments": call["arguments"]}
        yield {"type": "response.function_call_arguments.done", **done}
        yield {"type": "response.output_item.done", "output_index": at, "item": call}

    def _place(self, index: int) -> int:
        """A call's, among all items."""
        return self._has_thoughts + self._has_message + index

    def _message_done(self, status: str) -> Iterator[Values]:
        index = int(self._has_thoughts)
        at, part = {"item_id": self._item_id, "output_index": index, "content_index": 0}, self._part()
        yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": part["logprobs"]}
        yield {"type": "response.content_part.done", **at, "part": part}
        yield {"type": "response.output_item.done", "output_index": index, "item": self._item(status)}

    def _call_items(self) -> list[Values]:
        """The calls; the last is incomplete where it was cut."""
        is_cut = self._status == "incomplete" and self._parser is not None and not self._parser.is_whole
        last = len(self._calls) - 1
        return [
            {**call, "status": "incomplete" if is_cut and index == last else "completed"}
            for index, call in enumerate(self._calls)
        ]

    def _items(self, status: str) -> list[Values]:
        calls = self._call_items()
        thoughts = [self._thought_item(self._status_of_thoughts)] if any(self._thought_texts) else []
        has_message = any(self._texts) or not (calls or thoughts)
        return [*thoughts, *([self._item("completed" if calls else status)] if has_message else []), *calls]

    @property
    def _item_id(self) -> str:
        return f"msg_{self.request_id}"

    def _part(self) -> Values:
        logprobs = self._marking(self._num_thought_tokens)
        return {"type": "output_text", "text": "".join(self._texts), "annotations": [], "logprobs": logprobs}

    def _item(self, status: str) -> Values:
        content = [self._part()]
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str) -> Values:
        is_cut = status == "incomplete"
        return {
            "id": f"{self.prefix}{self.request_id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "model": self.model,
            "output": [] if status in ("in_progress", "failed") else self._items(status),
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
            "background": False,
            "service_tier": "default",
            "max_tool_calls": None,
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "presence_penalty": self._sampling.presence_penalty,
            "frequency_penalty": self._sampling.frequency_penalty,
            "top_logprobs": self._asked.num_top or 0,
            **({"ended_by_deadline": True} if self._ended_by_deadline else {}),
            **self._asked.echoed,
        }
