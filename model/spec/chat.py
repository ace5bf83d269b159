"""Renders conversations to token ids by a model's chat template: the only way from text to control tokens.

A template is an untrusted program (Jinja, as in Hugging Face's tokenizers). It runs in a sandbox
(`model.spec.chat_sandbox`) without side effects and with limits of time and size. Its own output may be control tokens;
the content of messages never is, whatever the template does with it:

    message    `<|im_end|>`, anywhere               → ordinary characters
    template   `<|im_end|>`                         → the control token

Noncharacters, which text must not contain, distinguish the two while the template runs. In messages one follows every
character that a control token begins with, and precedes every one that it ends with, so that cutting and joining cannot
make a control token. Strings that templates search for in messages (`</think>`, say) stay whole, enclosed by two other
noncharacters, with which string methods find them. Output without noncharacters is the template's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from model.spec.chat_sandbox import CLOSE, OPEN, Sandbox, enclose, find_literals, rendering
from model.spec.tokenizer import CONTROL_MARK, Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles. A closed list, as some templates spell control tokens with them."""

VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The control tokens that templates have by name."""

THOUGHTS = ("<think>", "</think>")
"""The tags around what a model thinks ahead of its answer."""

MAX_TEMPLATE_CHARACTERS = 256 * 1024
_CALL_TAGS = ("<tool_call>", "</tool_call>")
_MAX_REASON = 500
"""The limit of a template's error message, in characters."""

# A noncharacter, as `OPEN` and `CLOSE`.
_BREAK = "\ufdd1"
_RESERVED = frozenset({CONTROL_MARK, _BREAK, OPEN, CLOSE})
# Surrogates, too: an escape can spell them, but they cannot be encoded.
_UNFIT = re.compile("[\ud800-\udfff" + "".join(_RESERVED) + "]")
_MARKS = re.compile("[" + "".join(_RESERVED) + "]")


class ChatTemplateError(ValueError):
    """A template cannot be used."""


class ConversationError(ValueError):
    """A conversation cannot be rendered. `place` is the part at fault, as in `[2].role`, or empty."""

    def __init__(self, reason: str, place: str = "") -> None:
        self.reason = reason
        self.place = place
        super().__init__(f"{place}: {reason}" if place else reason)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: a role of `ROLES` and its content.

    An assistant's may have calls of tools, whose arguments are objects; a tool's names the call that it answers.
    """

    role: str
    content: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """chat.json: a template, and the spellings of the control tokens that it has by name (`VARIABLES`)."""

    template: str
    variables: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text of chat.json."""
        values = {"template": self.template, "variables": dict(self.variables)}
        return json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ChatSettings:
        """Parses chat.json.

        Raises:
            ChatTemplateError: when it is none.
        """
        try:
            values = json.loads(text)
            template, variables = values["template"], values["variables"]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise ChatTemplateError(f"not a template and its variables: {error!r}") from error
        if not isinstance(template, str) or not isinstance(variables, dict):
            raise ChatTemplateError("template must be a string and variables an object")
        wrong = [name for name, value in variables.items() if name not in VARIABLES or not isinstance(value, str)]
        if wrong:
            raise ChatTemplateError(
                f"variables are {', '.join(VARIABLES)}, all strings; not {', '.join(map(str, wrong))}"
            )
        return cls(template, variables)


