"""GPT-2: learned positions, LayerNorm before each part, matrices stored input first. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

from model.hf.activations import read_activation
from model.hf.folder import CONFIG, Stored
from model.hf.layout import MAX_LAYERS, Described, Layout, Part
from model.hf.values import Values
from model.spec.config import Architecture, ModelConfig, Norm, NormPlacement, Positions

_MATRICES = {
    "self_attention.qkv": "attn.c_attn",
    "self_attention.output": "attn.c_proj",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}
_UNSUPPORTED = ("scale_attn_by_inverse_layer_idx", "add_cross_attention")


def describe(values: Values, stored: Mapping[str, Stored], problems: list[str]) -> Described | None:
    """Reads config.json; None if problems prevent it."""
    width, heads = values.integer("n_embd"), values.integer("n_head")
    if width % heads:
        problems.append(f"{CONFIG}: n_embd {width} is not a multiple of n_head {heads}")
    for name in _UNSUPPORTED:
        if values.flag(name, default=False):
            values.refuse(name, "which is not supported")
    if not values.flag("scale_attn_weights", default=True):
        values.refuse("scale_attn_weights", "scores are divided by √d_k here")
    vocab_size, context = values.integer("vocab_size"), values.integer("n_positions")
    layers, inner = values.integer("n_layer", most=MAX_LAYERS), values.integer("n_inner", 4 * width)
    activation = read_activation(values, "activation_function", "gelu_new")
    epsilon = values.number("layer_norm_epsilon", 1e-5)
    is_tied = values.flag("tie_word_embeddings", default=True)
    if problems:
        return None
    config = ModelConfig(
        architecture=Architecture.DECODER_ONLY,
        vocab_size=vocab_size,
        context=context,
        d_model=width,
        num_layers=layers,
        num_heads=heads,
        d_ff=inner,
        positions=Positions.LEARNED,
        norm=Norm.LAYER,
        norm_placement=NormPlacement.PRE,
        norm_epsilon=epsilon,
        activation=activation,
        attention_bias=True,
        mlp_bias=True,
        tie_embeddings=is_tied,
    )
    # The first checkpoints omit this prefix.
    prefix = "" if "wte.weight" in stored else "transformer."
    return Described(config, _layout(config, prefix))


def _layout(config: ModelConfig, prefix: str) -> Layout:
    layout = Layout(ignored=(rf"{prefix}h\.\d+\.attn\.(masked_)?bias",))
    width, inner = config.d_model, config.d_ff
    table = Part(f"{prefix}wte.weight", (config.vocab_size, width))
    layout.add("embedding.tokens.weight", table)
    layout.add("embedding.positions.weight", Part(f"{prefix}wpe.weight", (config.context, width)))
    shapes = {
        "self_attention.qkv": (width, 3 * width),
        "self_attention.output": (width, width),
        "feed_forward.up": (width, inner),
        "feed_forward.down": (inner, width),
    }
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}", f"{prefix}h.{index}"
        for name, module in _MATRICES.items():
            shape = shapes[name]
            layout.add(f"{ours}.{name}.weight", Part(f"{theirs}.{module}.weight", shape, transposed=True))
            layout.add(f"{ours}.{name}.bias", Part(f"{theirs}.{module}.bias", shape[1:]))
        layout.add_norm(f"{ours}.self_attention_residual.norm", f"{theirs}.ln_1", width, bias=True)
        layout.add_norm(f"{ours}.feed_forward_residual.norm", f"{theirs}.ln_2", width, bias=True)
    layout.add_norm("final_norm", f"{prefix}ln_f", width, bias=True)
    layout.add_head(table, is_tied=config.tie_embeddings)
    return layout
