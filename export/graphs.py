"""The torch modules that become decoder.onnx and encoder.onnx: the model's own layers around a graph's attention.

Embeddings, projections, norms and feed-forward networks are the trained modules themselves. The backend of the model's
score (`export.backend`) replaces the attention between projections; its operators may be ones that torch cannot run.
What a graph computes is proven by replaying golden cases on ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from export.additive import ADDITIVE
from export.backend import AttentionBackend, Buffers, DecoderAttention, Feeds, Graph
from export.dot import DOT
from model.nn.attention import CrossAttention, SelfAttention
from model.nn.transformer import Decoder, EncoderDecoder
from model.spec.artifact import decoder_signature, encoder_signature
from model.spec.config import AttentionScore, ModelConfig

OPSET = 24

_BACKENDS: Mapping[AttentionScore, AttentionBackend] = {AttentionScore.DOT: DOT, AttentionScore.ADDITIVE: ADDITIVE}


def unsupported(config: ModelConfig) -> list[str]:
    """Why the operators cannot compute this model; empty when they can."""
    return _BACKENDS[config.attention_score].unsupported(config)


class DecoderGraph(Graph):
    """One step of cached decoding: new tokens and K/V buffers in, selected logits out, buffers extended in place.

    After the last layer's attention only the positions in `logits_indices` are computed: the rest of that layer, the
    final norm and the head, which for a large vocabulary costs more than all layers. Other positions need K/V alone.
    """

    def __init__(self, model: Decoder) -> None:
        super().__init__(decoder_signature(model.config))
        self.model = model

    def compute(self, feeds: Feeds) -> Mapping[str, Tensor]:
        """See `Graph`."""
        config = self.model.config
        fetches: dict[str, Tensor] = {}
        hidden = self.model.embed(feeds["input_ids"], feeds.get("position_ids"))
        attention = _BACKENDS[config.attention_score].in_decoder(self.model, feeds)

        def wanted(x: Tensor) -> Tensor:
            # `[1, num_logits, width]`: three axes as everywhere before, which `export.fusion` relies on.
            return x.reshape(1, -1, x.shape[-1]).index_select(1, feeds["logits_indices"])

        for index, layer in enumerate(self.model.layers):
            cache = _Cache(attention, index, feeds, fetches)
            attend_cross = cache.attend_cross if config.is_encoder_decoder else None
            select = wanted if index + 1 == config.num_layers else None
            hidden = layer(hidden, cache.attend_self, attend_cross, select)
        fetches["logits"] = self.model.unembed(self.model.final_norm(hidden).squeeze(0))
        return fetches


@dataclass(frozen=True, slots=True)
class _Cache:
    """One layer's buffers: which inputs its attention reads, and which outputs they become."""

    attention: DecoderAttention
    index: int
    feeds: Feeds
    fetches: dict[str, Tensor]

    def attend_self(self, module: SelfAttention, x: Tensor) -> Tensor:
        y, (key, value) = self.attention.attend_self(module, x, self._buffers("past"))
        self.fetches[f"present_key_{self.index}"], self.fetches[f"present_value_{self.index}"] = key, value
        return y

    def attend_cross(self, module: CrossAttention, x: Tensor) -> Tensor:
        y, (key, value) = self.attention.attend_cross(module, x, self._buffers("cross"))
        self.fetches[f"cross_key_out_{self.index}"], self.fetches[f"cross_value_out_{self.index}"] = key, value
        return y

    def _buffers(self, kind: str) -> Buffers:
        return self.feeds[f"{kind}_key_{self.index}"], self.feeds[f"{kind}_value_{self.index}"]


class EncoderGraph(Graph):
    """The whole encoder and every decoder layer's keys and values of its memory, computed once per source."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__(encoder_signature(model.config))
        self.model = model

    def compute(self, feeds: Feeds) -> Mapping[str, Tensor]:
        """See `Graph`."""
        encoder = self.model.encoder
        attention = _BACKENDS[self.model.config.attention_score].in_encoder(self.model, feeds)
        memory = encoder.embedding(feeds["source_ids"])
        for layer in encoder.layers:
            memory = layer(memory, attention.attend)
        memory = encoder.final_norm(memory)
        fetches: dict[str, Tensor] = {}
        readers = (module for module in self.model.layers.modules() if isinstance(module, CrossAttention))
        for index, reader in enumerate(readers):
            fetches[f"cross_key_{index}"], fetches[f"cross_value_{index}"] = reader.project_memory(memory)
        return fetches
