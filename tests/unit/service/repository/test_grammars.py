"""Compiled grammars: cached by content within a bound, refused ones too, and each caller gets an error of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import gc as garbage
import random
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders

from model.spec.artifact import TOKENIZER, FileEntry
from model.spec.tokenizer import Tokenizer
from service.engine.sampling.grammar import Vocabulary
from service.engine.types import StructuredOutput
from service.errors import InvalidRequest, UnsupportedFeature
from service.process import grammar_check
from service.process.grammar_check import GrammarCheck, Verdict
from service.repository import grammars, loading
from service.repository.grammars import Grammars
from tests.servers import eventually, letter_tokenizer, served_model
from tests.structured import HOSTILE, VOCAB_SIZE, regex_of, schema_of, tokenizer, vocabulary


@pytest.fixture
async def compiler() -> AsyncIterator[Grammars]:
    compiler = Grammars()
    yield compiler
    compiler.close()


async def test_grammar_is_compiled_once_for_a_vocabulary(compiler: Grammars) -> None:
    other = Vocabulary(tokenizer(), VOCAB_SIZE, (2,))
    first = await compiler.compile("", vocabulary(), regex_of("a+"))
    assert await compiler.compile("", vocabulary(), regex_of("a+")) is first
    assert await compiler.compile("", vocabulary(), regex_of("b+")) is not first
    assert await compiler.compile("", other, regex_of("a+")) is not first


async def test_grammar_is_compiled_once_for_all_who_wait(compiler: Grammars) -> None:
    with patch.object(compiler, "_compile", wraps=compiler._compile) as compiling:
        asking = [asyncio.ensure_future(compiler.compile("", vocabulary(), regex_of("a+"))) for _ in range(3)]
        await asyncio.sleep(0)
        asking[0].cancel()
        assert await asking[1] is await asking[2]
    assert compiling.call_count == 1


async def test_grammar_that_nobody_waits_for_any_more_is_not_compiled(compiler: Grammars) -> None:
    may_go_on = threading.Event()
    compile_ = compiler._compile

    def wait(*arguments: Any) -> Any:
        may_go_on.wait()
        return compile_(*arguments)

    with patch.object(compiler, "_compile", side_effect=wait) as compiling:
        first = [asyncio.ensure_future(compiler.compile("", vocabulary(), regex_of(f"{name}+"))) for name in "ab"]
        await eventually(lambda: compiling.call_count == 2)  # both threads are busy
        leaving = asyncio.ensure_future(compiler.compile("", vocabulary(), regex_of("c+")))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        may_go_on.set()
        await asyncio.gather(*first)
        assert not compiler._running
        assert not compiler._num_waiting
    assert compiling.call_count == 2


async def test_grammar_whose_limit_an_output_met_is_compiled_anew(compiler: Grammars) -> None:
    with patch.dict(grammar_check.LIMITS, max_lexer_states=60):
        first = await compiler.compile("", vocabulary(), regex_of("(a|b)*a(a|b){12}"))
    matcher, rng = first.start(), random.Random(1)
    while matcher.problem is None:
        matcher.add(ord(rng.choice("ab")) + 3)
        matcher.mask(np.zeros(VOCAB_SIZE, np.float32))
    assert first.is_spent
    second = await compiler.compile("", vocabulary(), regex_of("(a|b)*a(a|b){12}"))
    assert second is not first
    matcher = second.start()
    matcher.mask(np.zeros(VOCAB_SIZE, np.float32))
    assert matcher.problem is None
    total = sum(num_bytes for _, (_, num_bytes) in compiler._cached.values())
    assert compiler._num_cached_bytes.total() == total


async def test_refused_grammar_is_tried_once_and_named(compiler: Grammars) -> None:
    asked = schema_of({"properties": {"a": {"not": {}}}})
    errors = []
    for _ in range(2):
        with pytest.raises(InvalidRequest) as raised:
            await compiler.compile("", vocabulary(), asked)
        errors.append(raised.value)
    assert errors[0].field == "structured_output.json_schema#/properties/a/not"
    assert str(errors[0]) == str(errors[1])
    assert errors[0] is not errors[1]
    with patch.object(compiler, "_compile", side_effect=AssertionError), pytest.raises(InvalidRequest):
        await compiler.compile("", vocabulary(), asked)


async def test_cache_forgets_what_was_used_longest_ago(compiler: Grammars) -> None:
    grammar = await compiler.compile("", vocabulary(), regex_of("a+"))
    rare = await compiler.compile("", vocabulary(), regex_of("c+"))
    with patch.object(grammars, "_MAX_CACHED_BYTES", compiler._num_cached_bytes.total() - 1):
        assert await compiler.compile("", vocabulary(), regex_of("a+")) is grammar
    assert compiler._num_cached_bytes.total() == sum(num_bytes for _, (_, num_bytes) in compiler._cached.values())
    assert await compiler.compile("", vocabulary(), regex_of("c+")) is not rare


async def test_cache_forgets_grammars_of_the_tenant_that_takes_most(compiler: Grammars) -> None:
    kept = await compiler.compile("modest", vocabulary(), regex_of("a+"))
    first, *_, last = [await compiler.compile("greedy", vocabulary(), regex_of(f"b{{{n}}}")) for n in range(1, 6)]
    with patch.object(grammars, "_MAX_CACHED_BYTES", compiler._num_cached_bytes.total() - 1):
        assert await compiler.compile("greedy", vocabulary(), regex_of("b{5}")) is last
    assert await compiler.compile("modest", vocabulary(), regex_of("a+")) is kept
    assert await compiler.compile("greedy", vocabulary(), regex_of("b{1}")) is not first


@pytest.mark.parametrize("decoder", [decoders.Fuse(), decoders.WordPiece()], ids=["fuse", "word-piece"])
@pytest.mark.parametrize("is_installed", [False, True])
def test_model_has_a_vocabulary_where_that_is_possible(decoder: Any, is_installed: bool) -> None:
    inner = tokenizers.Tokenizer.from_str(letter_tokenizer().to_json())
    inner.decoder = decoder
    with patch.object(grammar_check, "find_spec", return_value=is_installed or None):
        found = loading._vocabulary("m", Tokenizer(inner), served_model().manifest)
    assert (found is not None) == (is_installed and isinstance(decoder, decoders.Fuse))


def test_models_of_one_tokenizer_share_a_vocabulary_as_long_as_they_are_there() -> None:
    def vocabulary_of(entry: FileEntry, *eos_ids: int) -> Vocabulary | None:
        files = {**manifest.files, TOKENIZER: entry}
        asked = dataclasses.replace(manifest, files=files, eos_ids=eos_ids)
        return loading._shared_vocabulary("m", tokenizer(), asked)

    manifest, entry, other = served_model().manifest, FileEntry("a" * 64, 1), FileEntry("b" * 64, 1)
    kept = vocabulary_of(entry, 2)
    assert kept is not None
    assert vocabulary_of(entry, 2) is kept
    assert vocabulary_of(other, 2) is not kept
    assert vocabulary_of(entry, 3) is not kept
    gone = weakref.ref(kept)
    del kept
    garbage.collect()
    assert gone() is None


async def test_model_without_a_vocabulary_is_refused_by_name(compiler: Grammars) -> None:
    with pytest.raises(UnsupportedFeature, match="structured_output"):
        await compiler.compile("", None, regex_of("a"))


async def test_slow_grammar_blocks_neither_the_loop_nor_another(compiler: Grammars) -> None:
    await compiler.compile("", vocabulary(), regex_of("warm"))
    slow = asyncio.create_task(compiler.compile("a", vocabulary(), HOSTILE["many optional characters"]))
    await asyncio.sleep(0)
    await compiler.compile("b", vocabulary(), regex_of("b+"))
    assert not slow.done()
    with pytest.raises(InvalidRequest, match="takes more than"):
        await slow


async def test_one_tenants_short_grammars_take_turns_with_anothers(compiler: Grammars) -> None:
    begun: list[object] = []
    is_full, gate = threading.Event(), threading.Event()

    def compile_one(_: object, asked: StructuredOutput) -> tuple[InvalidRequest, int]:
        begun.append(asked.value)
        if len(begun) == 2:
            is_full.set()
        gate.wait()
        return InvalidRequest("f", "v", "l"), 1

    with patch.object(compiler, "_compile", compile_one):
        asked = [("a", f"a{{{count}}}") for count in range(1, 20)] + [("b", "b")]
        waiting = [asyncio.create_task(compiler.compile(name, vocabulary(), regex_of(text))) for name, text in asked]
        await asyncio.to_thread(is_full.wait)
        gate.set()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert begun.index("b") <= 4


async def test_cancelled_wait_leaves_others_alone(compiler: Grammars) -> None:
    first = asyncio.create_task(compiler.compile("", vocabulary(), regex_of("x+")))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await compiler.compile("", vocabulary(), regex_of("x+"))


async def test_a_child_that_is_in_use_when_the_compiler_closes_ends_with_its_trial() -> None:
    compiler, tries, may_end = Grammars(), threading.Event(), threading.Event()
    checks: list[GrammarCheck] = []
    try_out = GrammarCheck.try_out

    def held(check: GrammarCheck, grammar: str) -> Verdict:
        verdict = try_out(check, grammar)
        checks.append(check)
        tries.set()
        may_end.wait()
        return verdict

    with patch.object(GrammarCheck, "try_out", held):
        compiling = asyncio.create_task(compiler.compile("", vocabulary(), regex_of("a+")))
        await asyncio.to_thread(tries.wait)
        compiler.close()
        assert checks[0]._child is not None
        may_end.set()
        await compiling
    assert checks[0]._child is None
