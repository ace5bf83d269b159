"""Structured output for tests: a byte-level vocabulary, drawn schemas of every supported keyword, hostile grammars."""

from __future__ import annotations

import importlib.resources
import json
import random
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from model.spec.tokenizer import Tokenizer
from service.engine.sampling.grammar import Grammar, Vocabulary
from service.engine.types import StructuredOutput, StructureKind
from service.process.grammar_check import describe_grammar
from tests.artifacts import tiny_tokenizer
from tests.fakes import EOS

VOCAB_SIZE = 288


@cache
def tokenizer() -> Tokenizer:
    """Of `tiny_artifact`: control tokens, the 256 bytes, some words."""
    return Tokenizer(tiny_tokenizer(VOCAB_SIZE, ends_with_eos=False))


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer(), VOCAB_SIZE, (EOS,))


def compiled(asked: StructuredOutput) -> Grammar:
    return vocabulary().compile(describe_grammar(asked.kind, asked.value))


def schema_of(schema: Any) -> StructuredOutput:
    return StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps(schema))


def regex_of(expression: str) -> StructuredOutput:
    return StructuredOutput(StructureKind.REGEX, expression)


def shipped_schemas(count: int) -> list[str]:
    """Schemas that installed packages ship, of up to 60 KiB; always the same ones."""
    folders = [Path(str(importlib.resources.files(name))) for name in ("check_jsonschema", "kubernetes_validate")]
    files = sorted(path for folder in folders for path in folder.rglob("*.json") if path.stat().st_size <= 60 << 10)
    return [path.read_text(encoding="utf-8") for path in random.Random(0).sample(files, count)]


def draw_schema(source: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema that has a short value; all of them together have every supported keyword."""
    kinds: list[Callable[[random.Random, int], dict[str, Any]]] = [
        _string, _pattern, _format, _integer, _number, _multiple, _fixed, _any_of, _one_of, _all_of
    ]  # fmt: skip
    if depth:
        kinds += [_object, _object, _object, _map, _array, _tuple, _reference]
    return source.choice(kinds)(source, depth)


def _string(source: random.Random, _: int) -> dict[str, Any]:
    least = source.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + source.randint(0, 4)}


def _pattern(source: random.Random, _: int) -> dict[str, Any]:
    return {"type": "string", "pattern": source.choice(("^[a-c]{2}$", "^(ab|cd)?x$", r"^\d{1,3}$", "^ä+b$"))}


FORMATS = jsonschema.FormatChecker(("date", "ipv4", "ipv6", "uuid"))


@FORMATS.checks("time")
def _is_time(value: object) -> bool:
    """As RFC 3339 has it; the library's is that of an old draft."""
    return not isinstance(value, str) or bool(re.fullmatch(r"\d\d:\d\d:\d\d(\.\d+)?(z|[+-]\d\d:\d\d)", value, re.I))


def validate(text: str, schema: Any) -> None:
    """Raises unless a JSON text follows a schema, and its formats."""
    jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)


def _format(source: random.Random, _: int) -> dict[str, Any]:
    return {"type": "string", "format": source.choice(("date", "time", "ipv4", "uuid"))}


def _integer(source: random.Random, _: int) -> dict[str, Any]:
    low = source.randint(-200, 200)
    ends = ("minimum", "maximum") if source.random() < 0.5 else ("exclusiveMinimum", "exclusiveMaximum")
    return {"type": "integer", ends[0]: low, ends[1]: low + source.randint(2, 99)}


def _number(source: random.Random, _: int) -> dict[str, Any]:
    return {"type": "number", "minimum": source.randint(-9, 0), "exclusiveMaximum": source.randint(1, 9)}


def _multiple(source: random.Random, _: int) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": source.choice((2, 5, 7)), "minimum": 0, "maximum": 99}


def _fixed(source: random.Random, _: int) -> dict[str, Any]:
    values = ["a", 'q"\\', 7, -1.5, None, True, ["x", 1], {"k": {}}, "é😀"]
    if source.random() < 0.5:
        return {"const": source.choice(values)}
    return {"enum": source.sample(values, source.randint(1, 4))}


def _any_of(source: random.Random, depth: int) -> dict[str, Any]:
    if source.random() < 0.3:
        return {"type": source.sample(["null", "boolean"], source.randint(1, 2))}
    return {"anyOf": [draw_schema(source, max(depth - 1, 0)) for _ in range(2)]}


