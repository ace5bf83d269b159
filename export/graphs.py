"""The torch modules that become decoder.onnx and encoder.onnx: the model's own layers around a graph's attention.

Each takes and returns tensors in the order of the artifact's signature. Embeddings, projections, norms and feed-forward
networks are the trained modules themselves; only the way from queries, keys and values to an output is replaced, by the
backend of the model's score (`export.backend`), which may emit operators that torch cannot run.

What a graph computes is proven by replaying golden cases on ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from export.additive import ADDITIVE
from export.backend import AttentionBackend, Buffers, DecoderAttention, Feeds
from export.dot import DOT
from model.nn.attention import CrossAttention, SelfAttention
from model.nn.transformer import Decoder, EncoderDecoder
from model.spec.artifact import TensorSpec, decoder_signature, encoder_signature
from model.spec.config import AttentionScore, ModelConfig

OPSET = 24

_BACKENDS: Mapping[AttentionScore, AttentionBackend] = {AttentionScore.DOT: DOT, AttentionScore.ADDITIVE: ADDITIVE}


def unsupported(config: ModelConfig) -> list[str]:
    """Why the operators cannot compute this model; empty when they can."""
    return _BACKENDS[config.attention_score].unsupported(config)


class DecoderGraph(nn.Module):
    """One step of cached decoding: new tokens and K/V buffers in, the wanted logits out, the buffers extended in place.

    Only the positions that `logits_indices` names go on after the last layer's attention: the rest of that layer, the
    final norm and the head, which for a large vocabulary costs more than all layers together. Of the others keys and
    values are all that is ever asked for again.
    """

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model
        self.inputs, self.outputs = decoder_signature(model.config)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors as `decoder_signature` lists its inputs → tensors as it lists its outputs."""
        config = self.model.config
        feeds = _by_name(self.inputs, tensors)
        fetches: dict[str, Tensor] = {}
        hidden = self.model.embed(feeds["input_ids"], feeds.get("position_ids"))
        attention = _BACKENDS[config.attention_score].in_decoder(self.model, feeds)

        def wanted(x: Tensor) -> Tensor:
            # `[1, num_logits, width]`: of three axes like all before it, which `export.operators` goes by.
            return x.reshape(1, -1, x.shape[-1]).index_select(1, feeds["logits_indices"])

        for index, layer in enumerate(self.model.layers):
            cache = _Cache(attention, index, feeds, fetches)
            attend_cross = cache.attend_cross if config.is_encoder_decoder else None
            select = wanted if index + 1 == config.num_layers else None
            hidden = layer(hidden, cache.attend_self, attend_cross, select)
        fetches["logits"] = self.model.unembed(self.model.final_norm(hidden).squeeze(0))
        return tuple(fetches[spec.name] for spec in self.outputs)


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


class EncoderGraph(nn.Module):
    """The whole encoder and every decoder layer's keys and values of its memory, computed once per source."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model
        self.inputs, self.outputs = encoder_signature(model.config)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors as `encoder_signature` lists its inputs → tensors as it lists its outputs."""
        feeds = _by_name(self.inputs, tensors)
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
        return tuple(fetches[spec.name] for spec in self.outputs)


def _by_name(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)}
