"""The two families of transformer, built from the same parts.

    DecoderOnly      tokens → embed → layers (causal) → final_norm → unembed → logits
    EncoderDecoder   source → encoder (bidirectional) → memory; then the same, each layer attending to the memory too

`forward` computes whole sequences, for training and the reference decoder. The exporter uses the parts with a cached
attention of its own. Sequences are right-padded: a causal decoder ignores what follows, so only sources need lengths.

Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.nn.attention import (
    AdditiveScore,
    Attend,
    CrossAttention,
    SelfAttention,
    attend_fused,
    join_heads,
    padding_mask,
    split_heads,
    window_mask,
)
from model.nn.layers import DecoderLayer, EncoderLayer, make_norm
from model.nn.positions import RotaryPositions, make_added_positions, make_rotary_positions
from model.spec.config import ModelConfig, NormPlacement


class Embedding(nn.Module):
    """Token vectors, times √d with `scale_embeddings`, plus positions, then dropout (sections 3.4, 3.5, 5.4).

    `tokens` may be shared with another embedding; `length` bounds the positions. `embedding_norm` adds a norm before
    the dropout.
    """

    def __init__(self, config: ModelConfig, tokens: nn.Embedding, length: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = make_added_positions(config, length)
        self.scale = math.sqrt(config.d_model) if config.scale_embeddings else 1.0
        self.norm = make_norm(config) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Ids `[B, S] int64` → `[B, S, d]`; positions are 0…S-1 unless given as `[B, S]` or `[S] int64`."""
        hidden: Tensor = self.tokens(ids) * self.scale
        if self.positions is not None:
            if position_ids is None:
                position_ids = torch.arange(ids.shape[-1], device=ids.device)
            hidden = hidden + self.positions(position_ids)
        if self.norm is not None:
            hidden = self.norm(hidden)
        out: Tensor = self.dropout(hidden)
        return out


class Encoder(nn.Module):
    """Encodes a source bidirectionally into the memory that the decoder attends to."""

    def __init__(self, config: ModelConfig, tokens: nn.Embedding) -> None:
        super().__init__()
        self.embedding = Embedding(config, tokens, config.source_context)
        self.rotary = make_rotary_positions(config, config.source_context)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.final_norm = _make_final_norm(config)

    def forward(self, source_ids: Tensor, source_lengths: Tensor, attend: Attend = attend_fused) -> Tensor:
        """`[B, S] int64` right-padded and `[B]` lengths → memory `[B, S, d]`, undefined past each length."""
        mask = padding_mask(source_lengths, source_ids.shape[1])
        attend_self = partial(_attend_self, rotary=self.rotary, attend=partial(attend, mask=mask))
        hidden = self.embedding(source_ids)
        for layer in self.layers:
            hidden = layer(hidden, attend_self)
        memory: Tensor = self.final_norm(hidden)
        return memory


class Decoder(nn.Module):
    """The parts that both families share: embedding, causal layers, final norm, output head.

    With tied embeddings the head is the transposed token table (section 3.4), and `head` is None. `logits_bias` `[V]`
    and `rotary` are None unless configured; `final_norm` is the identity for post-norm layers, which end in a norm.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config, nn.Embedding(config.vocab_size, config.d_model), config.context)
        self.rotary = make_rotary_positions(config, config.context)
        self.layers = nn.ModuleList(DecoderLayer(config, config.window(index)) for index in range(config.num_layers))
        self.final_norm = _make_final_norm(config)
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.logits_bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.logits_bias else None

    def embed(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Ids `[B, T] int64` → `[B, T, d]`; positions are 0…T-1 unless given. Rotary models add none here."""
        hidden: Tensor = self.embedding(input_ids, position_ids)
        return hidden

    def unembed(self, hidden: Tensor) -> Tensor:
        """Normed hidden states `[..., d]` → logits `[..., V]`."""
        head = self.embedding.tokens.weight if self.head is None else self.head.weight
        return F.linear(hidden, head, self.logits_bias)


class DecoderOnly(Decoder):
    """A causal language model: each position predicts the next token from those up to itself."""

    def forward(self, input_ids: Tensor, attend: Attend = attend_fused) -> Tensor:
        """`[B, T] int64`, T ≤ context → logits `[B, T, V]`; padding on the right changes nothing before it."""
        attend_self = partial(_attend_self, rotary=self.rotary, attend=partial(attend, is_causal=True))
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, attend_self)
        return self.unembed(self.final_norm(hidden))


