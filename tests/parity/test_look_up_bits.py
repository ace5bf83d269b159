"""Guesses by look-up on real graphs: the same tokens and the same log-probabilities, in fewer steps."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from model import kernels
from model.spec import artifact, golden
from model.spec.artifact import GOLDEN, TOKENIZER, KVPrecision, Precision
from model.spec.generation import GenerationRules
from model.spec.tokenizer import Tokenizer
from service.app import App
from service.config import ServeConfig
from service.engine.engine import Engine, LastRun
from service.engine.factory import build_engine, build_runner
from service.engine.proof.chunk_proof import find_difference
from service.engine.scheduler import EngineLimits
from service.engine.sessions.session import SessionOptions
from service.engine.types import (
    GenerationRequest,
    SamplingParams,
    StepOutput,
    StoppingParams,
)
from service.errors import StartupError
from service.repository.loading import build_engines, load_models
from tests.artifacts import ADDITIVE, LEARNED, paged_artifact, tiny_artifact
from tests.fakes import drain

needs_kernels = pytest.mark.skipif(not kernels.operators(), reason="the kernels are not built for this processor")

LOOK_UP = 6
LIMITS = EngineLimits(max_batch_size=2, prefill_chunk=16, max_prefill_tokens=32)
GUESSING = dataclasses.replace(LIMITS, look_up=LOOK_UP)
THREADS = SessionOptions(intra_op_threads=2, allow_spinning=False)
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "learned-fp32": LEARNED,
    "windowed-fp32": {"sliding_window": 19, "layer_types": ("sliding", "full"), "query_key_norm": True},
    "int8": {"precision": Precision.INT8},
    "int4": {"precision": Precision.INT4},
    "kv-int8": {"kv_precision": KVPrecision.INT8},
    "learned-int8-kv-int8": {**LEARNED, "precision": Precision.INT8, "kv_precision": KVPrecision.INT8},
}
SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.6, seed=5), SamplingParams(seed=6, top_k=9))


def engine_for(folder: Path, limits: EngineLimits, options: SessionOptions = THREADS) -> Engine:
    """What a server builds, and proves before it serves."""
    manifest = artifact.load(folder)
    cases = golden.load(folder / GOLDEN)
    engine = build_engine(folder, manifest, Tokenizer.load(folder / TOKENIZER).decode, limits, options, LastRun())
    engine.prove_speculation(cases)
    tolerance = golden.tolerance_of(manifest.precision, manifest.kv_cache.precision)
    assert all(case.passed for case in engine.verify_golden(cases, tolerance))
    return engine


@cache
def prompts(vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Texts that say the same again and again: one word, a sentence, a sentence whose words come in another order."""
    source = np.random.default_rng(0)
    word, sentence = (source.integers(3, vocab_size, length).tolist() for length in (2, 7))
    return tuple(map(tuple, (word * 6, sentence * 3 + sentence[:2], [*sentence, *sentence[::-1], *sentence[:3]])))


def requests(vocab_size: int) -> Iterator[GenerationRequest]:
    """Every prompt, drawn in every way, up to the context's end."""
    for number, (prompt, sampling) in enumerate(itertools.product(prompts(vocab_size), SAMPLINGS)):
        yield GenerationRequest(
            request_id=f"r{number}",
            model="tiny",
            prompt_token_ids=prompt,
            sampling=sampling,
            stopping=StoppingParams(max_tokens=96, ignore_eos=True),
            logprobs=3,
        )


def ask(engine: Engine, vocab_size: int) -> list[list[StepOutput]]:
    """One request after the other."""
    outputs = []
    for wanted in requests(vocab_size):
        engine.add_request(wanted)
        outputs.append(drain(engine))
    return outputs


def answers(outputs: Sequence[StepOutput]) -> list[Any]:
    return [(event.token_id, event.logprobs, event.finish_reason) for output in outputs for event in output.events]


@needs_kernels
@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_have_the_bits_that_they_have_without_guesses(variant: str) -> None:
    folder = tiny_artifact("decoder-only", **VARIANTS[variant])
    vocab_size = artifact.load(folder).config.vocab_size
    engine = engine_for(folder, GUESSING)
    assert engine.max_draft_tokens == LOOK_UP, "what computes here gives a chunk the bits of its tokens"
    alone, guessed = ask(engine_for(folder, LIMITS), vocab_size), ask(engine, vocab_size)
    assert [answers(outputs) for outputs in guessed] == [answers(outputs) for outputs in alone]
    steps = [output.stats for outputs in guessed for output in outputs]
    drafted, accepted = (sum(getattr(each, f"num_{kind}_tokens") for each in steps) for kind in ("draft", "accepted"))
    assert 0 < accepted < drafted, "some guesses are right, and some are wrong"
    assert len(steps) == sum(map(len, alone)) - accepted


