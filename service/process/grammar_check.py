"""Structured output's grammars, as llguidance takes them, and the child process that tries each one first.

A hostile grammar may take minutes to compile, gigabytes of memory, or overflow the stack, which no thread survives. So
a child compiles it and follows it for some tokens, under limits of time and memory, before the server compiles it with
a larger stack. `python -m service.process.grammar_check` is the child: it reads a grammar, as JSON text, from each line
of stdin, and answers each with a line: JSON of what is wrong with it and what it takes, or nothing if it was ended.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

LIMITS: Mapping[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""Of llguidance's `LLParserLimits`: states take one to two kilobytes each, a step's fuel some milliseconds."""
STACK_BYTES = 32 << 20
"""Of a thread that compiles a grammar that has passed: four times what the child had."""

_CHILD_STACK_BYTES = 8 << 20
_MAX_CPU_SECONDS = 1
# A busy machine may keep the child waiting.
_MAX_WALL_SECONDS = 60.0
_START_SECONDS = 60.0
_MAX_BYTES = 32 << 20
_ADDRESS_SPACE = 1 << 30
_NICENESS = 10
_MAX_ERROR = 300
# The child follows a grammar for so many tokens: what is too complex to follow often shows early.
_NUM_STEPS = 48
_END = 256

# Keywords whose values are schemas by names that are no keywords.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"const", "enum", "default", "examples", "example", "required"})


def is_available() -> bool:
    """Whether llguidance is installed (extra `structured`)."""
    return find_spec("llguidance") is not None


def describe_grammar(kind: str, value: Any) -> str:
    """A grammar as llguidance reads it: JSON text.

    Args:
        kind: "json_schema", "json", "regex", "grammar" or "choice".
        value: the schema's text, nothing, the expression, Lark's text, or the texts.

    Raises:
        ValueError: when it is no JSON object, as a schema must be.
    """
    from llguidance import LLMatcher  # an extra

    if kind in ("json_schema", "json"):
        # What a schema says of the compiler is the caller's to say, but for what would loosen the schema itself.
        strict: Any = {"lenient": False, "coerce_one_of": False}
        return LLMatcher.grammar_from_json_schema("{}" if kind == "json" else value, overrides=strict)
    if kind == "choice":
        kind, value = "regex", "|".join(map(re.escape, value))
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    # Not as it is: text that begins with "{" would be taken for JSON.
    return json.dumps({"grammars": [{"lark_grammar": value}]})


def find_keyword(schema: str, error: str) -> str:
    """Where a JSON schema has the first keyword that llguidance's error names, as a JSON pointer; "" if nowhere."""
    listed = re.search(r"Unimplemented keys: (\[.*?\])", error)
    # An error may repeat the schema's own words, and these look like a list.
    try:
        keys = set(json.loads(listed[1])) if listed else {"oneOf"} if error.startswith("oneOf") else set()
        keywords = _keywords(json.loads(schema)) if keys else ()
        return next((f"#{path}" for path, key in keywords if key in keys), "")
    except (TypeError, ValueError, RecursionError):
        return ""


