"""Hugging Face transformers: `generate` on a static batch, scaled dot-product attention, key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.protocol import Options, System, Window, main, nats_of


class Transformers(System):
    """Loads the folder as it is; precisions are torch's dtype names."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._model: Any = None

    def load(self) -> str:
        """Returns the version of transformers and of torch."""
        import torch
        import transformers

        torch.set_num_threads(self._options.threads)
        transformers.logging.set_verbosity_error()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            self._options.folder, dtype=getattr(torch, self._options.precision), attn_implementation="sdpa"
        ).eval()
        self._model.generation_config = transformers.GenerationConfig(pad_token_id=0)
        return f"{transformers.__version__} (torch {torch.__version__})"

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """One call of `generate`; no end-of-sequence id, so that nothing ends early."""
        import torch
        from transformers import GenerationConfig

        config = GenerationConfig(
            max_new_tokens=new, min_new_tokens=new, do_sample=False, use_cache=True, pad_token_id=0, eos_token_id=None
        )
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return tokens

    def score(self, windows: Sequence[Window]) -> float:
        """Window by window, without a cache."""
        import torch

        nats = 0.0
        with torch.inference_mode():
            for ids, scored in windows:
                logits = self._model(torch.tensor([ids[:-1]]), use_cache=False).logits[0]
                nats += nats_of(logits[-scored:].float().numpy(), ids, scored)
        return nats


if __name__ == "__main__":
    main(Transformers)
