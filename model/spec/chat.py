"""Conversations to token ids, by a model's own template: the one way on which control tokens come from text.

A template is a program that others wrote (Jinja, as Hugging Face's tokenizers carry them along). It runs in a sandbox
(`model.spec.chat_sandbox`) that changes nothing, reads nothing and is bounded in time and size. What it writes itself
may be control tokens; what people said never is, whatever they said and whatever the template does with it:

    said       `<|im_end|>`, anywhere               → ordinary characters
    written    `<|im_end|>` by the template         → the control token

Noncharacters, which no text may hold, tell the two apart while the template runs. One stands behind every character
of a message that a control token begins with, and before every one that it ends with, so that no cutting and joining
makes one of what was said; strings that templates look for in messages (`</think>`, say) are left whole but enclosed by
two others, with which string methods find them. What comes out with nothing in it is the template's own.

Knows templates and a tokenizer; nothing of models or the wire.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import jinja2
from jinja2.exceptions import SecurityError

from model.spec.chat_sandbox import CLOSE, OPEN, Sandbox, enclose, find_literals, rendering
from model.spec.tokenizer import CONTROL_MARK, Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may speak. A closed list, as some templates spell control tokens with it."""

VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The control tokens that templates know by name."""

MAX_TEMPLATE_CHARACTERS = 256 * 1024
_MAX_REASON = 500
"""Characters of what a template says when it refuses."""

# A noncharacter, as `OPEN` and `CLOSE` are.
_BREAK = "\ufdd1"
_RESERVED = frozenset({CONTROL_MARK, _BREAK, OPEN, CLOSE})
# And halves of characters, which an escape can spell and nobody can encode.
_UNFIT = re.compile("[\ud800-\udfff" + "".join(_RESERVED) + "]")
_MARKS = re.compile("[" + "".join(_RESERVED) + "]")


class ChatTemplateError(ValueError):
    """A template cannot be used; the message says why."""


class ConversationError(ValueError):
    """A conversation cannot be rendered. `place` is the part at fault, as in `[2].role`, empty where it is no one's."""

    def __init__(self, reason: str, place: str = "") -> None:
        self.reason = reason
        self.place = place
        super().__init__(f"{place}: {reason}" if place else reason)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: who speaks, one of `ROLES`, and what is said."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """chat.json: a template, and the spellings of the control tokens that it knows by name (`VARIABLES`)."""

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
    """A template with its tokenizer, ready to use; immutable, and safe to use from several threads.

    Args:
        settings: the template.
        tokenizer: of the model's prompts.
        now: what the template's `strftime_now` tells.

    Raises:
        ChatTemplateError: when the template cannot be compiled, or is one that bounds cannot hold.
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
            literals = find_literals(environment.parse(source))
        except (jinja2.TemplateError, RecursionError, MemoryError, ValueError, SyntaxError) as error:
            raise ChatTemplateError(f"cannot be compiled: {error}") from error
        # An escape may spell in a literal what the source itself does not hold.
        for text in (source, *literals, *settings.variables.values()):
            if unfit := _UNFIT.search(text):
                raise ChatTemplateError(f"has U+{ord(unfit.group()):04X}, which no text may hold")
        self._variables = dict(settings.variables)
        text = "\0".join(literals)
        # Added tokens that are not special are the template's if it writes them.
        ordinary = {
            spelling for spelling in tokenizer.added_spellings - tokenizer.control_spellings if spelling in text
        }
        self._tokenizer = tokenizer.with_marks(ordinary)
        self._guard = _Guard(tokenizer.control_spellings, ordinary, literals)
        environment.sought = self._guard.sought

    def render(self, messages: Sequence[Message]) -> str:
        """What the template makes of a conversation to be answered, each of its control tokens behind `CONTROL_MARK`.

        Raises:
            ConversationError: when the template refuses it, or there is something in it that cannot be.
        """
        if not messages:
            raise ConversationError("must have at least 1 message")
        said = []
        for index, message in enumerate(messages):
            if message.role not in ROLES:
                raise ConversationError(f"must be one of {', '.join(ROLES)}", f"[{index}].role")
            # One search: a set of a megabyte's characters would keep other threads waiting.
            if reserved := _MARKS.search(message.content):
                raise ConversationError(
                    f"must not have the noncharacter U+{ord(reserved.group()):04X}", f"[{index}].content"
                )
            said.append({"role": message.role, "content": self._guard.protect(message.content)})
        try:
            with rendering():
                written = self._template.render(
                    **self._variables, messages=said, tools=None, documents=None, add_generation_prompt=True
                )
        except SecurityError as error:
            raise ConversationError(f"the model's template was stopped: {_tell(error)}") from error
        except Exception as error:  # whatever a program may raise that others wrote
            raise ConversationError(f"the model's template refuses it: {_tell(error)}") from error
        return self._guard.resolve(written)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation to be answered; may take milliseconds.

        Raises:
            ConversationError: as `render`.
        """
        return self.tokenize(self.render(messages))

    def tokenize(self, written: str) -> list[int]:
        """Token ids of what `render` returned; may take milliseconds."""
        return self._tokenizer.encode(written)


class _Guard:
    """Tells what people said from what a template writes.

    Args:
        special: control tokens, never to come from what was said.
        ordinary: tokens that are the template's as well, though templates look for them in messages.
        literals: strings that the template holds; it may look for these, too.
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
        self._said = _any_of({*sought, *ends})
        enclosed = enclose(f"(?:{_any_of(sought).pattern})")
        self._written = re.compile(f"({enclosed})|({_any_of(control).pattern})|[{_BREAK}{OPEN}{CLOSE}]")

    def protect(self, content: str) -> str:
        """What was said, as the template gets it."""

        def mark(match: re.Match[str]) -> str:
            found = match.group()
            if found in self.sought:
                return enclose(found)
            before, behind = (_BREAK if found in ends else "" for ends in (self._lasts, self._firsts))
            return f"{before}{found}{behind}"

        return self._said.sub(mark, content)

    def resolve(self, written: str) -> str:
        """What the template made of it, with the template's own control tokens marked and nothing else."""

        def mark(match: re.Match[str]) -> str:
            enclosed, control = match.groups()
            if enclosed is not None:
                return enclosed[1:-1]
            return "" if control is None else f"{CONTROL_MARK}{control}"

        return self._written.sub(mark, written)


def _in_any_case(characters: Iterable[str]) -> frozenset[str]:
    """The characters, and those that a change of case makes them of."""
    return frozenset(each for one in characters for each in (one, one.lower(), one.upper()) if len(each) == 1)


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """The longest of these; of none, a pattern that never matches."""
    ordered = sorted(spellings, key=lambda spelling: (-len(spelling), spelling))
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)")


def _tell(error: Exception) -> str:
    """Its words without marks, and no more of them than an answer can take."""
    words = _MARKS.sub("", str(error)[: 2 * _MAX_REASON])
    return words if len(words) <= _MAX_REASON else f"{words[: _MAX_REASON - 1]}…"