class EncoderDecoder(Decoder):
    """A sequence-to-sequence model: an encoder for the source, and a causal decoder that attends to its output.

    With tied and shared embeddings and equal vocabularies source and target have one token table (section 3.4).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        shared = config.tie_embeddings and config.share_embeddings and config.source_vocab_size == config.vocab_size
        tokens = self.embedding.tokens if shared else nn.Embedding(config.source_vocab_size, config.d_model)
        self.encoder = Encoder(config, tokens)

    def encode(self, source_ids: Tensor, source_lengths: Tensor, attend: Attend = attend_fused) -> Tensor:
        """`[B, S] int64` right-padded and `[B]` lengths in 1…S → memory `[B, S, d]`."""
        memory: Tensor = self.encoder(source_ids, source_lengths, attend)
        return memory

    def decode(
        self, memory: Tensor, source_lengths: Tensor, target_ids: Tensor, attend: Attend = attend_fused
    ) -> Tensor:
        """Memory `[B, S, d]`, `[B]` lengths and target inputs `[B, T] int64` (start token first) → `[B, T, V]`."""
        return self.unembed(self.decode_hidden(memory, source_lengths, target_ids, attend))

    def decode_hidden(
        self, memory: Tensor, source_lengths: Tensor, target_ids: Tensor, attend: Attend = attend_fused
    ) -> Tensor:
        """As `decode`, up to the normed hidden states `[B, T, d]`, for callers that need few positions' logits."""
        mask = padding_mask(source_lengths, memory.shape[1])
        attend_self = partial(_attend_self, rotary=self.rotary, attend=partial(attend, is_causal=True))
        attend_cross = partial(_attend_cross, memory=memory, attend=partial(attend, mask=mask))
        hidden = self.embed(target_ids)
        for layer in self.layers:
            hidden = layer(hidden, attend_self, attend_cross)
        normed: Tensor = self.final_norm(hidden)
        return normed

    def forward(
        self, source_ids: Tensor, source_lengths: Tensor, target_ids: Tensor, attend: Attend = attend_fused
    ) -> Tensor:
        """Teacher forcing: `[B, S]`, `[B]`, `[B, T]` → logits `[B, T, V]` of each next target token."""
        memory = self.encode(source_ids, source_lengths, attend)
        return self.decode(memory, source_lengths, target_ids, attend)


Transformer = DecoderOnly | EncoderDecoder
"""Either family."""


def build(config: ModelConfig, seed: int | None = None) -> Transformer:
    """A model with random weights, in training mode, float32 on the CPU.

    With a `seed` the weights depend on (config, seed) alone, and torch's generator is left unchanged.
    """
    if seed is None:
        return _build(config)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _build(config)


def build_empty(config: ModelConfig) -> Transformer:
    """A model with uninitialized parameters, for loading: random weights take seconds for large models.

    Position tables are initialized. In training mode, float32 on the CPU.
    """
    with torch.device("meta"):
        model = _assemble(config)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="cpu")))
    return model


def num_parameters(model: nn.Module) -> int:
    """The number of trained parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _assemble(config: ModelConfig) -> Transformer:
    return EncoderDecoder(config) if config.is_encoder_decoder else DecoderOnly(config)


def _build(config: ModelConfig) -> Transformer:
    model = _assemble(config)
    _initialize(model, config)
    return model


def _initialize(model: Transformer, config: ModelConfig) -> None:
    """Normal weights of deviation √(2/5d), zero biases; norms keep their own start, γ = 1 and β = 0.

    √(2/5d) is the SmallInit of Nguyen and Salazar, "Transformers without Tears" (2019): about GPT-2's 0.02 at its
    width, and suitable for narrower models. Projections into a pre-norm residual stream are divided by the root of
    their number (GPT-2), so that the stream's variance does not grow with depth; post-norm normalizes each sum.
    Scaled embeddings start at d^-1/2, which √d lifts to the unit scale of the sinusoids; learned positions beside them
    start at 1. The vectors of additive scores start at D^-1/2, which keeps the scores' variance below one for any
    width; at zero, as in Bahdanau et al., queries and keys would have no gradient at first.
    """
    deviation = math.sqrt(2.0 / (5.0 * config.d_model))
    positions = {module.positions for module in model.modules() if isinstance(module, Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=deviation)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            scaled = 1.0 if module in positions else config.d_model**-0.5
            nn.init.normal_(module.weight, std=scaled if config.scale_embeddings else deviation)
        elif isinstance(module, AdditiveScore):
            nn.init.normal_(module.vector, std=config.head_dim**-0.5)
    if config.norm_placement is NormPlacement.PRE:
        for layers in (model.layers, *((model.encoder.layers,) if isinstance(model, EncoderDecoder) else ())):
            writers = [module for name, module in layers.named_modules() if name.endswith((".output", ".down"))]
            for writer in writers:
                nn.init.normal_(writer.weight, std=deviation / math.sqrt(len(writers)))


def _make_final_norm(config: ModelConfig) -> nn.Module:
    return make_norm(config) if config.norm_placement is NormPlacement.PRE else nn.Identity()


def _attend_self(module: SelfAttention, x: Tensor, *, rotary: RotaryPositions | None, attend: Attend) -> Tensor:
    q, k, v = module.split(module.project(x))
    if rotary is not None:
        q, k = rotary(q), rotary(k)
    if 0 < module.window < x.shape[1]:
        attend = partial(attend, mask=window_mask(x.shape[1], module.window, device=x.device))
    return join_heads(attend(q, k, v, score=module.score))


def _attend_cross(module: CrossAttention, x: Tensor, *, memory: Tensor, attend: Attend) -> Tensor:
    q = split_heads(module.project_query(x), module.head_dim)
    k, v = module.project_memory(memory)
    return join_heads(attend(q, k, v, score=module.score))
