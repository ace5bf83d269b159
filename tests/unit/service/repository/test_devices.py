"""Which device a server computes on: what its models are exported for, what works, and what it says of that."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from model.spec.artifact import MANIFEST, KVFormat, KVLayout, KVPrecision, Manifest, Precision
from model.spec.artifact import Device as BuiltFor
from model.spec.config import Architecture, ModelConfig, Positions
from service.config import ServeConfig
from service.engine.kv.budget import weight_bytes
from service.engine.types import Device
from service.errors import StartupError
from service.repository import loading
from service.repository.devices import artifact_folder, choose_device
from service.repository.models import ServedModel

CONFIG = ModelConfig(
    architecture=Architecture.DECODER_ONLY,
    vocab_size=50,
    context=512,
    d_model=32,
    num_layers=2,
    num_heads=2,
    d_ff=64,
    positions=Positions.ROTARY,
)
MISSING = "libcublas.so.13 is missing: the extra `gpu` brings CUDA's libraries and cuDNN"


def manifest(device: BuiltFor) -> Manifest:
    on_cuda = device is BuiltFor.CUDA
    kv = KVFormat(KVPrecision.BF16, layout=KVLayout.PAGED, block_size=256) if on_cuda else KVFormat()
    return Manifest(
        config=CONFIG,
        device=device,
        precision=Precision.BF16 if on_cuda else Precision.FP32,
        opset=24,
        eos_ids=(2,),
        pad_id=0,
        decoder_start_id=1,
        graphs={},
        files={},
        kv_cache=kv,
    )


def put(folder: Path, device: BuiltFor) -> None:
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(manifest(device).to_json(), encoding="utf-8")


def test_models_are_the_subfolders_but_hidden_ones_and_what_file_systems_put_there(tmp_path: Path) -> None:
    for name in ("b", "a", ".b-before", "lost+found"):
        put(tmp_path / name, BuiltFor.CPU)
    (tmp_path / "README").write_text("a file")
    assert loading.model_names(tmp_path) == ("a", "b")
    assert loading.settle_device(ServeConfig(models=tmp_path)).device is Device.CPU
    (tmp_path / "bare").mkdir()
    with pytest.raises(StartupError, match="bare has no subfolder, and so no model to serve"):
        loading.load_models(tmp_path / "bare")
    with pytest.raises(StartupError, match="none cannot be read: No such file"):
        loading.model_names(tmp_path / "none")


def works(_: Path) -> str | None:
    return None


def fails(_: Path) -> str | None:
    return MISSING


def choose(root: Path, wanted: Device, find_problem: Callable[[Path], str | None] = works) -> Device:
    return choose_device(wanted, sorted(root.iterdir()), find_problem)


def problems(root: Path, wanted: Device, find_problem: Callable[[Path], str | None] = works) -> tuple[str, ...]:
    with pytest.raises(StartupError) as caught:
        choose(root, wanted, find_problem)
    return tuple(caught.value.problems)


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """Models for either device."""
    for name in ("a", "b"):
        for device in BuiltFor:
            put(tmp_path / name / device, device)
    return tmp_path


def test_auto_is_cuda_where_all_models_have_it_and_it_works(both: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert choose(both, Device.AUTO) is Device.CUDA
    assert not caplog.messages, "nothing is amiss"
    assert artifact_folder(both / "a", Device.CUDA) == both / "a" / "cuda"
    assert artifact_folder(both / "a", Device.CPU) == both / "a" / "cpu"


def test_auto_tries_cuda_with_an_artifact_that_is_for_it(both: Path) -> None:
    tried: list[Path] = []
    choose(both, Device.AUTO, tried.append)  # type: ignore[arg-type]
    assert tried == [both / "a" / "cuda"]


def test_auto_is_the_processor_where_cuda_does_not_work_and_says_why(
    both: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose(both, Device.AUTO, fails) is Device.CPU
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message == f"computing on the CPU, as CUDA does not work: {MISSING}"


def test_cuda_that_is_wanted_and_does_not_work_is_refused_with_the_reason(both: Path) -> None:
    assert problems(both, Device.CUDA, fails) == (f"device is cuda: {MISSING}",)
    assert choose(both, Device.CUDA) is Device.CUDA


def test_the_processor_that_is_wanted_is_taken_whatever_else_works(both: Path) -> None:
    assert choose(both, Device.CPU) is Device.CPU


def test_models_of_one_device_settle_which_it_is(tmp_path: Path) -> None:
    put(tmp_path / "a", BuiltFor.CUDA)
    assert choose(tmp_path, Device.AUTO) is Device.CUDA
    assert artifact_folder(tmp_path / "a", Device.CUDA) == tmp_path / "a"
    assert problems(tmp_path, Device.AUTO, fails) == (f"device is auto: a is exported for cuda alone, and {MISSING}",)
    wanted = "device is cpu: a is not exported for it, export it with --device cpu"
    assert problems(tmp_path, Device.CPU) == (wanted,)


def test_models_for_the_processor_need_no_cuda(tmp_path: Path) -> None:
    def untried(_: Path) -> str | None:
        raise AssertionError("nothing here is for CUDA")

    put(tmp_path / "a", BuiltFor.CPU)
    put(tmp_path / "b" / "cpu", BuiltFor.CPU)
    assert choose(tmp_path, Device.AUTO, untried) is Device.CPU
    wanted = "is not exported for it, export it with --device cuda"
    assert problems(tmp_path, Device.CUDA, untried) == (f"device is cuda: a {wanted}", f"device is cuda: b {wanted}")


def test_models_that_have_no_device_in_common_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "a", BuiltFor.CPU)
    put(tmp_path / "b", BuiltFor.CUDA)
    put(tmp_path / "c" / "cuda", BuiltFor.CUDA)
    reason = "exported for cuda alone, and a for cpu alone: one server computes on one device"
    assert problems(tmp_path, Device.AUTO) == (f"device is auto: b is {reason}", f"device is auto: c is {reason}")


def test_a_folder_that_cannot_be_read_is_left_to_whoever_loads_it(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / MANIFEST).write_text("{}")
    (tmp_path / "empty").mkdir()
    assert choose(tmp_path, Device.AUTO) is Device.CPU
    put(tmp_path / "a", BuiltFor.CUDA)
    assert choose(tmp_path, Device.AUTO) is Device.CUDA


# What the device has room for


def served(name: str) -> ServedModel:
    return ServedModel(
        name=name,
        manifest=manifest(BuiltFor.CUDA),
        prompt_tokenizer=None,  # type: ignore[arg-type]
        output_tokenizer=None,  # type: ignore[arg-type]
        golden_cases=(),
    )


def test_models_on_a_device_share_what_it_has_left_beside_weights_and_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = ServeConfig(models=tmp_path, max_batch_size=4)
    models = (served("a"), served("b"))
    needs = loading.needs_of(models[0].manifest, config)
    assert needs.whole == 4 * 512 * CONFIG.kv_bytes_per_token // 2, "in two bytes each"
    plenty = 2 * (needs.besides + needs.whole)
    monkeypatch.setattr(loading, "cuda_free_bytes", lambda: plenty)
    pool = loading.share_memory(models, config)
    assert (dict(pool.parts), pool.num_bytes) == ({"a": needs.whole, "b": needs.whole}, None)
    # With less, as much of it as there is; and what was asked for, if it fits.
    less = plenty - needs.whole
    monkeypatch.setattr(loading, "cuda_free_bytes", lambda: less)
    pool = loading.share_memory(models, config)
    assert dict(pool.parts) == {"a": needs.whole // 2, "b": needs.whole // 2}
    asked = dataclasses.replace(config, kv_memory=2 * needs.least)
    assert dict(loading.share_memory(models, asked).parts) == {"a": needs.least, "b": needs.least}
    with pytest.raises(StartupError, match="--memory is for models on a CPU"):
        loading.share_memory(models, dataclasses.replace(config, memory=plenty))
    asked = dataclasses.replace(config, kv_memory=2 * needs.whole)
    with pytest.raises(StartupError, match=f"all models need {plenty} bytes, there are {less}"):
        loading.share_memory(models, asked)
    monkeypatch.setattr(loading, "cuda_free_bytes", lambda: 2 * needs.besides)
    with pytest.raises(StartupError, match=f"weights and steps need {2 * needs.besides} bytes of the device's memory"):
        loading.share_memory(models, config)


def test_weights_are_counted_by_their_files() -> None:
    from model.spec.artifact import FileEntry

    sizes = {"decoder.onnx": 3, "decoder.onnx.data": 500, "encoder.onnx.data": 70, "golden.npz": 9_000}
    files = {name: FileEntry("0" * 64, size) for name, size in sizes.items()}
    one = dataclasses.replace(manifest(BuiltFor.CUDA), files=files)
    assert weight_bytes(one) == 573
    config = ServeConfig(models=Path())
    bare = loading.needs_of(manifest(BuiltFor.CUDA), config)
    assert loading.needs_of(one, config).besides == bare.besides + 573
