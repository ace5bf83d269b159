"""What a model wants of every output: kept by sampling and by beam search, for both families, in every request."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from model.spec.generation import NO_RULES, GenerationError, GenerationRules, GenerationSettings
from service.engine.batch import BeamRow
from service.engine.logits import make_beam_rules, make_model_rules, make_rules
from service.engine.sampling.sampler import Sampler
from service.engine.types import BeamSearchParams, FinishReason, SamplingParams, StoppingParams
from service.errors import InvalidRequest
from service.scoring import make_task
from tests.fakes import EOS, VOCAB_SIZE, FakeRunner, drain, events_of, fake_engine, request, spell, tokens_of
from tests.servers import served_model

FIRST, LAST, NEVER = 9, EOS, 12
RULES = GenerationRules(forced_first_id=FIRST, forced_last_id=LAST, suppressed_ids=(NEVER,))


def generated(rules: GenerationRules, max_tokens: int = 6, **options: object) -> list[int]:
    engine = fake_engine(FakeRunner(4), encoder_decoder=True, generation=rules)
    engine.add_request(request(prompt=(5, 6, 7), max_tokens=max_tokens, **options))  # type: ignore[arg-type]
    return tokens_of(drain(engine), "r")


def test_settings_survive_json_and_name_all_that_is_wrong() -> None:
    settings = GenerationSettings((3, 4), RULES)
    assert GenerationSettings.from_json(settings.to_json()) == settings
    assert GenerationRules.from_dict(NO_RULES.to_dict()) == NO_RULES
    wrong = {"eos_ids": [], "rules": {"forced_first_id": -1, "suppressed_ids": [True], "renormalize": 1}}
    wrong["rules"] |= {"more": 2, "patience": -1.0}
    with pytest.raises(GenerationError) as caught:
        GenerationSettings.from_json(json.dumps(wrong))
    for said in (
        "forced_first_id is -1",
        "suppressed_ids is [True]",
        "renormalize is 1",
        "unknown field 'more'",
        "patience is -1",
    ):
        assert any(said in problem for problem in caught.value.problems)
    for text in ("[", "[]", '{"eos_ids": [1]}', '{"eos_ids": [1], "rules": []}', '{"eos_ids": [], "rules": {}}'):
        with pytest.raises(GenerationError):
            GenerationSettings.from_json(text)


def test_first_token_is_forced_and_the_last_where_the_output_is_cut_off() -> None:
    free = generated(NO_RULES)
    assert free[0] != FIRST
    assert free[-1] != LAST
    tokens = generated(RULES)
    assert len(tokens) == len(free) == 6
    assert (tokens[0], tokens[-1]) == (FIRST, LAST)
    assert generated(RULES, max_tokens=1) == [LAST]


def test_output_that_is_cut_off_by_a_forced_end_has_ended() -> None:
    engine = fake_engine(FakeRunner(4), encoder_decoder=True, generation=RULES)
    engine.add_request(request(prompt=(5,), max_tokens=3))
    assert events_of(drain(engine), "r")[-1].finish_reason is FinishReason.END_OF_SEQUENCE


@pytest.mark.parametrize("seed", range(5))
def test_rules_hold_for_whatever_is_drawn(seed: int) -> None:
    sampling = SamplingParams(temperature=5.0, seed=seed, logit_bias=((NEVER, 100.0), (FIRST, -100.0)))
    tokens = generated(RULES, max_tokens=20, sampling=sampling)
    assert tokens[0] == FIRST
    assert NEVER not in tokens


def test_a_beginning_that_the_request_gives_takes_the_place_of_the_forced_one() -> None:
    tokens = generated(RULES, target_prefix=(FIRST, 5))
    assert tokens[0] != FIRST
    assert tokens[-1] == LAST


def test_forced_token_counts_as_certain_and_what_is_left_only_if_it_is_wished() -> None:
    row = np.array([[3.0, 2.0, 1.0, 0.0]], np.float32)
    everything = math.log(sum(math.exp(value) for value in row[0]))

    def logprobs(rules: GenerationRules, max_tokens: int) -> dict[int, float]:
        wishes = make_model_rules(rules, max_tokens=max_tokens, has_prefix=False)
        made = make_beam_rules(
            BeamSearchParams(beam_size=2), StoppingParams(), (), (), wishes, renormalize=rules.renormalize
        )
        ((expansion,),) = Sampler().expand(row, [BeamRow((0,), 4, (made,), 2)])  # type: ignore[misc]
        assert expansion.top_token_ids == (0, 1), "alternatives are the model's own, whatever the rules"
        assert expansion.top_logprobs[0] == pytest.approx(3.0 - everything)
        return dict(zip(expansion.token_ids.tolist(), expansion.logprobs.tolist(), strict=True))

    assert logprobs(GenerationRules(forced_first_id=3), 5) == {3: 0.0}
    assert logprobs(GenerationRules(forced_last_id=2, suppressed_ids=(2,)), 1) == {2: 0.0}
    kept = logprobs(GenerationRules(suppressed_ids=(0,)), 5)
    assert kept == pytest.approx({1: 2 - everything, 2: 1 - everything, 3: -everything})
    left = math.log(sum(math.exp(value) for value in row[0][1:]))
    renormalised = logprobs(GenerationRules(suppressed_ids=(0,), renormalize=True), 5)
    assert renormalised == pytest.approx({1: 2 - left, 2: 1 - left, 3: -left})


def test_rules_are_forked_with_their_wishes() -> None:
    wishes = make_model_rules(RULES, max_tokens=2, has_prefix=False)
    rules = make_beam_rules(BeamSearchParams(beam_size=2), StoppingParams(), (), (), wishes, renormalize=True)
    assert rules is not None
    fork = rules.fork()
    fork.add(FIRST)
    row = np.zeros(16, np.float32)
    assert np.isfinite(rules.apply(row)).nonzero()[0].tolist() == [FIRST]
    assert np.isfinite(fork.apply(row)).nonzero()[0].tolist() == [LAST]
    assert fork.renormalizes


def test_beams_begin_and_end_as_the_model_wants() -> None:
    engine = fake_engine(FakeRunner(4), encoder_decoder=True, generation=RULES)
    beams = BeamSearchParams(beam_size=3, num_hypotheses=3)
    engine.add_request(request(prompt=(5, 6), max_tokens=5, beam_search=beams))
    outputs = drain(engine)
    found = [tokens_of(outputs, "r", index) for index in range(3)]
    assert len({tuple(tokens) for tokens in found}) == 3
    for tokens in found:
        assert (tokens[0], tokens[-1], NEVER in tokens) == (FIRST, LAST, False)


def test_patience_is_the_models_where_a_request_says_nothing_of_it() -> None:
    """A search of three beams, in which much ends, at every way to end it: the model's own, and the request's."""

    def steps(own: float, asked: float | None) -> int:
        engine = fake_engine(FakeRunner(4), encoder_decoder=True, generation=GenerationRules(patience=own))
        stopping = StoppingParams(max_tokens=12, stop_token_ids=frozenset(range(1, VOCAB_SIZE, 2)))
        beams = BeamSearchParams(beam_size=3, patience=asked)
        engine.add_request(request(prompt=(5, 6), stopping=stopping, beam_search=beams))
        return len(drain(engine))

    assert steps(1000.0, None) == steps(1.0, 1000.0) > steps(1.0, None) == steps(1000.0, 1.0)


def test_a_model_without_wishes_has_no_rules() -> None:
    assert make_model_rules(NO_RULES, max_tokens=3, has_prefix=False) == ()
    assert make_rules(SamplingParams(), StoppingParams(), (), ()) is None


def test_forced_beginning_comes_before_what_a_request_gives() -> None:
    model = served_model(encoder_decoder=True, generation=RULES)
    assert model.encode_target_prefix("ab") == (FIRST, *spell("ab"))
    assert model.encode_target_prefix("") == ()
    task = make_task(model, "ab", "cd")
    assert task.target_prefix_token_ids == (FIRST, *spell("cd"))
    assert task.start == 2
    assert task.scored_token_ids == spell("cd")


def test_allowed_tokens_that_the_model_suppresses_leave_nothing_and_are_refused() -> None:
    model = served_model(generation=RULES)
    model.check_logits_rules(SamplingParams(allowed_token_ids=(NEVER, 5)), StoppingParams())
    with pytest.raises(InvalidRequest, match=r"allowed_token_ids: must have a token that fake does not suppress"):
        model.check_logits_rules(SamplingParams(allowed_token_ids=(NEVER,)), StoppingParams())
    with pytest.raises(InvalidRequest, match=r"stopping\.min_tokens: must be 0"):
        model.check_logits_rules(SamplingParams(allowed_token_ids=(NEVER, EOS)), StoppingParams(min_tokens=1))
