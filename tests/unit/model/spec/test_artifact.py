"""`model.spec.artifact`: an artifact is what its manifest says, or it is refused with everything that is wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.spec import artifact
from model.spec.artifact import (
    ArtifactError,
    Device,
    FileEntry,
    GraphSpec,
    KVFormat,
    KVLayout,
    KVPrecision,
    Manifest,
    Precision,
    TensorSpec,
)
from model.spec.artifact.manifest import parse_fields
from model.spec.config import ModelConfig
from model.spec.generation import GenerationRules

CONFIGS = {
    "decoder-only": ModelConfig(
        architecture="decoder-only", vocab_size=20, context=16, d_model=8, num_layers=2, num_heads=2, d_ff=16
    ),
    "encoder-decoder": ModelConfig(
        architecture="encoder-decoder",
        vocab_size=20,
        context=16,
        d_model=8,
        num_layers=1,
        num_encoder_layers=1,
        num_heads=2,
        d_ff=16,
        positions="sinusoidal",
    ),
}
Change = Callable[[Manifest], Manifest]


def make_manifest(config: ModelConfig, files: dict[str, FileEntry]) -> Manifest:
    graphs = {artifact.DECODER: GraphSpec("decoder.onnx", *artifact.decoder_signature(config))}
    if config.is_encoder_decoder:
        graphs[artifact.ENCODER] = GraphSpec("encoder.onnx", *artifact.encoder_signature(config))
    return Manifest(
        config=config,
        device=Device.CPU,
        precision=Precision.FP32,
        opset=24,
        eos_ids=(2,),
        pad_id=0,
        decoder_start_id=1,
        graphs=graphs,
        files=files,
        training={"steps": 10},
        versions={"exporter": "1"},
    )


def make_artifact(folder: Path, config: ModelConfig) -> Path:
    """An artifact in form alone: every file is there and listed, none holds a graph."""
    names = ["decoder.onnx", "decoder.onnx.data", artifact.TOKENIZER, artifact.GOLDEN, artifact.PARITY]
    names += ["encoder.onnx", "encoder.onnx.data"] if config.is_encoder_decoder else []
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(f"contents of {name}".encode())
    files = {name: artifact.hash_file(folder / name) for name in names}
    (folder / artifact.MANIFEST).write_text(make_manifest(config, files).to_json(), encoding="utf-8")
    return folder


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "artifact", CONFIGS[request.param])


@pytest.fixture
def decoder_folder(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "artifact", CONFIGS["decoder-only"])


def rewrite(folder: Path, change: Change) -> None:
    manifest = change(artifact.read_manifest(folder))
    (folder / artifact.MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def list_files(folder: Path, **changes: FileEntry) -> None:
    rewrite(folder, lambda manifest: dataclasses.replace(manifest, files={**manifest.files, **changes}))


def problems_of(folder: Path) -> tuple[str, ...]:
    with pytest.raises(ArtifactError) as caught:
        artifact.load(folder)
    assert caught.value.folder == folder
    return caught.value.problems


def test_a_whole_artifact_loads_as_written(folder: Path) -> None:
    manifest = artifact.load(folder)
    assert manifest == make_manifest(manifest.config, dict(manifest.files))
    assert manifest.config in CONFIGS.values()


def test_a_manifest_without_kv_cache_means_float32(decoder_folder: Path) -> None:
    path = decoder_folder / artifact.MANIFEST
    values = json.loads(path.read_text(encoding="utf-8"))
    wanted = {"precision": "fp32", "calibration": "", "layout": "slots", "block_size": 0}
    assert values.pop("kv_cache") == wanted
    path.write_text(json.dumps(values), encoding="utf-8")
    assert artifact.load(decoder_folder).kv_cache == KVFormat(KVPrecision.FP32)


def test_kv_in_eight_bits_is_a_matter_of_signatures(folder: Path) -> None:
    rewrite(folder, lambda manifest: dataclasses.replace(manifest, kv_cache=KVFormat(KVPrecision.INT8, "none")))
    problems = problems_of(folder)
    wanted = ["decoder inputs lacks past_key_0 int8[", "decoder outputs has unexpected present_value_0 float32["]
    if artifact.read_manifest(folder).config.is_encoder_decoder:
        wanted += ["decoder inputs lacks cross_value_0 int8[", "decoder outputs lacks cross_key_out_0 int8["]
        wanted += ["encoder outputs lacks cross_key_0 int8["]
    for start in wanted:
        assert any(problem.startswith(start) for problem in problems), start

    def change(manifest: Manifest) -> Manifest:
        config = manifest.config
        graphs = {artifact.DECODER: GraphSpec("decoder.onnx", *artifact.decoder_signature(config, KVPrecision.INT8))}
        if config.is_encoder_decoder:
            signature = artifact.encoder_signature(config, KVPrecision.INT8)
            graphs[artifact.ENCODER] = GraphSpec("encoder.onnx", *signature)
        return dataclasses.replace(manifest, graphs=graphs)

    rewrite(folder, change)
    manifest = artifact.load(folder)
    assert manifest.kv_cache == KVFormat(KVPrecision.INT8, "none")


@pytest.mark.parametrize("value", [None, "int8", {"precision": "int2", "calibration": ""}, {"precision": "int8"}])
def test_a_malformed_kv_cache_is_refused_by_name(decoder_folder: Path, value: object) -> None:
    path = decoder_folder / artifact.MANIFEST
    values = json.loads(path.read_text(encoding="utf-8")) | {"kv_cache": value}
    path.write_text(json.dumps(values), encoding="utf-8")
    assert any("kv_cache is malformed" in problem for problem in problems_of(decoder_folder))


def test_a_checksum_is_sha256_over_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 1_000_000)
    # The standard's own third example (FIPS 180-2, appendix B.3).
    known = "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"
    assert artifact.hash_file(path) == FileEntry(known, 1_000_000)
    in_pieces = bytes(range(256)) * 10_000
    path.write_bytes(in_pieces)
    assert artifact.hash_file(path) == FileEntry(hashlib.sha256(in_pieces).hexdigest(), len(in_pieces))


def test_every_bad_file_is_listed_at_once(decoder_folder: Path) -> None:
    outside = decoder_folder.parent / "outside"
    outside.write_bytes(b"secret")
    (decoder_folder / artifact.TOKENIZER).unlink()
    with (decoder_folder / "decoder.onnx.data").open("r+b") as stream:
        stream.write(b"X")
    with (decoder_folder / artifact.GOLDEN).open("ab") as stream:
        stream.write(b"more")
    (decoder_folder / "link").symlink_to(outside)
    (decoder_folder / "loop").symlink_to("loop")
    (decoder_folder / "dangling").symlink_to("nowhere")
    (decoder_folder / "foreign.bin").write_bytes(b"foreign")
    (decoder_folder / "deep").mkdir()
    (decoder_folder / "deep" / "foreign.bin").write_bytes(b"foreign")
    entry = artifact.hash_file(outside)
    names = ("../outside", str(outside), "link", "loop", "nul\0name", "n" * 300, "deep")
    list_files(decoder_folder, **dict.fromkeys(names, entry))

    problems = problems_of(decoder_folder)
    exact = {
        "tokenizer.json is missing",
        "decoder.onnx.data does not match its sha256 in the manifest",
        "golden.npz has 26 bytes, the manifest says 22",
        "'../outside' leaves the artifact's folder",
        f"{str(outside)!r} leaves the artifact's folder",
        "'link' leaves the artifact's folder",
        "deep is a directory, must be a regular file",
        "foreign.bin is not in the manifest",
        "deep/foreign.bin is not in the manifest",
        "dangling is not in the manifest",
    }
    assert exact <= set(problems)
    rest = sorted(set(problems) - exact)
    assert [problem.partition(" cannot be read: ")[0] for problem in rest] == [
        repr("loop"),
        repr("n" * 300),
        repr("nul\0name"),
    ]


def test_of_many_problems_the_first_are_named_each_in_a_line_and_the_others_counted(decoder_folder: Path) -> None:
    missing = {name: FileEntry("0" * 64, 1) for name in ("a" * 2000, *(f"file-{number:04}" for number in range(1999)))}
    list_files(decoder_folder, **missing)
    first, *others, last = problems_of(decoder_folder)
    assert len(first) == 1000
    assert first.startswith("'aaa")
    assert others == [f"file-{number:04} is missing" for number in range(19)]
    assert last == "and 1980 more problems"


def test_a_manifest_with_more_files_than_a_folder_may_have_is_refused_by_their_number(
    decoder_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_files(decoder_folder, **{f"missing-{number}": FileEntry("0" * 64, 1) for number in range(5000)})
    with monkeypatch.context() as patch:
        patch.setattr(artifact.checks, "_check_file", None)
        assert problems_of(decoder_folder) == ("files lists 5005 names, must list at most 4096",)


def test_a_link_that_stays_inside_is_a_file_like_any_other(decoder_folder: Path) -> None:
    (decoder_folder / "decoder.onnx").rename(decoder_folder / "graph")
    (decoder_folder / "decoder.onnx").symlink_to("graph")
    list_files(decoder_folder, graph=artifact.hash_file(decoder_folder / "graph"))
    artifact.load(decoder_folder)


def test_files_that_an_artifact_needs_must_be_listed(decoder_folder: Path) -> None:
    rewrite(decoder_folder, lambda manifest: dataclasses.replace(manifest, files={}))
    problems = problems_of(decoder_folder)
    for name in ("decoder.onnx", artifact.TOKENIZER, artifact.GOLDEN, artifact.PARITY):
        assert f"files does not list {name}" in problems
        assert f"{name} is not in the manifest" in problems


def test_a_graph_with_another_signature_is_refused_tensor_by_tensor(decoder_folder: Path) -> None:
    def change(manifest: Manifest) -> Manifest:
        graph = manifest.graphs[artifact.DECODER]
        inputs = (TensorSpec("input_ids", "int32", ("batch", "sequence")), *graph.inputs[1:])
        return dataclasses.replace(
            manifest,
            graphs={
                artifact.DECODER: GraphSpec(graph.file, inputs, graph.outputs[:-1]),
                "vision": GraphSpec(graph.file, (), ()),
            },
        )

    rewrite(decoder_folder, change)
    assert problems_of(decoder_folder) == (
        "graphs lists unknown 'vision'",
        "decoder inputs lacks input_ids int64[batch, sequence]",
        "decoder inputs has unexpected input_ids int32[batch, sequence]",
        "decoder outputs lacks present_value_1 float32[batch, 2, capacity, 4]",
    )


def test_a_prefill_graph_of_a_former_release_is_ignored(decoder_folder: Path) -> None:
    graph = GraphSpec("decoder.onnx", (), ())
    rewrite(
        decoder_folder,
        lambda manifest: dataclasses.replace(manifest, graphs={**manifest.graphs, artifact.PREFILL: graph}),
    )
    assert artifact.PREFILL in artifact.load(decoder_folder).graphs


def test_an_encoder_decoder_needs_both_graphs(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "artifact", CONFIGS["encoder-decoder"])
    rewrite(folder, lambda manifest: dataclasses.replace(manifest, graphs={}))
    assert {"graphs lacks 'decoder'", "graphs lacks 'encoder'"} <= set(problems_of(folder))


def test_every_bad_field_is_listed_with_the_bad_files(decoder_folder: Path) -> None:
    path = decoder_folder / artifact.MANIFEST
    values = json.loads(path.read_text(encoding="utf-8"))
    values["config"] |= {"d_model": 0, "colour": 3}
    values |= {"device": "tpu", "precision": "fp8", "opset": "24", "colour": 3}
    path.write_text(json.dumps(values), encoding="utf-8")
    (decoder_folder / artifact.TOKENIZER).unlink()
    problems = problems_of(decoder_folder)
    parts = ("'colour'", "colour", "'tpu'", "'fp8'", "opset", "tokenizer.json is missing")
    assert len(problems) == len(parts)
    assert [part for part in parts if not any(part in problem for problem in problems)] == []


def test_a_manifest_outside_the_folder_is_refused(decoder_folder: Path) -> None:
    path = decoder_folder / artifact.MANIFEST
    path.rename(decoder_folder.parent / "elsewhere.json")
    path.symlink_to("../elsewhere.json")
    assert "'manifest.json' leaves the artifact's folder" in problems_of(decoder_folder)
    path.unlink()
    path.symlink_to(path.name)
    assert problems_of(decoder_folder)


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        (
            {"device": Device.CUDA},
            [
                "device is cuda, this version serves cpu",
                "precision is fp32, this version serves fp16, bf16",
                "kv_cache.layout is slots, must be paged for cuda",
            ],
        ),
        (
            {"precision": Precision.FP16, "opset": 7, "eos_ids": ()},
            [
                "precision is fp16, this version serves fp32, bf16, int8, int4",
                "opset is 7, this version serves 23 to 26",
                "eos_ids is empty: no output would end",
            ],
        ),
        ({"kv_cache": KVFormat(block_size=16)}, ["kv_cache.block_size is 16, must be 0 in slots"]),
        (
            {"precision": Precision.INT8, "kv_cache": KVFormat(KVPrecision.INT8, "", KVLayout.PAGED, 24)},
            [
                "kv_cache.block_size is 24, must be a power of two and at least 16",
                "precision is int8, must be fp32 where K/V are paged",
                "kv_cache.precision is int8, must be fp32",
            ],
        ),
        (
            {
                "device": Device.CUDA,
                "precision": Precision.FP16,
                "kv_cache": KVFormat(KVPrecision.BF16, "", KVLayout.PAGED, 8),
            },
            [
                "device is cuda, this version serves cpu",
                "kv_cache.block_size is 8, must be a power of two and at least 16",
                "kv_cache.precision is bf16, must be fp16",
            ],
        ),
        ({"kv_cache": KVFormat(layout=KVLayout.PAGED, block_size=16)}, []),
        (
            {"pad_id": -1, "decoder_start_id": 20, "eos_ids": (2, 99)},
            [
                "pad_id has -1, must be in [0, 20)",
                "decoder_start_id has 20, must be in [0, 20)",
                "eos_ids has 99, must be in [0, 20)",
            ],
        ),
        (
            {"generation": GenerationRules(suppressed_ids=tuple(range(20)), forced_last_id=20)},
            [
                "generation.forced_last_id has 20, must be in [0, 20)",
                "generation.suppressed_ids are the whole vocabulary: nothing could be generated",
            ],
        ),
    ],
)
def test_a_manifest_that_this_version_cannot_serve_is_refused(
    decoder_folder: Path, changes: dict[str, Any], problems: list[str]
) -> None:
    rewrite(decoder_folder, lambda manifest: dataclasses.replace(manifest, **changes))
    found = problems_of(decoder_folder)
    assert [each for each in found if not each.startswith(("graphs ", "decoder ", "and "))] == problems


def test_a_folder_without_manifest_is_no_artifact(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == ("manifest.json is missing: not an artifact",)
    assert problems_of(tmp_path / "nowhere") == ("manifest.json is missing: not an artifact",)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe", "can't decode"),
        (b"[" * 200_000, "recursion"),
        (b"[]", "manifest is not a JSON object"),
        (b"{}", "format_version is None, this version reads 1"),
        (b'{"format_version": 2}', "format_version is 2, this version reads 1"),
        (b'{"format_version": 1, "colour": 3}', "unknown field 'colour'"),
        (b'{"format_version": 1}', "missing field 'graphs'"),
    ],
)
def test_a_manifest_that_is_not_one_is_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / artifact.MANIFEST).write_bytes(data)
    assert any(problem in found for found in problems_of(tmp_path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(st.sampled_from([field.name for field in dataclasses.fields(Manifest)]), JSON)
def test_a_manifest_with_any_field_spoiled_is_parsed_or_its_problem_is_named(name: str, value: object) -> None:
    values = json.loads(make_manifest(CONFIGS["decoder-only"], {"decoder.onnx": FileEntry("00", 1)}).to_json())
    values[name] = value
    fields, problems = parse_fields(json.dumps(values))
    assert problems or Manifest(**fields).config
