"""BART and Marian: encoder and decoder with LayerNorm after each part, biases throughout.

    bart        learned positions, of which the first two rows are unused; a norm after the embeddings
    marian      sinusoidal positions, all sines before all cosines; shared or separate vocabularies

Both add a bias to the logits, which their files may omit. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from model.hf.activations import read_activation
from model.hf.folder import CONFIG, Stored
from model.hf.layout import MAX_LAYERS, Described, Layout, Part
from model.hf.values import Values
from model.spec.config import Architecture, ModelConfig, Norm, NormPlacement, Positions

_POSITION_OFFSET = 2
_UNSUPPORTED = ("normalize_before", "add_final_layer_norm")


def describe(values: Values, stored: Mapping[str, Stored], problems: list[str]) -> Described | None:
    """Reads config.json; None if problems prevent it."""
    is_marian = values.get("model_type") == "marian"
    width = values.integer("d_model")
    heads = _same(values, "attention_heads", problems)
    inner = _same(values, "ffn_dim", problems)
    if width % heads:
        problems.append(f"{CONFIG}: d_model {width} is not a multiple of encoder_attention_heads {heads}")
    for name in _UNSUPPORTED:
        if values.flag(name, default=False):
            values.refuse(name, "which is not supported: norms stand behind each part")
    vocab_size, context = values.integer("vocab_size"), values.integer("max_position_embeddings")
    is_tied = values.flag("tie_word_embeddings", default=True)
    is_shared = not is_marian or values.flag("share_encoder_decoder_embeddings", default=True)
    target_size = vocab_size if is_shared else values.integer("decoder_vocab_size", vocab_size)
    prefix = "" if any(name in stored for name in ("shared.weight", "encoder.embed_tokens.weight")) else "model."
    fields: dict[str, Any] = {
        "architecture": Architecture.ENCODER_DECODER,
        "vocab_size": target_size,
        "source_vocab_size": vocab_size,
        "context": context,
        "source_context": context,
        "d_model": width,
        "num_encoder_layers": values.integer("encoder_layers", most=MAX_LAYERS),
        "num_layers": values.integer("decoder_layers", most=MAX_LAYERS),
        "num_heads": heads,
        "d_ff": inner,
        "positions": Positions.SINUSOIDAL_HALVES if is_marian else Positions.LEARNED,
        "norm": Norm.LAYER,
        "norm_placement": NormPlacement.POST,
        "activation": read_activation(values, "activation_function", "gelu"),
        "attention_bias": True,
        "mlp_bias": True,
        "tie_embeddings": is_tied,
        "share_embeddings": is_shared,
        "scale_embeddings": values.flag("scale_embedding", default=False),
        "embedding_norm": not is_marian,
        "logits_bias": "final_logits_bias" in stored,
    }
    if problems:
        return None
    config = ModelConfig(**fields)
    return Described(config, _layout(config, stored, prefix, is_marian=is_marian))


def _same(values: Values, name: str, problems: list[str]) -> int:
    """A size that must be equal in encoder and decoder."""
    sizes = {side: values.integer(f"{side}_{name}") for side in ("encoder", "decoder")}
    if len(set(sizes.values())) > 1:
        problems.append(f"{CONFIG}: encoder_{name} {sizes['encoder']} and decoder_{name} {sizes['decoder']} differ")
    return sizes["decoder"]


def _layout(config: ModelConfig, stored: Mapping[str, Stored], prefix: str, *, is_marian: bool) -> Layout:
    # The first BART checkpoints contain a version tensor.
    layout = Layout(ignored=(rf"{re.escape(prefix)}(encoder|decoder)\.version",))
    _add_tables(layout, config, stored, prefix)
    stacks = {"": ("decoder", config.num_layers), "encoder.": ("encoder", config.num_encoder_layers)}
    for ours, (side, num_layers) in stacks.items():
        theirs = f"{prefix}{side}"
        table = f"{theirs}.embed_positions.weight"
        if is_marian:
            layout.sinusoids[table] = (config.context, config.d_model)
        else:
            rows = (config.context + _POSITION_OFFSET, config.d_model)
            positions = Part(table, rows, skipped_rows=_POSITION_OFFSET)
            layout.add(f"{ours}embedding.positions.weight", positions)
            layout.add_norm(f"{ours}embedding.norm", f"{theirs}.layernorm_embedding", config.d_model, bias=True)
        for index in range(num_layers):
            _add_layer(layout, config, f"{ours}layers.{index}", f"{theirs}.layers.{index}", has_cross=not ours)
    if config.logits_bias:
        layout.add("logits_bias", Part("final_logits_bias", (1, config.vocab_size)))
    return layout


def _add_tables(layout: Layout, config: ModelConfig, stored: Mapping[str, Stored], prefix: str) -> None:
    """Token tables and head, under whichever of their names the file has; the other names must be copies."""
    names = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
    shared, source, target = (f"{prefix}{name}.weight" for name in names)
    head = "lm_head.weight"

    def add(ours: str, rows: int, *names: str) -> None:
        present = next((name for name in names if name in stored), names[0])
        table = Part(present, (rows, config.d_model))
        layout.add(ours, table)
        layout.copies.update({name: table for name in names if name != present})

    if config.tie_embeddings and config.share_embeddings:
        add("embedding.tokens.weight", config.vocab_size, shared, target, source, head)
    elif config.tie_embeddings:
        add("embedding.tokens.weight", config.vocab_size, target, head)
        add("encoder.embedding.tokens.weight", config.source_vocab_size, source)
    else:
        # A side without a table of its own reads the shared one; if both have one, the shared table is unused.
        add("embedding.tokens.weight", config.vocab_size, target if target in stored else shared)
        add("encoder.embedding.tokens.weight", config.source_vocab_size, source if source in stored else shared)
        add("head.weight", config.vocab_size, head)
        layout.ignored += (re.escape(shared),)


def _add_layer(layout: Layout, config: ModelConfig, ours: str, theirs: str, *, has_cross: bool) -> None:
    width, inner = config.d_model, config.d_ff
    own = {f"{theirs}.self_attn.{part}_proj": width for part in "qkv"}
    layout.add_linear(f"{ours}.self_attention.qkv", own, width, bias=True)
    layout.add_linear(f"{ours}.self_attention.output", {f"{theirs}.self_attn.out_proj": width}, width, bias=True)
    layout.add_norm(f"{ours}.self_attention_residual.norm", f"{theirs}.self_attn_layer_norm", width, bias=True)
    if has_cross:
        cross = f"{theirs}.encoder_attn"
        layout.add_linear(f"{ours}.cross_attention.query", {f"{cross}.q_proj": width}, width, bias=True)
        memory = {f"{cross}.k_proj": width, f"{cross}.v_proj": width}
        layout.add_linear(f"{ours}.cross_attention.key_value", memory, width, bias=True)
        layout.add_linear(f"{ours}.cross_attention.output", {f"{cross}.out_proj": width}, width, bias=True)
        layout.add_norm(f"{ours}.cross_attention_residual.norm", f"{theirs}.encoder_attn_layer_norm", width, bias=True)
    layout.add_linear(f"{ours}.feed_forward.up", {f"{theirs}.fc1": inner}, width, bias=True)
    layout.add_linear(f"{ours}.feed_forward.down", {f"{theirs}.fc2": width}, inner, bias=True)
    layout.add_norm(f"{ours}.feed_forward_residual.norm", f"{theirs}.final_layer_norm", width, bias=True)
