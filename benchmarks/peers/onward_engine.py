"""The engine alone as a system under test: no gRPC, no threads of ours, every step called from here.

What `onward` loses against it is what the service costs. Speaks the peers' protocol; see `benchmarks.peers.onward`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from benchmarks.peers.onward import artifact, export, version
from benchmarks.peers.protocol import Options, main
from model.spec.artifact import TOKENIZER, load
from model.spec.tokenizer import Tokenizer
from service.engine.engine import Engine, LastRun
from service.engine.factory import build_engine
from service.engine.scheduler import EngineLimits
from service.engine.sessions.session import SessionOptions
from service.engine.types import GenerationRequest, SamplingParams, StoppingParams, TokenEvent


class OnwardEngine:
    """One engine with the server's own defaults.

    Args:
        options: as the protocol has them.
        prefill_chunk: prompt tokens per step; None leaves it to the engine.
    """

    def __init__(self, options: Options, prefill_chunk: int | None = None) -> None:
        self._options = options
        self._prefill_chunk = prefill_chunk
        self._engine: Engine | None = None
        self._ids = count()

    def prepare(self) -> None:
        """Exports."""
        export(self._options)

    def load(self) -> str:
        """Loads the graphs and reserves the K/V; golden cases are the server's business."""
        folder = artifact(self._options)
        tokenizer = Tokenizer.load(folder / TOKENIZER)
        limits = EngineLimits(max_batch_size=self._options.max_batch)
        if self._prefill_chunk is not None:
            limits = replace(limits, prefill_chunk=self._prefill_chunk, max_prefill_tokens=self._prefill_chunk)
        options = SessionOptions(intra_op_threads=self._options.threads)
        self._engine = build_engine(folder, load(folder), tokenizer.decode, limits, options, LastRun())
        return version()

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """All requests are there before the first step."""
        rows = {self._add(prompt, new): list[int]() for prompt in prompts}
        while self._loaded.has_work:
            for event in self._step():
                if event.token_id is not None:
                    rows[event.request_id].append(event.token_id)
        return list(rows.values())

    def prefill_seconds(self, prompt: Sequence[int]) -> list[float]:
        """How long each step takes that a prompt by itself needs until its first token."""
        self._add(prompt, 1)
        seconds = []
        while self._loaded.has_work:
            began = time.perf_counter()
            self._step()
            seconds.append(time.perf_counter() - began)
        return seconds

    @property
    def _loaded(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("not loaded")
        return self._engine

    def _add(self, prompt: Sequence[int], new: int) -> str:
        name = str(next(self._ids))
        self._loaded.add_request(
            GenerationRequest(
                request_id=name,
                model="",
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(temperature=0.0),
                stopping=StoppingParams(max_tokens=new, ignore_eos=True),
            )
        )
        return name

    def _step(self) -> tuple[TokenEvent, ...]:
        events = self._loaded.step().events
        for event in events:
            if event.error is not None:
                raise event.error
        return events

    def close(self) -> None:
        """There is nothing that would outlive this process."""


if __name__ == "__main__":
    main(OnwardEngine)
