"""Files of an artifact that are none, or far too large: refused by name, and the next model is loaded as ever.

One server meets them all.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import pytest

from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from onward.v1.model_pb2_grpc import ModelServiceStub
from tests.artifacts import rehash
from tests.faults.process import DECODER, MODELS, ServerProcess, greedy, put_complete_artifacts, serving

_TERABYTE = 1 << 40
_SECONDS = 60.0
_LITTLE_KIB = 96 << 10
_NAMES = (
    *("manifest.json", "tokenizer.json", "chat.json", "golden.npz", "attention.npz", "parity.json"),
    *("decoder.onnx", "decoder.onnx.data", "explain.onnx"),
)


def _pipe(file: Path) -> str:
    os.mkfifo(file)
    return "is a pipe, must be a regular file"


def _socket(file: Path) -> str:
    # A socket's address is short, and bound from within the folder it needs no more than its name.
    before = Path.cwd()
    os.chdir(file.parent)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(file.name)
    os.chdir(before)
    return "is a socket, must be a regular file"


def _folder(file: Path) -> str:
    file.mkdir()
    return "is a directory, must be a regular file"


def _device(file: Path) -> str:
    with suppress(PermissionError):  # without the right to make one; then it is a link to one
        os.mknod(file, 0o600 | 0o020000, os.makedev(1, 5))
        return "is a device, must be a regular file"
    file.symlink_to("/dev/zero")
    return "leaves the artifact's folder"


def _terabyte(file: Path) -> str:
    """Sparse, and as large as the manifest says."""
    with file.open("wb") as stream:
        stream.truncate(_TERABYTE)
    manifest = file.with_name("manifest.json")
    if file != manifest:
        values = json.loads(manifest.read_text())
        values["files"][file.name]["num_bytes"] = _TERABYTE
        manifest.write_text(json.dumps(values))
    return f"has {_TERABYTE} bytes, must have at most "


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A complete artifact, of which copies are spoiled, where no server sees it."""
    (tmp_path / "good").mkdir()
    put_complete_artifacts(tmp_path / "good")
    return tmp_path / "good" / DECODER


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ServerProcess]]:
    """A server and its folder, in which are things that are no models."""
    folder = tmp_path_factory.mktemp("models")
    _pipe(folder / "pipe")
    _socket(folder / "socket")
    (folder / "loop").symlink_to("loop")
    with serving(folder) as server:
        yield folder, server
        assert server.stop() == 0


@pytest.fixture
def server(running: tuple[Path, ServerProcess]) -> ServerProcess:
    return running[1]


@pytest.fixture
def models(running: tuple[Path, ServerProcess]) -> Iterator[Path]:
    """The folder that is served, for models "bad" and "next"."""
    folder, server = running
    yield folder
    for name in ("bad", "next"):
        shutil.rmtree(folder / name, ignore_errors=True)
        with server.channel() as channel, suppress(grpc.RpcError):  # as a test that fails may have loaded it
            ModelServiceStub(channel).UnloadModel(model_pb2.UnloadModelRequest(model=name), timeout=_SECONDS)


@pytest.fixture
def bad(good: Path, models: Path) -> Path:
    """A copy of the complete artifact, to be spoiled where the server finds it."""
    return Path(shutil.copytree(good, models / "bad"))


def _change_config(folder: Path, **fields: int) -> None:
    """Overwrites fields of the model's config in its manifest."""
    values = json.loads((folder / "manifest.json").read_text())
    values["config"].update(fields)
    (folder / "manifest.json").write_text(json.dumps(values))


def _refusal(server: ServerProcess, model: str) -> str:
    """What LoadModel says of a model that is unfit."""
    with server.channel() as channel, pytest.raises(grpc.RpcError) as refused:
        ModelServiceStub(channel).LoadModel(model_pb2.LoadModelRequest(model=model), timeout=_SECONDS)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION, refused.value.details()
    return str(refused.value.details())


def _loads(server: ServerProcess, model: str) -> None:
    """A model can be loaded, which takes the turn that a refused one must not have kept, and unloaded."""
    with server.channel() as channel:
        ModelServiceStub(channel).LoadModel(model_pb2.LoadModelRequest(model=model), timeout=_SECONDS)
        GenerationServiceStub(channel).Generate(greedy(model, max_tokens=2), timeout=_SECONDS)
        ModelServiceStub(channel).UnloadModel(model_pb2.UnloadModelRequest(model=model), timeout=_SECONDS)


@pytest.mark.parametrize("spoil", [_pipe, _socket, _folder, _device, _terabyte])
def test_file_of_an_artifact_that_is_none_is_refused_by_name_and_the_next_model_is_loaded(
    server: ServerProcess, good: Path, models: Path, spoil: Callable[[Path], str]
) -> None:
    for name in _NAMES:
        shutil.copytree(good, models / "bad")
        (models / "bad" / name).unlink()
        complaint = spoil(models / "bad" / name)
        refusal = _refusal(server, "bad")
        assert name in refusal
        assert complaint in refusal
        assert str(models) not in refusal
        shutil.rmtree(models / "bad")
    shutil.copytree(good, models / "next")
    _loads(server, "next")


