"""Tools in OpenAI's shape: what they ask of an answer, and the calls in it.

A call is text, as Hermes and Qwen write it, in tags where the model's template has them:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Bern"}}
    </tool_call>

A grammar made of the tools' schemas holds the model to it: from the beginning where a call is required, else from the
first tag on, ahead of which its text is free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from model.spec.chat import Chat, Message
from onward.v1 import generation_pb2 as pb
from service.errors import InvalidRequest, UnsupportedFeature
from service.process.grammar_check import find_keyword
from service.transport.http.bodies import MAX_SCHEMA_DEPTH, elements_of, loads, nests_deeper
from service.transport.http.fields import refuse_others, take

Values = dict[str, Any]

FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
_MAX_TOOLS = 128
# Of the arguments of all earlier calls: lists and objects, and what separates their entries.
_MAX_ELEMENTS = 16384
# Of the arguments of each.
_MAX_DEPTH = 64
# Of all of them as JSON: a response repeats those, too, that are in no prompt as none may be called.
_MAX_TOOLS_BYTES = 512 << 10
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CALL_TAG, _END_TAG = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{"name": "([a-zA-Z0-9_-]+)", "arguments": ')
# What a schema says of the compiler may loosen the schema itself, or spell arguments as what is no JSON.
_STRICT = {"lenient": False, "coerce_one_of": False}
_SPACED = "whitespace_flexible"
# The grammar's lines ahead of the first function's schema.
_NUM_LINES = 2


@dataclass(frozen=True, slots=True)
class Function:
    """A tool; `place` is where the request has its schema."""

    name: str
    described: Values
    place: str

    @property
    def schema(self) -> Values:
        """What arguments must be: an object, without properties where the request names none."""
        own = self.described.get("parameters") or {"properties": {}, "additionalProperties": False}
        guidance = own.get("x-guidance")
        kept = {_SPACED: guidance[_SPACED]} if isinstance(guidance, dict) and _SPACED in guidance else {}
        return {**own, "type": "object", "x-guidance": kept | _STRICT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a request offers; `callable_names` are those that its choice leaves."""

    functions: tuple[Function, ...]
    callable_names: tuple[str, ...]
    must_call: bool
    is_parallel: bool

    @property
    def for_template(self) -> tuple[Values, ...]:
        """As templates have them from Hugging Face."""
        return tuple({"type": "function", "function": each.described} for each in self.functions)

    @property
    def _callable(self) -> list[Function]:
        return [each for each in self.functions if each.name in self.callable_names]

    def constrain(self, request: pb.GenerateRequest, chat: Chat | None) -> None:
        """Sets the grammar of the answer.

        Raises:
            UnsupportedFeature: when the template knows no tools, or no calls that can be distinguished from text.
        """
        if chat is None:
            return  # refused with the conversation
        if not chat.has_tools:
            raise UnsupportedFeature("tools", "is not supported: the model's template has none")
        if not chat.has_tagged_calls and not self.must_call:
            why = f"is not supported as auto: the model's template has no calls in {CALL_TAG} of text; required is"
            raise UnsupportedFeature("tool_choice", why)
        request.structured_output.grammar = self.grammar(is_tagged=chat.has_tagged_calls)

    def grammar(self, *, is_tagged: bool) -> str:
        """In Lark's notation. The functions' schemas have a line each, by which `locating` finds them."""
        opening, tag, end = ("\n{", CALL_TAG, "}\n" + _END_TAG) if is_tagged else ("{", "", "}")
        first = "opening" if not self.must_call else json.dumps(tag) if tag else ""
        more = f"({json.dumps(chr(10) + tag)} call)*" if self.is_parallel and is_tagged else ""
        start = f"{first} call {more}".strip()
        functions = self._callable
        lines = [f"start: {start}" if self.must_call else f"start: TEXT | {start}"]
        lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
        lines += [f"args_{index}: %json {json.dumps(each.schema)}" for index, each in enumerate(functions)]
        for index, each in enumerate(functions):
            head = f'{opening}"name": {json.dumps(each.name)}, "arguments": '
            lines.append(f"call_{index}: {json.dumps(head)} args_{index} {json.dumps(end)}")
        if not self.must_call:
            lines.append("TEXT: /(?s:.*)/")
            lines.append(f"opening[lazy]: /(?s:.*){CALL_TAG}/")
        return "\n".join(lines)

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Errors of the grammar name the function's schema, and the keyword in it."""
        try:
            yield
        except InvalidRequest as error:
            line = re.match(r"at (\d+)\(", error.limit)
            index = int(line[1]) - 1 - _NUM_LINES if line else -1
            if error.field != "structured_output.grammar" or not 0 <= index < len(self._callable):
                raise
            function = self._callable[index]
            why = error.limit.partition("JSON schema: ")[2].partition(" 1 | ")[0] or error.limit
            pointer = find_keyword(json.dumps(function.schema), why)
            raise InvalidRequest(f"{function.place}{pointer}", pointer.rpartition("/")[2], why) from error


