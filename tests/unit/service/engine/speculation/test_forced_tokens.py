"""Tokens that a grammar forces are draft tokens: the same events to the last bit, in fewer steps."""

from __future__ import annotations

import dataclasses

import pytest

from service.engine.types import FinishReason, GenerationRequest, SamplingParams, StoppingParams, StructuredOutput
from service.errors import InvalidRequest
from tests.fakes import request, tokens_of
from tests.structured import VOCAB_SIZE, compiled, regex_of, schema_of, tokenizer
from tests.unit.service.engine.speculation.test_prompt_lookup import num_accepted, reported, run

RECORD = schema_of(
    {
        "type": "object",
        "properties": {
            "identifier": {"type": "integer", "minimum": 0, "maximum": 9999},
            "description": {"type": "string", "maxLength": 12},
            "is_available": {"type": "boolean"},
        },
        "required": ["identifier", "description", "is_available"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)


def structured_request(asked: StructuredOutput, seed: int, *, ignore_eos: bool = False) -> GenerationRequest:
    stopping = StoppingParams(max_tokens=150, ignore_eos=ignore_eos)
    plain = request("a", (5, 6), sampling=SamplingParams(seed=seed), stopping=stopping, logprobs=1)
    return dataclasses.replace(plain, structured_output=asked, grammar=compiled(asked))


@pytest.mark.parametrize("look_up", [1, 5, 15])
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize(
    "asked",
    [RECORD, regex_of("abcdefgh"), regex_of("(xyz){3}[ab]+(end)?"), schema_of({"enum": ["abcde", "abcdf"]})],
    ids=["schema", "forced to the end", "regex", "enum"],
)
def test_forced_tokens_are_drafts_and_change_no_event(asked: StructuredOutput, ignore_eos: bool, look_up: int) -> None:
    for seed in range(3):
        wanted = structured_request(asked, seed, ignore_eos=ignore_eos)
        (alone, _), (drafted, _) = (run(wanted, drafts, vocab_size=VOCAB_SIZE) for drafts in (0, look_up))
        assert reported(drafted) == reported(alone)
        assert num_accepted(drafted) > 0
        assert len(drafted) < len(alone)


def test_forced_tokens_save_a_third_of_the_steps_of_a_record() -> None:
    wanted = structured_request(RECORD, seed=1)
    (alone, _), (drafted, _) = (run(wanted, drafts, vocab_size=VOCAB_SIZE) for drafts in (0, 8))
    assert drafted[-1].events[-1].finish_reason is FinishReason.STOP
    assert len(drafted) <= 0.7 * len(alone)


def test_forced_tokens_beyond_the_end_are_no_drafts() -> None:
    # Their K/V would lie behind the row's. One token is sampled alone, and one behind the draft.
    wanted = dataclasses.replace(
        structured_request(regex_of("abcdefgh"), seed=1), stopping=StoppingParams(max_tokens=3)
    )
    outputs, _ = run(wanted, 5, vocab_size=VOCAB_SIZE)
    assert sum(output.stats.num_draft_tokens for output in outputs) == 1
    assert tokens_of(outputs, "a") == tokenizer().encode_plain("abc")


def test_grammar_that_fails_behind_a_draft_fails_with_its_own_error() -> None:
    # "b" is forced behind "a", and not allowed.
    sampling = SamplingParams(seed=1, allowed_token_ids=tuple(tokenizer().encode_plain("xa")))
    wanted = dataclasses.replace(structured_request(regex_of("xab"), seed=1), sampling=sampling)
    (alone, _), (drafted, _) = (run(wanted, drafts, vocab_size=VOCAB_SIZE) for drafts in (0, 4))
    assert tokens_of(drafted, "a") == tokens_of(alone, "a") == tokenizer().encode_plain("xa")
    for outputs in (alone, drafted):
        assert isinstance(outputs[-1].events[-1].error, InvalidRequest)