def _keywords(schema: Any) -> Iterator[tuple[str, str]]:
    """The keywords of a schema and of those in it, each with its path, in the order of the text."""
    # What is left to look at, the next one last: a keyword with its value, or a schema or list of them without one.
    left: list[tuple[str | None, Any, str]] = [(None, schema, "")]
    while left:
        key, value, path = left.pop()
        inner: list[tuple[str | None, Any, str]] = []
        if key is not None:
            yield path, key
            if key in _NAMED and isinstance(value, dict):
                inner = [(None, each, f"{path}/{_escape(name)}") for name, each in value.items()]
            elif key not in _DATA:
                inner = [(None, value, path)]
        elif isinstance(value, list):
            inner = [(None, each, f"{path}/{index}") for index, each in enumerate(value)]
        elif isinstance(value, dict):
            inner = [(name, each, f"{path}/{_escape(name)}") for name, each in value.items()]
        left += reversed(inner)


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def shorten_error(error: str) -> str:
    """An error of llguidance for a client: without the state or the traceback, with its paths, that may follow it."""
    if error.startswith("panic"):
        return "llguidance fails at it"
    text = "matches nothing" if "NoExtensionBias" in error else error.split("\n<", maxsplit=1)[0]
    return " ".join(text.split())[:_MAX_ERROR]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with a grammar, None if it may be compiled; and the bytes that it takes, about."""

    problem: str | None
    num_bytes: int = 0


class GrammarCheck:
    """Tries grammars in a child, one after another. A child that hangs is replaced."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def try_out(self, grammar: str) -> Verdict:
        """Whether a grammar may be compiled. Blocks.

        Raises:
            OSError: when no child can be started, or the child does not answer.
        """
        if self._child is not None and self._child.poll() is not None:
            self.close()
        child = self._child or self._start()
        pipe: Any = child.stdin
        pipe.write(json.dumps(grammar).encode() + b"\n")
        pipe.flush()
        answer = self._read(child, _MAX_WALL_SECONDS)
        if answer is None:
            # Of the machine or the child, not of the grammar: the limits end a trial sooner.
            raise OSError("the process that checks grammars did not answer")
        if not answer:
            return Verdict(f"takes more than {_MAX_CPU_SECONDS} s or {_MAX_BYTES >> 20} MiB, or nests too deeply")
        problem, num_bytes = json.loads(answer)
        return Verdict(problem and shorten_error(problem), num_bytes)

    def close(self) -> None:
        """Ends the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with suppress(BrokenPipeError):
                    pipe.close()  # type: ignore[union-attr]

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "service.process.grammar_check"]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere)  # noqa: S603 (ourselves)
        self._child = child
        if self._read(child, _START_SECONDS) is None:
            raise OSError("the process that checks grammars did not start")
        return child

    def _read(self, child: subprocess.Popen[bytes], seconds: float) -> bytes | None:
        """A line without its end; None from a child that has ended or takes too long, which is closed."""
        out: Any = child.stdout
        # Not `select`, which knows no descriptor beyond 1,023.
        poll = select.poll()
        poll.register(out, select.POLLIN)
        line: bytes = out.readline() if poll.poll(1000 * seconds) else b""
        if line.endswith(b"\n"):
            return line[:-1]
        self.close()
        return None


class _Bytes:
    """A vocabulary of the 256 bytes and an end, for llguidance."""

    is_tokenizer_wrapper = True
    eos_token_id = _END
    bos_token_id = None
    special_token_ids = (_END,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _peak_bytes() -> int:
    """The most memory that this process has had since it was forked."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _try(tokenizer: Any, grammar: str) -> tuple[str | None, int]:
    """Compiles a grammar and follows it; what is wrong with it, and the bytes that it took."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**LIMITS)
    # What all grammars need is in memory before this one is measured.
    _follow(LLMatcher(tokenizer, describe_grammar("json", ""), log_level=0, limits=limits))
    before = _peak_bytes()
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        return matcher.get_error(), 0
    problem, num_bytes = _follow(matcher.deep_copy()), _peak_bytes() - before
    if problem is None and num_bytes > _MAX_BYTES:
        problem = f"takes more than {_MAX_BYTES >> 20} MiB"
    return problem, num_bytes


def _follow(matcher: Any) -> str | None:
    """Takes some tokens that a grammar allows, always the same ones."""
    draws = random.Random(0)  # noqa: S311 (a walk)
    for step in range(_NUM_STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return f"is too complex: {matcher.get_error()}"
        allowed = [byte for byte in range(_END) if mask[byte >> 3] >> (byte & 7) & 1]
        if not allowed:
            return None if step or matcher.is_accepting() else "matches nothing"
        matcher.consume_token(draws.choice(allowed))
        matcher.compute_ff_tokens()
    return None


def _answer(tokenizer: Any, grammar: str) -> None:
    """Writes a verdict; in a process of its own, whose memory is all the same before each grammar."""
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_SECONDS, _MAX_CPU_SECONDS))
    threading.stack_size(_CHILD_STACK_BYTES)
    verdicts: list[tuple[str | None, int]] = []
    trial = threading.Thread(target=lambda: verdicts.append(_try(tokenizer, grammar)))
    trial.start()
    trial.join()
    sys.stdout.write(json.dumps(verdicts[0]))
    sys.stdout.flush()


def main() -> None:
    """The child. It forks for each grammar: one that ends the process leaves an empty line as its answer."""
    import llguidance

    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    vocabulary: Any = _Bytes()
    tokenizer = llguidance.LLTokenizer(vocabulary, slices=[])
    print(flush=True)  # noqa: T201 (ready)
    for line in sys.stdin.buffer:
        if (pid := os.fork()) == 0:
            try:
                _answer(tokenizer, json.loads(line))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        print(flush=True)  # noqa: T201 (the end of the answer)


if __name__ == "__main__":
    main()
