"""A request's cost, held to a count of every step, row, query and key one by one, and to what an engine runs."""

from __future__ import annotations

import doctest
import itertools
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest

from model.spec import cost
from model.spec.config import ModelConfig
from model.spec.cost import PhaseWork, RequestShape
from service.engine.scheduler import EngineLimits
from service.engine.types import (
    BeamSearchParams,
    GenerationRequest,
    PromptScoring,
    SamplingParams,
    StepStats,
    StoppingParams,
)
from service.forecasting.costing import CostModel
from tests.environment import ROOT
from tests.fakes import FakeRunner, drain, fake_engine, request
from tests.unit.model.spec.test_cost import decoder_only, encoder_decoder

COUNTED = [field.name for field in fields(PhaseWork)]


@dataclass
class Naive:
    """One request, computed as slowly as it can be told: `phases` are the tallies of its two phases."""

    shape: RequestShape
    phases: list[dict[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._prefill()
        self._decode()

    def _prefill(self) -> None:
        shape, count = self.shape, dict.fromkeys(COUNTED, 0)
        self.phases.append(count)
        source, is_cached = range(shape.source_tokens), shape.cached_tokens > 0
        if source and not is_cached:
            count["num_encoder_runs"] += 1
            count["num_encoder_tokens"] += len(source)
            count["num_encoder_pairs"] += len([1 for _ in source for _ in source])
            padded = range(shape.padded_source_tokens or len(source))
            count["num_padded_encoder_pairs"] += len(
                [1 for query in padded for key in padded if query not in source or key not in source]
            )
        held = 0 if source else shape.cached_tokens
        while held < shape.prompt_tokens:
            piece = [held]
            while piece[-1] + 1 < shape.prompt_tokens and (not shape.chunk or (piece[-1] + 1) % shape.chunk):
                piece.append(piece[-1] + 1)
            count["num_steps"] += 1
            pairs = [1 for query in piece for key in range(shape.prompt_tokens) if key <= query]
            if len(piece) == 1:
                count["num_decode_steps"] += 1
                count["num_decode_rows"] += 1
                count["num_decode_pairs"] += len(pairs) + len(source)
            else:
                count["num_prefill_runs"] += 1
                count["num_prefill_tokens"] += len(piece)
                count["num_prefill_pairs"] += len(pairs) + len(piece) * len(source)
                if held == 0 and shape.padded_prompt_tokens:
                    padding = range(len(piece), shape.padded_prompt_tokens)
                    count["num_padded_pairs"] += len([1 for query in padding for key in range(query + 1)])
            is_end = piece[-1] + 1 == shape.prompt_tokens
            count["num_logits"] += len(piece) if shape.scores_prompt else int(is_end or len(piece) == 1)
            held = piece[-1] + 1
            count["kv_token_steps"] += held
            count["kv_source_token_steps"] += len(source)

    def _decode(self) -> None:
        shape, count = self.shape, dict.fromkeys(COUNTED, 0)
        self.phases.append(count)
        # The first tokens came of the prompt.
        rows = [[shape.prompt_tokens, left - 1] for left in shape.generated_tokens]
        while rows := [row for row in rows if row[1] > 0]:
            count["num_steps"] += 1
            count["num_decode_steps"] += 1
            for row in rows:
                row[0] += 1
                row[1] -= 1
                count["num_decode_rows"] += 1
                count["num_logits"] += 1
                count["num_decode_pairs"] += row[0] + shape.source_tokens
                count["kv_token_steps"] += row[0]
                count["kv_source_token_steps"] += shape.source_tokens


def shapes() -> list[RequestShape]:
    generated = [(1,), (2,), (6,), (3, 1, 5), (4, 4)]
    made = [
        RequestShape(prompt_tokens=prompt, generated_tokens=rows, cached_tokens=cached, chunk=chunk)
        for prompt, rows, cached, chunk in itertools.product(range(1, 14), generated, (0, 4, 8), (None, 1, 4))
        if cached < prompt
    ]
    made += [
        replace(shape, padded_prompt_tokens=8) for shape in made if 1 < min(shape.prompt_tokens, shape.chunk or 99) <= 8
    ]
    made += [
        RequestShape(
            prompt_tokens=prompt,
            generated_tokens=rows,
            source_tokens=source,
            cached_tokens=cached,
            chunk=1,
            padded_source_tokens=padded,
        )
        for prompt, rows, source, padded in itertools.product((1, 2, 5), generated, (1, 3, 7), (None, 8))
        for cached in (0, source)
    ]
    return made + [replace(shape, scores_prompt=True) for shape in made[::7]]


def test_work_is_what_a_count_step_by_step_gives() -> None:
    for shape in shapes():
        work = cost.request_work(shape)
        for phase, expected in zip((work.prefill, work.decode), Naive(shape).phases, strict=True):
            assert {name: getattr(phase, name) for name in COUNTED} == expected, shape


def test_cost_of_a_small_request_by_hand() -> None:
    config = decoder_only()
    shape = RequestShape(prompt_tokens=5, generated_tokens=(3,), chunk=4, padded_prompt_tokens=4)
    # Pieces of 4 and 1 tokens, then two of the three tokens: contexts of 1, 2, 3, 4, 5, 6 and 7.
    found = cost.request_cost(config, shape)
    assert found.attended_pairs == 2 * (1 + 2 + 3 + 4 + 5 + 6 + 7)
    assert found.padded_pairs == 0
    # As in test_cost: 256 weights of attention and 256 of the feed-forward network a layer, 80 for three logits: of the
    # piece of 4 nobody wants any, nor what follows the last layer's attention, 64 weights of W^O and the network.
    assert found.linear_flops == 2 * (7 * 2 * 512 - 4 * (64 + 256) + 3 * 80)
    assert found.attention_flops == 4 * 8 * found.attended_pairs
    # Held after each step, in float32: keys and values of 8 channels in 2 layers.
    assert found.kv_byte_steps == (4 + 5 + 6 + 7) * 2 * 8 * 2 * 4
    assert cost.request_cost(config, shape, kv_token_bytes=1).kv_byte_steps == 4 + 5 + 6 + 7


def fed(shape: RequestShape) -> tuple[list[int], list[int]]:
    """The positions of all tokens that a request without a source computes, and of those that pad its beginning."""
    prompt = shape.prompt_tokens
    rows = [prompt + index for count in shape.generated_tokens for index in range(count - 1)]
    beginning = 0 if shape.cached_tokens else min(prompt, shape.chunk or prompt)
    padding = range(beginning, shape.padded_prompt_tokens or 0) if beginning > 1 else range(0)
    return [*range(shape.cached_tokens, prompt), *rows], list(padding)


def _met(position: int, window: int) -> int:
    """Keys that a token at `position` meets in one layer that sees all and in two that see a window."""
    keys = range(position + 1)
    return len(keys) + 2 * len([key for key in keys if position - key < window])


@pytest.mark.parametrize("window", [1, 3, 9, 50])
def test_a_layer_with_a_window_attends_to_what_lies_within_it_and_holds_all(window: int) -> None:
    mixed = decoder_only(num_layers=3, sliding_window=window, layer_types=("full", "sliding", "sliding"))
    whole = decoder_only(num_layers=3)
    for shape in shapes():
        if shape.source_tokens:
            continue
        found, without = cost.request_cost(mixed, shape), cost.request_cost(whole, shape)
        attended, padded = (sum(_met(position, window) for position in each) for each in fed(shape))
        assert (found.attended_pairs, found.padded_pairs) == (attended, padded), shape
        assert found.attention_flops == cost.pair_flops(mixed) * attended
        assert (found.linear_flops, found.kv_byte_steps) == (without.linear_flops, without.kv_byte_steps)


def test_cost_of_an_encoded_source_by_hand() -> None:
    config = encoder_decoder()
    shape = RequestShape(
        prompt_tokens=1, generated_tokens=(2, 2), source_tokens=3, chunk=1, padded_source_tokens=4, cached_tokens=0
    )
    found = cost.request_cost(config, shape)
    # One row meets one token, then two rows meet two tokens each; all meet the source, which meets itself in 3 layers.
    assert found.attended_pairs == 2 * (1 + 2 * 2 + 3 * 3) + 3 * 9
    assert found.padded_pairs == 3 * (16 - 9)
    assert found.attention_flops == 4 * 8 * found.attended_pairs
    decoder, source = 2 * (256 + 256 + 2 * 64), 3 * (256 + 256) + 2 * 2 * 64
    assert found.linear_flops == 2 * (3 * decoder + 3 * source + 3 * 80)
    assert found.kv_byte_steps == (1 + 2 * 2 + 3 * 3) * 2 * 8 * 2 * 4
    cached = cost.request_cost(config, replace(shape, cached_tokens=3))
    assert found.linear_flops - cached.linear_flops == 2 * 3 * source
    assert found.attended_pairs - cached.attended_pairs == 3 * 9
    assert cached.padded_pairs == 0
    assert cached.kv_byte_steps == found.kv_byte_steps
    assert cost.request_cost(config, shape, kv_token_bytes=1).kv_byte_steps == 1 + 2 * 2 + 3 * 3


@pytest.mark.parametrize("config", [decoder_only(), encoder_decoder()])
def test_a_prompt_with_all_its_logits_costs_the_linear_operations_of_a_forward_pass(config: ModelConfig) -> None:
    source = 5 if config.is_encoder_decoder else 0
    shape = RequestShape(prompt_tokens=9, generated_tokens=(1,), source_tokens=source, chunk=4, scores_prompt=True)
    assert cost.request_cost(config, shape).linear_flops == cost.forward_flops(config, 9, source).linear
    assert cost.request_cost(config, shape).attended_pairs == cost.attended_pairs(config, 9, source)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"generated_tokens": ()}, r"generated_tokens is \(\)"),
        ({"generated_tokens": (1, -1)}, "generated_tokens"),
        ({"chunk": 0}, "chunk is 0"),
        ({"cached_tokens": 3}, "cached_tokens is 3, must be at least 0 and below the 3"),
        ({"cached_tokens": -1}, "cached_tokens is -1"),
        ({"source_tokens": 3, "cached_tokens": 2}, "cached_tokens is 2, a source is cached as a whole"),
    ],
)
def test_a_request_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RequestShape(**{"prompt_tokens": 3, "generated_tokens": (1,), **fields})


