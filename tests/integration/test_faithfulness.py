"""Served greedy tokens are the reference's: a real server process, real graphs, judged by PyTorch everywhere."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from benchmarks.frame.servers import serving
from benchmarks.scenarios import faithfulness
from model import checkpoint
from model.spec.config import Architecture
from tests.artifacts import tiny_artifact

POSITIONS_PER_FAMILY = 10_000
CONCURRENCY = 24
MODEL = "tiny"
# Untied embeddings: a tied random model mostly repeats its last token, and would agree with anything.
SIZES = {
    Architecture.DECODER_ONLY: {"context": 256, "tie_embeddings": False},
    Architecture.ENCODER_DECODER: {"context": 128, "tie_embeddings": False},
}


@pytest.mark.parametrize("family", [*Architecture])
@pytest.mark.sampled(1)
def test_served_greedy_tokens_are_the_reference_decoders(family, tmp_path):
    artifact = tiny_artifact(family, **SIZES[family])
    shutil.copytree(artifact, tmp_path / "models" / MODEL)
    source = artifact.parent / "checkpoint"
    requests = list(faithfulness.random_requests(checkpoint.load(source).config, POSITIONS_PER_FAMILY, seed=1))
    # Fewer slots than callers: requests queue, join a running batch and leave it while others go on.
    with serving(tmp_path / "models", "--max-batch-size", "8", "--no-metrics", "--prefill-chunk", "32") as target:
        outputs = asyncio.run(faithfulness.collect(target, MODEL, requests, CONCURRENCY))
    verdict = faithfulness.judge(source, MODEL, outputs)
    assert verdict.positions >= POSITIONS_PER_FAMILY
    assert verdict.agreement >= 0.999
    assert verdict.max_logprob_error <= 1e-4
    assert verdict.worst_disagreement_margin < 1e-4
    assert len({token for output in outputs for token in output.tokens}) >= 20, (
        "the model says too little to prove much"
    )
