"""A prompt alone on real graphs: several chunks in one run give the bits that they give one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from model.spec import artifact, golden
from model.spec.artifact import GOLDEN, TOKENIZER
from model.spec.tokenizer import Tokenizer
from service.engine.engine import Engine, LastRun
from service.engine.factory import build_engine
from service.engine.scheduler import EngineLimits
from service.engine.types import GenerationRequest, SamplingParams, StepOutput, StoppingParams
from tests.artifacts import tiny_artifact
from tests.fakes import drain
from tests.parity.test_look_up_bits import THREADS, VARIANTS, answers, needs_kernels

LIMITS = EngineLimits(max_batch_size=2, prefill_chunk=8, max_prefill_tokens=8, short_prompt=4)
# Heads of a width for which AMX attends in long chunks.
LONG = {"context": 448, "head_dim": 32}
APART = dataclasses.replace(LIMITS, merged_chunks=1)


def engine_for(variant: str, limits: EngineLimits, *, own_kernels: bool = True, **sizes: int) -> Engine:
    """What a server builds, and proves before it serves."""
    folder = tiny_artifact("decoder-only", **VARIANTS[variant], **sizes)
    options = dataclasses.replace(THREADS, own_kernels=own_kernels)
    decode = Tokenizer.load(folder / TOKENIZER).decode
    engine = build_engine(folder, artifact.load(folder), decode, limits, options, LastRun())
    cases = golden.load(folder / GOLDEN)
    engine.prove_merged_chunks(cases)
    engine.prove_speculation(cases)
    return engine


def requests(*lengths: int) -> list[GenerationRequest]:
    """Some prompts begin alike, so that cached chunks count, too."""
    tokens = np.random.default_rng(0).integers(3, 60, max(lengths)).tolist()
    return [
        GenerationRequest(
            request_id=f"r{number}",
            model="tiny",
            prompt_token_ids=tuple(tokens[:length] if number % 3 == 0 else [number + 3, *tokens[1:length]]),
            sampling=SamplingParams(temperature=0.7, seed=number),
            stopping=StoppingParams(max_tokens=6, ignore_eos=True),
            logprobs=3,
        )
        for number, length in enumerate(lengths)
    ]


def ask(engine: Engine, wanted: Sequence[GenerationRequest]) -> list[list[StepOutput]]:
    """One request after the other."""
    outputs = []
    for request in wanted:
        engine.add_request(request)
        outputs.append(drain(engine))
    return outputs


@needs_kernels
@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_have_the_bits_of_chunks_one_by_one(variant: str) -> None:
    merging = engine_for(variant, LIMITS)
    assert merging.chunk_rules.long_run == 32
    wanted = requests(61, 9, 17, 20, 33, 34, 55)
    merged, apart = ask(merging, wanted), ask(engine_for(variant, APART), wanted)
    assert [answers(outputs) for outputs in merged] == [answers(outputs) for outputs in apart]
    assert sum(map(len, merged)) < sum(map(len, apart)) - 10
    assert max(output.stats.num_prefill_tokens for outputs in merged for output in outputs) == 32


@needs_kernels
@pytest.mark.parametrize("variant", ["fp32", "int8", "kv-int8"])
def test_a_prompt_has_the_bits_that_it_has_beside_others_whatever_is_left_of_it(variant: str) -> None:
    """With chunks that AMX attends in, and ends of prompts that it does not."""
    limits = dataclasses.replace(LIMITS, prefill_chunk=128, max_prefill_tokens=128, max_batch_size=4)
    engine = engine_for(variant, limits, **LONG)
    assert engine.chunk_rules.long_run == 512
    wanted = requests(140, 300, 268, 384, 420)
    alone = ask(engine, wanted)
    assert max(output.stats.num_prefill_tokens for outputs in alone for output in outputs) == 384
    engine = engine_for(variant, limits, **LONG)
    for request in wanted:
        engine.add_request(request)
    together = drain(engine)
    for request, outputs in zip(wanted, alone, strict=True):
        own = [event for output in together for event in output.events if event.request_id == request.request_id]
        assert [(each.token_id, each.logprobs, each.finish_reason) for each in own] == answers(outputs)


@needs_kernels
@pytest.mark.parametrize("variant", ["fp32", "kv-int8"])
def test_drafts_beside_a_prompt_that_is_new_leave_its_keys_and_values(variant: str) -> None:
    """Rows with fewer drafts compute some tokens again: not their prompts', which AMX may have attended in."""
    limits = dataclasses.replace(LIMITS, prefill_chunk=128, max_prefill_tokens=128)
    first, second = (
        dataclasses.replace(
            request,
            sampling=SamplingParams(temperature=temperature, seed=1),
            stopping=StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        for request, temperature, max_tokens in zip(requests(130, 256), (0.0, 2.0), (200, 40), strict=True)
    )
    (alone,) = ask(engine_for(variant, limits, **LONG), [second])
    engine = engine_for(variant, dataclasses.replace(limits, look_up=6), **LONG)
    engine.add_request(first)
    steps = [engine.step() for _ in range(12)]
    assert steps[-1].stats.num_draft_tokens == 6, "by now its text recurs"
    engine.add_request(second)
    together = drain(engine)
    own = [event for output in together for event in output.events if event.request_id == second.request_id]
    assert [(each.token_id, each.logprobs, each.finish_reason) for each in own] == answers(alone)
    assert any(output.stats.num_draft_tokens and output.stats.num_decode_rows == 2 for output in together)


def test_standard_operators_merge_no_chunks() -> None:
    assert not engine_for("fp32", LIMITS, own_kernels=False).chunk_rules.long_run
