"""CTranslate2: weights converted by its own converter, `Generator.generate_batch` over a static batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Options, System, main


class CTranslate2(System):
    """Precisions are its compute types; the converted weights serve all of them."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
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
            compute_type=self._options.precision,
            inter_threads=1,
            intra_threads=self._options.threads,
        )
        return str(ctranslate2.__version__)

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """One batch, whatever its size; no end token, so that nothing ends early."""
        results = self._generator.generate_batch(
            [[self._words[token] for token in prompt] for prompt in prompts],
            max_length=new,
            min_length=new,
            beam_size=1,
            sampling_topk=1,
            include_prompt_in_result=False,
            max_batch_size=0,
            end_token=[],
        )
        return [list(result.sequences_ids[0]) for result in results]


if __name__ == "__main__":
    main(CTranslate2)
