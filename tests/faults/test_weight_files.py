"""Weights that change on the disk under a running model: it computes with its own, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from model.spec.artifact import CPU_PRECISIONS, Precision
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from onward.v1.model_pb2_grpc import ModelServiceStub
from tests.artifacts import tiny_artifact
from tests.faults.cut_weights import AFTER, BEFORE, CUT
from tests.faults.process import DECODER, MODELS, ServerProcess, greedy, serving

# So large that the project's kernels copy matrices, and the embedding is more than what tests read of it.
_SIZES = {"vocab_size": 4096, "d_model": 128, "d_ff": 512, "context": 256}
_TEXTS = ("3 May", "the quick brown fox jumps over the lazy dog", "0123456789 ~!@#$%^&*()")
_NUM_TOKENS = 48


def _overwrite(file: Path) -> None:
    """As `cp` of another model's file does: the same inode, truncated and written."""
    file.write_bytes(bytes(reversed(file.read_bytes())))


def _truncate(file: Path) -> None:
    file.write_bytes(b"")


def _remove(file: Path) -> None:
    file.unlink()


_CHANGES: tuple[Callable[[Path], None], ...] = (_overwrite, _truncate, _remove)


def _answers(server: ServerProcess, model: str) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Tokens and their log-probabilities, for texts that read rows of the embedding which no proof reads."""
    found = []
    with server.channel() as channel:
        for text in _TEXTS:
            request = greedy(model, text, _NUM_TOKENS, response=pb.ResponseOptions(logprobs=0))
            (output,) = GenerationServiceStub(channel).Generate(request, timeout=120).outputs
            found.append((tuple(output.token_ids), tuple(each.logprob for each in output.logprobs)))
    return found


@pytest.mark.parametrize("kernels", ["auto", "standard"])
@pytest.mark.parametrize("precision", CPU_PRECISIONS)
@pytest.mark.sampled(1)
def test_weights_overwritten_truncated_and_removed_under_a_running_model_leave_its_answers_bit_identical(
    tmp_path: Path, precision: Precision, kernels: str
) -> None:
    for model in MODELS:
        shutil.copytree(tiny_artifact(model, precision, **_SIZES), tmp_path / model)
    with serving(tmp_path, "--kernels", kernels) as server:
        expected = {model: _answers(server, model) for model in MODELS}
        assert server.stop() == 0
    # Another server, which has read no more of its weights than its proof did.
    with serving(tmp_path, "--kernels", kernels) as server:
        for change in _CHANGES:
            for model in MODELS:
                for file in (tmp_path / model).glob("*.onnx.data"):
                    change(file)
            assert {model: _answers(server, model) for model in MODELS} == expected
            with server.channel() as channel, pytest.raises(grpc.RpcError) as refused:
                ModelServiceStub(channel).ReloadModel(model_pb2.ReloadModelRequest(model=DECODER), timeout=120)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert {model: _answers(server, model) for model in MODELS} == expected
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("precision", "moment"), [(Precision.FP32, BEFORE), (Precision.FP32, AFTER), (Precision.INT4, AFTER)]
)
@pytest.mark.sampled(1)
def test_weights_truncated_between_their_checksum_and_their_proof_are_refused_and_the_server_goes_on(
    tmp_path: Path, precision: Precision, moment: str
) -> None:
    for model in MODELS:
        shutil.copytree(tiny_artifact(model, precision, **_SIZES), tmp_path / model)
    files = {file: file.read_bytes() for file in tmp_path.glob("*/*.onnx.data")}
    with serving(tmp_path, module="tests.faults.cut_weights") as server, server.channel() as channel:
        expected = {model: _answers(server, model) for model in MODELS}
        models = ModelServiceStub(channel)
        for model in MODELS:
            (tmp_path / CUT).write_text(moment, encoding="ascii")
            with pytest.raises(grpc.RpcError) as refused:
                models.ReloadModel(model_pb2.ReloadModelRequest(model=model), timeout=120)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert str(refused.value.details()).endswith("changed while it was loaded")
            (tmp_path / CUT).unlink()
        assert {model: _answers(server, model) for model in MODELS} == expected
        # What is loaded beside streams answers as what is loaded at the start, and has its weights to itself, too.
        for file, data in files.items():
            file.write_bytes(data)
        for model in MODELS:
            models.ReloadModel(model_pb2.ReloadModelRequest(model=model), timeout=120)
        for file in files:
            _truncate(file)
        assert {model: _answers(server, model) for model in MODELS} == expected
        assert server.stop() == 0


@pytest.mark.whole
def test_explain_weights_truncated_between_their_checksum_and_their_proof_leave_the_server_going(
    tmp_path: Path,
) -> None:
    for model in MODELS:
        shutil.copytree(tiny_artifact(model, explain_graph=True), tmp_path / model)
    with serving(tmp_path, module="tests.faults.cut_weights") as server, server.channel() as channel:
        (tmp_path / CUT).write_text(BEFORE, encoding="ascii")
        for model in MODELS:
            with pytest.raises(grpc.RpcError) as refused:
                GenerationServiceStub(channel).Explain(pb.ExplainRequest(model=model, text="3 May"), timeout=120)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "has changed on the disk while its explain graph was loaded" in str(refused.value.details())
            assert _answers(server, model)
        assert server.stop() == 0


def test_explain_graph_answers_the_same_once_its_weights_are_truncated(tmp_path: Path) -> None:
    for model in MODELS:
        shutil.copytree(tiny_artifact(model, explain_graph=True), tmp_path / model)
    with serving(tmp_path) as server, server.channel() as channel:

        def explain(model: str) -> bytes:
            request = pb.ExplainRequest(model=model, text="3 May")
            return GenerationServiceStub(channel).Explain(request, timeout=120).SerializeToString(deterministic=True)

        expected = {model: explain(model) for model in MODELS}
        for file in tmp_path.glob("*/*.onnx.data"):
            _truncate(file)
        assert {model: explain(model) for model in MODELS} == expected
        assert server.stop() == 0


def test_folder_that_is_renamed_over_the_one_in_use_changes_nothing_until_it_is_reloaded(tmp_path: Path) -> None:
    """As `docs/serve/models.md` says to replace a model, which is as the exporter does it."""
    models = tmp_path / "models"
    models.mkdir()
    shutil.copytree(tiny_artifact(DECODER), models / DECODER)
    shutil.copytree(tiny_artifact(DECODER, d_ff=80), models / ".new")
    with serving(models) as server, server.channel() as channel:
        before = _answers(server, DECODER)
        (models / DECODER).rename(models / ".old")
        (models / ".new").rename(models / DECODER)
        shutil.rmtree(models / ".old")
        assert _answers(server, DECODER) == before
        ModelServiceStub(channel).ReloadModel(model_pb2.ReloadModelRequest(model=DECODER), timeout=120)
        assert _answers(server, DECODER) != before
        assert server.stop() == 0
