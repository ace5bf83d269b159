"""Recurrent encoder-decoders: vanilla, LSTM or GRU cells, stacked, with one fixed context vector or with attention.

    source → bidirectional cells → memory: [→h_j; ←h_j] of every position j
    s_i = cell(s_{i-1}, [y_{i-1}; c_i])
    fixed:     c_i = [→h_S; ←h_1], the same for every i
    additive:  c_i = Σ_j α_ij [→h_j; ←h_j],  α_i = softmax_j(vᵀ tanh(W s_{i-1} + U h_j))

The two differ in c_i alone. The interface is `EncoderDecoder`'s, so that trainer and scores do not distinguish them.
Cells are torch's.

Sources: Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate" (2015), section 3 and
appendix A; fixed context: Cho et al. (2014). The maxout readout is replaced by tanh, and output embeddings are tied to
the target's.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.nn.attention import Attend
from model.spec.recurrent import Cell, Context, RecurrentConfig

_CELLS: dict[Cell, type[nn.RNN] | type[nn.LSTM] | type[nn.GRU]] = {
    Cell.RNN: nn.RNN,
    Cell.LSTM: nn.LSTM,
    Cell.GRU: nn.GRU,
}
_FORGET = 1
"""The forget gate's place among an LSTM's, in torch's order."""

State = Tensor | tuple[Tensor, Tensor]
"""Of a stack of cells, `[L, B, h]`; an LSTM's outputs and memories."""


