"""A Jinja sandbox with limits of time and memory, for untrusted chat templates.

Jinja's own sandbox keeps templates from the interpreter's objects and from changing their arguments, but bounds neither
time nor memory. Here loop iterations, calls, time, lengths of strings and the size of all values that are written,
compared or passed on count against a budget; a template that exceeds it is stopped with Jinja's `SecurityError`.

Strings in a template's arguments may be enclosed (`enclose`) to mark their origin; string methods that search for an
enclosed string find it (`Sandbox.sought`).
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
from functools import reduce, wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 100_000
"""Loop iterations and calls in one rendering."""
MAX_SECONDS = 2.0
MAX_CHARACTERS = 4 * 2**20
"""The limit of a string that a template makes."""
MAX_TOTAL_CHARACTERS = 64 * 2**20
"""The limit of all of them together."""
_MAX_WEIGHT = 4 * MAX_CHARACTERS
"""The limit of a list or an object as text: a few that hold one another twice exceed any memory."""
_MAX_ARGUMENT = 10_000
"""The limit of integers given to methods and filters, which may be widths or counts."""

# Noncharacters (The Unicode Standard, section 23.7): valid code points that text must not contain.
OPEN, CLOSE = "\ufdd2", "\ufdd3"
"""The characters before and after an enclosed string."""

# Marks of where strings are from stay what they are.
_NOT_ASCII = re.compile("[^\x00-\x7f\ufdd0-\ufdd3]")


def enclose(text: str) -> str:
    """The string between `OPEN` and `CLOSE`."""
    return f"{OPEN}{text}{CLOSE}"


@dataclass(slots=True)
class _Budget:
    """The resources that one rendering has used."""

    deadline: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)
    steps: int = 0
    characters: int = 0
    weights: dict[int, tuple[Any, int]] = field(default_factory=dict)

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise SecurityError(f"more than {MAX_STEPS} loop iterations and calls")
        if time.monotonic() > self.deadline:
            raise SecurityError(f"more than {MAX_SECONDS:g} seconds")

    def make(self, size: int) -> None:
        self.characters += size
        if size > MAX_CHARACTERS or self.characters > MAX_TOTAL_CHARACTERS:
            raise SecurityError(
                f"more than {MAX_CHARACTERS} characters in a string, or than {MAX_TOTAL_CHARACTERS} in all"
            )

    def weigh(self, value: Any) -> int:
        """The approximate size of a value as text, nested values included; raises above `_MAX_WEIGHT`.

        A value that occurs twice counts twice, as it would in writing or comparing. Values in the sandbox are
        immutable, so sizes are cached by id; the entry keeps the value alive, so that its id is not reused.
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
    """Gives everything rendered in the block one budget."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def _spent() -> _Budget:
    """The current rendering's budget; outside of one, as when constants are folded, a fresh one."""
    return _budget.get(None) or _Budget()