def _one_of(source: random.Random, depth: int) -> dict[str, Any]:
    return {"oneOf": [_string(source, depth), _integer(source, depth), {"type": "null"}]}


def _all_of(source: random.Random, _: int) -> dict[str, Any]:
    low = source.randint(0, 9)
    return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + source.randint(0, 50)}]}


def _object(source: random.Random, depth: int) -> dict[str, Any]:
    names = source.sample(["a", "name", "x y", "ü", '"'], source.randint(1, 3))
    required = source.sample(names, source.randint(0, len(names)))
    return {
        "type": "object",
        "properties": {name: draw_schema(source, depth - 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _map(source: random.Random, _: int) -> dict[str, Any]:
    if source.random() < 0.5:
        rest = {"additionalProperties": _integer(source, 0)}
    else:
        rest = {"patternProperties": {"^k[0-9]$": _string(source, 0)}, "additionalProperties": False}
    return {"type": "object", "minProperties": source.randint(0, 1), "maxProperties": source.randint(1, 2), **rest}


def _array(source: random.Random, depth: int) -> dict[str, Any]:
    least = source.randint(0, 2)
    items = draw_schema(source, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + source.randint(0, 2)}


def _tuple(source: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "array", "prefixItems": [draw_schema(source, depth - 1)], "items": False, "minItems": 1}


def _reference(source: random.Random, depth: int) -> dict[str, Any]:
    # By a reference to the whole document's definitions only where it is the document.
    if depth < 2:
        return _object(source, depth)
    return {"$ref": "#/$defs/part", "$defs": {"part": draw_schema(source, depth - 1)}}


def _chain(length: int) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(length)) + f'\nr{length}: "a"'


_DEFS = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(1500)}
HOSTILE: Mapping[str, StructuredOutput] = {
    "giant repetition": regex_of("((((a{1,100}){1,100}){1,100}){1,100})"),
    "many optional characters": regex_of("a?" * 20000),
    "exponential states": regex_of("(a|b)*a(a|b){500}c"),
    "exponential alternatives": regex_of("(" + "|".join(f".{{{i}}}x" for i in range(1, 300)) + ")*"),
    "deep groups": regex_of("(" * 10000 + "a" + ")" * 10000),
    "matches nothing": regex_of("[^\\s\\S]"),
    "chain of rules": StructuredOutput(StructureKind.GRAMMAR, _chain(8000)),
    "exponential rules": StructuredOutput(
        StructureKind.GRAMMAR, "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "a"'
    ),
    "endless recursion": StructuredOutput(StructureKind.GRAMMAR, "start: start"),
    "left recursion": StructuredOutput(StructureKind.GRAMMAR, 'start: start start | "a" | start'),
    "malformed": StructuredOutput(StructureKind.GRAMMAR, "start: {{{"),
    "control tokens": StructuredOutput(StructureKind.GRAMMAR, 'start: <[0-2]> "a"'),
    "other form": StructuredOutput(StructureKind.GRAMMAR, '{"grammars": [{"json_schema": {}}]}'),
    "deep schema": StructuredOutput(StructureKind.JSON_SCHEMA, '{"items":' * 4000 + "{}" + "}" * 4000),
    "chain of references": schema_of({"$ref": "#/$defs/a0", "$defs": {**_DEFS, "a1500": {"type": "null"}}}),
    "circular references": schema_of({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "many properties": schema_of({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}),
    "giant length": schema_of({"type": "string", "minLength": 10**6, "maxLength": 10**8}),
    "giant array": schema_of({"type": "array", "minItems": 10**8}),
    "remote": schema_of({"$ref": "https://example.com/schema.json"}),
}
"""Grammars that are refused, or that no output can follow to its end."""


def draw_hostile(source: random.Random) -> StructuredOutput:
    """One of `HOSTILE`, damaged: pieces of it repeated, cut, or joined with another."""
    asked = source.choice([*HOSTILE.values()])
    text = str(asked.value)
    for _ in range(source.randint(0, 3)):
        at = source.randrange(len(text) + 1)
        end = min(len(text), at + source.randint(0, 40))
        text = source.choice(
            (text[:at] + text[at:end] * source.randint(2, 30) + text[end:], text[:at] + text[end:], text[:end])
        )
    return StructuredOutput(asked.kind, text[: 60 << 10] or "a")
