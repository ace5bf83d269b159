"""Plain torch beside the engine: the same weights, keys and values in one buffer, a step captured as a CUDA graph.

What someone would write by hand who wants no library: a static batch, every buffer where it was, greedy tokens that
never leave the device. On a CPU the step runs as it is. Needs torch; knows no server.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from model.nn.attention import SelfAttention, join_heads, split_heads
from model.nn.positions import rotate
from model.nn.transformer import Decoder


class TorchDecode:
    """A batch of sequences of one length, greedily continued.

    Args:
        model: decoder-only with rotary positions, on the device, in the precision to compute in.
        batch: how many sequences.
        capacity: how many tokens each may come to.

    Raises:
        ValueError: for a model of another kind.
    """

    def __init__(self, model: Decoder, batch: int, capacity: int) -> None:
        config = model.config
        if config.is_encoder_decoder or model.rotary is None or config.sliding_window:
            raise ValueError("only for decoder-only models with rotary positions and without windows")
        weight = model.embedding.tokens.weight
        self._model, self._rotary = model, model.rotary
        self._device = weight.device
        shape = (config.num_layers, 2, batch, config.num_kv_heads, capacity, config.head_dim)
        self._kv = torch.zeros(shape, dtype=weight.dtype, device=self._device)
        self._tokens = torch.zeros(batch, 1, dtype=torch.int64, device=self._device)
        self._position = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._keys = torch.arange(capacity, device=self._device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def prefill(self, prompts: Tensor) -> None:
        """Computes prompts `[B, T]` and chooses what follows."""
        length = prompts.shape[1]
        positions = torch.arange(length, device=self._device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._kv[layer, 0, :, :, :length], self._kv[layer, 1, :, :, :length] = k, v
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        self._tokens.copy_(self._next(self._hidden(prompts, positions, attend)))
        self._position.fill_(length)

    @torch.inference_mode()
    def capture(self) -> None:
        """Has the device remember a step; on a CPU nothing. What the sequences are is left as it was."""
        if self._device.type != "cuda":
            return
        kept = self._tokens.clone(), self._position.clone()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()
        self._tokens.copy_(kept[0])
        self._position.copy_(kept[1])

    @torch.inference_mode()
    def step(self) -> None:
        """One more token for each sequence."""
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    @property
    def tokens(self) -> list[int]:
        """What was chosen last; waits for the device."""
        tokens: list[int] = self._tokens[:, 0].tolist()
        return tokens

    def _step(self) -> None:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._kv[layer, 0], self._kv[layer, 1]
            keys.index_copy_(2, self._position, k)
            values.index_copy_(2, self._position, v)
            mask = (self._keys <= self._position)[None, None, None]
            # The queries that share a key head as one head's queries: no kernel need repeat keys for them then.
            grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[-1])
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(q.shape)

        self._tokens.copy_(self._next(self._hidden(self._tokens, self._position, attend)))
        self._position.add_(1)

    def _hidden(
        self, ids: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Tokens `[B, T]` at positions `[T]` → `[B, T, d]` after the last layer."""
        cos, sin = self._rotary.cos[positions], self._rotary.sin[positions]
        hidden = self._model.embed(ids)
        for index, layer in enumerate(self._model.layers):

            def attend_self(module: SelfAttention, x: Tensor, index: int = index) -> Tensor:
                q, k, v = module.unpack(module.project(x))
                q, k, v = (split_heads(part, module.head_dim) for part in (q, k, v))
                y = attend(index, rotate(q, cos, sin), rotate(k, cos, sin), v)
                return join_heads(y)

            hidden = layer(hidden, attend_self)
        return hidden

    def _next(self, hidden: Tensor) -> Tensor:
        """`[B, T, d]` → the most likely tokens after each sequence, `[B, 1]`."""
        logits = self._model.unembed(self._model.final_norm(hidden[:, -1:]))
        return logits.argmax(dim=-1)
