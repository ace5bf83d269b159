"""A prompt alone on real graphs: several chunks in one run give the bits that they give one by one."""

from __future__ import annotations

import dataclasses

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
APART = dataclasses.replace(LIMITS, merged_chunks=1)


def engine_for(variant: str, limits: EngineLimits, *, own_kernels: bool = True) -> Engine:
    """What a server builds, and proves before it serves."""
    folder = tiny_artifact("decoder-only", **VARIANTS[variant])
    options = dataclasses.replace(THREADS, own_kernels=own_kernels)
    decode = Tokenizer.load(folder / TOKENIZER).decode
    engine = build_engine(folder, artifact.load(folder), decode, limits, options, LastRun())
    engine.prove_merged_chunks(golden.load(folder / GOLDEN))
    return engine


def ask(engine: Engine) -> list[list[StepOutput]]:
    """One request after the other; prompts begin alike, so that cached chunks count, too."""
    outputs = []
    tokens = np.random.default_rng(0).integers(3, 60, 61).tolist()
    for number, length in enumerate((61, 9, 17, 20, 33, 34, 55)):
        prompt = tokens[:length] if number % 3 == 0 else [number + 3, *tokens[1:length]]
        request = GenerationRequest(
            request_id=f"r{number}",
            model="tiny",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.7, seed=number),
            stopping=StoppingParams(max_tokens=6, ignore_eos=True),
            logprobs=3,
        )
        engine.add_request(request)
        outputs.append(drain(engine))
    return outputs


@needs_kernels
@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_have_the_bits_of_chunks_one_by_one(variant: str) -> None:
    merging = engine_for(variant, LIMITS)
    assert merging.chunk_rules.long_run == 32
    merged, apart = ask(merging), ask(engine_for(variant, APART))
    assert [answers(outputs) for outputs in merged] == [answers(outputs) for outputs in apart]
    assert sum(map(len, merged)) < sum(map(len, apart)) - 10
    assert max(output.stats.num_prefill_tokens for outputs in merged for output in outputs) == 32


def test_standard_operators_merge_no_chunks() -> None:
    assert not engine_for("fp32", LIMITS, own_kernels=False).chunk_rules.long_run
