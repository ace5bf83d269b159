"""The engine on real graphs serves the reference's answers; test_batch_invariance has the rest."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from model.nn import reference
from model.spec import artifact, golden
from model.spec.artifact import KVPrecision, Precision
from model.spec.tokenizer import Tokenizer
from service.engine.engine import Engine, LastRun
from service.engine.factory import build_engine, build_runner
from service.engine.scheduler import EngineLimits
from service.engine.sessions.session import GraphSession
from service.engine.types import (
    GenerationRequest,
    PromptScoring,
    StepOutput,
    StoppingParams,
    TokenLogprobs,
)
from service.errors import StartupError
from tests.artifacts import random_model, tiny_artifact, tiny_config
from tests.fakes import drain, events_of, tokens_of
from tests.served import (
    DECODER_ONLY,
    ENCODER_DECODER,
    LENGTHS,
    THREADS,
    VARIANTS,
    alone,
    make_request,
    served,
)

TOLERANCE = golden.TOLERANCES[Precision.FP32]
FAMILIES = pytest.mark.parametrize("family", [DECODER_ONLY, ENCODER_DECODER])

ANSWERING = pytest.mark.parametrize("variant", ["rotary", "sinusoidal"])
"""Variants with the weights of `random_model(tiny_config(family))`."""


@pytest.fixture(scope="module", autouse=True)
def engines_are_released() -> Iterator[None]:
    yield
    served.cache_clear()
    alone.cache_clear()


def tiny_engine(folder: Path, max_batch_size: int) -> Engine:
    decode = Tokenizer.load(folder / artifact.TOKENIZER).decode
    limits = EngineLimits(max_batch_size=max_batch_size)
    return build_engine(folder, artifact.load(folder), decode, limits, THREADS, LastRun())


@pytest.mark.parametrize(
    ("max_batch_size", "precision", "kv"),
    [
        (1, Precision.FP32, KVPrecision.FP32),
        (3, Precision.FP32, KVPrecision.INT8),
        (16, Precision.FP32, KVPrecision.FP32),
        (3, Precision.INT8, KVPrecision.FP32),
        (3, Precision.INT4, KVPrecision.FP32),
    ],
)
@FAMILIES
def test_engine_replays_every_golden_case(
    family: str, max_batch_size: int, precision: Precision, kv: KVPrecision
) -> None:
    folder = tiny_artifact(family, precision, kv)
    engine = tiny_engine(folder, max_batch_size)
    results = engine.verify_golden(golden.load(folder / artifact.GOLDEN), golden.tolerance_of(precision, kv))
    assert len(results) >= 8
    assert [result for result in results if not result.passed] == []
    assert not engine.has_work
    cache = build_runner(folder, artifact.load(folder), EngineLimits(), THREADS).kv
    assert {buffer.dtype for buffer in (*cache.own, *cache.cross)} == {np.dtype(kv.dtype)}


@ANSWERING
def test_engine_scores_given_text_as_the_reference_does_alone_and_batched(variant: str) -> None:
    """With and without a continuation, over chunk boundaries, among requests that come and go."""
    config = tiny_config(VARIANTS[variant][0])
    host = served(variant)
    model = random_model(config)
    requests = []
    for number, length in enumerate((*LENGTHS[1:], config.context)):
        request = make_request(config, number, length)
        text = tuple(np.random.default_rng(number).integers(0, config.vocab_size, length).tolist())
        prompt, prefix = (request.prompt_token_ids, text[1:]) if config.is_encoder_decoder else (text, ())
        max_tokens = 0 if length == config.context else number % 3
        requests.append(
            dataclasses.replace(
                request,
                prompt_token_ids=prompt,
                target_prefix_token_ids=prefix,
                stopping=StoppingParams(max_tokens=max_tokens, ignore_eos=True),
                scoring=PromptScoring(num_top=3, start=1 + number % 2 * (length - 2)),
            )
        )
    alone = {}
    for request in requests:
        engine = host.engine()
        engine.add_request(request)
        alone[request.request_id] = drain(engine)
    engine = host.engine()
    outputs: list[StepOutput] = []
    for request in requests:
        engine.add_request(request)
        engine.add_request(dataclasses.replace(make_request(config, 90, 5), request_id=f"with-{request.request_id}"))
        outputs.append(engine.step())
    outputs += drain(engine)
    for request in requests:
        scores = scores_of(outputs, request.request_id)
        assert scores == scores_of(alone[request.request_id], request.request_id)
        assert tokens_of(outputs, request.request_id) == tokens_of(alone[request.request_id], request.request_id)
        prompt, prefix = request.prompt_token_ids, request.target_prefix_token_ids
        tokens, source = ([config.bos_id, *prefix], prompt) if config.is_encoder_decoder else (list(prompt), None)
        expected = reference.logits(model, tokens, source).log_softmax(-1).numpy()
        assert request.scoring is not None
        positions = range(request.scoring.start, len(tokens))
        wanted = [expected[at - 1, tokens[at]] for at in positions]
        np.testing.assert_allclose([score.logprob for score in scores], wanted, rtol=0, atol=2 * TOLERANCE.absolute)
        for score, at in zip(scores, positions, strict=True):
            best = np.sort(expected[at - 1])[:-4:-1]
            np.testing.assert_allclose(score.top_logprobs, best, rtol=0, atol=2 * TOLERANCE.absolute)


def scores_of(outputs: Sequence[StepOutput], request_id: str) -> list[TokenLogprobs]:
    return [each for event in events_of(outputs, request_id) for each in event.prompt_logprobs]


@ANSWERING
def test_engine_serves_the_references_greedy_tokens_to_ragged_joining_and_leaving_requests(variant: str) -> None:
    """10,000 positions: each served token is the arg-max of one teacher-forced, cache-less forward over its output."""
    config = tiny_config(VARIANTS[variant][0])
    host = served(variant)
    model = random_model(config)
    engine = host.engine()
    rng = np.random.default_rng(0)
    requests: list[GenerationRequest] = []
    outputs: list[StepOutput] = []
    num_asked = 0
    while num_asked < 10_000:
        number = len(requests)
        request = make_request(config, number, int(rng.integers(1, 60)))
        prefix: tuple[int, ...] = ()
        if config.is_encoder_decoder:
            prefix = tuple(rng.integers(0, config.vocab_size, number % 4).tolist())
        room = config.context - (1 + len(prefix) if config.is_encoder_decoder else len(request.prompt_token_ids))
        count = int(rng.integers(1, room + 1))
        num_asked += count
        stopping = StoppingParams(max_tokens=count, ignore_eos=True)
        requests.append(dataclasses.replace(request, stopping=stopping, target_prefix_token_ids=prefix))
        engine.add_request(requests[-1])
        outputs += [engine.step() for _ in range(int(rng.integers(0, 12)))]
    outputs += drain(engine, max_steps=10_000)
    num_equal = 0
    max_error = 0.0
    for request in requests:
        output = tokens_of(outputs, request.request_id)
        assert len(output) == request.stopping.max_tokens
        prompt, prefix = request.prompt_token_ids, request.target_prefix_token_ids
        given, source = ([config.bos_id, *prefix], prompt) if config.is_encoder_decoder else (list(prompt), None)
        expected = reference.logits(model, [*given, *output[:-1]], source).numpy()[len(given) - 1 :]
        num_equal += int((expected.argmax(-1) == output).sum())
        seed = request.sampling.seed
        assert seed is not None
        positions = range(len(given), len(given) + len(output))
        actual = np.stack([np.frombuffer(host.recorder.logits[seed, 0, at], np.float32) for at in positions])
        max_error = max(max_error, float(np.abs(actual - expected).max()))
    assert num_equal / num_asked >= 0.999
    assert max_error <= TOLERANCE.absolute


def test_session_refuses_a_graph_that_is_not_the_manifests(tmp_path: Path) -> None:
    folder = tiny_artifact(DECODER_ONLY)
    spec = artifact.load(folder).graphs[artifact.DECODER]
    foreign = dataclasses.replace(spec, inputs=spec.inputs[1:], outputs=(*spec.outputs, spec.inputs[0]))
    with pytest.raises(StartupError) as caught:
        GraphSession(folder, foreign, THREADS)
    assert len(caught.value.problems) == 2
    shutil.copy(folder / spec.file, tmp_path)
    (tmp_path / spec.file).write_bytes((folder / spec.file).read_bytes()[:100])
    with pytest.raises(StartupError):
        GraphSession(tmp_path, spec, THREADS)


def test_runner_refuses_logits_that_no_machine_could_hold() -> None:
    """Rows for scores are touched only on use, when it is too late to find that memory is short."""
    folder = tiny_artifact(DECODER_ONLY)
    limits = EngineLimits(max_batch_size=2, prefill_chunk=1 << 40, max_prefill_tokens=1 << 40)
    with pytest.raises(StartupError, match=rf"prefill_chunk {1 << 40}: {(1 << 40) + 2} rows of logits need"):
        build_runner(folder, artifact.load(folder), limits, THREADS)
    source = tiny_artifact(ENCODER_DECODER)
    assert build_runner(source, artifact.load(source), limits, THREADS).kv.num_slots == 2