def run_alone(
    asked: GenerationRequest, config: ModelConfig, limits: EngineLimits, before: GenerationRequest | None = None
) -> tuple[list[StepStats], int, RequestShape]:
    """One request's steps on an engine of its own, the tokens that its rows held after each, and its shape."""
    runner = FakeRunner(limits.max_batch_size)
    engine = fake_engine(runner, encoder_decoder=config.is_encoder_decoder, limits=limits, context=config.context)
    if before is not None:
        engine.add_request(before)
        drain(engine)
        runner.batches.clear()
    engine.add_request(asked)
    steps, held, told = [], 0, {}
    num_cached = num_search_steps = 0
    while engine.has_work:
        output = engine.step()
        steps.append(output.stats)
        batch = runner.batches[-1]
        slots = {slot for slot, row in enumerate(batch.decode) if not row.is_padding}
        slots |= {row.slot for group in batch.prefill_groups for row in group.rows}
        slots |= {chunk.slot for chunk in batch.prefills}
        held += sum(len(runner._tokens[slot]) for slot in slots)
        for event in output.events:
            told[event.output_index] = told.get(event.output_index, 0) + (event.token_id is not None)
            num_cached, num_search_steps = event.num_cached_tokens, event.num_search_steps
    rows = tuple(told.values())
    if asked.beam_search is not None:
        rows = (num_search_steps,) * asked.num_rows
    return steps, held, CostModel(config, engine.chunk_rules).shape(asked, num_cached, rows)