class Chat:
    """A template with its tokenizer. Immutable, thread-safe. `now` is the clock of the template's `strftime_now`.

    Raises:
        ChatTemplateError: when the template cannot be compiled or bounded, or a control token is a single character.
    """

    def __init__(
        self, settings: ChatSettings, tokenizer: Tokenizer, now: Callable[[], datetime] = datetime.now
    ) -> None:
        source = settings.template
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ChatTemplateError(f"has {len(source)} characters, must have at most {MAX_TEMPLATE_CHARACTERS}")
        environment = Sandbox(now)
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
            literals = find_literals(tree)
        except (jinja2.TemplateError, RecursionError, MemoryError, ValueError, SyntaxError) as error:
            raise ChatTemplateError(f"cannot be compiled: {error}") from error
        # A literal may spell by an escape what the source does not contain.
        for text in (source, *literals, *settings.variables.values()):
            if unfit := _UNFIT.search(text):
                raise ChatTemplateError(f"has U+{ord(unfit.group()):04X}, which no text may hold")
        if short := sorted(each for each in tokenizer.control_spellings if len(each) == 1):
            raise ChatTemplateError(f"the control token {short[0]!r} is a character that every message may have")
        self._variables = dict(settings.variables)
        text = "\0".join(literals)
        names = {name.name for name in tree.find_all(jinja2.nodes.Name)}
        self.has_tools = "tools" in names
        """Whether the template shows tools."""
        self.has_thinking_switch = "enable_thinking" in names
        """Whether the template lets a conversation say whether the answer begins with thoughts."""
        self.has_thoughts = THOUGHTS[1] in text and not tokenizer.control_spellings.intersection(THOUGHTS)
        """Whether the template separates thoughts from answers, by tags that are text."""
        # Others have tags of the same name around XML.
        is_json = all(each in text for each in (*_CALL_TAGS, '"name"', '"arguments"')) and "<function=" not in text
        self.has_tagged_calls = is_json and not tokenizer.control_spellings.intersection(_CALL_TAGS)
        """Whether calls of tools are `{"name": …, "arguments": …}` between tags that are text."""
        # Added tokens that are not special count as control tokens if the template writes them.
        ordinary = {
            spelling for spelling in tokenizer.added_spellings - tokenizer.control_spellings if spelling in text
        }
        self._tokenizer = tokenizer.with_marks(ordinary)
        self._guard = _Guard(tokenizer.control_spellings, ordinary, literals)
        environment.sought = self._guard.sought
        switches = (None, False, True) if self.has_thoughts else ()
        self.begins_within_thoughts = {switch: self._begins_within_thoughts(switch) for switch in switches}
        """Whether an answer begins inside of thoughts, as the prompt ends there, by `enable_thinking`."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        enable_thinking: bool | None = None,
    ) -> str:
        """Renders a conversation to be answered, with `CONTROL_MARK` before each of the template's control tokens.

        Args:
            messages: at least one.
            tools: that the answer may call, as Hugging Face's templates have them.
            enable_thinking: the template's variable, left out where it is None.

        Raises:
            ConversationError: when the template refuses it, or a message is invalid.
        """
        if not messages:
            raise ConversationError("must have at least 1 message")
        protected = []
        for index, message in enumerate(messages):
            if message.role not in ROLES:
                raise ConversationError(f"must be one of {', '.join(ROLES)}", f"[{index}].role")
            # One regular expression: a Python loop over a megabyte would hold the GIL.
            if reserved := _MARKS.search(message.content):
                raise ConversationError(
                    f"must not have the noncharacter U+{ord(reserved.group()):04X}", f"[{index}].content"
                )
            values: dict[str, Any] = {"role": message.role, "content": self._guard.protect(message.content)}
            if message.tool_calls:
                values["tool_calls"] = self._protect_value(list(message.tool_calls), f"[{index}].tool_calls")
            if message.tool_call_id:
                values["tool_call_id"] = self._protect_value(message.tool_call_id, f"[{index}].tool_call_id")
            protected.append(values)
        shown = self._protect_value(list(tools), "") if tools else None
        switch = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            with rendering():
                written = self._template.render(
                    **self._variables,
                    **switch,
                    messages=protected,
                    tools=shown,
                    documents=None,
                    add_generation_prompt=True,
                )
        except SecurityError as error:
            raise ConversationError(f"the model's template was stopped: {_reason(error)}") from error
        except Exception as error:  # an untrusted program may raise anything
            raise ConversationError(f"the model's template refuses it: {_reason(error)}") from error
        return self._guard.resolve(written)

    def _begins_within_thoughts(self, enable_thinking: bool | None) -> bool:  # noqa: FBT001 (the switch's value)
        try:
            written = self.render([Message("user", "a")], enable_thinking=enable_thinking)
        except ConversationError:
            return False
        return written.rstrip().endswith(THOUGHTS[0])

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation to be answered; may take milliseconds.

        Raises:
            ConversationError: as `render`.
        """
        return self.tokenize(self.render(messages))

    def _protect_value(self, value: Any, place: str) -> Any:
        """JSON for the template, each string of it protected."""
        try:
            return self._guard.protect_value(value)
        except ValueError as error:
            raise ConversationError(str(error), place) from error
        except RecursionError as error:
            raise ConversationError("is nested too deeply", place) from error

    def tokenize(self, written: str) -> list[int]:
        """Token ids of what `render` returned; may take milliseconds."""
        return self._tokenizer.encode(written)


