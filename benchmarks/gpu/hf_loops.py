"""Hugging Face transformers beside the engine: `generate` with a static cache, whose steps it compiles on a GPU itself.

As its users would run it for speed. Its own weights are ours, under its names. Needs torch and transformers.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import hf_folder
from model.nn.transformer import Transformer
from model.spec.config import ModelConfig


class TransformersDecode:
    """A Llama by transformers.

    Args:
        model: ours, decoder-only and of Llama's parts, in the precision to compute in; not needed afterwards.
        device: where to run.

    Raises:
        benchmarks.peers.hf_folder.UnknownFamily: when the model is no Llama.
    """

    def __init__(self, model: Transformer, device: str) -> None:
        import transformers
        from transformers import GenerationConfig

        transformers.logging.set_verbosity_error()
        self._device = device
        weights = dict(model.named_parameters())
        self._model = _build(model.config, next(iter(weights.values())).dtype, device)
        tensors = rename(weights, model.config)
        missing, unexpected = self._model.load_state_dict(tensors, strict=False)
        tied = {"lm_head.weight"} if model.config.tie_embeddings else set()
        if unexpected or set(missing) - tied:
            raise ValueError(f"transformers has {missing} that we lack, and lacks {unexpected}")
        self._model.eval()
        # What a request leaves open is taken from here: nothing ends a sequence early.
        self._model.generation_config = GenerationConfig(pad_token_id=0)
        self._caches: dict[tuple[int, int], Any] = {}
        self.version = str(transformers.__version__)

    # Not in inference mode: compiled steps that change a cache in place ask for the versions of its tensors.
    @torch.no_grad()
    def generate(self, prompts: Tensor, new: int, kept_capacity: int = 0) -> list[list[int]]:
        """Exactly so many greedy tokens after each of the prompts `[B, T]`.

        `kept_capacity` is how many tokens a cache has room for that is kept from call to call, so that a compiled step
        finds it where it was; with 0 `generate` makes a new one, and need not wait for each token.
        """
        from transformers import CompileConfig, GenerationConfig

        config = GenerationConfig(
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            use_cache=True,
            cache_implementation=None if kept_capacity else "static",
            pad_token_id=0,
            eos_token_id=None,
            # A step for each batch by itself, as fast as it can be: not one for all that are yet to come.
            compile_config=CompileConfig(dynamic=False) if prompts.device.type == "cuda" else None,
        )
        kept = {"past_key_values": self._cache(len(prompts), kept_capacity)} if kept_capacity else {}
        mask = torch.ones_like(prompts)
        output = self._model.generate(prompts, attention_mask=mask, generation_config=config, **kept)
        tokens: list[list[int]] = output[:, prompts.shape[1] :].tolist()
        return tokens

    @torch.no_grad()
    def prefill(self, prompt: Tensor) -> Tensor:
        """A prompt `[1, T]` → the logits after it, `[V]`, keys and values kept as for what would follow."""
        logits: Tensor = self._model(prompt, use_cache=True, logits_to_keep=1).logits
        return logits[0, -1]

    def forget(self) -> None:
        """Gives back what was compiled and kept for the sizes so far."""
        self._caches.clear()
        if self._device == "cuda":
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()

    def _cache(self, batch: int, capacity: int) -> Any:
        """An empty one, of tensors that are where they were."""
        from transformers import StaticCache

        if (batch, capacity) not in self._caches:
            self._caches[batch, capacity] = StaticCache(config=self._model.config, max_cache_len=capacity)
        else:
            self._caches[batch, capacity].reset()
        return self._caches[batch, capacity]


def rename(weights: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Our tensors under Llama's names, with a head of its own where ours has one."""
    tensors: dict[str, Any] = dict(hf_folder.rename(weights, replace(config, tie_embeddings=True)))
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = weights["head.weight"]
    return tensors


def _build(config: ModelConfig, dtype: torch.dtype, device: str) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    described = hf_folder.describe(replace(config, tie_embeddings=True))
    for name in ("model_type", "architectures", "torch_dtype"):
        described.pop(name)
    described["tie_word_embeddings"] = config.tie_embeddings
    theirs = LlamaConfig(**described)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(theirs, dtype=dtype, attn_implementation="sdpa")