class RecurrentEncoderDecoder(nn.Module):
    """Bidirectional cells encode, as many units of them decode."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        d_model, hidden, cell = config.d_model, config.hidden, _CELLS[config.cell]
        self.config = config
        self.scale = math.sqrt(d_model)
        self.tokens = nn.Embedding(config.vocab_size, d_model)
        self.source_tokens = self.tokens if config.shares_tokens else nn.Embedding(config.source_vocab_size, d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = cell(
            d_model,
            hidden,
            config.num_encoder_layers,
            batch_first=True,
            bidirectional=True,
            dropout=config.dropout if config.num_encoder_layers > 1 else 0.0,
        )
        self.first_state = nn.Linear(hidden, config.cell.num_states * config.num_layers * hidden)
        self.has_attention = config.attention is Context.ADDITIVE
        if self.has_attention:
            self.query = nn.Linear(hidden, hidden, bias=False)
            self.key = nn.Linear(2 * hidden, hidden, bias=False)
            self.vector = nn.Linear(hidden, 1, bias=False)
        self.decoder = cell(
            d_model + 2 * hidden,
            hidden,
            config.num_layers,
            batch_first=True,
            dropout=config.dropout if config.num_layers > 1 else 0.0,
        )
        self.readout = nn.Linear(d_model + 3 * hidden, d_model)

    def encode(self, source_ids: Tensor, source_lengths: Tensor, attend: Attend | None = None) -> Tensor:
        """`[B, S] int64` right-padded, lengths `[B]` in 1…S → memory `[B, S, 2h]`, zero past each length.

        `attend` is ignored here and below; the interface is the transformer's.
        """
        del attend
        embedded = self.dropout(self.source_tokens(source_ids) * self.scale)
        # Packing starts the backward cells at each row's last token instead of in the padding.
        packed = nn.utils.rnn.pack_padded_sequence(
            embedded, source_lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        outputs, _ = self.encoder(packed)
        memory: Tensor
        memory, _ = nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True, total_length=source_ids.shape[1])
        return memory

    def decode_hidden(
        self, memory: Tensor, source_lengths: Tensor, target_ids: Tensor, attend: Attend | None = None
    ) -> Tensor:
        """Memory, `[B]` lengths and target inputs `[B, T] int64` (start token first) → readouts `[B, T, d]`."""
        del attend
        return self.advance(memory, source_lengths, target_ids, self.begin(memory))[0]

    def begin(self, memory: Tensor) -> State:
        """The decoder's first state, from the backward cells' last."""
        config = self.config
        first = torch.tanh(self.first_state(memory[:, 0, config.hidden :]))
        shape = len(memory), config.cell.num_states, config.num_layers, config.hidden
        states = first.reshape(shape).permute(1, 2, 0, 3)
        return (states[0].contiguous(), states[1].contiguous()) if len(states) > 1 else states[0].contiguous()

    def advance(
        self, memory: Tensor, source_lengths: Tensor, target_ids: Tensor, state: State, keys: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Reads `[B, T]` further target inputs from a state: readouts `[B, T, d]`, and the state after them.

        `keys` are the memory's for attention, `key(memory)`, where a caller has them.
        """
        embedded = self.dropout(self.tokens(target_ids) * self.scale)
        if self.has_attention:
            keys = self.key(memory) if keys is None else keys
            contexts, outputs, state = self._attending(memory, keys, source_lengths, embedded, state)
        else:
            contexts = self._fixed(memory, source_lengths)[:, None].expand(-1, embedded.shape[1], -1)
            outputs, state = self.decoder(torch.cat((embedded, contexts), dim=-1), state)
        seen = torch.cat((embedded, contexts, outputs), dim=-1)
        return self.dropout(torch.tanh(self.readout(seen))), state

    def unembed(self, hidden: Tensor) -> Tensor:
        """Readouts `[..., d]` → logits `[..., V]`."""
        return F.linear(hidden, self.tokens.weight)

    def forward(
        self, source_ids: Tensor, source_lengths: Tensor, target_ids: Tensor, attend: Attend | None = None
    ) -> Tensor:
        """Teacher forcing: `[B, S]`, `[B]`, `[B, T]` → logits `[B, T, V]` of each next target token."""
        memory = self.encode(source_ids, source_lengths, attend)
        return self.unembed(self.decode_hidden(memory, source_lengths, target_ids, attend))

    def _fixed(self, memory: Tensor, source_lengths: Tensor) -> Tensor:
        """Last outputs of both directions, `[B, 2h]`: the forward cells' is at a row's last token."""
        hidden = self.config.hidden
        last = memory[torch.arange(len(memory), device=memory.device), source_lengths - 1, :hidden]
        return torch.cat((last, memory[:, 0, hidden:]), dim=-1)

    def _attending(
        self, memory: Tensor, keys: Tensor, source_lengths: Tensor, embedded: Tensor, state: State
    ) -> tuple[Tensor, Tensor, State]:
        """Contexts `[B, T, 2h]`, outputs `[B, T, h]` and the last state: a query is the state before its token."""
        padding = torch.arange(memory.shape[1], device=memory.device) >= source_lengths[:, None]
        contexts, outputs = [], []
        for token in torch.split(embedded, 1, dim=1):
            query = self.query((state if isinstance(state, Tensor) else state[0])[-1])
            scores = self.vector(torch.tanh(query[:, None] + keys)).squeeze(-1)
            weights = scores.masked_fill(padding, float("-inf")).softmax(dim=-1)
            context = weights[:, None] @ memory
            output, state = self.decoder(torch.cat((token, context), dim=-1), state)
            contexts.append(context)
            outputs.append(output)
        return torch.cat(contexts, dim=1), torch.cat(outputs, dim=1), state


def build_recurrent(config: RecurrentConfig, seed: int | None = None) -> RecurrentEncoderDecoder:
    """A model with random weights, in training mode, float32 on the CPU.

    With a `seed` the weights depend on (config, seed) alone, and torch's generator is left unchanged. Recurrent
    matrices start orthogonal for each gate (Bahdanau et al., appendix B.1), other matrices by Glorot, biases at zero
    but the forget gate's at 1 (Jozefowicz et al., 2015), embeddings as the transformer's.
    """
    if seed is None:
        return _initialize(RecurrentEncoderDecoder(config))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _initialize(RecurrentEncoderDecoder(config))


def _initialize(model: RecurrentEncoderDecoder) -> RecurrentEncoderDecoder:
    config = model.config
    for name, parameter in model.named_parameters():
        if name.endswith("tokens.weight"):
            nn.init.normal_(parameter, std=config.d_model**-0.5)
        elif parameter.ndim < 2:
            nn.init.zeros_(parameter)
            if config.cell is Cell.LSTM and "bias_ih" in name:
                nn.init.ones_(parameter.data.chunk(config.cell.num_gates)[_FORGET])
        elif "weight_hh" in name:
            for gate in parameter.data.chunk(config.cell.num_gates):
                nn.init.orthogonal_(gate)
        else:
            nn.init.xavier_uniform_(parameter)
    return model
