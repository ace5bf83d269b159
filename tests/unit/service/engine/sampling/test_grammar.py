"""Masks of grammars, and outputs that follow them: on an engine whose model wants to say anything."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from model.spec.generation import GenerationRules
from model.spec.tokenizer import Tokenizer
from service.engine.engine import Engine
from service.engine.logits import LogitsRules
from service.engine.sampling import grammar
from service.engine.sampling.grammar import _MAX_CANONICAL_BYTES, GrammarError, Matcher, Vocabulary, _Words
from service.engine.scheduler import EngineLimits
from service.engine.types import (
    BeamSearchParams,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    StoppingParams,
    StructuredOutput,
    StructureKind,
    TokenEvent,
)
from service.errors import InvalidRequest
from service.process.grammar_check import describe_grammar
from tests.fakes import EOS, FakeRunner, drain, events_of, fake_engine, request, tokens_of
from tests.structured import HOSTILE, VOCAB_SIZE, compiled, draw_schema, regex_of, schema_of, tokenizer, validate

CONTEXT = 512
PERSON = schema_of(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)


def engine(*, encoder_decoder: bool = False, **options: Any) -> Engine:
    limits = EngineLimits(max_batch_size=4, prefill_chunk=8, max_prefill_tokens=16)
    runner = FakeRunner(4, VOCAB_SIZE)
    return fake_engine(
        runner, context=CONTEXT, limits=limits, decode=tokenizer().decode, encoder_decoder=encoder_decoder, **options
    )


def asking(asked: StructuredOutput, request_id: str = "r", seed: int = 1, **fields: Any) -> GenerationRequest:
    sampling = fields.pop("sampling", SamplingParams(temperature=1.0, seed=seed))
    fields = {"max_tokens": 200, **fields}
    return replace(request(request_id, sampling=sampling, **fields), structured_output=asked, grammar=compiled(asked))


def answer(engine: Engine, asked: GenerationRequest) -> list[TokenEvent]:
    engine.add_request(asked)
    return events_of(drain(engine), asked.request_id)


def text_of(events: list[TokenEvent]) -> str:
    return tokenizer().decode([each.token_id for each in events if each.token_id is not None])


def allowed(matcher: Matcher, size: int = VOCAB_SIZE) -> set[int]:
    row = np.zeros(size, np.float32)
    matcher.mask(row)
    return set(np.flatnonzero(row == 0).tolist())


def spelled(text: str) -> list[int]:
    return tokenizer().encode_plain(text)


@given(tokens=st.sets(st.binary(min_size=1, max_size=6), max_size=40), data=st.binary(max_size=40))
def test_long_text_is_split_at_the_longest_tokens(tokens: set[bytes], data: bytes) -> None:
    words = _Words(tokenizer(), tuple(tokens), sorted(tokens), [], [])
    expected, at = list[bytes](), 0
    spelled = tuple(tokens)
    while at < len(data):
        fitting = [token for token in tokens if data.startswith(token, at)]
        if not fitting:
            break
        expected.append(max(fitting, key=len))
        at += len(expected[-1])
    assert [spelled[token_id] for token_id in words._split(data)] == expected


def test_of_long_forced_text_the_beginning_is_split() -> None:
    words = _Words(tokenizer(), (b"a",), [b"a"], [], [])
    assert words(b"a" * 100_000) == [0] * _MAX_CANONICAL_BYTES


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_output_is_valid_or_was_cut(seed: int) -> None:
    schema = draw_schema(random.Random(seed))
    *_, last = events = answer(engine(), asking(schema_of(schema), seed=seed))
    assert last.error is None
    if last.finish_reason is FinishReason.LENGTH:
        assert len(events) == 200
    else:
        assert last.finish_reason in (FinishReason.STOP, FinishReason.END_OF_SEQUENCE)
        validate(text_of(events), schema)


def test_complete_output_ends_without_a_token_for_the_end() -> None:
    events = answer(engine(), asking(regex_of("ab")))
    assert [each.token_id for each in events] == spelled("ab")
    assert (events[-1].finish_reason, events[-1].matched_stop, events[-1].is_mute) == (FinishReason.STOP, None, False)


def test_complete_output_of_the_greatest_length_is_not_called_cut() -> None:
    assert answer(engine(), asking(regex_of("ab"), max_tokens=2))[-1].finish_reason is FinishReason.STOP
    assert answer(engine(), asking(regex_of("abc"), max_tokens=2))[-1].finish_reason is FinishReason.LENGTH


def test_control_tokens_are_never_allowed_and_the_end_only_where_the_text_may_end() -> None:
    matcher = compiled(regex_of("(.|\n)*x")).start()
    assert allowed(matcher).isdisjoint({0, 1, 2})
    matcher.add(spelled("x")[0])
    assert allowed(matcher) & {0, 1, 2} == {EOS}
    named = StructuredOutput(StructureKind.GRAMMAR, 'start: <[0-2]> "a" <[0-2]>')
    assert allowed(compiled(named).start()) == set()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_grammar_allows_the_tokens_that_its_mask_leaves(seed: int) -> None:
    source = random.Random(seed)
    matcher = compiled(schema_of(draw_schema(source))).start(may_end=False)
    is_beginning = True
    while (left := allowed(matcher)) and source.random() < 0.95:
        known = {token_id for token_id in range(VOCAB_SIZE) if matcher.allows(token_id)}
        assert known == (set() if is_beginning else left)
        row = np.arange(VOCAB_SIZE, dtype=np.float32)
        few, logits = matcher.narrow(row)
        assert (few is None) == (len(left) > VOCAB_SIZE / 4)
        tokens = np.flatnonzero(np.isfinite(logits)) if few is None else few
        assert tokens.tolist() == logits[np.isfinite(logits)].tolist() == sorted(left)
        matcher.add(source.choice(sorted(left)))
        is_beginning = False


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 5])
def test_tokens_are_drawn_among_the_few_that_a_grammar_leaves_as_by_its_mask(temperature: float, top_k: int) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=0.9, seed=7)
    asked = asking(regex_of("([0-9]{3}[a-z]{2}-)*"), sampling=sampling, logprobs=2)
    with patch.object(LogitsRules, "narrow", lambda rules, row: (None, rules.apply(row))):
        masked = [replace(each, timings=None) for each in answer(engine(), asked)]
    assert [replace(each, timings=None) for each in answer(engine(), asked)] == masked


@pytest.mark.parametrize("pattern", ["(.|\n){40}", "[a-m]{40}", "a(bc|de)*f"])
def test_a_greedy_token_that_the_grammar_allows_needs_no_mask(pattern: str) -> None:
    asked = asking(regex_of(pattern), sampling=SamplingParams(temperature=0.0))
    with (
        patch.object(LogitsRules, "spare", return_value=False),
        patch.object(Matcher, "narrow", autospec=True, side_effect=Matcher.narrow) as every,
    ):
        masked = [replace(each, timings=None) for each in answer(engine(), asked)]
    with patch.object(Matcher, "narrow", autospec=True, side_effect=Matcher.narrow) as some:
        assert [replace(each, timings=None) for each in answer(engine(), asked)] == masked
    assert every.call_count == len(masked)
    assert 0 < some.call_count <= every.call_count
    if pattern == "(.|\n){40}":
        assert some.call_count <= every.call_count // 2, "its model would rather end, or write a control token"


def test_ignored_end_is_not_allowed() -> None:
    matcher = compiled(regex_of("a+")).start(may_end=False)
    matcher.add(spelled("a")[0])
    assert allowed(matcher) == set(spelled("a"))
    events = answer(engine(), asking(regex_of("a+"), stopping=StoppingParams(max_tokens=30, ignore_eos=True)))
    assert (len(events), events[-1].finish_reason) == (30, FinishReason.LENGTH)


def test_character_of_several_tokens_is_followed_byte_by_byte() -> None:
    matcher = compiled(regex_of("[éè]!")).start()
    first, second = spelled("é")
    assert allowed(matcher) == {first}
    matcher.add(first)
    assert allowed(matcher) == {second, spelled("è")[1]}


def test_token_that_loses_its_space_at_the_beginning_of_a_text_counts_as_what_it_shows() -> None:
    names = ["<s>", "</s>", "▁", "▁a", "a", "b"]
    inner = tokenizers.Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[]))
    inner.add_special_tokens(names[:2])
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    grammar = Vocabulary(Tokenizer(inner), len(names), (1,)).compile(describe_grammar("regex", "[ab]+( [ab])?"))
    matcher = grammar.start()
    assert allowed(matcher, len(names)) == {3, 4, 5}
    matcher.add(3)
    assert allowed(matcher, len(names)) == {1, 2, 3, 4, 5}
    assert allowed(grammar.start(is_beginning=False), len(names)) == {4, 5}


def test_text_that_the_vocabulary_cannot_spell_is_no_fault_where_another_token_has_it() -> None:
    # " ye" is forced, and "y" is no token.
    names = ["<s>", "</s>", "yes", "yellow", " "]
    inner = tokenizers.Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[]))
    inner.add_special_tokens(names[:2])
    inner.decoder = decoders.Fuse()
    vocabulary = Vocabulary(Tokenizer(inner), len(names), (1,))
    matcher = vocabulary.compile(describe_grammar("regex", "(yes|yellow) (yes|yellow)")).start()
    for token_id, forced in ((2, (4,)), (4, ()), (3, ())):
        matcher.add(token_id)
        assert (matcher.forced(), matcher.problem) == (forced, None)
    assert matcher.is_complete


def test_fork_is_independent() -> None:
    matcher = compiled(regex_of("ab|cd")).start()
    fork = matcher.fork()
    matcher.add(spelled("a")[0])
    assert (allowed(matcher), allowed(fork)) == (set(spelled("b")), set(spelled("ac")))


@pytest.mark.parametrize("beams", [None, BeamSearchParams(beam_size=3, num_hypotheses=2)], ids=["sampled", "beams"])
def test_outputs_are_the_same_alone_and_in_company(beams: BeamSearchParams | None) -> None:
    requests = [asking(PERSON, f"p{seed}", seed, beam_search=beams) for seed in range(1 if beams else 3)]
    requests += [asking(regex_of("(ab|c)+d"), "x", 7), request("free", sampling=SamplingParams(seed=3), max_tokens=40)]
    alone = [[(e.token_id, e.finish_reason) for e in answer(engine(), each)] for each in requests]
    crowd = engine()
    for each in requests:
        crowd.add_request(each)
    outputs = drain(crowd)
    assert [[(e.token_id, e.finish_reason) for e in events_of(outputs, each.request_id)] for each in requests] == alone


def test_preempted_outputs_go_on_where_they_were() -> None:
    requests = [asking(PERSON, f"p{seed}", seed) for seed in range(4)]
    alone = [[each.token_id for each in answer(engine(), asked)] for asked in requests]
    crowd = engine()
    for asked in requests:
        crowd.add_request(asked)
    outputs = [crowd.step() for _ in range(6)]
    for number in range(3):
        crowd.add_request(request(f"urgent{number}", priority=1, max_tokens=5))
    outputs += drain(crowd)
    assert sum(output.stats.num_preemptions for output in outputs) > 0
    assert [tokens_of(outputs, asked.request_id) for asked in requests] == alone


def test_every_output_and_every_hypothesis_follows_the_grammar() -> None:
    many = asking(PERSON, sampling=SamplingParams(n=3, seed=5, temperature=1.0))
    beams = asking(PERSON, beam_search=BeamSearchParams(beam_size=4, num_hypotheses=4))
    for asked in (many, beams):
        events = answer(engine(), asked)
        for index in range(asked.num_outputs):
            own = [each for each in events if each.output_index == index]
            assert own[-1].finish_reason in (FinishReason.STOP, FinishReason.END_OF_SEQUENCE)
            validate(text_of(own), json.loads(str(PERSON.value)))


def test_output_i_does_not_depend_on_how_many_there_are() -> None:
    def first(n: int) -> list[int | None]:
        events = answer(engine(), asking(PERSON, sampling=SamplingParams(n=n, seed=5)))
        return [each.token_id for each in events if each.output_index == 0]

    assert first(1) == first(3)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (asking(regex_of("ab"), sampling=SamplingParams(seed=1, allowed_token_ids=(40,))), "leaves no token"),
        (asking(HOSTILE["exponential rules"]), "cannot be followed"),
    ],
    ids=["other rules", "limits"],
)
def test_request_without_a_token_left_ends_alone(asked: GenerationRequest, problem: str) -> None:
    crowd, free = engine(), request("free", sampling=SamplingParams(seed=3), max_tokens=20)
    expected = [each.token_id for each in answer(engine(), free)]
    crowd.add_request(free)
    events = answer(crowd, asked)
    assert isinstance(events[-1].error, InvalidRequest)
    assert problem in str(events[-1].error)
    crowd.add_request(free)
    assert [each.token_id for each in events_of(drain(crowd), "free")] == expected


def test_models_own_first_token_precedes_the_text_and_its_last_token_is_not_forced() -> None:
    rules = GenerationRules(forced_first_id=1, forced_last_id=EOS)
    model = engine(generation=rules, encoder_decoder=True)
    events = answer(model, asking(regex_of("abcdef"), max_tokens=4))
    assert [each.token_id for each in events] == [1, *spelled("abc")]
    assert events[-1].finish_reason is FinishReason.LENGTH


def test_text_of_choices_and_any_json() -> None:
    texts = ("a.b", "<x>", "é|", 'q"')
    events = answer(engine(), asking(StructuredOutput(StructureKind.CHOICE, texts)))
    assert text_of(events) in texts
    value = answer(engine(), asking(StructuredOutput(StructureKind.JSON), seed=3))
    if value[-1].finish_reason is not FinishReason.LENGTH:
        json.loads(text_of(value))


def test_a_form_whose_first_mask_is_beyond_the_limits_is_refused_when_it_is_compiled() -> None:
    texts = tuple(f"{a}{b}" for a in "abcdefgh" for b in "stuvwxyz")
    asked = StructuredOutput(StructureKind.CHOICE, texts)
    assert compiled(asked).start().problem is None
    limits = {**grammar.LIMITS, "step_lexer_fuel": 0}
    with patch.object(grammar, "LIMITS", limits), pytest.raises(GrammarError, match="too many expressions"):
        compiled(asked)