class _Guard:
    """Distinguishes the content of messages from the template's own output.

    Messages must never become `special` tokens (control tokens) or `ordinary` ones, which templates may search for in
    messages, as for their own `literals`.
    """

    def __init__(self, special: Iterable[str], ordinary: Iterable[str], literals: Iterable[str]) -> None:
        special = {spelling for spelling in special if spelling}
        control = special.union(ordinary)
        self._firsts = _in_any_case(spelling[0] for spelling in control)
        self._lasts = _in_any_case(spelling[-1] for spelling in control)
        ends = self._firsts | self._lasts
        sought = set(ordinary)
        sought |= {
            literal
            for literal in literals
            if len(literal) > 1 and ends.intersection(literal) and not any(each in literal for each in special)
        }
        self.sought = frozenset(sought)
        self._protected = _any_of({*sought, *ends})
        self._ends = _any_of(ends)
        enclosed = enclose(f"(?:{_any_of(sought).pattern})")
        self._resolved = re.compile(f"({enclosed})|({_any_of(control).pattern})|[{_BREAK}{OPEN}{CLOSE}]")

    def protect(self, content: str) -> str:
        """A message's content for the template, with noncharacters."""

        def mark(match: re.Match[str]) -> str:
            return enclose(match.group()) if match.group() in self.sought else self._break(match)

        return self._protected.sub(mark, content)

    def protect_value(self, value: Any) -> Any:
        """JSON for the template. No string of it is enclosed, as escapes would change it between its marks.

        Raises:
            ValueError: for a string with a noncharacter or a lone surrogate.
        """
        if isinstance(value, str):
            if unfit := _UNFIT.search(value):
                kind = "noncharacter" if _MARKS.match(unfit.group()) else "lone surrogate"
                raise ValueError(f"must not have the {kind} U+{ord(unfit.group()):04X}")
            return self._ends.sub(self._break, value)
        if isinstance(value, Mapping):
            return {self.protect_value(key): self.protect_value(each) for key, each in value.items()}
        return [self.protect_value(each) for each in value] if isinstance(value, list) else value

    def _break(self, match: re.Match[str]) -> str:
        before, behind = (_BREAK if match.group() in ends else "" for ends in (self._lasts, self._firsts))
        return f"{before}{match.group()}{behind}"

    def resolve(self, written: str) -> str:
        """The template's output without noncharacters, with its own control tokens marked."""

        def mark(match: re.Match[str]) -> str:
            enclosed, control = match.groups()
            if enclosed is not None:
                return enclosed[1:-1]
            return "" if control is None else f"{CONTROL_MARK}{control}"

        return self._resolved.sub(mark, written)


def _in_any_case(characters: Iterable[str]) -> frozenset[str]:
    """The characters in upper and lower case."""
    return frozenset(each for one in characters for each in (one, one.lower(), one.upper()) if len(each) == 1)


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of these; never, if there are none."""
    ordered = sorted(spellings, key=lambda spelling: (-len(spelling), spelling))
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)")


def _reason(error: Exception) -> str:
    """The error's message without noncharacters, truncated."""
    words = _MARKS.sub("", str(error)[: 2 * _MAX_REASON])
    return words if len(words) <= _MAX_REASON else f"{words[: _MAX_REASON - 1]}…"