def decode_tools(values: Mapping[str, Any], *, is_nested: bool) -> Tools | None:
    """The tools of a request, None where it has none or may not call them.

    Args:
        values: of the request.
        is_nested: whether functions are objects of their own, as in chat, or spread over their tool, as in responses.

    Raises:
        InvalidRequest, UnsupportedFeature: naming the first field that is wrong.
    """
    listed = take(values, "tools", list, "a list") or []
    choice = "auto" if values.get("tool_choice") is None else values["tool_choice"]
    is_parallel = take(values, "parallel_tool_calls", bool, "true or false")
    if not listed:
        if choice not in ("none", "auto"):
            raise InvalidRequest("tool_choice", choice, "means nothing without tools")
        return None
    if len(listed) > _MAX_TOOLS:
        raise InvalidRequest("tools", len(listed), f"must have at most {_MAX_TOOLS} entries")
    functions = tuple(_function(each, f"tools[{index}]", is_nested=is_nested) for index, each in enumerate(listed))
    if (num_bytes := len(json.dumps(listed))) > _MAX_TOOLS_BYTES:
        raise InvalidRequest("tools", f"{num_bytes} bytes", f"must have at most {_MAX_TOOLS_BYTES} as JSON")
    names = [each.name for each in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequest(functions[index].place.replace("parameters", "name"), name, "must be unique")
    chosen = tuple(names)
    if isinstance(choice, dict):
        chosen = (_chosen(choice, names, is_nested=is_nested),)
    elif choice not in ("none", "auto", "required"):
        raise InvalidRequest("tool_choice", choice, "must be none, auto, required, or an object that names a function")
    if choice == "none":
        return None
    return Tools(
        functions=functions,
        callable_names=chosen,
        must_call=choice != "auto",
        is_parallel=is_parallel is not False and not isinstance(choice, dict),
    )


def _chosen(choice: Values, names: list[str], *, is_nested: bool) -> str:
    place, known = "tool_choice", ("type", "function" if is_nested else "name")
    if choice.get("type") != "function":
        raise UnsupportedFeature(f"{place}.type", "must be function, no other is supported")
    refuse_others(choice, known, {}, (), place)
    if is_nested:
        choice, place = take(choice, "function", dict, "an object") or {}, f"{place}.function"
        refuse_others(choice, ("name",), {}, (), place)
    if choice.get("name") not in names:
        raise InvalidRequest(f"{place}.name", choice.get("name"), "must be the name of one of tools")
    name: str = choice["name"]
    return name


def _function(tool: Any, place: str, *, is_nested: bool) -> Function:
    if not isinstance(tool, dict):
        raise InvalidRequest(place, tool, "must be an object")
    if tool.get("type") != "function":
        raise UnsupportedFeature(f"{place}.type", "must be function, no other is supported")
    known = ("name", "description", "parameters", "strict")
    refuse_others(tool, ("type", "function") if is_nested else ("type", *known), {}, (), place)
    if is_nested:
        place = f"{place}.function"
        tool = tool.get("function")
        if not isinstance(tool, dict):
            raise InvalidRequest(place, tool, "must be an object")
        refuse_others(tool, known, {}, (), place)
    name, parameters = tool.get("name"), tool.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{place}.name", name, "must have from 1 to 64 letters, digits, _ and -")
    # Arguments follow the schema, whether the tool is strict or not.
    for field, kind, noun in (
        ("description", str, "a string"),
        ("parameters", dict, "an object"),
        ("strict", bool, "true or false"),
    ):
        if tool.get(field) is not None and type(tool[field]) is not kind:
            raise InvalidRequest(f"{place}.{field}", tool[field], f"must be {noun}")
    if parameters and parameters.get("type", "object") != "object":
        raise InvalidRequest(f"{place}.parameters.type", parameters["type"], "must be object")
    if nests_deeper(parameters, MAX_SCHEMA_DEPTH):
        raise InvalidRequest(f"{place}.parameters", "a schema", f"must nest at most {MAX_SCHEMA_DEPTH} deep")
    described = {"name": name, "description": tool.get("description") or "", "parameters": parameters or {}}
    return Function(name, described, f"{place}.parameters")


class Arguments:
    """Parses the arguments of a request's earlier calls: with a bounded number of elements, all together, and depth."""

    def __init__(self) -> None:
        self._num_left = _MAX_ELEMENTS

    def parse(self, text: Any, field: str) -> Values:
        """One call's.

        Raises:
            InvalidRequest: when it is not the text of a JSON object, or exceeds a bound.
        """
        self._num_left -= sum(elements_of(text.encode(errors="replace"))) if isinstance(text, str) else 0
        if self._num_left < 0:
            raise InvalidRequest(field, f"{len(text)} characters", f"must have at most {_MAX_ELEMENTS} elements in all")
        try:
            found = loads(text)
        except (TypeError, ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise InvalidRequest(field, text, "must be the text of a JSON object")
        if nests_deeper(found, _MAX_DEPTH):
            raise InvalidRequest(field, f"{len(text)} characters", f"must nest at most {_MAX_DEPTH} deep")
        return found


def decode_calls(message: Mapping[str, Any], place: str, arguments: Arguments) -> tuple[Values, ...]:
    """The calls of an assistant's earlier message, for the template: their arguments are objects there.

    Raises:
        InvalidRequest, UnsupportedFeature: naming the first field that is wrong.
    """
    calls = []
    for index, each in enumerate(take(message, "tool_calls", list, "a list") or []):
        where = f"{place}.tool_calls[{index}]"
        if not isinstance(each, dict):
            raise InvalidRequest(where, each, "must be an object")
        if each.get("type", "function") != "function":
            raise UnsupportedFeature(f"{where}.type", "must be function, no other is supported")
        refuse_others(each, ("id", "type", "function"), {}, ("index",), where)
        function = each.get("function")
        if not isinstance(function, dict):
            raise InvalidRequest(f"{where}.function", function, "must be an object")
        refuse_others(function, ("name", "arguments"), {}, (), f"{where}.function")
        calls.append(described_call(each.get("id"), function, where, f"{where}.function", arguments))
    return tuple(calls)


def described_call(call_id: Any, function: Mapping[str, Any], where: str, inner: str, arguments: Arguments) -> Values:
    """One earlier call as templates have it."""
    name = function.get("name")
    for field, value in ((f"{where}.id", call_id), (f"{inner}.name", name)):
        if not isinstance(value, str):
            raise InvalidRequest(field, value, "must be a string")
    parsed = arguments.parse(function.get("arguments"), f"{inner}.arguments")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed}}


