"""Llama and its relatives: rotary positions, RMSNorm before each part, SwiGLU, grouped queries.

    llama       biases around attention or in the network, if configured
    mistral     a sliding window over all layers
    qwen2       biases of queries, keys and values, none after attention; optionally a window over the upper layers
    qwen3       queries and keys normalized per head, heads of configurable width; windows as qwen2

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.hf.folder import CONFIG, Stored
from model.hf.layout import MAX_LAYERS, Described, Layout, Part
from model.hf.rope import read_rope
from model.hf.values import Values, shorten
from model.spec.config import Activation, Architecture, LayerType, ModelConfig, Norm, NormPlacement, Positions

_LAYER_TYPES = {"full_attention": LayerType.FULL, "sliding_attention": LayerType.SLIDING}
_KEY_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
"""Transformers' default; null means as many as there are heads."""
_MAX_CONTEXT = 2**22
"""The context is not checked by any weight, and rotation tables of its length are allocated."""


def describe(values: Values, _: Mapping[str, Stored], problems: list[str]) -> Described | None:
    """Reads config.json; None if problems prevent it."""
    kind, notes = str(values.get("model_type")), list[str]()
    is_qwen = kind in ("qwen2", "qwen3")
    heads = values.integer("num_attention_heads")
    width = values.integer("hidden_size")
    context = values.integer("max_position_embeddings", most=_MAX_CONTEXT)
    layers = values.integer("num_hidden_layers", most=MAX_LAYERS)
    is_said = "num_key_value_heads" in values.names
    key_heads = values.integer("num_key_value_heads", heads if is_said else _KEY_HEADS.get(kind, heads))
    if heads % key_heads:
        problems.append(f"{CONFIG}: num_attention_heads {heads} is not a multiple of num_key_value_heads {key_heads}")
    # Transformers' default for qwen3; the others derive the width as d / heads.
    head_dim = values.integer("head_dim", 128 if kind == "qwen3" else max(1, width // heads))
    if kind != "qwen3" and values.get("head_dim") is None and width % heads:
        problems.append(f"{CONFIG}: hidden_size {width} is not a multiple of num_attention_heads {heads}")
    values.word("hidden_act", "silu", ("silu", "swish"))
    fields: dict[str, Any] = {
        "architecture": Architecture.DECODER_ONLY,
        "vocab_size": values.integer("vocab_size"),
        "context": context,
        "d_model": width,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": key_heads,
        "head_dim": head_dim,
        "d_ff": values.integer("intermediate_size"),
        "positions": Positions.ROTARY,
        "norm": Norm.RMS,
        "norm_placement": NormPlacement.PRE,
        "norm_epsilon": values.number("rms_norm_eps", 1e-6),
        "activation": Activation.SWIGLU,
        "attention_bias": kind == "qwen2" or (kind != "mistral" and values.flag("attention_bias", default=False)),
        "attention_output_bias": kind != "qwen2",
        "mlp_bias": kind == "llama" and values.flag("mlp_bias", default=False),
        "query_key_norm": kind == "qwen3",
        "tie_embeddings": values.flag("tie_word_embeddings", default=False),
        **read_rope(values, context, problems, notes),
        **(_upper_windows(values, layers, problems) if is_qwen else {}),
        **({"sliding_window": _window(values)} if kind == "mistral" else {}),
    }
    if not is_qwen and values.get("layer_types") is not None:
        values.refuse("layer_types", f"{kind} layers are all alike")
    if problems:
        return None
    config = ModelConfig(**fields)
    return Described(config, _layout(config), tuple(notes))


def _window(values: Values) -> int:
    """0 for none; transformers' default if the field is absent."""
    is_said = "sliding_window" in values.names
    return values.integer("sliding_window", 0 if is_said else 4096)


def _upper_windows(values: Values, layers: int, problems: list[str]) -> dict[str, Any]:
    """Windows on the layers above the first `max_window_layers`, or as `layer_types` lists them."""
    window = _window(values) if values.flag("use_sliding_window", default=False) else 0
    if not window:
        return {}
    kinds = values.get("layer_types")
    if kinds is None:
        first = values.integer("max_window_layers", 28, least=0)
        kinds = ["full_attention" if index < first else "sliding_attention" for index in range(layers)]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in _LAYER_TYPES for kind in kinds):
        problems.append(f"{CONFIG}: layer_types is {shorten(kinds)}, must be a list of {', '.join(_LAYER_TYPES)}")
        return {}
    types = tuple(_LAYER_TYPES[kind] for kind in kinds)
    return {"sliding_window": window, "layer_types": types} if LayerType.SLIDING in types else {}


def _layout(config: ModelConfig) -> Layout:
    layout = Layout(ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",))
    width, inner = config.d_model, config.d_ff
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    table = Part("model.embed_tokens.weight", (config.vocab_size, width))
    layout.add("embedding.tokens.weight", table)
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        attention, network = f"{theirs}.self_attn", f"{theirs}.mlp"
        packed = {f"{attention}.q_proj": queries, f"{attention}.k_proj": keys, f"{attention}.v_proj": keys}
        layout.add_linear(f"{ours}.self_attention.qkv", packed, width, bias=config.attention_bias)
        output_bias = config.attention_bias and config.attention_output_bias
        layout.add_linear(f"{ours}.self_attention.output", {f"{attention}.o_proj": width}, queries, bias=output_bias)
        if config.query_key_norm:
            for part in ("query", "key"):
                norm = f"{attention}.{part[0]}_norm"
                layout.add_norm(f"{ours}.self_attention.{part}_norm", norm, config.head_dim, bias=False)
        gates = {f"{network}.gate_proj": inner, f"{network}.up_proj": inner}
        layout.add_linear(f"{ours}.feed_forward.gate_up", gates, width, bias=config.mlp_bias)
        layout.add_linear(f"{ours}.feed_forward.down", {f"{network}.down_proj": width}, inner, bias=config.mlp_bias)
        layout.add_norm(f"{ours}.self_attention_residual.norm", f"{theirs}.input_layernorm", width, bias=False)
        layout.add_norm(f"{ours}.feed_forward_residual.norm", f"{theirs}.post_attention_layernorm", width, bias=False)
    layout.add_norm("final_norm", "model.norm", width, bias=False)
    layout.add_head(table, is_tied=config.tie_embeddings)
    return layout
