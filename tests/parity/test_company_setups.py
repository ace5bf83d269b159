"""Batch invariance by kernels and by standard operators, on one thread and on three, tiny and at true widths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest

from model import kernels
from service.engine.kv.reservations import KVBudget
from tests.artifacts import tiny_artifact
from tests.fakes import drain, tokens_of
from tests.parity.test_batch_invariance import long_request, num_cached
from tests.parity.test_look_up_bits import GUESSING, LIMITS, answers, engine_for
from tests.parity.test_look_up_bits import ask as ask_by_look_up
from tests.served import DECODER_ONLY, SETUPS, alone, answer_of, ask, options_of, pool, run, served, sizes

GUESSED = tuple(setup for setup in SETUPS if sizes(setup)[0] == DECODER_ONLY and "+kernels" in setup)


def cases(setups: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrizes `setup`; wide ones take minutes and are left to `--whole`."""
    marks = {setup: [pytest.mark.whole] * setup.endswith("+wide") for setup in setups}
    return pytest.mark.parametrize("setup", [pytest.param(setup, marks=each) for setup, each in marks.items()])


@pytest.fixture(autouse=True)
def engines_are_released() -> Iterator[None]:
    yield
    served.cache_clear()
    alone.cache_clear()


@cases(SETUPS)
@pytest.mark.sampled(4)
@pytest.mark.timeout(600)
def test_batch_invariance_in_company_after_cache_hits_and_preemptions(setup: str) -> None:
    if "+kernels" in setup and not kernels.operators():
        pytest.skip("the kernels are not built for this processor")
    host = served(setup)
    tokens, logits = alone(setup)
    outputs = run(host.engine(), [(number % 3, request) for number, request in enumerate(pool(host.config))], {})
    assert {name: tokens_of(outputs, name) for name in tokens} == tokens
    assert host.recorder.logits == logits

    request = long_request(host.config)
    cold = ask(host, request)
    logits = dict(host.recorder.logits)
    engine = host.engine()
    for each in (dataclasses.replace(request, request_id="before"), request):
        engine.add_request(each)
        outputs = drain(engine)
    assert num_cached(outputs, request) > 0
    assert answer_of(outputs, request) == answer_of(cold, request)
    assert all(host.recorder.logits[key] == bits for key, bits in logits.items())

    engine = host.engine(KVBudget(num_bytes=1 << 20))
    engine.add_request(request)
    outputs = [engine.step() for _ in range(4)]
    urgent = dataclasses.replace(long_request(host.config, 3), request_id="urgent", priority=1)
    # It needs all rows, so that the other is preempted.
    engine.add_request(dataclasses.replace(urgent, sampling=dataclasses.replace(urgent.sampling, n=8)))
    outputs += drain(engine)
    assert sum(output.stats.num_preemptions for output in outputs) == 1
    assert answer_of(outputs, request) == answer_of(cold, request)
    assert all(host.recorder.logits[key] == bits for key, bits in logits.items())


@cases(GUESSED)
@pytest.mark.sampled(2)
@pytest.mark.timeout(600)
@pytest.mark.skipif(not kernels.operators(), reason="the kernels are not built for this processor")
def test_look_up_changes_no_bit(setup: str) -> None:
    family, overrides = sizes(setup)
    folder, options = tiny_artifact(family, **overrides), options_of(setup)
    engine = engine_for(folder, GUESSING, options)
    assert engine.max_draft_tokens == GUESSING.look_up
    vocab_size = overrides.get("vocab_size", 288)
    found, expected = (ask_by_look_up(each, vocab_size) for each in (engine, engine_for(folder, LIMITS, options)))
    assert [answers(outputs) for outputs in found] == [answers(outputs) for outputs in expected]
    assert sum(output.stats.num_accepted_tokens for outputs in found for output in outputs) > 0
