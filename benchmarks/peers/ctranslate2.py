"""CTranslate2: weights converted by its own converter, `Generator.generate_batch` over a static batch.

Its thread settings are two systems: all threads compute one batch, or with `-workers` behind a precision each thread
computes a part of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Options, System, Window, main, nats_of


class CTranslate2(System):
    """Precisions are its compute types; the converted weights serve all of them."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._type, _, workers = options.precision.partition("-")
        self._workers = options.threads if workers else 1
        self._converted: Path = options.work / "converted"
        self._generator: Any = None
        self._words: list[str] = []

    def prepare(self) -> None:
        """Runs the converter for transformers' models."""
        if (self._converted / "model.bin").exists():
            return
        from ctranslate2.converters import TransformersConverter

        TransformersConverter(str(self._options.folder)).convert(str(self._converted), force=True)

    def load(self) -> str:
        """Returns the version."""
        import ctranslate2

        self._words = json.loads((self._converted / "vocabulary.json").read_text(encoding="utf-8"))
        self._generator = ctranslate2.Generator(
            str(self._converted),
            device="cpu",
            compute_type=self._type,
            inter_threads=self._workers,
            intra_threads=self._options.threads // self._workers,
        )
        return str(ctranslate2.__version__)

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """One batch for each worker, whatever its size; no end token, so that nothing ends early."""
        results = self._generator.generate_batch(
            [[self._words[token] for token in prompt] for prompt in prompts],
            max_length=new,
            min_length=new,
            beam_size=1,
            sampling_topk=1,
            include_prompt_in_result=False,
            max_batch_size=-(-len(prompts) // self._workers),
            end_token=[],
        )
        return [list(result.sequences_ids[0]) for result in results]

    def score(self, windows: Sequence[Window]) -> float:
        """Window by window."""
        import ctranslate2
        import numpy as np

        nats = 0.0
        for ids, scored in windows:
            logits = self._generator.forward_batch([list(ids[:-1])]).to(ctranslate2.DataType.float32)
            nats += nats_of(np.array(logits)[0], ids, scored)
        return nats


if __name__ == "__main__":
    main(CTranslate2)
