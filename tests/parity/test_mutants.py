"""What an artifact's proof refuses after the export: any stored tensor changed, with every checksum made to fit.

A sample of tiny mutants; `--whole`: every one, at a width of 768.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from export.verify import verify
from model import kernels
from model.spec import golden
from model.spec.artifact import GOLDEN, MANIFEST, ArtifactError, KVPrecision, Precision, load, read_manifest
from model.spec.config import Architecture, AttentionScore
from model.spec.golden import MAX_DRIFT, MAX_OTHER_DRIFT, CaseResult
from service.engine.engine import LastRun
from service.engine.factory import build_engine
from service.engine.scheduler import EngineLimits
from service.engine.sessions.session import SessionOptions
from service.errors import StartupError
from service.repository.loading import load_model
from tests.artifacts import ADDITIVE, change_tensor, paged_artifact, rehash, tiny_artifact, write_checksums
from tests.parity.test_stored_weights import mutants

pytestmark = pytest.mark.skipif(not kernels.operators(), reason="by standard operators a proof is not exact")

WIDE = {"d_model": 768, "num_heads": 12, "num_kv_heads": 4, "d_ff": 2048, "vocab_size": 1021}
SAMPLE = 6
"""Mutants of each set-up that a run tries: others with each seed of the tests' order."""
_LEAST_VALUES = 8
"""Smaller tensors are constants of the graph: shapes and axes."""
EQUIVALENT = {("no_sinks", "times 1.1")}
"""Changes no logit: the scores of absent attention sinks are so low that their exponentials are 0."""


