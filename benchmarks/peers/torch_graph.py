"""Plain torch as a peer: our weights, keys and values in one buffer, a decode step captured as a CUDA graph.

What one would write by hand without a library: a static batch, every buffer at a fixed address, greedy tokens that stay
on the device. On a CPU the step runs uncaptured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.protocol import Options, System, main
from model import checkpoint
from model.nn.attention import SelfAttention, join_heads, split_heads
from model.nn.positions import rotate
from model.nn.transformer import Decoder, DecoderOnly

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_MULTIPLE = 64
_WARM_STEPS = 3


class TorchDecode:
    """A batch of sequences of one length, continued greedily.

    Args:
        model: decoder-only with rotary positions, on the device, in the precision to compute in.
        batch: sequences.
        capacity: tokens that each has room for.

    Raises:
        ValueError: for another kind of model.
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
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=self._device)
        self._position = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._keys = torch.arange(capacity, device=self._device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def prefill(self, prompts: Tensor) -> None:
        """Computes prompts `[B, T]` and chooses the next tokens."""
        length = prompts.shape[1]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._kv[layer, 0, :, :, :length], self._kv[layer, 1, :, :, :length] = k, v
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        self.tokens.copy_(self._next(self._hidden(prompts, torch.arange(length, device=self._device), attend)))
        self._position.fill_(length)

    @torch.inference_mode()
    def step(self) -> None:
        """One more token for each sequence; the first step on CUDA is captured."""
        if self._device.type != "cuda":
            self._step()
            return
        if self._graph is None:
            self._capture()
        assert self._graph is not None  # noqa: S101 (for the type checker)
        self._graph.replay()

    def _capture(self) -> None:
        """Captures a step, and restores the sequences."""
        kept = self.tokens.clone(), self._position.clone()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_STEPS):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()
        self.tokens.copy_(kept[0])
        self._position.copy_(kept[1])

    def _step(self) -> None:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._kv[layer, 0], self._kv[layer, 1]
            keys.index_copy_(2, self._position, k)
            values.index_copy_(2, self._position, v)
            mask = (self._keys <= self._position)[None, None, None]
            # Queries that share a key head become one head's queries, so that no kernel repeats keys.
            grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[-1])
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(q.shape)

        self.tokens.copy_(self._next(self._hidden(self.tokens, self._position, attend)))
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
                return join_heads(attend(index, rotate(q, cos, sin), rotate(k, cos, sin), v))

            hidden = layer(hidden, attend_self)
        return hidden

    def _next(self, hidden: Tensor) -> Tensor:
        """`[B, T, d]` → the greedy tokens after each sequence, `[B, 1]`."""
        return self._model.unembed(self._model.final_norm(hidden[:, -1:])).argmax(dim=-1)


class TorchGraph(System):
    """Loads our checkpoint; one captured step for each batch and capacity."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._model: Decoder | None = None
        self._loops: dict[tuple[int, int], TorchDecode] = {}

    def load(self) -> str:
        """Returns torch's version."""
        loaded = checkpoint.load(self._options.folder).model
        if not isinstance(loaded, DecoderOnly):
            raise TypeError(f"{self._options.folder} is no decoder-only model")
        self._model = loaded.to(device=self._options.device, dtype=DTYPES[self._options.precision]).eval()
        return torch.__version__

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """All tokens are read from the device at the end."""
        if self._model is None:
            raise RuntimeError("not loaded")
        key = len(prompts), -(-(len(prompts[0]) + new) // _MULTIPLE) * _MULTIPLE
        if key not in self._loops:
            self._loops.clear()
            self._loops[key] = TorchDecode(self._model, *key)
        loop = self._loops[key]
        loop.prefill(torch.tensor(prompts, device=self._options.device))
        chosen = [loop.tokens.clone()]
        for _ in range(new - 1):
            loop.step()
            chosen.append(loop.tokens.clone())
        tokens: list[list[int]] = torch.cat(chosen, dim=1).tolist()
        return tokens


if __name__ == "__main__":
    main(TorchGraph)
