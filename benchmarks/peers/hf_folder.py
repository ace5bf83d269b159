"""A decoder-only checkpoint as a Hugging Face folder, so that others can run the very same weights.

Two of their families are known: GPT-2 (learned positions, LayerNorm, GELU, biases) and Llama (rotary positions,
RMSNorm, SwiGLU, no biases); both pre-norm with tied embeddings. Anything else is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.spec.config import Activation, ModelConfig, Norm, NormPlacement, Positions, RopeScaling
from model.spec.files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor


class UnknownFamily(ValueError):
    """The checkpoint is neither a GPT-2 nor a Llama; the message says why."""


def family(config: ModelConfig) -> str:
    """`gpt2` or `llama`.

    Raises:
        UnknownFamily: when it is neither.
    """
    common = (
        not config.is_encoder_decoder
        and config.norm_placement is NormPlacement.PRE
        and config.tie_embeddings
        and not config.scale_embeddings
        and not (config.query_key_norm or config.embedding_norm or config.logits_bias or config.sliding_window)
        and config.rope_scaling is RopeScaling.NONE
        and config.attention_output_bias
    )
    parts = (config.positions, config.norm, config.activation)
    biases = {config.attention_bias, config.mlp_bias}
    plain = config.num_kv_heads == config.num_heads and config.head_dim * config.num_heads == config.d_model
    if common and plain and parts == (Positions.LEARNED, Norm.LAYER, Activation.GELU) and biases == {True}:
        return "gpt2"
    if common and parts == (Positions.ROTARY, Norm.RMS, Activation.SWIGLU) and biases == {False}:
        return "llama"
    raise UnknownFamily(f"neither GPT-2 nor Llama: {', '.join(parts)}, biases {sorted(biases)}")


def describe(config: ModelConfig) -> dict[str, Any]:
    """The contents of their config.json."""
    common = {
        "vocab_size": config.vocab_size,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "pad_token_id": config.pad_id,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    if family(config) == "gpt2":
        return common | {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_positions": config.context,
            "n_embd": config.d_model,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_inner": config.d_ff,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": config.norm_epsilon,
        }
    return common | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": config.context,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
    }


def rename(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our tensors under their names: fused ones split for Llama, input-first matrices for GPT-2."""
    if family(config) == "gpt2":
        return _gpt2(weights, config)
    return _llama(weights, config)


def write(checkpoint: Path, out: Path) -> None:
    """Writes or replaces the folder `out`; config.json comes last, so that a folder that has one is whole.

    Raises:
        UnknownFamily: when the checkpoint is of neither family.
        model.checkpoint.CheckpointError: when it cannot be read.
    """
    import safetensors.torch

    from model import checkpoint as checkpoints

    source = checkpoints.load(checkpoint)
    tensors = {name: tensor.detach().contiguous() for name, tensor in rename(_named(source), source.config).items()}
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").unlink(missing_ok=True)
    safetensors.torch.save_file(tensors, out / "model.safetensors", {"format": "pt"})
    write_atomically(out / "tokenizer.json", source.tokenizer.read_bytes())
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": source.config.context, **special}
    write_atomically(out / "tokenizer_config.json", json.dumps(tokenizer, indent=1).encode())
    generation = {"bos_token_id": source.config.bos_id, "eos_token_id": source.config.eos_id}
    write_atomically(out / "generation_config.json", json.dumps(generation).encode())
    write_atomically(out / "config.json", json.dumps(describe(source.config), indent=1).encode())


def _named(source: Any) -> dict[str, Tensor]:
    return dict(source.model.named_parameters())


def _llama(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    import torch

    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors = {
        "model.embed_tokens.weight": weights["embedding.tokens.weight"],
        "model.norm.weight": weights["final_norm.weight"],
    }
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        parts = torch.split(weights[ours + "self_attention.qkv.weight"], [query, kv, kv])
        for name, part in zip("qkv", parts, strict=True):
            tensors[f"{theirs}self_attn.{name}_proj.weight"] = part
        gate, up = weights[ours + "feed_forward.gate_up.weight"].chunk(2)
        tensors |= {
            theirs + "self_attn.o_proj.weight": weights[ours + "self_attention.output.weight"],
            theirs + "mlp.gate_proj.weight": gate,
            theirs + "mlp.up_proj.weight": up,
            theirs + "mlp.down_proj.weight": weights[ours + "feed_forward.down.weight"],
            theirs + "input_layernorm.weight": weights[ours + "self_attention_residual.norm.weight"],
            theirs + "post_attention_layernorm.weight": weights[ours + "feed_forward_residual.norm.weight"],
        }
    return tensors


def _gpt2(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    tensors = {
        "transformer.wte.weight": weights["embedding.tokens.weight"],
        "transformer.wpe.weight": weights["embedding.positions.weight"],
    }
    matrices = {
        "self_attention.qkv": "attn.c_attn",
        "self_attention.output": "attn.c_proj",
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.down": "mlp.c_proj",
    }
    norms = {"self_attention_residual.norm": "ln_1", "feed_forward_residual.norm": "ln_2"}
    for part in ("weight", "bias"):
        tensors[f"transformer.ln_f.{part}"] = weights[f"final_norm.{part}"]
        for layer in range(config.num_layers):
            for ours, theirs in (matrices | norms).items():
                tensor = weights[f"layers.{layer}.{ours}.{part}"]
                tensors[f"transformer.h.{layer}.{theirs}.{part}"] = tensor.T if tensor.dim() == 2 else tensor
    return tensors
