"""One model's engine: requests in, one step at a time, events out.

A step is four lines: schedule, run, sample, commit. Synchronous and single-threaded by design; whoever owns the thread
calls `add_request`, `abort` and `step` from it. Knows no transport, no queues between threads and no files.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from model.golden import CaseResult, GoldenCase, compare
from service.engine.batch import ScheduledBatch
from service.engine.failure import report_failure
from service.engine.replay import replay
from service.engine.runner import Runner
from service.engine.sampler import Sampler
from service.engine.scheduler import Scheduler
from service.engine.types import GenerationRequest, StepOutput, StepStats

Float32 = npt.NDArray[np.float32]


class Engine:
    """Generates for many requests at once.

    Args:
        scheduler: owns the sequences.
        runner: computes logits, and owns the K/V.
        sampler: chooses tokens.
        clock: monotonic seconds; deadlines are compared with it.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, sampler: Sampler, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._clock = clock
        self._run_seconds = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a request lives here: whether `step` would do anything."""
        return self._scheduler.has_work

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return self._scheduler.num_waiting

    def add_request(self, request: GenerationRequest) -> None:
        """Accepts a request; it starts with the next step that has room, and ends with exactly one terminal event.

        Token ids must lie inside the vocabulary: they go to the graph as they are.

        Raises:
            InvalidRequest: when the id is in use or a length is out of range; there will be no event then.
        """
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request with the next step, which reports it cancelled; unknown and finished ones are ignored."""
        self._scheduler.abort(request_id)

    def step(self) -> StepOutput:
        """Moves every running request forward.

        A failure while computing ends the requests that were running, each with an `EngineFailed` that shares an id
        with one log entry; those that wait are not touched, and the next step starts on empty slots.
        """
        started = self._clock()
        self._run_seconds = 0.0
        batch = self._scheduler.schedule(started)
        try:
            logits = self._run(batch)
            sampled = self._sampler.sample(logits, batch.samples)
            events = self._scheduler.commit(batch, sampled, self._clock())
        except Exception as error:
            events = self._scheduler.fail_running(report_failure("a step failed", error), self._clock())
        return StepOutput(events, self._stats(batch, self._clock() - started))

    def verify_golden(self, cases: abc.Sequence[GoldenCase], tolerance: float) -> tuple[CaseResult, ...]:
        """Replays golden cases on the runner that serves; the proof to ask for before taking requests.

        Args:
            cases: what PyTorch answered.
            tolerance: the largest absolute error of a logit that passes.

        Raises:
            RuntimeError: when requests live here, whose K/V the replay would overwrite.
        """
        if self.has_work:
            raise RuntimeError("golden cases can only be replayed on an idle engine")
        pieces, num_slots = self._scheduler.pieces, self._scheduler.max_batch_size
        return tuple(compare(case, replay(self._runner, case, pieces, num_slots), tolerance) for case in cases)

    def _run(self, batch: ScheduledBatch) -> Float32:
        started = self._clock()
        try:
            return self._runner.run(batch)
        finally:
            self._run_seconds = self._clock() - started

    def _stats(self, batch: ScheduledBatch, seconds: float) -> StepStats:
        return StepStats(
            num_rows=batch.num_rows,
            num_tokens=batch.num_tokens,
            num_padding_tokens=batch.num_padding_tokens,
            run_seconds=self._run_seconds,
            host_seconds=seconds - self._run_seconds,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            kv_usage_ratio=self._scheduler.kv_usage_ratio,
        )
