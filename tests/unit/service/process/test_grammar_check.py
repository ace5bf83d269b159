"""Grammars are tried in a child first: hostile ones end there, and what is wrong is said with its place."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest

from service.engine.types import StructuredOutput
from service.process import grammar_check
from service.process.grammar_check import GrammarCheck, describe_grammar, find_keyword, shorten_error
from tests.structured import HOSTILE, draw_hostile, regex_of, schema_of

# What may be followed for a while, and costs no more than others do.
BOUNDED = {"exponential states", "exponential alternatives", "left recursion", "giant length", "giant array"}
FINE = regex_of("[a-z]+")
# Seen as the greatest: an eighth of it.
MAX_GRAMMAR_BYTES = 32 << 20


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarCheck]:
    check = GrammarCheck()
    yield check
    check.close()


def problem_of(check: GrammarCheck, asked: StructuredOutput) -> str | None:
    try:
        grammar = describe_grammar(asked.kind, asked.value)
    except ValueError as error:
        return str(error)
    verdict = check.try_out(grammar)
    assert verdict.problem is not None or verdict.num_bytes <= MAX_GRAMMAR_BYTES
    return verdict.problem


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammar_is_refused_or_bounded_and_the_next_is_checked(check: GrammarCheck, name: str) -> None:
    problem = problem_of(check, HOSTILE[name])
    assert (problem is None) == (name in BOUNDED | {"control tokens"}), problem
    assert problem is None or len(problem) <= 300
    assert problem_of(check, FINE) is None


def test_damaged_hostile_grammars_end_no_check(check: GrammarCheck, pytestconfig: pytest.Config) -> None:
    for seed in range(10_000 if pytestconfig.getoption("--whole") else 20):
        problem_of(check, draw_hostile(random.Random(seed)))
    assert problem_of(check, FINE) is None


def test_child_that_is_killed_is_replaced() -> None:
    check = GrammarCheck()
    assert problem_of(check, FINE) is None
    child = check._child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert problem_of(check, FINE) is None
    check.close()


def test_child_is_heard_by_a_server_with_thousands_of_descriptors() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 1100), limits[1]))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        while stack.enter_context(Path(os.devnull).open()).fileno() < 1024:
            pass
        check = GrammarCheck()
        stack.callback(check.close)
        assert problem_of(check, FINE) is None


def test_child_that_does_not_answer_is_no_refusal() -> None:
    check = GrammarCheck()
    assert problem_of(check, FINE) is None
    child = check._child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    with patch.object(grammar_check, "_MAX_WALL_SECONDS", 0.05), pytest.raises(OSError, match="did not answer"):
        problem_of(check, FINE)
    assert problem_of(check, FINE) is None
    check.close()


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {}}, "#/not"),
        ({"properties": {"a/b": {"items": [{"contains": {}}]}}}, "#/properties/a~1b/items/0/contains"),
        ({"properties": {"contains": {"type": "array", "contains": {}}}}, "#/properties/contains/contains"),
        ({"enum": [{"not": 1}], "anyOf": [{}, {"not": {}}]}, "#/anyOf/1/not"),
        ({"items": {"oneOf": [{"minimum": 1}, {"maximum": 2}]}}, "#/items/oneOf"),
    ],
)
def test_keyword_that_is_refused_is_found(check: GrammarCheck, schema: object, place: str) -> None:
    problem = problem_of(check, schema_of(schema))
    assert problem is not None
    assert find_keyword(json.dumps(schema), problem) == place


@pytest.mark.parametrize("written", ["[x]", "[{}]", '["a"]'])
def test_a_schema_whose_words_look_like_a_list_of_keywords_is_refused(check: GrammarCheck, written: str) -> None:
    schema = {"type": f"Unimplemented keys: {written}"}
    problem = problem_of(check, schema_of(schema))
    assert problem is not None
    assert written in problem
    assert find_keyword(json.dumps(schema), problem) == ""


def test_client_sees_no_path_of_a_panic() -> None:
    panic = 'panic: called `Result::unwrap()` on an `Err` value: Some("Traceback:\\n File \\"/srv/a.py\\"")\n<state>\n'
    assert "/srv" not in shorten_error(panic)
    assert shorten_error("too many rules\n<state>\n") == "too many rules"


@pytest.mark.parametrize("loosened", [{"lenient": True}, {"coerce_one_of": True}])
def test_schema_cannot_loosen_itself(check: GrammarCheck, loosened: dict[str, bool]) -> None:
    schema = {"oneOf": [{"minimum": 1}, {"maximum": 2}], "x-guidance": loosened}
    assert problem_of(check, schema_of(schema)) is not None
