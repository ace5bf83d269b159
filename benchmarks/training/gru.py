"""Recurrent baseline: an encoder-decoder of GRUs with additive attention, as large as a given transformer.

    source → bidirectional GRU → annotations [→h_j; ←h_j]
    s_i = GRU(s_{i-1}, [y_{i-1}; c_i]),  c_i = Σ_j α_ij [→h_j; ←h_j],  α_i = softmax_j(vᵀ tanh(W s_{i-1} + U h_j))

It has the interface of `EncoderDecoder` and the same training loop. Only the ablation uses it; it is never exported.

Sources: Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate" (2015), section 3 and
appendix A; GRU, Cho et al. (2014). The maxout readout is replaced by tanh, and output embeddings are tied to the
input's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.nn.attention import Attend
from model.nn.transformer import build, num_parameters
from model.spec.config import ModelConfig

_MAX_HIDDEN = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig:
    """One token table for source and target, `[vocab_size, d_model]`; GRUs of `hidden` units, two in the encoder."""

    vocab_size: int
    d_model: int
    hidden: int


class RecurrentEncoderDecoder(nn.Module):
    """A bidirectional GRU encoder, and a GRU decoder with additive attention."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        d_model, hidden = config.d_model, config.hidden
        self.config = config
        self.scale = math.sqrt(d_model)
        self.tokens = nn.Embedding(config.vocab_size, d_model)
        self.encoder = nn.GRU(d_model, hidden, batch_first=True, bidirectional=True)
        self.first_state = nn.Linear(hidden, hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(2 * hidden, hidden, bias=False)
        self.vector = nn.Linear(hidden, 1, bias=False)
        self.decoder = nn.GRUCell(d_model + 2 * hidden, hidden)
        self.readout = nn.Linear(d_model + 3 * hidden, d_model)

    def encode(self, source_ids: Tensor, source_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, S] int64` right-padded, lengths `[B]` in 1…S → annotations `[B, S, 2h]`, zero past each length, and s_0.

        s_0 `[B, h]` is computed from the backward GRU's last state.
        """
        embedded = self.tokens(source_ids) * self.scale
        # Packing starts the backward GRU at each row's last token instead of in the padding.
        packed = nn.utils.rnn.pack_padded_sequence(
            embedded, source_lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        outputs, last = self.encoder(packed)
        annotations, _ = nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True, total_length=source_ids.shape[1])
        return annotations, torch.tanh(self.first_state(last[1]))

    def forward(
        self, source_ids: Tensor, source_lengths: Tensor, target_ids: Tensor, attend: Attend | None = None
    ) -> Tensor:
        """Teacher forcing: `[B, S]`, `[B]`, `[B, T]` → logits `[B, T, V]` of each next target token.

        `attend` is ignored; the interface is the transformer's.
        """
        del attend
        annotations, state = self.encode(source_ids, source_lengths)
        keys = self.key(annotations)
        padding = torch.arange(source_ids.shape[1], device=source_ids.device) >= source_lengths[:, None]
        embedded = self.tokens(target_ids) * self.scale
        seen = []
        for token in embedded.unbind(dim=1):
            scores = self.vector(torch.tanh(self.query(state)[:, None] + keys)).squeeze(-1)
            weights = scores.masked_fill(padding, float("-inf")).softmax(dim=-1)
            context = (weights[:, None] @ annotations).squeeze(1)
            state = self.decoder(torch.cat((token, context), dim=-1), state)
            seen.append(torch.cat((token, context, state), dim=-1))
        return F.linear(torch.tanh(self.readout(torch.stack(seen, dim=1))), self.tokens.weight)


def equal_size(config: ModelConfig) -> RecurrentConfig:
    """The recurrent model nearest in parameters to a transformer with shared embeddings; same `d_model` and vocabulary.

    Raises:
        ValueError: if embeddings are not shared, or no `hidden` comes near.
    """
    has_one_table = config.tie_embeddings and config.share_embeddings and config.source_vocab_size == config.vocab_size
    if not (config.is_encoder_decoder and has_one_table):
        raise ValueError("equal_size compares with an encoder-decoder of one token table")
    with torch.device("meta"):
        wanted = num_parameters(build(config))
    low, high = 1, _MAX_HIDDEN
    if not _size(config, low) <= wanted <= _size(config, high):
        raise ValueError(f"no hidden in {low}…{high} comes near {wanted} parameters")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _size(config, middle) <= wanted else (low, middle)
    return _recurrent(config, min((low, high), key=lambda hidden: abs(_size(config, hidden) - wanted)))


def build_recurrent(config: RecurrentConfig, seed: int) -> RecurrentEncoderDecoder:
    """A model with weights that are a function of (config, seed), in training mode, float32 on the CPU.

    Recurrent matrices start orthogonal for each gate (Bahdanau et al., appendix B.1), other matrices by Glorot, biases
    at zero, embeddings as the transformer's.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = RecurrentEncoderDecoder(config)
        for name, parameter in model.named_parameters():
            if name == "tokens.weight":
                nn.init.normal_(parameter, std=config.d_model**-0.5)
            elif parameter.ndim < 2:
                nn.init.zeros_(parameter)
            elif "weight_hh" in name:
                for gate in parameter.data.chunk(3):
                    nn.init.orthogonal_(gate)
            else:
                nn.init.xavier_uniform_(parameter)
    return model


def _recurrent(config: ModelConfig, hidden: int) -> RecurrentConfig:
    return RecurrentConfig(vocab_size=config.vocab_size, d_model=config.d_model, hidden=hidden)


def _size(config: ModelConfig, hidden: int) -> int:
    with torch.device("meta"):
        return num_parameters(RecurrentEncoderDecoder(_recurrent(config, hidden)))