_FILTERS = (
    "abs", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby",
    "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title", "trim", "unique",
    "upper",
)  # fmt: skip
# Methods that amplify their input or could make control tokens, and that no template needs.
_FORBIDDEN_METHODS = frozenset(
    {"expandtabs", "translate", "maketrans", "format", "format_map", "encode", "unescape", "striptags"}
)
_BOUNDED_LOOP, _WEIGHED = "bounded_loop", "weighed"


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as in Hugging Face's tokenizers, without the features that cannot be bounded.

    Every loop iteration and call counts as a step, every string made of others counts its characters, and every value
    that is written, compared or passed is weighed first. Not available: formatting with widths, recursive loops,
    inclusion of other templates, and a few filters.

    `now` is the clock of `strftime_now`; `sought` are strings that searches find even where they are enclosed.
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
        own = {"tojson": _to_json, "join": _join, "replace": self._replace_filter, "indent": _indent, "sum": _sum}
        filters = {name: FILTERS[name] for name in _FILTERS} | own
        self.filters = {name: _checked(function, _count_call) for name, function in filters.items()}
        self.filters |= {_BOUNDED_LOOP: _bounded_loop, _WEIGHED: _weighed}
        self.tests = {name: _checked(test, _weigh_all) for name, test in self.tests.items()}
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
        """Joins the output of blocks, macros and the whole template."""
        parts = list(pieces)
        _spent().make(sum(map(len, parts)))
        return "".join(parts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parses a template and inserts the checks of loops, comparisons and keys."""
        tree = super()._parse(source, name, filename)
        for other in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            raise jinja2.TemplateSyntaxError("there are no other templates", other.lineno)
        for loop in tree.find_all(nodes.For):
            if loop.recursive:
                raise jinja2.TemplateSyntaxError("recursive loops are not offered", loop.lineno)
            loop.iter = _filter(loop.iter, _BOUNDED_LOOP)
        for compared in tree.find_all(nodes.Compare):
            compared.expr = _weighing(compared.expr)
            for operand in compared.ops:
                operand.expr = _weighing(operand.expr)
        for pair in tree.find_all(nodes.Pair):
            pair.key = _weighing(pair.key)
        return _without_concat(tree)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`a[b]`; a lookup hashes all of b."""
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
        _count_call(*args, *kwargs.values())
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
        """The string to search for: enclosed if the text has it so."""
        is_sought = isinstance(argument, str) and argument in self.sought
        return enclose(argument) if is_sought and enclose(argument) in text else argument

    def wrap_str_format(self, value: Any) -> None:
        """Replaces no format method by Jinja's safe one: widths would be unbounded."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Forbids further methods of strings."""
        if isinstance(obj, str) and attr in _FORBIDDEN_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without private and special attribute names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # A template's names may include "self".
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _require_public(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        # Nested namespaces could grow exponentially.
        return "<namespace>"


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the attribute {name!r}")


class _Generation(Extension):
    """`{% generation %}`, which marks the model's output for training: its contents are rendered as they are."""

    tags = {"generation"}  # noqa: RUF012 — as the library wants it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the block's contents."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def find_literals(tree: nodes.Template) -> set[str]:
    """All strings in a template: its text, and the constants of its expressions."""
    found = {node.data for node in tree.find_all(nodes.TemplateData)}
    return found | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}


def _without_concat(tree: nodes.Template) -> nodes.Template:
    """Rewrites `a ~ b`, which the sandbox cannot intercept, as `a|string + b|string`."""

    def rewrite(node: nodes.Node) -> nodes.Node:
        for name, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                setattr(node, name, rewrite(value))
            elif isinstance(value, list):
                setattr(node, name, [rewrite(each) if isinstance(each, nodes.Node) else each for each in value])
        if not isinstance(node, nodes.Concat):
            return node
        parts: list[nodes.Expr] = [_filter(part, "string") for part in node.nodes]
        return reduce(lambda left, right: nodes.Add(left, right, lineno=node.lineno), parts)

    rewrite(tree)
    return tree


def _bounded_loop(items: Any) -> Iterator[Any]:
    for item in items:
        _spent().step()
        yield item


def _checked(function: Any, check: Callable[..., None]) -> Callable[..., Any]:
    """The function, with `check` called on its arguments first."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, *kwargs.values())
        return function(*args, **kwargs)

    return checked


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _weighing(node: nodes.Expr) -> nodes.Expr:
    """The expression with its value weighed, unless it is a constant."""
    return node if isinstance(node, nodes.Const) else _filter(node, _WEIGHED)


def _weighed(value: Any) -> Any:
    _spent().weigh(value)
    return value


def _weigh_all(*values: Any) -> None:
    for value in values:
        _weighed(value)


def _count_call(*values: Any) -> None:
    """Counts a call with these arguments, and checks them."""
    _spent().step()
    _require_small(*values)
    _weigh_all(*values)


def _require_small(*values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_ARGUMENT:
            raise SecurityError(f"the number {value if abs(value) < 10**18 else 'beyond 10**18'}")


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, items: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Jinja's own, for numbers only: a sum of lists copies them with each addition."""
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
    """As Jinja's own, with its output counted before it is made."""
    prefix = " " * width if isinstance(width, int) else str(width)
    lines = str(text).split("\n")
    _spent().make(sum(map(len, lines)) + len(lines) * (len(prefix) + 1))
    indented = [f"{prefix}{line}" if line or blank else line for line in lines[1:]]
    return "\n".join([f"{prefix}{lines[0]}" if first else lines[0], *indented])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 — Hugging Face's signature
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """As in Hugging Face: without Jinja's HTML escapes."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        text = _NOT_ASCII.sub(lambda match: json.dumps(match.group())[1:-1], text)
    _spent().make(len(text))
    return text


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
