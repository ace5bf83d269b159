"""Converts a Hugging Face folder to GGUF. llama.cpp's own converter requires a tokenizer that it knows.

For GPT-2 and Llama with tied embeddings, from one float32 safetensors file. Matrices get the wanted type; norms, biases
and positions stay float32. Runs in llama.cpp's environment, which has the package `gguf`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
_GPT2 = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_LLAMA = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """Writes `path`, its matrices as `kind`: F32, F16, BF16 or Q8_0."""
    import gguf

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = config["model_type"]
    staged = path.with_suffix(".part")
    writer = gguf.GGUFWriter(staged, family)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(_FILE_TYPES[kind])
    weights = read_safetensors(folder / "model.safetensors")
    if family == "gpt2":
        _describe_gpt2(writer, config)
        tensors = gpt2_tensors(weights, config["n_layer"])
    else:
        _describe_llama(writer, config)
        tensors = llama_tensors(weights, config)
    quantization = gguf.GGMLQuantizationType[kind]
    for name, values in tensors:
        contiguous = np.ascontiguousarray(values)
        if kind == "F32" or values.ndim == 1 or name == "position_embd.weight":
            writer.add_tensor(name, contiguous)
        else:
            writer.add_tensor(name, gguf.quantize(contiguous, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    staged.rename(path)


def read_safetensors(path: Path) -> Mapping[str, Array]:
    """Float32 tensors of one file, read without the library `safetensors`."""
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] != "F32":
            raise ValueError(f"{path}: {name} is {entry['dtype']}, not F32")
        first, last = entry["data_offsets"]
        values = np.frombuffer(raw, np.float32, (last - first) // 4, begin + first)
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def gpt2_tensors(weights: Mapping[str, Array], num_layers: int) -> Iterator[tuple[str, Array]]:
    """Tensors under llama.cpp's names, matrices transposed: GPT-2's are input-first."""
    yield "token_embd.weight", weights["transformer.wte.weight"]
    yield "position_embd.weight", weights["transformer.wpe.weight"]
    for part in ("weight", "bias"):
        yield f"output_norm.{part}", weights[f"transformer.ln_f.{part}"]
        for layer in range(num_layers):
            for theirs, ours in _GPT2.items():
                yield f"blk.{layer}.{ours}.{part}", weights[f"transformer.h.{layer}.{theirs}.{part}"].T


def llama_tensors(weights: Mapping[str, Array], config: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    """Tensors under llama.cpp's names, query and key rows in its order of rotary pairs."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    yield "token_embd.weight", weights["model.embed_tokens.weight"]
    yield "output_norm.weight", weights["model.norm.weight"]
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in _LLAMA.items():
            values = weights[f"model.layers.{layer}.{theirs}.weight"]
            if ours in heads:
                values = interleave_pairs(values, heads[ours])
            yield f"blk.{layer}.{ours}.weight", values


def interleave_pairs(weight: Array, num_heads: int) -> Array:
    """Reorders each head's rows from split halves to interleaved rotary pairs."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.transpose(0, 2, 1, 3).reshape(weight.shape)


def _describe_gpt2(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _describe_llama(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