def test_terabyte_of_weights_that_the_sizes_in_the_manifest_allow_is_refused_by_the_memory_of_the_machine(
    server: ServerProcess, good: Path, models: Path, bad: Path
) -> None:
    complaint = _terabyte(bad / "decoder.onnx.data")
    _change_config(bad, d_ff=_TERABYTE)
    assert f"decoder.onnx.data {complaint}" in _refusal(server, "bad")
    shutil.copytree(good, models / "next")
    _loads(server, "next")


def test_manifest_that_claims_a_billion_layers_is_refused_before_they_are_listed(
    server: ServerProcess, bad: Path
) -> None:
    _change_config(bad, num_layers=10**9)
    assert "num_layers is 1000000000, must be at most" in _refusal(server, "bad")


def test_pipe_that_a_graph_names_for_its_weights_is_refused_like_any_file_that_is_not_in_the_manifest(
    server: ServerProcess, good: Path, models: Path
) -> None:
    import onnx

    graph = onnx.load(good / "decoder.onnx", load_external_data=False)
    for tensor in graph.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "endless" if entry.key == "location" else entry.value
    onnx.save(graph, good / "decoder.onnx")
    rehash(good)
    os.mkfifo(good / "endless")
    good.rename(models / "bad")
    assert "endless is not in the manifest" in _refusal(server, "bad")


def test_pipe_for_the_manifest_of_a_device_is_refused_by_name(server: ServerProcess, models: Path) -> None:
    (models / "bad" / "cpu").mkdir(parents=True)
    _pipe(models / "bad" / "cpu" / "manifest.json")
    assert "manifest.json is a pipe, must be a regular file" in _refusal(server, "bad")


def test_pipes_sockets_and_loops_of_links_beside_models_are_no_models(server: ServerProcess) -> None:
    with server.channel() as channel:
        listed = ModelServiceStub(channel).ListModels(model_pb2.ListModelsRequest(), timeout=_SECONDS)
        assert {model.name for model in listed.models} == set(MODELS)
        for name in ("pipe", "socket", "loop"):
            with pytest.raises(grpc.RpcError) as refused:
                ModelServiceStub(channel).LoadModel(model_pb2.LoadModelRequest(model=name), timeout=_SECONDS)
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def _zeros(file: Path) -> str:
    """A quarter of a megabyte that unpacks to more than the limit of 256 MiB."""
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive, archive.open("more.npy", "w") as stream:
        for _ in range(257):
            stream.write(bytes(1 << 20))
    return "unpacks to "


def _one_array_too_long(file: Path) -> str:
    """Few enough bytes, and more tokens than the model has room for."""
    with np.load(file) as found:
        name = next(name for name in found if name.endswith(("/sequence", "/sequence/0")))
        np.savez_compressed(file, **{**found, name: np.ones(1 << 24, np.int64)})
    return "must have 1 to "


def _boastful_header(file: Path) -> str:
    """A header that claims a terabyte, before data that have it not."""
    with np.load(file) as found:
        index = found["index"].tobytes()
    with zipfile.ZipFile(file, "w") as archive:
        header = io.BytesIO()
        header_of = {"descr": "|u1", "fortran_order": False, "shape": (_TERABYTE,)}
        np.lib.format.write_array_header_1_0(header, header_of)
        archive.writestr("index.npy", header.getvalue() + index)
    return "its header says "


@pytest.mark.parametrize("spoil", [_zeros, _one_array_too_long, _boastful_header])
def test_golden_cases_that_unpack_to_more_than_the_model_has_are_refused_before_they_are_unpacked(
    server: ServerProcess, good: Path, models: Path, spoil: Callable[[Path], str]
) -> None:
    complaint = spoil(good / "golden.npz")
    rehash(good)
    good.rename(models / "bad")
    before = server.forget_peak()
    refusal = _refusal(server, "bad")
    assert "golden.npz" in refusal
    assert complaint in refusal
    assert server.status("VmHWM") - before < _LITTLE_KIB


@pytest.mark.parametrize("spoil", [_zeros, _one_array_too_long, _boastful_header])
def test_golden_attention_that_unpacks_to_more_than_the_model_has_is_not_unpacked(
    server: ServerProcess, good: Path, models: Path, spoil: Callable[[Path], str]
) -> None:
    spoil(good / "attention.npz")
    rehash(good)
    good.rename(models / "bad")
    with server.channel() as channel:
        ModelServiceStub(channel).LoadModel(model_pb2.LoadModelRequest(model="bad"), timeout=_SECONDS)
        before = server.forget_peak()
        stub, request = GenerationServiceStub(channel), pb.ExplainRequest(model="bad", text="3 May")
        with pytest.raises(grpc.RpcError) as refused:
            stub.Explain(request, timeout=_SECONDS)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "golden cases" in str(refused.value.details())
        assert server.status("VmHWM") - before < _LITTLE_KIB