def changed(folder: Path) -> Iterator[tuple[str, str, str, Any]]:
    """A graph's file, one of its tensors, what is wrong with it, and its wrong values."""
    for path in sorted(folder.glob("*.onnx")):
        tensors = {each.name: numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer}
        for name, right in tensors.items():
            if right.size >= _LEAST_VALUES:
                for what, values in mutants(tensors, name):
                    if (name, what) not in EQUIVALENT:
                        yield path.name, name, what, values


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", list(Architecture))
@pytest.mark.parametrize(
    ("precision", "kv"),
    [
        (Precision.BF16, KVPrecision.FP32),
        (Precision.INT8, KVPrecision.FP32),
        (Precision.INT4, KVPrecision.FP32),
        (Precision.INT4, KVPrecision.INT8),
    ],
)
def test_a_proof_refuses_every_mutant(
    family: Architecture, precision: Precision, kv: KVPrecision, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    is_whole = request.config.getoption("--whole")
    overrides: dict[str, Any] = dict(WIDE) if is_whole else {}
    if is_whole and family is Architecture.ENCODER_DECODER:
        overrides["num_kv_heads"] = overrides["num_heads"]
    folder = tiny_artifact(family, precision, kv, **overrides)
    all_mutants = list(changed(folder))
    seed = request.config.getoption("randomly_seed", 0)
    chosen = all_mutants if is_whole else random.Random(f"{seed}").sample(all_mutants, SAMPLE)
    passed = []
    for file, name, what, values in chosen:
        mutant = Path(shutil.copytree(folder, tmp_path / "mutant"))
        change_tensor(mutant, file, name, lambda _, values=values: values)
        report = verify(mutant, lambda _: None)
        if not report.failed:
            passed.append((file, name, what, max(case.drift or 0.0 for case in report.cases)))
        shutil.rmtree(mutant)
    assert passed == []
    assert all(case.drift == 0.0 < MAX_DRIFT for case in verify(folder, lambda _: None).cases)


@pytest.mark.parametrize("family", list(Architecture))
def test_a_proof_refuses_a_wrong_row_of_any_token(
    family: Architecture, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = tiny_artifact(family, Precision.INT8)
    draw = random.Random(f"{request.config.getoption('randomly_seed', 0)}")
    for file in ("decoder.onnx", "encoder.onnx")[: len(load(folder).graphs)]:
        (name,) = (
            each.name
            for each in onnx.load(folder / file).graph.initializer
            if each.name.endswith("tokens.weight_scale")
        )
        for token in (load(folder).config.bos_id, *draw.sample(range(load(folder).config.vocab_size), 8)):
            mutant = Path(shutil.copytree(folder, tmp_path / "mutant"))
            change_tensor(mutant, file, name, lambda scales, token=token: scales * (np.arange(len(scales)) != token))
            report = verify(mutant, lambda _: None)
            assert report.failed, f"{file}: token {token}"
            assert any(name.startswith("every-token") for name in report.failed)
            shutil.rmtree(mutant)


def test_a_graph_that_answers_otherwise_only_where_no_case_asks_is_refused(tmp_path: Path) -> None:
    """As clipped extremes, which the cases' random tokens do not reach."""
    folder = Path(shutil.copytree(tiny_artifact(Architecture.DECODER_ONLY, Precision.INT8), tmp_path / "mutant"))
    graph = onnx.load(folder / "decoder.onnx", load_external_data=False)
    graph.graph.node.append(helper.make_node("Clip", ["answers", "", "most"], ["logits"]))
    next(node for node in graph.graph.node if "logits" in node.output).output[0] = "answers"
    graph.graph.initializer.append(numpy_helper.from_array(np.array(1e4, np.float32), "most"))
    onnx.save(graph, folder / "decoder.onnx")
    rehash(folder)
    assert not verify(folder, lambda _: None).failed
    # With golden.npz as it was, whose checksum is one of those that are written.
    shutil.copyfile(tiny_artifact(Architecture.DECODER_ONLY, Precision.INT8) / GOLDEN, folder / GOLDEN)
    write_checksums(folder)
    with pytest.raises(ArtifactError, match=r"decoder\.onnx is not the file"):
        verify(folder, lambda _: None)
    with pytest.raises(StartupError, match=r"decoder\.onnx is not the file"):
        load_model(folder)


def test_a_manifest_cannot_widen_the_limit(tmp_path: Path) -> None:
    """Additive scores are not reproducible; whether an artifact's bits are known is for its golden cases to say."""
    folder = Path(shutil.copytree(tiny_artifact(Architecture.ENCODER_DECODER, Precision.INT8), tmp_path / "mutant"))
    manifest = read_manifest(folder)
    config = dataclasses.replace(manifest.config, attention_score=AttentionScore.ADDITIVE)
    (folder / MANIFEST).write_text(dataclasses.replace(manifest, config=config).to_json())
    assert not read_manifest(folder).is_reproducible
    change_tensor(folder, "decoder.onnx", "layers.1.feed_forward.down.weight_scale", lambda scales: scales * 1.05)
    report = verify(folder, lambda _: None)
    assert report.failed
    assert all(case.max_drift == MAX_DRIFT and case.max_abs_error <= case.tolerance for case in report.cases)
    options = SessionOptions(intra_op_threads=1)
    engine = build_engine(folder, load(folder), lambda _: "", EngineLimits(max_batch_size=3), options, LastRun())
    tolerance = golden.tolerance_of(manifest.precision, manifest.kv_cache.precision)
    assert not all(case.passed for case in engine.verify_golden(golden.load(folder / GOLDEN), tolerance))


def test_the_engine_that_serves_refuses_a_mutant_where_the_exports_kernels_compute(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_artifact(Architecture.DECODER_ONLY, Precision.INT4), tmp_path / "mutant"))
    file, name = "decoder.onnx", "layers.1.feed_forward.gate_up.weight_scale"
    change_tensor(folder, file, name, lambda scales: scales * 1.1)
    manifest, cases = load(folder), golden.load(folder / GOLDEN)

    def results(**values: bool) -> Sequence[CaseResult]:
        options = SessionOptions(intra_op_threads=1, **values)
        engine = build_engine(folder, manifest, lambda _: "", EngineLimits(max_batch_size=3), options, LastRun())
        return engine.verify_golden(cases, golden.tolerance_of(manifest.precision, manifest.kv_cache.precision))

    exact = results()
    assert all(case.drift is not None and case.drift > MAX_DRIFT and not case.passed for case in exact)
    # Others round otherwise: a tenth in one matrix of these is less than what rounding may do, a third is more.
    for other in ({"own_kernels": False}, {"map_weights": True}):
        assert all(case.max_drift == MAX_OTHER_DRIFT and case.passed for case in results(**other))
    change_tensor(folder, file, name, lambda scales: scales * 1.2)
    for other in ({"own_kernels": False}, {"map_weights": True}):
        assert not all(case.passed for case in results(**other))
        assert all(case.max_abs_error <= case.tolerance for case in results(**other)), "near enough to PyTorch"


def test_graphs_whose_bits_depend_on_the_batch_answer_nearly_as_at_export(tmp_path: Path) -> None:
    family = Architecture.DECODER_ONLY
    sizes = {"d_model": 48, "head_dim": 8, "d_ff": 96}
    additive = tiny_artifact(family, Precision.INT4, **{**ADDITIVE[family], **sizes})
    for folder in (paged_artifact(family), additive):
        assert not load(folder).is_reproducible
        cases = verify(folder, lambda _: None).cases
        assert all(case.max_drift == MAX_OTHER_DRIFT and case.drift == 0 and case.passed for case in cases)
    mutant = Path(shutil.copytree(additive, tmp_path / "mutant"))
    change_tensor(mutant, "decoder.onnx", "final_norm.weight", lambda weights: weights * 1.5)
    report = verify(mutant, lambda _: None)
    assert report.failed
    assert all(case.max_abs_error <= case.tolerance for case in report.cases), "near enough to PyTorch"
