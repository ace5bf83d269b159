"""The engine alone as a system under test, in this process: what `onward` is slower by is the cost of the service.

On CUDA its graphs are emitted without the exporter's proof (`benchmarks.frame.paged`), which takes minutes of CPU for a
large model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from benchmarks.frame.engine import greedy_request, load_engine, serve
from benchmarks.frame.models import artifact_folder, export, version
from benchmarks.peers.protocol import Options, System, main
from service.engine.engine import Engine
from service.engine.scheduler import EngineLimits

_CUDA_CHUNK = 4096


class OnwardEngine(System):
    """One engine with the server's own defaults, or on CUDA with a chunk of 4,096 tokens."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._is_cuda = options.device == "cuda"
        self._engine: Engine | None = None
        self._ids = count()

    def prepare(self) -> None:
        """Exports."""
        if self._is_cuda:
            from benchmarks.frame.paged import emit_checkpoint

            emit_checkpoint(self._options.folder, self._options.work, self._options.precision, self._options.device)
        else:
            export(self._options.folder, self._options.work, self._options.precision)

    def load(self) -> str:
        """Loads the graphs and allocates the K/V."""
        limits = EngineLimits(max_batch_size=self._options.max_batch)
        if self._is_cuda:
            rows = self._options.max_batch
            limits = EngineLimits(max_batch_size=rows, prefill_chunk=_CUDA_CHUNK, max_prefill_tokens=_CUDA_CHUNK)
        folder = artifact_folder(self._options.work, self._options.precision)
        self._engine = load_engine(folder, limits, self._options.threads)
        return version()

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """All requests arrive before the first step."""
        if self._engine is None:
            raise RuntimeError("not loaded")
        requests = [greedy_request(str(next(self._ids)), prompt, new) for prompt in prompts]
        answers = serve(self._engine, ((0, request) for request in requests))
        return [answers.tokens[request.request_id] for request in requests]


if __name__ == "__main__":
    main(OnwardEngine)
