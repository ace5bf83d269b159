"""Hugging Face transformers for speed: `generate` with a static cache, whose steps it compiles on a GPU by itself.

Our weights under its names, in the present environment. Llama's parts only.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.peers import hf_folder
from benchmarks.peers.protocol import Options, System, Window, main, nats_of
from benchmarks.peers.torch_graph import DTYPES
from model import checkpoint
from model.nn.transformer import Transformer
from model.spec.config import ModelConfig


class CompiledTransformers(System):
    """One static cache for each batch, kept from call to call so that a compiled step finds it at its address."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._model: Any = None
        self._caches: dict[int, tuple[int, Any]] = {}

    def load(self) -> str:
        """Returns the version of transformers and of torch."""
        import transformers

        transformers.logging.set_verbosity_error()
        self.use(checkpoint.load(self._options.folder).model)
        return f"{transformers.__version__} (torch {torch.__version__})"

    def use(self, model: Transformer) -> None:
        """Takes over our weights.

        Raises:
            benchmarks.peers.hf_folder.UnknownFamily: if the model has other parts than Llama.
            ValueError: if weights are missing.
        """
        from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

        config = model.config
        described = hf_folder.describe(replace(config, tie_embeddings=True))
        for name in ("model_type", "architectures", "torch_dtype"):
            described.pop(name)
        described["tie_word_embeddings"] = config.tie_embeddings
        with torch.device(self._options.device):
            dtype = DTYPES[self._options.precision]
            self._model = AutoModelForCausalLM.from_config(
                LlamaConfig(**described), dtype=dtype, attn_implementation="sdpa"
            )
        missing, unexpected = self._model.load_state_dict(rename(dict(model.named_parameters()), config), strict=False)
        tied = {"lm_head.weight"} if config.tie_embeddings else set()
        if unexpected or set(missing) - tied:
            raise ValueError(f"transformers has {missing} that we lack, and lacks {unexpected}")
        self._model.eval()
        # Requests take what they leave open from here: no sequence ends early.
        self._model.generation_config = GenerationConfig(pad_token_id=0)

    # Not in inference mode: compiled steps that change a cache in place need the versions of its tensors.
    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """Exactly so many greedy tokens."""
        from transformers import CompileConfig, GenerationConfig

        config = GenerationConfig(
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            eos_token_id=None,
            # A step compiled for each batch by itself.
            compile_config=CompileConfig(dynamic=False) if self._options.device == "cuda" else None,
        )
        ids = torch.tensor(prompts, device=self._options.device)
        cache = self._cache(len(prompts), ids.shape[1] + new)
        output = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, past_key_values=cache
        )
        tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return tokens

    @torch.no_grad()
    def score(self, windows: Sequence[Window]) -> float:
        """Window by window, without a cache, uncompiled."""
        nats = 0.0
        for ids, scored in windows:
            given = torch.tensor([ids[:-1]], device=self._options.device)
            logits = self._model(given, use_cache=False).logits[0, -scored:]
            nats += nats_of(logits.float().cpu().numpy(), ids, scored)
        return nats

    def _cache(self, batch: int, length: int) -> Any:
        """An empty cache with room for so many tokens; those of other batches are freed."""
        from transformers import StaticCache

        capacity, cache = self._caches.get(batch, (0, None))
        if capacity >= length:
            cache.reset()
            return cache
        self._caches.clear()
        if self._options.device == "cuda":
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
        cache = StaticCache(config=self._model.config, max_cache_len=length)
        self._caches[batch] = length, cache
        return cache


def rename(weights: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Our tensors under Llama's names, with a head where ours has one."""
    tensors: dict[str, Any] = dict(hf_folder.rename(weights, replace(config, tie_embeddings=True)))
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = weights["head.weight"]
    return tensors


if __name__ == "__main__":
    main(CompiledTransformers)
