"""Chunks without wanted logits compute none, and later logits have the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from model.spec import artifact
from model.spec.artifact import KVPrecision, Precision
from service.engine.batch import DecodeRow, PrefillChunk, ScheduledBatch
from service.engine.factory import build_runner
from service.engine.scheduler import EngineLimits
from service.engine.sessions.session import SessionOptions
from tests.artifacts import LEARNED, tiny_artifact

LIMITS = EngineLimits(max_batch_size=2, prefill_chunk=16, max_prefill_tokens=32)
_MARK = 7.0


@pytest.mark.parametrize(
    ("overrides", "precision", "kv_precision", "own_kernels"),
    [
        pytest.param({}, Precision.FP32, KVPrecision.FP32, True, id="llama"),
        pytest.param({}, Precision.FP32, KVPrecision.FP32, False, id="llama-standard"),
        pytest.param(LEARNED, Precision.INT8, KVPrecision.INT8, True, id="gpt2-int8-kv-int8"),
        pytest.param({"norm_placement": "post"}, Precision.FP32, KVPrecision.FP32, True, id="post-norm"),
        pytest.param({}, Precision.INT4, KVPrecision.FP32, True, id="llama-int4"),
    ],
)
def test_chunk_without_logits_leaves_those_that_are_there_and_the_same_keys_and_values(
    precision: Precision, kv_precision: KVPrecision, overrides: Mapping[str, Any], own_kernels: bool
) -> None:
    folder = tiny_artifact("decoder-only", precision, kv_precision, **overrides)
    manifest = artifact.load(folder)
    options = SessionOptions(intra_op_threads=2, allow_spinning=False, own_kernels=own_kernels)
    tokens = np.random.default_rng(0).integers(3, manifest.config.vocab_size, 41).tolist()

    def answers(*, wants_logits: bool) -> list[npt.NDArray[np.float32]]:
        runner = build_runner(folder, manifest, LIMITS, options)
        found = []
        for start, stop, is_end in ((0, 16, False), (16, 32, False), (32, 40, True)):
            chunk = PrefillChunk(1, start, tuple(tokens[start:stop]), wants_logits=wants_logits or is_end)
            # Short of a run nothing writes there: the array is the runner's own.
            logits = runner.run(ScheduledBatch())
            logits[1] = _MARK
            logits = runner.run(ScheduledBatch(prefills=(chunk,)))
            assert (logits[1] == _MARK).all() == (not chunk.wants_logits)
            assert np.isfinite(logits).all()
            found.append(logits[1].copy())
        row = DecodeRow(tokens[40], 40, source_length=0, is_padding=False)
        padding = DecodeRow(tokens[0], 0, source_length=0, is_padding=True)
        found.append(runner.run(ScheduledBatch(decode=(padding, row)))[1].copy())
        return found

    without, whole = answers(wants_logits=False), answers(wants_logits=True)
    for left, right in zip(without[2:], whole[2:], strict=True):
        np.testing.assert_array_equal(left.view(np.uint32), right.view(np.uint32))