LIMITS = EngineLimits(max_batch_size=4, prefill_chunk=8, max_prefill_tokens=8, short_prompt=8)
FREE = StoppingParams(max_tokens=6)
SEARCH = BeamSearchParams(beam_size=3, num_hypotheses=2)


@pytest.mark.parametrize("config", [decoder_only(vocab_size=32), encoder_decoder(vocab_size=32)])
@pytest.mark.parametrize("length", [1, 2, 5, 8, 9, 16, 20])
@pytest.mark.parametrize("kind", ["greedy", "three outputs", "beams", "again", "prompt scored"])
def test_work_is_what_an_engine_runs_for_a_request_alone(config: ModelConfig, length: int, kind: str) -> None:
    asked = request("a", range(3, 3 + length), stopping=FREE)
    match kind:
        case "three outputs":
            asked = replace(asked, sampling=SamplingParams(temperature=3.0, n=3, seed=length))
        case "beams":
            asked = replace(asked, beam_search=SEARCH)
        case "prompt scored" if length > 1 and not config.is_encoder_decoder:
            asked = replace(asked, scoring=PromptScoring())
    if config.is_encoder_decoder:
        asked = replace(asked, target_prefix_token_ids=tuple(range(4, 4 + length % 4)))
    before = replace(asked, request_id="b") if kind == "again" else None
    steps, held, shape = run_alone(asked, config, LIMITS, before)
    if before is not None and (config.is_encoder_decoder or length > 8):
        assert shape.cached_tokens > 0
    work = cost.request_work(shape)
    phases = (work.prefill, work.decode)
    for name in COUNTED:
        if name in StepStats.__slots__:
            total = sum(getattr(phase, name) for phase in phases)
            assert total == sum(getattr(stats, name) for stats in steps), name
    assert sum(phase.num_steps for phase in phases) == sum(stats.num_tokens > 0 for stats in steps)
    assert sum(phase.kv_token_steps for phase in phases) == held
    padding = sum(stats.num_padding_tokens for stats in steps)
    assert (padding > 0) == any(phase.num_padded_pairs or phase.num_padded_encoder_pairs for phase in phases)


def test_outputs_are_taken_to_be_as_long_as_they_may() -> None:
    costs = CostModel(decoder_only(context=32), fake_engine(limits=LIMITS, context=32).chunk_rules)
    asked = request("a", range(3, 13), max_tokens=100, sampling=SamplingParams(n=2))
    assert costs.shape(asked).generated_tokens == (22, 22)
    assert costs.shape(request("a", max_tokens=7)).generated_tokens == (7,)
    assert costs.shape(replace(asked, beam_search=SEARCH)).generated_tokens == (22,) * 3


def test_the_example_in_the_documents_is_what_it_says() -> None:
    results = doctest.testfile(str(ROOT / "docs/serve/cost.md"), module_relative=False)
    assert results.attempted > 10
    assert results.failed == 0
