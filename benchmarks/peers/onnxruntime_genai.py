"""onnxruntime-genai: graphs made by its own model builder, its `Generator` over a static batch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Options, System, Window, main, nats_of


class OnnxRuntimeGenAI(System):
    """Precisions are those of the builder's `-p`."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._built: Path = options.work / options.precision
        self._model: Any = None

    def prepare(self) -> None:
        """Runs the builder; raises with the last line of what it said where it refuses the model."""
        if (self._built / "genai_config.json").exists():
            return
        staged = self._options.work / f"{self._options.precision}.part"
        shutil.rmtree(staged, ignore_errors=True)
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(self._options.folder)]
        command += ["-o", str(staged), "-p", self._options.precision, "-e", "cpu", "-c", str(self._options.work)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            said = (done.stdout.strip().splitlines() or [""])[-1]
            raise RuntimeError(f"the model builder exited with {done.returncode}: {said[-500:]}")
        staged.rename(self._built)

    def load(self) -> str:
        """Returns the version."""
        import onnxruntime_genai

        config = onnxruntime_genai.Config(str(self._built))
        threads = {"intra_op_num_threads": self._options.threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
        self._model = onnxruntime_genai.Model(config)
        return str(onnxruntime_genai.__version__)

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """One `Generator`; `min_length` keeps it from ending early."""
        import numpy as np
        import onnxruntime_genai

        ids = np.array(prompts, np.int32)
        length = ids.shape[1] + new
        search = onnxruntime_genai.GeneratorParams(self._model)
        search.set_search_options(
            batch_size=len(prompts),
            max_length=length,
            min_length=length,
            do_sample=False,
            past_present_share_buffer=True,
        )
        generator = onnxruntime_genai.Generator(self._model, search)
        generator.append_tokens(ids)
        for _ in range(new):
            generator.generate_next_token()
        return [generator.get_sequence(row)[ids.shape[1] :].tolist() for row in range(len(prompts))]

    def score(self, windows: Sequence[Window]) -> float:
        """A `Generator` for each window; its graph's output has the logits of the whole prompt."""
        import numpy as np
        import onnxruntime_genai

        nats = 0.0
        for ids, scored in windows:
            search = onnxruntime_genai.GeneratorParams(self._model)
            search.set_search_options(batch_size=1, max_length=len(ids), do_sample=False)
            generator = onnxruntime_genai.Generator(self._model, search)
            generator.append_tokens(np.array([ids[:-1]], np.int32))
            nats += nats_of(generator.get_output("logits")[0], ids, scored)
        return nats


if __name__ == "__main__":
    main(OnnxRuntimeGenAI)