@needs_kernels
@pytest.mark.parametrize("variant", ["fp32", "windowed-fp32", "int4", "learned-int8-kv-int8"])
def test_guesses_for_rows_that_decode_together_change_no_bit(variant: str) -> None:
    folder = tiny_artifact("decoder-only", **VARIANTS[variant])
    vocab_size = artifact.load(folder).config.vocab_size
    alone = ask(engine_for(folder, LIMITS), vocab_size)
    engine = engine_for(folder, dataclasses.replace(GUESSING, max_batch_size=5))
    for wanted in requests(vocab_size):
        engine.add_request(wanted)
    together = drain(engine)
    for number, outputs in enumerate(alone):
        own = [event for output in together for event in output.events if event.request_id == f"r{number}"]
        assert [(each.token_id, each.logprobs, each.finish_reason) for each in own] == answers(outputs)
    shared = [output.stats for output in together if output.stats.num_decode_rows > 1]
    assert sum(stats.num_accepted_tokens for stats in shared) > 0
    assert any(stats.num_draft_tokens > stats.num_accepted_tokens for stats in shared)


@needs_kernels
def test_a_server_guesses_as_its_flag_says_and_shows_it(tmp_path: Path) -> None:
    (tmp_path / "tiny").symlink_to(tiny_artifact("decoder-only"))
    (tmp_path / "other").symlink_to(tiny_artifact("encoder-decoder"))
    config = ServeConfig(models=tmp_path, look_up=3, max_batch_size=2, threads=1, spin=False)
    models, registry = load_models(tmp_path), CollectorRegistry()
    App(config, models, build_engines(tmp_path, models, config), registry)
    shown = {
        model.name: registry.get_sample_value("onward_spec_decode_max_draft_tokens", {"model_name": model.name})
        for model in models
    }
    assert shown == {"tiny": 3, "other": 0}


def test_a_model_with_rules_of_its_own_is_served_without_guesses_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tiny_artifact("decoder-only")
    manifest = dataclasses.replace(artifact.load(folder), generation=GenerationRules(suppressed_ids=(5,)))
    # By standard operators, for which a model of which something could be guessed would be refused.
    options = dataclasses.replace(THREADS, own_kernels=False)
    engine = build_engine(folder, manifest, str, GUESSING, options, LastRun())
    engine.prove_speculation(golden.load(folder / GOLDEN))
    assert engine.max_draft_tokens == 0
    (record,) = (record for record in caplog.records if record.name == "service.engine.factory")
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"{folder}: no prompt-lookup speculation: rules of its own (suppressed_ids) hold for every output, "
        "and rules count tokens as they come"
    )


def refusals(folder: Path, **options: Any) -> list[str]:
    manifest = artifact.load(folder)
    settings = dataclasses.replace(THREADS, **options)
    with pytest.raises(StartupError) as refusal:
        build_engine(folder, manifest, str, GUESSING, settings, LastRun())
    return [problem.removeprefix(f"{folder}: look_up is {LOOK_UP}: ") for problem in refusal.value.problems]


def test_speculation_is_refused_with_its_obstacles(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_artifact("decoder-only")
    assert refusals(tiny, own_kernels=False) == [
        "the kernels are not to be used, and standard operators give a chunk other bits"
    ]
    blocks = "keys and values lie in blocks, and the graphs over blocks are not computed by our kernels"
    monkeypatch.setattr(kernels, "why_not", lambda: None)
    paged = paged_artifact("decoder-only")
    assert refusals(paged) == [blocks]
    monkeypatch.setattr(kernels, "why_not", lambda: "not built")
    assert refusals(tiny) == ["there are no kernels, and standard operators give a chunk other bits: not built"]


@needs_kernels
def test_a_graph_that_standard_operators_compute_is_refused_with_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = refusals(tiny_artifact("decoder-only", **ADDITIVE["decoder-only"]))
    assert problem.startswith("the decoder has standard operators for ")
    assert "MatMul" in problem
    # The very artifact that our kernels compute, where they are said to be there and are not.
    monkeypatch.setattr(kernels, "library", lambda: None)
    monkeypatch.setattr(kernels, "why_not", lambda: None)
    (problem,) = refusals(tiny_artifact("decoder-only"))
    assert "GroupQueryAttention" in problem


def test_proof_finds_that_standard_operators_give_a_chunk_other_bits() -> None:
    folder = tiny_artifact("decoder-only", **LEARNED)
    options = dataclasses.replace(THREADS, own_kernels=False)
    runner = build_runner(folder, artifact.load(folder), LIMITS, options)
    cases = golden.load(folder / GOLDEN)
    found = find_difference(runner, cases, num_slots=2, longest_chunk=LOOK_UP + 1, max_tokens=32, context=96)
    assert found is not None
    assert "has other bits in a chunk of" in found
