"""Jinja within bounds: runs what others wrote, who may want all of the machine's time and memory, or what else it has.

A template gets nothing but what it is given and changes nothing. Turns of loops, calls, time, lengths of strings and
whatever is written, compared or handed on are counted against a budget, and a template beyond it is stopped with
Jinja's `SecurityError`. Knows nothing of conversations, but that strings in what a template is given may be enclosed,
so that it can be told where they come from: what looks for them finds them all the same.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 100_000
"""Turns of loops and calls in one rendering."""
MAX_SECONDS = 2.0
MAX_CHARACTERS = 4 * 2**20
"""Of any string that a template makes."""
MAX_TOTAL_CHARACTERS = 64 * 2**20
"""Of all of them together."""
_MAX_WEIGHT = 4 * MAX_CHARACTERS
"""Of a list or an object, as text: a few that hold one another twice over come to more than any memory."""
_MAX_ARGUMENT = 10_000
"""Of whole numbers given to methods and filters, which may be widths or counts."""

# Noncharacters (The Unicode Standard, section 23.7): valid code points that no text may hold.
OPEN, CLOSE = "\ufdd2", "\ufdd3"
"""What stands before and behind a string that is enclosed."""


def enclose(text: str) -> str:
    """The string between `OPEN` and `CLOSE`."""
    return f"{OPEN}{text}{CLOSE}"


@dataclass(slots=True)
class _Budget:
    """What one rendering has used up."""

    deadline: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)
    steps: int = 0
    characters: int = 0
    weights: dict[int, tuple[Any, int]] = field(default_factory=dict)

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise SecurityError(f"more than {MAX_STEPS} turns of loops and calls")
        if time.monotonic() > self.deadline:
            raise SecurityError(f"more than {MAX_SECONDS:g} seconds")

    def make(self, size: int) -> None:
        self.characters += size
        if size > MAX_CHARACTERS or self.characters > MAX_TOTAL_CHARACTERS:
            raise SecurityError(
                f"more than {MAX_CHARACTERS} characters in a string, or than {MAX_TOTAL_CHARACTERS} in all"
            )

    def weigh(self, value: Any) -> int:
        """About how many characters a value has as text, whatever it holds; at most `_MAX_WEIGHT`.

        What holds one thing twice counts it twice, which is what writing or comparing it would take. Nothing in the
        sandbox changes, so that each is weighed once; the value is kept, or another could get its id.
        """
        if isinstance(value, str):
            return len(value)
        if isinstance(value, Mapping):
            parts = [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, AbstractSet, ValuesView)):
            parts = list(value)
        else:
            return 1
        if id(value) not in self.weights:
            weight = 1 + sum(map(self.weigh, parts))
            if weight > _MAX_WEIGHT:
                raise SecurityError(f"more than {_MAX_WEIGHT} characters in a list or an object")
            self.weights[id(value)] = (value, weight)
        return self.weights[id(value)][1]


_budget: ContextVar[_Budget] = ContextVar("_budget")


@contextmanager
def rendering() -> Iterator[None]:
    """The block has a budget of its own, which whatever it renders uses up."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def _spent() -> _Budget:
    """The rendering's, or where nothing is rendered, as when constants are folded, one of its own."""
    return _budget.get(None) or _Budget()


