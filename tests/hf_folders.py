"""Folders in Hugging Face's layout, made without their library or torch: a tiny Llama, every part to be changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from model.spec.config import Architecture
from model.tokenizer_training import byte_level_bpe

Tensors = dict[str, npt.NDArray[Any]]

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 270,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GENERATION: Mapping[str, Any] = {"bos_token_id": 1, "eos_token_id": [2, 7], "temperature": 0.6, "do_sample": True}
TOKENIZER_CONFIG: Mapping[str, Any] = {
    "bos_token": "<bos>",
    "eos_token": {"content": "<eos>", "lstrip": False},
    "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def tokenizer_json() -> str:
    """Bytes and a few merges, 270 tokens at most."""
    return byte_level_bpe(["hello hello there"], 270, Architecture.DECODER_ONLY, pattern=None).to_json()


def llama_tensors(config: Mapping[str, Any] = CONFIG, dtype: str = "float32") -> Tensors:
    """Random weights of the right names and shapes."""
    rng = np.random.default_rng(5)
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    shapes["lm_head.weight"] = (config["vocab_size"], width)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        shapes |= {
            f"{layer}self_attn.q_proj.weight": (queries, width),
            f"{layer}self_attn.k_proj.weight": (keys, width),
            f"{layer}self_attn.v_proj.weight": (keys, width),
            f"{layer}self_attn.o_proj.weight": (width, queries),
            f"{layer}mlp.gate_proj.weight": (inner, width),
            f"{layer}mlp.up_proj.weight": (inner, width),
            f"{layer}mlp.down_proj.weight": (width, inner),
            f"{layer}input_layernorm.weight": (width,),
            f"{layer}post_attention_layernorm.weight": (width,),
        }
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")


def write_folder(folder: Path, *, sharded: bool = False, tensors: Tensors | None = None, **changes: Any) -> Path:
    """A folder that can be imported; `changes` are of config.json, None leaves a field out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", GENERATION)
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    tensors = llama_tensors() if tensors is None else tensors
    if not sharded:
        save_file(tensors, folder / "model.safetensors")
        return folder
    placed = {name: SHARDS[index % 2] for index, name in enumerate(sorted(tensors))}
    for shard in SHARDS:
        save_file({name: tensors[name] for name, file in placed.items() if file == shard}, folder / shard)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": placed})
    return folder
