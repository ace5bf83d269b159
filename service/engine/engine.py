"""One model's engine: requests in, one step at a time, events out.

A step: schedule, run, sample (and score, and expand beams), commit. Synchronous and single-threaded: one thread calls
`add_request`, `abort` and `step`. Knows no transport, no queues between threads and no files.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

from model.spec.golden import CaseResult, GoldenCase, Tolerance, compare
from service.engine.batch import KVFree, KVRetain, ScheduledBatch
from service.engine.chunks import ChunkRules
from service.engine.interfaces import Runner
from service.engine.proof.batch_proof import MIN_CONTEXT, find_dependence, row_tokens
from service.engine.proof.calibration import calibrate, rounds
from service.engine.proof.chunk_proof import find_difference, find_merged_difference
from service.engine.proof.replay import replay_all
from service.engine.sampling.sampler import Sampler
from service.engine.scheduler import Scheduler
from service.engine.types import GenerationRequest, StepOutput, StepStats
from service.errors import report_failure

_LOGGER = logging.getLogger(__name__)

# Requests that a log entry names.
_MAX_NAMED = 32


@dataclass(slots=True)
class LastRun:
    """When a graph last finished on a thread, in the clock's seconds; None when there has been no work since.

    The engines of one thread share it: while another model's graph runs, the thread is not idle. `busy` are those that
    have work.
    """

    ended: float | None = None
    busy: WeakSet[Engine] = field(default_factory=WeakSet)


class Engine:
    """Generates for many requests at once.

    `last_run` is shared by the engines of one thread; deadlines are compared with `clock`. `warm_up` is called once on
    the stepping thread, before golden cases are replayed or steps are timed. `prepare` is `Engine.prepare`'s work.
    `name` identifies the engine in the log.

    Attributes:
        arithmetic: what decides the bits of its graphs (`model.kernels.arithmetic`), if golden cases say that they are
            reproducible.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        last_run: LastRun,
        clock: Callable[[], float] = time.monotonic,
        warm_up: Callable[[], None] | None = None,
        prepare: Callable[[], bool] | None = None,
        name: str = "engine",
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._last_run = last_run
        self._clock = clock
        self._warm_up = warm_up
        self._prepare = prepare
        self._name = name
        self.arithmetic = ""

    @property
    def has_work(self) -> bool:
        """Whether any request lives here."""
        return self._scheduler.has_work

    @property
    def num_running(self) -> int:
        """Requests that hold slots."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for slots."""
        return self._scheduler.num_waiting

    @property
    def chunk_rules(self) -> ChunkRules:
        """Chunking and padding rules. Constant once the proofs have run."""
        return self._scheduler.chunk_rules

    @property
    def max_draft_tokens(self) -> int:
        """Draft tokens of one step, at most; 0 without speculation."""
        return self._scheduler.drafter.max_tokens

    @property
    def kv_memory_bytes(self) -> int:
        """K/V memory. Constant."""
        return self._scheduler.kv_memory_bytes

    @property
    def kv_needed_bytes(self) -> int:
        """K/V memory in which all live requests can finish, if no more come."""
        return self._scheduler.kv_needed_bytes

    def limit_kv(self, num_bytes: int) -> None:
        """Limits K/V to `num_bytes` of `kv_memory_bytes`; requests that do not fit wait.

        Unused memory above the limit is freed with the next step.

        Raises:
            ValueError: when running and preempted requests hold more.
        """
        self._scheduler.limit_kv(num_bytes)

    def num_cached_tokens(self, request: GenerationRequest) -> int:
        """Tokens of a request's prompt, or source, that the prefix cache would provide if it were admitted now.

        Raises:
            InvalidRequest: when `add_request` would refuse it.
        """
        return self._scheduler.num_cached_tokens(request)

    def add_request(self, request: GenerationRequest) -> None:
        """Queues a request; it starts with the next step that has room, and ends with exactly one terminal event.

        Token ids must lie inside the vocabulary: they go to the graph as they are.

        Raises:
            InvalidRequest: when the id is in use or a length is out of range; there will be no event then.
        """
        self._scheduler.add(request)
        self._last_run.busy.add(self)

    def abort(self, request_id: str) -> None:
        """Ends a request with the next step, which reports it cancelled; unknown and finished ones are ignored."""
        self._scheduler.abort(request_id)

    def prepare(self) -> bool:
        """Does some ten milliseconds of background work while no request waits; returns whether more is left.

        Makes copies to the prefix cache that have waited, one a call, then calls `prepare` of the constructor, which is
        not called again after a failure: steps work without.

        Raises:
            RuntimeError: when requests live here.
        """
        if self.has_work:
            raise RuntimeError("the engine is not idle: requests live here")
        batch = self._scheduler.schedule_idle()
        try:
            if batch.kv_operations:
                self._runner.run(batch)
                return True
            return self._prepare is not None and self._prepare()
        except Exception as error:
            report_failure(f"{self._name}: background preparation failed", error)
            if batch.kv_operations:
                self._scheduler.forget_kv()
            else:
                self._prepare = None
            return False

    def step(self) -> StepOutput:
        """Moves every running request forward.

        A failure while computing ends the requests that hold slots, or lost them in this very step, each with an
        `EngineFailed` that shares an id with one log entry. Waiting requests are untouched, and start on empty slots.
        """
        drafter = self._scheduler.drafter
        before = self._scheduler.num_preemptions, drafter.num_accepted, drafter.num_accepted_pairs
        batch = self._scheduler.schedule(self._clock(), is_alone=len(self._last_run.busy) <= 1)
        last_ended, started = self._last_run.ended, self._clock()
        error_id = None
        try:
            logits = self._runner.run(batch)
            ended = self._last_run.ended = self._clock()
            sampled = self._sampler.sample(logits, batch.samples)
            scored = self._sampler.score(logits, batch.scores)
            expanded = self._sampler.expand(logits, batch.beams)
            events = self._scheduler.commit(batch, sampled, self._clock(), scored, expanded)
        except Exception as error:
            error_id = self._report_step(error)
            events = self._scheduler.fail_running(error_id, self._clock())
            # What was computed is lost: the step counts as one without work.
            batch, ended, last_ended = ScheduledBatch(), started, None
        if error_id is not None or not self.has_work:
            self._last_run.ended = None
        if not self.has_work:
            self._last_run.busy.discard(self)
        host_seconds = None if last_ended is None else started - last_ended
        return StepOutput(events, self._stats(batch, started, ended - started, host_seconds, before), error_id)

    def verify_golden(self, cases: Sequence[GoldenCase], tolerance: Tolerance) -> tuple[CaseResult, ...]:
        """Replays golden cases on the runner that serves, before it takes requests; empties the prefix cache.

        Raises:
            RuntimeError: when requests live here: the replay would overwrite their K/V.
        """
        with self._idle():
            self._last_run.ended = None
            self._warm_up_once()
            # Admission is bypassed: no more rows at once than fit into memory, whatever their lengths.
            num_slots = min(self._scheduler.limits.max_batch_size, self._scheduler.num_whole_rows)
            self._empty_rows()
            answers = replay_all(self._runner, cases, self.chunk_rules, num_slots)
            self._runner.own_weights()
            return tuple(
                compare(case, logits, tolerance, self.arithmetic) for case, logits in zip(cases, answers, strict=True)
            )

    def check_batch_invariance(self, cases: Sequence[GoldenCase]) -> bool | None:
        """Whether a golden case has the same bits alone and in a batch (`service.engine.proof.batch_proof`).

        If not, or if the check itself fails, disables speculation and merged chunks for the engine's life and logs why.
        Empties the prefix cache. Call it after `verify_golden`, where the device promises batch invariance.

        Returns:
            None if not checked: without cases, with one row, or in a short context.

        Raises:
            RuntimeError: when requests live here: the check would overwrite their K/V.
        """
        rules, limits = self.chunk_rules, self._scheduler.limits
        with self._idle():
            num_slots = min(limits.max_batch_size, self._scheduler.num_rows_of(*row_tokens(rules)))
            if not cases or num_slots < 2 or rules.context < MIN_CONTEXT:
                return None
            try:
                self._empty_rows()
                problem = find_dependence(
                    self._runner, cases, rules, num_slots=num_slots, max_prefill_tokens=limits.max_prefill_tokens
                )
            except Exception as error:  # as in `prove_speculation`
                failure = report_failure(f"{self._name}: the check of batch invariance failed", error)
                problem = f"the check failed, {failure.error_id}"
        if problem is not None:
            self._scheduler.drafter.enable(is_proven=False)
            self._scheduler.merge_chunks(is_proven=False)
            _LOGGER.warning("%s: not batch-invariant, no prompt-lookup speculation: %s", self._name, problem)
        return problem is None

    def prove_speculation(self, cases: Sequence[GoldenCase]) -> None:
        """Tests whether draft tokens would change a bit; enables speculation if not, and logs which.

        The result (`service.engine.proof.chunk_proof`) holds for the engine's life, as its graph, weights and machine
        do. Empties the prefix cache.

        Raises:
            RuntimeError: when requests live here: the test would overwrite their K/V.
        """
        with self._idle():
            if not (most := self._scheduler.drafter.max_provable_tokens):
                return
            limits = self._scheduler.limits
            try:
                problem = find_difference(
                    self._runner,
                    cases,
                    num_slots=limits.max_batch_size,
                    longest_chunk=most + 1,
                    max_tokens=limits.max_prefill_tokens,
                    context=self.chunk_rules.context,
                )
            except Exception as error:  # a runner that fails here fails golden cases too, which decide on serving
                failure = report_failure(f"{self._name}: the proof of speculation failed", error)
                problem = f"the proof failed, {failure.error_id}"
        self._scheduler.drafter.enable(is_proven=problem is None)
        if problem is None:
            _LOGGER.info("%s: prompt-lookup speculation with up to %d draft tokens changes no bit", self._name, most)
        else:
            _LOGGER.warning("%s: no prompt-lookup speculation: %s", self._name, problem)

    def prove_merged_chunks(self, cases: Sequence[GoldenCase]) -> None:
        """Tests whether several chunks in one run change a bit; allows such runs if not, and logs why if so.

        Holds for the engine's life, as `prove_speculation`. Empties the prefix cache. Nothing is tested where a run is
        one chunk: by `EngineLimits.merged_chunks`, for an encoder-decoder, or in a context without room for two.

        Raises:
            RuntimeError: when requests live here: the test would overwrite their K/V.
        """
        rules, most = self.chunk_rules, self._scheduler.limits.merged_chunks
        with self._idle():
            if most == 1 or rules.source_context or rules.context <= 2 * rules.chunk or not cases:
                return
            try:
                problem = find_merged_difference(
                    self._runner, cases, chunk=rules.chunk, num_chunks=most, context=rules.context
                )
            except Exception as error:  # as in `prove_speculation`
                failure = report_failure(f"{self._name}: the proof of merged chunks failed", error)
                problem = f"the proof failed, {failure.error_id}"
        self._scheduler.merge_chunks(is_proven=problem is None)
        if problem is not None:
            _LOGGER.warning("%s: no merged chunks: %s", self._name, problem)

    def calibrate(self, max_seconds: float, goes_on: Callable[[], bool] = lambda: True) -> tuple[StepStats, ...]:
        """Times steps of a few sizes (`service.engine.proof.calibration`), without speculation.

        Ends after `max_seconds`, or when `goes_on` returns False. Empties the prefix cache. Other engines of the thread
        do not count these runs in their host seconds.

        Raises:
            RuntimeError: when requests live here.
        """
        limits, drafter, shared = self._scheduler.limits, self._scheduler.drafter, self._last_run
        was_enabled = drafter.max_tokens > 0
        with self._idle():
            self._warm_up_once()
            shared.ended, self._last_run = None, LastRun()
            drafter.enable(is_proven=False)
            plan = tuple(rounds(self.chunk_rules, limits.max_batch_size, limits.max_prefill_tokens))
            try:
                return calibrate(self, plan, max_seconds, goes_on, self._clock)
            finally:
                self._last_run = shared
                drafter.enable(is_proven=was_enabled)

    @contextlib.contextmanager
    def _idle(self) -> Iterator[None]:
        """Allows runs outside the schedule while the engine is idle; empties rows and prefix cache afterwards."""
        if self.has_work:
            raise RuntimeError("the engine is not idle: requests live here")
        try:
            yield
        finally:
            self._scheduler.forget_kv()

    def _empty_rows(self) -> None:
        """Frees the K/V of all rows and of the prefix cache in the runner."""
        rows = range(self._scheduler.limits.max_batch_size)
        self._runner.run(ScheduledBatch(kv_operations=(KVRetain(frozenset()), *map(KVFree, rows))))

    def _warm_up_once(self) -> None:
        if self._warm_up is not None:
            self._warm_up()
            self._warm_up = None

    def _report_step(self, error: Exception) -> str:
        """Logs a failed step; returns the log entry's id."""
        ids = self._scheduler.running_ids
        rest = f" and {len(ids) - _MAX_NAMED} more" if len(ids) > _MAX_NAMED else ""
        named = ", ".join(ids[:_MAX_NAMED])
        return report_failure(f"{self._name}: a step failed with requests {named}{rest}", error).error_id

    def _stats(
        self,
        batch: ScheduledBatch,
        started: float,
        run_seconds: float,
        host_seconds: float | None,
        before: tuple[int, int, int],
    ) -> StepStats:
        """A step's numbers; `before` are the preemptions, accepted draft tokens and their pairs before it."""
        num_preempted, num_accepted, accepted_pairs = before
        num_accepted = self._scheduler.drafter.num_accepted - num_accepted
        accepted_pairs = self._scheduler.drafter.num_accepted_pairs - accepted_pairs
        return StepStats(
            start_time=started,
            num_rows=batch.num_rows,
            num_tokens=batch.num_tokens + num_accepted,
            num_padding_tokens=batch.num_padding_tokens,
            run_seconds=run_seconds,
            host_seconds=host_seconds,
            num_preemptions=self._scheduler.num_preemptions - num_preempted,
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