_FILTERS = (
    "abs", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby",
    "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title", "trim", "unique",
    "upper",
)  # fmt: skip
# Methods that make much of little, or control tokens of what is none, and that no template needs.
_FORBIDDEN_METHODS = frozenset(
    {"expandtabs", "translate", "maketrans", "format", "format_map", "encode", "unescape", "striptags"}
)
_BOUNDED_LOOP, _WEIGHED = "bounded_loop", "weighed"


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face's tokenizers have it, without what could not be bounded.

    Every loop's turn and every call counts as a step, every string made of others counts its characters, and whatever
    is written, compared or given to anything is weighed first. Formatting with widths, recursive loops, inclusion of
    other templates and a few filters are not offered.

    Args:
        now: what `strftime_now` tells.

    Attributes:
        sought: strings that templates find in what they are given though they are enclosed there.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            optimized=False,
            finalize=_weighed,
        )
        self.filters = {name: _bounded_filter(FILTERS[name]) for name in _FILTERS}
        self.filters |= {"tojson": _bounded_filter(_to_json), _BOUNDED_LOOP: _bounded_loop}
        self.filters |= {"join": _bounded_filter(_join), "replace": _bounded_filter(self._replace_filter)}
        self.filters |= {"indent": _bounded_filter(_indent), "sum": _bounded_filter(_sum), _WEIGHED: _weighed}
        self.tests = {name: _weighed_test(test) for name, test in self.tests.items()}
        self.sought: frozenset[str] = frozenset()
        self.globals = {name: self.globals[name] for name in ("range", "cycler", "joiner")}

        def strftime_now(format: str) -> str:  # noqa: A002 — the name that templates may use
            if not isinstance(format, str) or len(format) > 100 or re.search(r"[0-9]{3}", format):
                raise SecurityError("a time in such a format")
            return now().strftime(format)

        self.globals |= {"raise_exception": _raise, "strftime_now": strftime_now}
        self.globals |= {"dict": dict, "namespace": _Namespace}

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """What blocks, macros and the whole are put together by."""
        parts = list(pieces)
        _spent().make(sum(map(len, parts)))
        return "".join(parts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Puts the bounds into the template itself."""
        tree = super()._parse(source, name, filename)
        for other in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            raise jinja2.TemplateSyntaxError("there are no other templates", other.lineno)
        for loop in tree.find_all(nodes.For):
            if loop.recursive:
                raise jinja2.TemplateSyntaxError("recursive loops are not offered", loop.lineno)
            loop.iter = nodes.Filter(loop.iter, _BOUNDED_LOOP, [], [], None, None, lineno=loop.lineno)
        for compared in tree.find_all(nodes.Compare):
            compared.expr = _weighing(compared.expr)
            for operand in compared.ops:
                operand.expr = _weighing(operand.expr)
        for pair in tree.find_all(nodes.Pair):
            pair.key = _weighing(pair.key)
        return _without_concat(tree)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`a[b]`, which may have to find all that b holds."""
        return super().getitem(obj, _weighed(argument))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`+`, `*`, `**`, `%`."""
        match operator:
            case "+" if hasattr(left, "__len__") and hasattr(right, "__len__"):
                _spent().make(len(left) + len(right))
            case "*" if hasattr(left, "__len__") or hasattr(right, "__len__"):
                sized, times = (left, right) if hasattr(left, "__len__") else (right, left)
                _spent().make(len(sized) * max(times, 0) if isinstance(times, int) else 0)
            case "%" if isinstance(left, str):
                raise SecurityError("formatting")
            case "*" | "**" | "+":
                _require_small(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Methods, macros and functions."""
        _spent().step()
        _require_bounded(*args, *kwargs.values())
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str):
            args = (self._find(owner, args[0]), *args[1:]) if args else args
            if name == "replace" and len(args) >= 2:
                return _replace(owner, *args, **kwargs)
            if name == "join" and args:
                return _join(args[0], owner)
            _spent().make(len(owner))
        return super().call(context, function, *args, **kwargs)

    def _replace_filter(self, text: Any, old: Any, new: Any, count: int | None = None) -> str:
        return _replace(text, self._find(str(text), old), new, count)

    def _find(self, text: str, argument: Any) -> Any:
        """What a method is to look for in a text where the same was said."""
        is_sought = isinstance(argument, str) and argument in self.sought
        return enclose(argument) if is_sought and enclose(argument) in text else argument

    def wrap_str_format(self, value: Any) -> None:
        """No method is let through as one that formats safely: widths could be anything."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Besides what the sandbox forbids anyway."""
        if isinstance(obj, str) and attr in _FORBIDDEN_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's, whose attributes may shadow anything, without names that Python's own machinery asks for."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # So that a template's own names may include "self".
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _require_public(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        # What it holds may hold others of its kind, each of them twice.
        return "<namespace>"


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the attribute {name!r}")


class _Generation(Extension):
    """`{% generation %}`, by which templates say what the model wrote: of no concern here, but to be understood."""

    tags = {"generation"}  # noqa: RUF012 — as the library wants it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's contents, as they are."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def find_literals(tree: nodes.Template) -> set[str]:
    """All strings that a template holds: its text, and the constants of its expressions."""
    found = {node.data for node in tree.find_all(nodes.TemplateData)}
    return found | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}


