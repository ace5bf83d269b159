"""Thoughts of a model that thinks: what is ahead of `</think>` in an output is `reasoning_content`, the rest `content`.

    <think>
    The user asks for a name.
    </think>

    Ada

The opening tag is the model's own or already stands in the prompt. Over gRPC the text is whole, tags included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.spec.chat import THOUGHTS, Chat
from service.errors import InvalidRequest, UnsupportedFeature
from service.transport.http.fields import refuse_others, take

FIELD = "reasoning_content"
KWARGS = "chat_template_kwargs"
_VARIABLE = f"{KWARGS}.enable_thinking"
_EFFORTS = {"none": False, "medium": True}
_TAG, _END_TAG = THOUGHTS
_SPACE = " \t\n\r\v\f"  # as of bytes


@dataclass(frozen=True, slots=True)
class ThinkingSwitch:
    """Whether an answer shall begin with thoughts, and the field that says so."""

    is_on: bool
    field: str

    def check(self, chat: Chat) -> None:
        """Refuses what the model's template cannot do, and its model does not do anyway.

        Raises:
            UnsupportedFeature: naming the field.
        """
        if chat.has_thinking_switch:
            return
        if self.field == _VARIABLE:
            raise UnsupportedFeature(self.field, "is not supported: the model's template has no such variable")
        if self.is_on != chat.has_thoughts:
            effort = next(name for name, is_on in _EFFORTS.items() if is_on == chat.has_thoughts)
            raise UnsupportedFeature(self.field, f"must be {effort}: the model's template cannot switch its thoughts")


def decode_thinking(values: Mapping[str, Any], field: str, effort: Any) -> ThinkingSwitch | None:
    """By OpenAI's effort, which has no grades here, or vLLM's variables of a template, of which this is the only one.

    Args:
        values: of the request.
        field: where it has the effort.
        effort: its value.

    Raises:
        InvalidRequest, UnsupportedFeature: naming the field that is wrong.
    """
    given = take(values, KWARGS, dict, "an object") or {}
    refuse_others(given, ("enable_thinking",), {}, (), KWARGS)
    value = given.get("enable_thinking")
    if value is not None and type(value) is not bool:
        raise InvalidRequest(_VARIABLE, value, "must be true or false")
    if effort is None:
        return None if value is None else ThinkingSwitch(value, _VARIABLE)
    if value is not None:
        raise InvalidRequest(field, effort, f"must not be set with {_VARIABLE}")
    if not isinstance(effort, str) or effort not in _EFFORTS:
        raise UnsupportedFeature(field, f"must be {' or '.join(_EFFORTS)}: thoughts have no grades")
    return ThinkingSwitch(_EFFORTS[effort], field)


class ThoughtParser:
    """Splits an output, as it comes. `is_within` is whether it begins inside of thoughts.

    Thoughts end at their tag, or at `call_tag`, behind which a grammar lets nothing but calls follow.

    `num_tokens` are the tokens of its thoughts, tags included, among those that `count` had, while it `is_counting`.
    """

    def __init__(self, *, is_within: bool, call_tag: str | None = None) -> None:
        self._read = self._read_break if is_within else self._read_begin
        self._ends = (_END_TAG,) if call_tag is None else (_END_TAG, call_tag)
        self._end = re.compile("|".join(map(re.escape, self._ends)))
        self.has_ended = False
        self._rest = self._thoughts = self._content = ""
        self._is_last = False
        self._spelled = _TAG.encode() if is_within else b""
        self.is_counting = True
        self._num_seen = self.num_tokens = 0

    def count(self, spelled: bytes) -> None:
        """Counts a token, given its bytes: it may come ahead of its text."""
        if not self.is_counting:
            return
        self._num_seen += 1
        self._spelled = (self._spelled + spelled).lstrip()
        tag, ends = _TAG.encode(), [end.encode() for end in self._ends]
        self.is_counting = tag.startswith(self._spelled[: len(tag)])
        if self._spelled.startswith(tag):
            self.num_tokens = self._num_seen
            self.is_counting = not any(end in self._spelled for end in ends)
            # An end's beginning, at most, is kept beside the tag.
            self._spelled = tag + self._spelled[len(tag) :][-max(map(len, ends)) :]

    def take(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """New thoughts, and new text behind them. Line breaks beside the tags are left out."""
        self._rest += text
        self._is_last = is_last
        self._thoughts = self._content = ""
        while self._read():
            pass
        return self._thoughts, self._content

    def _read_begin(self) -> bool:
        begin = self._rest.lstrip(_SPACE)
        if begin.startswith(_TAG):
            self._rest = begin.removeprefix(_TAG)
            self._read = self._read_break
            return True
        if _TAG.startswith(begin) and not self._is_last:
            return False
        self._read = self._read_content
        return True

    def _read_thoughts(self) -> bool:
        found = self._end.search(self._rest)
        text = self._rest[: found.start()] if found else self._rest
        if found:
            self._rest = self._rest[found.end() if found.group() == _END_TAG else found.start() :]
            self.has_ended, self._read = True, self._read_break
        elif not self._is_last:
            # What may be the beginning of an end, and line breaks that may be ahead of it.
            kept = max(size for end in self._ends for size in range(len(end)) if text.endswith(end[:size]))
            self._rest = text[len(text[: len(text) - kept].rstrip("\n")) :]
        else:
            self._rest = ""
        self._thoughts += text.rstrip("\n") if found else text.removesuffix(self._rest)
        return found is not None

    def _read_break(self) -> bool:
        """Line breaks behind a tag."""
        self._rest = self._rest.lstrip("\n")
        if self._rest:
            self._read = self._read_content if self.has_ended else self._read_thoughts
        return bool(self._rest)

    def _read_content(self) -> bool:
        self._content, self._rest = self._content + self._rest, ""
        return False


def with_thoughts(thoughts: str, content: str) -> str:
    """An earlier answer as templates look for it."""
    return f"{_TAG}\n{thoughts}\n{_END_TAG}\n\n{content}"
