"""A CUDA artifact on a real device: parity, and the same answers twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from export.__main__ import main
from model.spec import artifact, golden
from model.spec.artifact import GOLDEN, Device
from model.spec.config import Architecture
from service.engine import factory
from service.engine.engine import LastRun
from service.engine.scheduler import EngineLimits
from service.engine.sessions.cuda_provider import find_cuda_problem
from service.engine.sessions.session import SessionOptions
from service.engine.types import Device as Wanted
from tests.artifacts import tiny_checkpoint, tiny_config
from tests.cuda_double import answers

pytestmark = pytest.mark.gpu

THREADS = SessionOptions(intra_op_threads=1, allow_spinning=False)
DECODER_ONLY, ENCODER_DECODER = Architecture.DECODER_ONLY, Architecture.ENCODER_DECODER
LIMITS = EngineLimits(max_batch_size=4, prefill_chunk=16, max_prefill_tokens=32)


@pytest.mark.parametrize("family", [DECODER_ONLY, ENCODER_DECODER])
def test_an_artifact_on_a_device_passes_its_proof_and_answers_the_same_twice(family: str, tmp_path: Path) -> None:
    if problem := find_cuda_problem():
        pytest.skip(problem)
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", tiny_config(family))
    out = tmp_path / "cuda"
    assert main([str(checkpoint), "--out", str(out), "--device", "cuda", "--precision", "fp16"]) == 0
    manifest = artifact.load(out, devices=[Device.CUDA])
    engine = factory.build_engine(out, manifest, lambda _: "", LIMITS, THREADS, LastRun(), device=Wanted.CUDA)
    tolerance = golden.tolerance_of(manifest.precision, manifest.kv_cache.precision)
    results = engine.verify_golden(golden.load(out / GOLDEN), tolerance)
    assert results
    assert all(result.passed for result in results)
    first = answers(engine, manifest)
    engine.verify_golden((), golden.Tolerance())  # forgets what is kept
    assert answers(engine, manifest) == first
