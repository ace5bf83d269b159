"""OpenVINO GenAI: weights converted by optimum-intel, its `ContinuousBatchingPipeline` over token ids.

Its converter refuses our tokenizer, which the pipeline does not need for ids. Eight and four bits are symmetric, four
in groups of 32 and, as optimum-intel has it, with embeddings and head in eight; their products quantize activations in
groups of 32, which is OpenVINO's default. K/V has the precision of other activations, or with `-kv8` behind a precision
eight bits, which is OpenVINO's default, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Options, System, Window, main

_GROUP = 32
_KV_GIGABYTES = 2
_F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
_BF16 = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
_PROPERTIES: Mapping[str, Mapping[str, object]] = {
    "fp32": _F32 | {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0},
    "bf16": _BF16 | {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0},
    "int8": _F32 | {"DYNAMIC_QUANTIZATION_GROUP_SIZE": _GROUP},
    "int4": _F32 | {"DYNAMIC_QUANTIZATION_GROUP_SIZE": _GROUP},
}
_BITS = {"int8": 8, "int4": 4}


class OpenVINO(System):
    """Precisions are ours."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._precision, _, self._kv = options.precision.partition("-")
        self._bits = _BITS.get(self._precision)
        self._converted: Path = options.work / f"{self._bits or 32}-bit"
        self._pipeline: Any = None

    def prepare(self) -> None:
        """Converts and quantizes."""
        if self._converted.exists():
            return
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

        scheme = None
        if self._bits:
            grouped = {"group_size": _GROUP} if self._bits == 4 else {}
            scheme = OVWeightQuantizationConfig(bits=self._bits, sym=True, **grouped)
        staged = self._converted.with_suffix(".part")
        shutil.rmtree(staged, ignore_errors=True)
        OVModelForCausalLM.from_pretrained(
            self._options.folder, export=True, compile=False, load_in_8bit=False, quantization_config=scheme
        ).save_pretrained(staged)
        staged.rename(self._converted)

    def load(self) -> str:
        """Returns the version. Prefix caching is off: prompts never repeat."""
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = _KV_GIGABYTES
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 4096
        scheduler.max_num_seqs = max(64, self._options.max_batch)
        properties = {"INFERENCE_NUM_THREADS": self._options.threads, **_PROPERTIES[self._precision]}
        if self._kv:
            properties["KV_CACHE_PRECISION"] = "u8"
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(self._converted), scheduler_config=scheduler, device="CPU", properties=properties
        )
        return str(openvino_genai.__version__)

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """All prompts in one call; `ignore_eos` keeps them from ending early."""
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        ids = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = self._pipeline.generate(ids, [config] * len(ids))
        return [list(result.m_generation_ids[0]) for result in results]

    def score(self, windows: Sequence[Window]) -> float:
        """All windows at once; each is echoed with its log-probabilities, and a token more."""
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig(max_new_tokens=1, echo=True, logprobs=1, do_sample=False)
        handles = [
            self._pipeline.add_request(number, openvino.Tensor(np.array([ids], np.int64)), config)
            for number, (ids, _) in enumerate(windows)
        ]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        nats = 0.0
        for handle, (ids, scored) in zip(handles, windows, strict=True):
            output = handle.read_all()[0]
            if output.generated_ids[: len(ids)] != list(ids):
                raise RuntimeError("a window was not echoed")
            nats -= sum(output.generated_log_probs[len(ids) - scored : len(ids)])
        return nats


if __name__ == "__main__":
    main(OpenVINO)
