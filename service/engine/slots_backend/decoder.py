"""The decoder graph over slots: which array is bound to which input and output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from model.spec.config import ModelConfig, Positions
from service.engine.sessions.device_memory import Array
from service.engine.sessions.session import Binding, GraphSession
from service.engine.slots_backend.kv_cache import SlotKV

Float32 = npt.NDArray[np.float32]


class SlotDecoder:
    """The decoder graph (`model.spec.artifact.decoder_signature`) and its inputs besides tokens.

    Args:
        config: the model's sizes.
        kv: the cache that the graph reads and writes.
        session: the graph.
        logits: `[rows, V]`, the output.

    Attributes:
        seqlens_k: `[slots] int32`, each row's tokens minus one, fed ones included.
        total_sequence_length: `[] int32`, the largest of them plus one.
        source_lengths: `[slots] int32`, of an encoder-decoder's rows.
    """

    def __init__(self, config: ModelConfig, kv: SlotKV, session: GraphSession, logits: Float32) -> None:
        self.seqlens_k = np.zeros(kv.num_slots, np.int32)
        self.total_sequence_length = np.zeros((), np.int32)
        self.source_lengths = np.zeros(kv.num_slots, np.int32)
        self._kv = kv
        self._session = session
        self._logits = logits
        self._has_source = config.is_encoder_decoder
        self._has_position_ids = config.positions is not Positions.ROTARY
        self._names = [f"{part}_{layer}" for layer in range(config.num_layers) for part in ("key", "value")]

    def bind(self, rows: slice, logits_rows: slice) -> Binding:
        """Binds the graph to slots and rows of the output, without tokens (`bind_tokens`)."""
        inputs: dict[str, Array] = {
            "seqlens_k": self.seqlens_k[rows],
            "total_sequence_length": self.total_sequence_length,
        }
        outputs: dict[str, Array] = {"logits": self._logits[logits_rows]}
        for name, buffer in zip(self._names, self._kv.own, strict=True):
            inputs[f"past_{name}"] = outputs[f"present_{name}"] = buffer[rows]
        if self._has_source:
            inputs["source_lengths"] = self.source_lengths[rows]
            for name, buffer in zip(self._names, self._kv.cross, strict=True):
                part, layer = name.split("_")
                inputs[f"cross_{name}"] = outputs[f"cross_{part}_out_{layer}"] = buffer[rows]
        return self._session.bind(inputs, outputs)

    def bind_logits(self, binding: Binding, logits_rows: slice) -> None:
        """Rebinds a binding to other rows of the output."""
        binding.bind_outputs({"logits": self._logits[logits_rows]})

    def bind_apart(self, own: Sequence[Array], num_tokens: int, logits: Float32) -> Binding:
        """Binds the graph to K/V outside the slots, without tokens (`bind_tokens`).

        Args:
            own: for each layer K then V, `[rows, kv_heads, num_tokens, head_dim]`.
            num_tokens: fed to each row, which is empty before.
            logits: `[wanted, V]`.
        """
        inputs: dict[str, Array] = {
            "seqlens_k": np.full(len(own[0]), num_tokens - 1, np.int32),
            "total_sequence_length": np.array(num_tokens, np.int32),
        }
        outputs: dict[str, Array] = {"logits": logits}
        for name, buffer in zip(self._names, own, strict=True):
            inputs[f"past_{name}"] = outputs[f"present_{name}"] = buffer
        return self._session.bind(inputs, outputs)

    def bind_tokens(self, binding: Binding, input_ids: Array, position_ids: Array, logits_indices: Array) -> None:
        """Binds tokens, `[rows, S] int64`, and the flat indices of the tokens whose logits are wanted."""
        inputs = {"input_ids": input_ids, "logits_indices": logits_indices}
        if self._has_position_ids:
            inputs["position_ids"] = position_ids
        binding.bind_inputs(inputs)