def _without_concat(tree: nodes.Template) -> nodes.Template:
    """`a ~ b`, which the sandbox does not see, as `a|string + b|string`, which it does."""

    def rewrite(node: nodes.Node) -> nodes.Node:
        for name, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                setattr(node, name, rewrite(value))
            elif isinstance(value, list):
                setattr(node, name, [rewrite(each) if isinstance(each, nodes.Node) else each for each in value])
        if not isinstance(node, nodes.Concat):
            return node
        parts: list[nodes.Expr] = [
            nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno) for part in node.nodes
        ]
        joined = parts[0]
        for part in parts[1:]:
            joined = nodes.Add(joined, part, lineno=node.lineno)
        return joined

    rewrite(tree)
    return tree


def _bounded_loop(items: Any) -> Iterator[Any]:
    for item in items:
        _spent().step()
        yield item


def _bounded_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _spent().step()
        _require_bounded(*args, *kwargs.values())
        return function(*args, **kwargs)

    return bounded


def _weighed(value: Any) -> Any:
    """The value, unless it is too large to be looked at as a whole."""
    _spent().weigh(value)
    return value


def _weighing(node: nodes.Expr) -> nodes.Expr:
    """An expression whose value is weighed; a constant needs no scales."""
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, _WEIGHED, [], [], None, None, lineno=node.lineno)


def _weighed_test(function: Any) -> Callable[..., Any]:
    @wraps(function)
    def weighed(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            _weighed(value)
        return function(*args, **kwargs)

    return weighed


def _require_bounded(*values: Any) -> None:
    _require_small(*values)
    for value in values:
        _weighed(value)


def _require_small(*values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_ARGUMENT:
            raise SecurityError(f"the number {value if abs(value) < 10**18 else 'beyond 10**18'}")


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, items: Any, attribute: Any = None, start: Any = 0) -> Any:
    """As Jinja's own, of numbers: lists would be copied anew with each that is added."""
    if not isinstance(start, (int, float)):
        raise SecurityError("a sum of what is no number")
    return FILTERS["sum"](environment, items, attribute, start)


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    limit = -1 if count is None else count
    times = text.count(old) if limit < 0 else min(limit, text.count(old))
    _spent().make(len(text) + times * len(new))
    replaced: str = text.replace(old, new, limit)
    return replaced


def _join(items: Any, separator: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        raise SecurityError("join by an attribute")
    parts, separator = [str(item) for item in items], str(separator)
    _spent().make(sum(map(len, parts)) + len(separator) * len(parts))
    joined: str = separator.join(parts)
    return joined


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:  # noqa: FBT001, FBT002
    """As Jinja's own."""
    prefix = " " * width if isinstance(width, int) else str(width)
    lines = str(text).split("\n")
    _spent().make(sum(map(len, lines)) + len(lines) * (len(prefix) + 1))
    indented = [f"{prefix}{line}" if line or blank else line for line in lines[1:]]
    return "\n".join([f"{prefix}{lines[0]}" if first else lines[0], *indented])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 — as Hugging Face has it
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """As Hugging Face has it: without HTML escapes, which is Jinja's own way."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    _spent().make(len(text))
    return text


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
