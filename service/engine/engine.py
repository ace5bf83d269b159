"""One model's engine: requests in, one step at a time, events out.

A step is four lines: schedule, run, sample, commit. Synchronous and single-threaded by design; whoever owns the thread
calls `add_request`, `abort` and `step` from it. Knows no transport, no queues between threads and no files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.spec.cost import causal_pairs
from model.spec.golden import CaseResult, GoldenCase, Tolerance, compare
from service.engine.batch import KVFree, KVRetain, ScheduledBatch
from service.engine.chunks import ChunkRules
from service.engine.proof.calibration import calibrate, rounds
from service.engine.proof.chunk_proof import find_difference
from service.engine.proof.replay import replay_all
from service.engine.runner import Runner
from service.engine.sampling.sampler import Sampler
from service.engine.scheduler import Scheduler
from service.engine.types import GenerationRequest, StepOutput, StepStats
from service.errors import report_failure

_LOGGER = logging.getLogger(__name__)

# As many requests as a log entry names.
_MAX_NAMED = 32


@dataclass(slots=True)
class LastRun:
    """When a graph last ran on a thread, in the clock's seconds; None when there has been nothing to run since.

    The engines of one thread share it: while another model's graph runs, the thread is not idle.
    """

    ended: float | None = None


class Engine:
    """Generates for many requests at once.

    Args:
        scheduler: owns the sequences.
        runner: computes logits, and owns the K/V.
        sampler: chooses tokens.
        last_run: shared by the engines that one thread steps.
        clock: monotonic seconds; deadlines are compared with it.
        rehearse: what is to be done once, on the thread that steps, before golden cases are replayed or steps are
            timed; nothing unless given.
        prepare: does a piece of what may be done ahead while nobody waits, and tells whether there is more of it;
            nothing unless given.
        name: what the log calls it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        last_run: LastRun,
        clock: Callable[[], float] = time.monotonic,
        rehearse: Callable[[], None] | None = None,
        prepare: Callable[[], bool] | None = None,
        name: str = "a model",
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._last_run = last_run
        self._clock = clock
        self._rehearse = rehearse
        self._prepare = prepare
        self._name = name
        self._num_preemptions = self._num_accepted_drafts = 0

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

    @property
    def pieces(self) -> ChunkRules:
        """How it cuts and pads what it computes: for life."""
        return self._scheduler.pieces

    @property
    def max_draft_tokens(self) -> int:
        """How many tokens of a row that computes alone are guessed at once, at most; 0 where none ever are."""
        return self._scheduler.max_draft_tokens

    @property
    def kv_memory_bytes(self) -> int:
        """What K/V may take: for life."""
        return self._scheduler.kv_memory_bytes

    def limit_kv(self, num_bytes: int) -> None:
        """Keeps K/V within so many bytes of `kv_memory_bytes` from now on, while others hold the rest.

        What does not fit into them waits; what is in nobody's use is freed with the next step.

        Raises:
            ValueError: when running and preempted requests hold more.
        """
        self._scheduler.limit_kv(num_bytes)

    @property
    def kv_needed_bytes(self) -> int:
        """What K/V must be able to take for all requests to end, if no more come."""
        return self._scheduler.kv_needed_bytes

    def num_cached_tokens(self, request: GenerationRequest) -> int:
        """How many tokens of a request's prompt, or of its source, it would find computed if it started now.

        Raises:
            InvalidRequest: when `add_request` would refuse it.
        """
        return self._scheduler.num_cached_tokens(request)

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

    def prepare(self) -> bool:
        """Does a piece of what makes later steps quicker, some ten milliseconds' worth; whether there is more of it.

        For when nobody waits. What fails is not tried again: steps do without.
        """
        try:
            return self._prepare is not None and self._prepare()
        except Exception as error:
            report_failure(f"{self._name}: what makes steps quicker could not be prepared", error)
            self._prepare = None
            return False

    def step(self) -> StepOutput:
        """Moves every running request forward.

        A failure while computing ends the requests that were running, each with an `EngineFailed` that shares an id
        with one log entry; those that wait are not touched, unless they lost their place in that very step, and the
        next step starts on empty slots.
        """
        batch = self._scheduler.schedule(self._clock())
        last_ended, started = self._last_run.ended, self._clock()
        try:
            logits = self._runner.run(batch)
            ended = self._last_run.ended = self._clock()
            sampled = self._sampler.sample(logits, batch.samples)
            scored = self._sampler.score(logits, batch.scores)
            expanded = self._sampler.expand(logits, batch.beams)
            events = self._scheduler.commit(batch, sampled, self._clock(), scored, expanded)
        except Exception as error:
            return self._fail_step(error, started)
        if not self.has_work:
            self._last_run.ended = None
        host_seconds = None if last_ended is None else started - last_ended
        return StepOutput(events, self._stats(batch, started, ended - started, host_seconds))

    def verify_golden(self, cases: Sequence[GoldenCase], tolerance: Tolerance) -> tuple[CaseResult, ...]:
        """Replays golden cases on the runner that serves; the proof to ask for before taking requests.

        Nothing that was kept for later requests outlives it.

        Args:
            cases: what PyTorch answered.
            tolerance: how far a logit may be off; `model.spec.golden.TOLERANCES` has one for each precision.

        Raises:
            RuntimeError: when requests live here, whose K/V the replay would overwrite.
        """
        if self.has_work:
            raise RuntimeError("golden cases can only be replayed on an idle engine")
        self._last_run.ended = None
        self._rehearse_once()
        pieces, max_rows = self._scheduler.pieces, self._scheduler.limits.max_batch_size
        # Rows of golden cases are admitted by nobody: as many at once as there is memory for, whatever their lengths.
        num_slots = min(max_rows, self._scheduler.num_whole_rows)
        try:
            empty = ScheduledBatch(kv_operations=(KVRetain(frozenset()), *map(KVFree, range(max_rows))))
            self._runner.run(empty)
            answers = replay_all(self._runner, cases, pieces, num_slots)
            self._runner.own_weights()
            return tuple(compare(case, logits, tolerance) for case, logits in zip(cases, answers, strict=True))
        finally:
            self._scheduler.forget_kv()

    def prove_look_up(self, cases: Sequence[GoldenCase]) -> None:
        """Finds out whether guesses would change a bit; from then on there are guesses if not, and the log says which.

        Before that there are none. What is found holds for the engine's life, as its graph, its weights and the machine
        do: it is for whoever builds it, once. Nothing that was kept for later requests outlives it.

        Args:
            cases: golden cases, of which one sequence is computed (`service.engine.proof.chunk_proof`).

        Raises:
            RuntimeError: when requests live here, whose K/V it would overwrite.
        """
        if self.has_work:
            raise RuntimeError("guesses can only be proven on an idle engine")
        most = self._scheduler.provable_draft_tokens
        if not most:
            return
        problem = self._find_difference(cases, most + 1)
        self._scheduler.let_guess(is_proven=problem is None)
        if problem is None:
            _LOGGER.info("%s: up to %d tokens are guessed by look-up, which changes no bit", self._name, most)
        else:
            _LOGGER.warning("%s: no tokens are guessed by look-up: %s", self._name, problem)

    def calibrate(self, max_seconds: float, goes_on: Callable[[], bool] = lambda: True) -> tuple[StepStats, ...]:
        """Runs steps of a few sizes, to learn how long they take (`service.engine.proof.calibration`).

        Nothing that was kept for later requests outlives it, and other engines of the thread hear nothing of it. Tokens
        are computed one by one.

        Args:
            max_seconds: how long.
            goes_on: asked before each step; once it says no, the rest is left out.

        Raises:
            RuntimeError: when requests live here.
        """
        if self.has_work:
            raise RuntimeError("only an idle engine can be calibrated")
        self._rehearse_once()
        limits, shared = self._scheduler.limits, self._last_run
        shared.ended, self._last_run = None, LastRun()
        plan = rounds(self.pieces, limits.max_batch_size, limits.max_prefill_tokens)
        guesses = self.max_draft_tokens > 0
        self._scheduler.let_guess(is_proven=False)
        try:
            return calibrate(self, tuple(plan), max_seconds, goes_on, self._clock)
        finally:
            self._last_run = shared
            self._scheduler.let_guess(is_proven=guesses)
            self._scheduler.forget_kv()

    def _find_difference(self, cases: Sequence[GoldenCase], longest_chunk: int) -> str | None:
        """Why a row is not to be fed chunks of so many tokens, None where it may."""
        limits = self._scheduler.limits
        try:
            return find_difference(
                self._runner,
                cases,
                num_slots=limits.max_batch_size,
                longest_chunk=longest_chunk,
                max_tokens=limits.max_prefill_tokens,
                context=self.pieces.context,
            )
        except Exception as error:  # what does not run here fails golden cases, too: they decide what that means
            return f"its proof failed, {report_failure(f'{self._name}: look-up could not be proven', error).error_id}"
        finally:
            self._scheduler.forget_kv()

    def _rehearse_once(self) -> None:
        if self._rehearse is not None:
            self._rehearse()
            self._rehearse = None

    def _fail_step(self, error: Exception, started: float) -> StepOutput:
        """Ends what ran, and reports a step that did nothing: what was computed is lost."""
        self._last_run.ended = None
        names = self._scheduler.running_ids
        rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        failure = report_failure(f"a step failed with requests {', '.join(names[:_MAX_NAMED])}{rest}", error)
        events = self._scheduler.fail_running(failure.error_id, self._clock())
        return StepOutput(events, self._stats(ScheduledBatch(), started, 0.0, None), failure.error_id)

    def _take_preemptions(self) -> int:
        total, before = self._scheduler.num_preemptions, self._num_preemptions
        self._num_preemptions = total
        return total - before

    def _take_accepted_drafts(self) -> int:
        total, before = self._scheduler.num_accepted_drafts, self._num_accepted_drafts
        self._num_accepted_drafts = total
        return total - before

    def _stats(
        self, batch: ScheduledBatch, started: float, run_seconds: float, host_seconds: float | None
    ) -> StepStats:
        num_accepted, drafted = self._take_accepted_drafts(), batch.drafted
        accepted_pairs = 0 if drafted is None else causal_pairs(num_accepted, drafted.start + 1)
        return StepStats(
            start_time=started,
            num_rows=batch.num_rows,
            num_tokens=batch.num_tokens + num_accepted,
            num_padding_tokens=batch.num_padding_tokens,
            run_seconds=run_seconds,
            host_seconds=host_seconds,
            num_preemptions=self._take_preemptions(),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            kv_usage_ratio=self._scheduler.kv_usage_ratio,
            num_prefill_runs=batch.num_prefill_runs,
            num_prefill_tokens=batch.num_prefill_tokens,
            num_prefill_pairs=batch.num_prefill_pairs,
            num_decode_rows=batch.num_decode_rows,
            num_decode_pairs=batch.num_decode_pairs + accepted_pairs,
            num_encoder_runs=batch.num_encoder_runs,
            num_encoder_tokens=batch.num_encoder_tokens,
            num_encoder_pairs=batch.num_encoder_pairs,
            num_draft_tokens=batch.num_draft_tokens,
            num_accepted_tokens=num_accepted,
        )
