"""Our weights under other people's names: nothing lost, nothing turned the wrong way."""

from __future__ import annotations

import ctypes
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.frame.paged import stirred
from benchmarks.peers import hf_folder, llama_cpp
from benchmarks.peers import systems as bench_systems
from benchmarks.peers.compiled_transformers import CompiledTransformers
from benchmarks.peers.ctranslate2_translator import sinusoids
from benchmarks.peers.gguf_file import gpt2_tensors, interleave_pairs, llama_tensors, read_safetensors
from benchmarks.peers.protocol import Options
from benchmarks.peers.torch_graph import TorchGraph
from model import checkpoint
from model.nn import reference
from model.nn.positions import sinusoidal_table
from model.nn.transformer import build
from model.spec.config import Activation, Architecture, ModelConfig, Norm, NormPlacement, Positions
from model.tokenizer_training import one_word_per_id

LLAMA = ModelConfig(
    architecture=Architecture.DECODER_ONLY,
    vocab_size=32,
    context=16,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    d_ff=24,
)
GPT2 = replace(
    LLAMA,
    num_kv_heads=4,
    d_ff=64,
    positions=Positions.LEARNED,
    norm=Norm.LAYER,
    activation=Activation.GELU,
    attention_bias=True,
    mlp_bias=True,
)


@pytest.mark.parametrize(("config", "name"), [(LLAMA, "llama"), (GPT2, "gpt2")])
def test_a_hugging_face_folder_holds_every_number_once(tmp_path: Path, config: ModelConfig, name: str) -> None:
    model = build(config, seed=0)
    tokenizers = {"tokenizer.json": one_word_per_id(config.vocab_size, config.architecture).to_json()}
    checkpoint.save(tmp_path / "ours", model, config, tokenizers, {})
    hf_folder.write(tmp_path / "ours", tmp_path / "theirs")
    written = read_safetensors(tmp_path / "theirs" / "model.safetensors")
    ours = sum(parameter.numel() for parameter in model.parameters())
    assert sum(values.size for values in written.values()) == ours
    described = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert described["model_type"] == hf_folder.family(config) == name
    tensors = dict(gpt2_tensors(written, config.num_layers) if name == "gpt2" else llama_tensors(written, described))
    assert sum(values.size for values in tensors.values()) == ours
    up = model.layers[1].feed_forward
    expected = up.up.weight if name == "gpt2" else up.gate_up.weight[config.d_ff :]
    np.testing.assert_array_equal(tensors["blk.1.ffn_up.weight"], expected.detach().numpy())


def test_queries_keys_and_values_are_split_in_the_order_they_are_packed() -> None:
    weights = dict(build(LLAMA, seed=0).named_parameters())
    renamed = hf_folder.rename(weights, LLAMA)
    parts = [renamed[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert [part.shape[0] for part in parts] == [16, 8, 8]
    assert torch.equal(torch.cat(parts), weights["layers.0.self_attention.qkv.weight"])


def test_rotated_pairs_are_interleaved_head_by_head() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert interleave_pairs(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_the_translator_is_given_the_sinusoids_that_the_model_adds() -> None:
    np.testing.assert_allclose(sinusoids(300, 24), sinusoidal_table(300, 24).numpy(), atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        *({"norm_placement": NormPlacement.POST}, {"tie_embeddings": False}, {"mlp_bias": True}, {"norm": Norm.LAYER}),
        *({"query_key_norm": True}, {"sliding_window": 4}, {"rope_scaling": "linear", "rope_factor": 2.0}),
    ],
)
def test_a_model_of_neither_family_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(hf_folder.UnknownFamily, match="neither GPT-2 nor Llama"):
        hf_folder.family(replace(LLAMA, **changes))


class QuantizeSettings(ctypes.Structure):
    """The fields of llama.cpp's own that are set here."""

    _fields_ = (("nthread", ctypes.c_int32), ("ftype", ctypes.c_int))


class Quantizer:
    """What making a file of fewer bits needs of llama-cpp-python: writes half of a file and ends with a code."""

    LLAMA_FTYPE_MOSTLY_Q4_0 = 2
    llama_model_quantize_default_params = QuantizeSettings

    def __init__(self) -> None:
        self.code = 0
        self.asked: list[tuple[str, int, int]] = []

    def llama_log_callback(self, report: object) -> object:
        return report

    def llama_log_set(self, report: object, _: object) -> None:
        assert callable(report)

    def llama_backend_init(self) -> None:
        pass

    def llama_model_quantize(self, source: bytes, target: bytes, settings: Any) -> int:
        self.asked.append((Path(source.decode()).name, settings._obj.ftype, settings._obj.nthread))
        Path(target.decode()).write_bytes(Path(source.decode()).read_bytes()[:2])
        return self.code


def test_four_bits_are_what_llama_cpps_own_quantizer_makes_of_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantizer, written = Quantizer(), list[str]()

    def write(folder: Path, path: Path, kind: str) -> None:
        written.append(kind)
        path.write_bytes(b"whole")

    monkeypatch.setitem(sys.modules, "llama_cpp", quantizer)
    monkeypatch.setattr(llama_cpp, "write_gguf", write)
    precision = bench_systems.SYSTEMS["llama.cpp"].precisions["int4"]
    options = Options(tmp_path, tmp_path, precision, threads=3, max_batch=1, context=1)
    quantizer.code = 1
    with pytest.raises(RuntimeError, match="llama_model_quantize returned 1"):
        llama_cpp.LlamaCpp(options).prepare()
    assert not list(tmp_path.glob("q4_0.gguf")), "half a file must not be taken for a whole one"
    quantizer.code = 0
    for _ in range(2):
        llama_cpp.LlamaCpp(options).prepare()
    assert (tmp_path / "q4_0.gguf").read_bytes() == b"wh"
    assert quantizer.asked == [("f32.gguf", Quantizer.LLAMA_FTYPE_MOSTLY_Q4_0, 3)] * 2
    assert written == ["F32"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("peer", [TorchGraph, CompiledTransformers])
def test_a_peer_with_our_checkpoint_writes_what_the_reference_writes(tmp_path: Path, peer: type, tied: bool) -> None:
    config = replace(LLAMA, context=64, tie_embeddings=tied)
    model = stirred(build(config, seed=11))
    tokenizers = {"tokenizer.json": one_word_per_id(config.vocab_size, config.architecture).to_json()}
    checkpoint.save(tmp_path, model, config, tokenizers, {})
    prompts = np.random.default_rng(2).integers(3, config.vocab_size, (3, 13)).tolist()
    expected = [reference.greedy(model, prompt, max_tokens=9) for prompt in prompts]
    system = peer(Options(tmp_path, tmp_path, "fp32", threads=1, max_batch=3, context=64))
    system.prepare()
    assert system.load()
    # A cache or a buffer that is kept from call to call changes nothing.
    for new in (2, 9, 9, 1):
        assert system.generate(prompts, new) == [answer[:new] for answer in expected]
    assert system.generate(prompts[:1], 9) == expected[:1]