def extra_bytes(tools: Tools | None, messages: tuple[Message, ...]) -> int:
    """The size of what a conversation has besides its messages' texts, as JSON."""
    calls = [
        (message.tool_call_id, message.tool_calls) for message in messages if message.tool_calls or message.tool_call_id
    ]
    described = [] if tools is None else tools.for_template
    return len(json.dumps([calls, described])) if calls or described else 0


class CallParser:
    """Splits an output, as it comes, into text and calls. `is_whole` is whether its last call has ended."""

    def __init__(self, *, is_tagged: bool, call_id: str) -> None:
        self._is_tagged = is_tagged
        self._call_id = call_id
        self._read = self._read_text if is_tagged else self._read_head
        self._rest = ""
        self._content = ""
        self._deltas: list[Values] = []
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.num_calls = 0
        self.is_whole = False

    def take(self, text: str, *, is_last: bool = False) -> tuple[str, list[Values]]:
        """New text of the answer, and what is new of its calls: `id` and `name` come with a call's first part."""
        self._rest += text
        self._content, self._deltas = "", []
        while self._read():
            pass
        if is_last and self._read == self._read_text and not self.num_calls:
            self._content, self._rest = self._content + self._rest, ""
        return self._content, self._deltas

    @property
    def is_cut(self) -> bool:
        """Whether a call has begun whose arguments have not ended."""
        in_head = self._read == self._read_head and (self._is_tagged or bool(self._rest))
        return in_head or self._read == self._read_arguments

    def _read_text(self) -> bool:
        text, tag, rest = self._rest.partition(CALL_TAG)
        if not tag:
            kept = next(size for size in range(len(CALL_TAG) - 1, -1, -1) if text.endswith(CALL_TAG[:size]))
            text, rest = text[: len(text) - kept], text[len(text) - kept :]
        # Between calls is a line break.
        self._content += "" if self.num_calls else text
        self._rest = rest
        if tag:
            self._read = self._read_head
        return bool(tag)

    def _read_head(self) -> bool:
        if (head := _HEAD.match(self._rest)) is None:
            return False
        self._rest = self._rest[head.end() :]
        call_id = f"{self._call_id}_{self.num_calls}"
        function = {"name": head[1], "arguments": ""}
        self._deltas.append({"index": self.num_calls, "id": call_id, "type": "function", "function": function})
        self.num_calls += 1
        self.is_whole = False
        self._read = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        """An object's end is where its braces are closed."""
        for at, character in enumerate(self._rest):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = character == "\\", character != '"'
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if character == "}" and not self._depth:
                    self._add_arguments(at + 1)
                    self._read = self._read_end
                    return True
        self._add_arguments(len(self._rest))
        return False

    def _add_arguments(self, count: int) -> None:
        text, self._rest = self._rest[:count], self._rest[count:]
        index = self.num_calls - 1
        if self._deltas and self._deltas[-1]["index"] == index:
            self._deltas[-1]["function"]["arguments"] += text
        elif text:
            self._deltas.append({"index": index, "function": {"arguments": text}})

    def _read_end(self) -> bool:
        end = "}\n" + _END_TAG if self._is_tagged else "}"
        if not self._rest.startswith(end):
            return False
        self._rest = self._rest[len(end) :]
        self.is_whole = True
        self._read = self._read_text
        return True
