"""Outputs of all live requests: sampled tokens, scores and beams appended, events reported, ended requests released.

Part of the scheduler, which decides what is computed; this decides what the results mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import TypeVar

from service.engine.batch import SampleRow
from service.engine.kv.ledger import KVLedger
from service.engine.outputs.beams import extend_beams, hypothesis_events
from service.engine.queueing.deadlines import Deadlines
from service.engine.queueing.tenants import Tenants
from service.engine.sampling.beam import Hypothesis
from service.engine.sampling.sampler import Expansion, SampledToken
from service.engine.sequence import Sequence, SequenceGroup
from service.engine.types import FinishReason, TokenEvent, TokenLogprobs
from service.errors import InvalidRequest, RequestError, report_failure

Result = TypeVar("Result")


class Outputs:
    """Live requests by id, and their events. Ended requests leave the ledger, their tenants and the deadlines."""

    def __init__(self, ledger: KVLedger, tenants: Tenants, deadlines: Deadlines) -> None:
        self.live: dict[str, SequenceGroup] = {}
        self._ledger = ledger
        self._tenants = tenants
        self._deadlines = deadlines
        self._events: list[TokenEvent] = []
        # Requests that lost outputs: their rows are to be released. Ordered, as the order decides which rows move.
        self._changed: dict[SequenceGroup, None] = {}

    def append_all(self, sequences: Iterable[Sequence], sampled: Collection[SampledToken | None], now: float) -> None:
        """Appends every sampled token; outputs that shared their prompt's row get rows of their own."""
        leaders: dict[SequenceGroup, Sequence] = {}
        for sequence, result in zip(sequences, sampled, strict=True):
            if not sequence.group.is_forked:
                leaders.setdefault(sequence.group, sequence)
            self._append(sequence, result, now)
        for group, leader in leaders.items():
            group.is_forked = True
            if group.sequences:
                self._ledger.fork(leader, group.sequences)

    def append_drafts(
        self, sequence: Sequence, results: Iterable[tuple[SampleRow, SampledToken | None]], now: float
    ) -> int:
        """Appends accepted draft tokens and the token sampled behind them; returns how many were accepted."""
        num_accepted = 0
        for sample, result in results:
            self._append(sequence, result, now)
            if result is None or result.token_id != sample.draft:
                break
            num_accepted += 1
            if sequence not in sequence.group.sequences:
                break
            sequence.num_computed_tokens += 1
        return num_accepted

    def extend_beams(self, group: SequenceGroup, expansions: tuple[Expansion, ...] | None, now: float) -> None:
        """Extends a request's beams by a step, or ends a search that is over."""
        if group.beams is None or (expansions := self._sound(group, expansions, now)) is None:
            return
        num_beams = len(group.sequences)
        extensions = group.beams.advance(expansions)
        if not extensions:
            self._report_hypotheses(group, group.beams.hypotheses(), now)
            return
        extend_beams(group, extensions, self._ledger)
        if len(group.sequences) < num_beams:
            self._changed[group] = None

    def report_scores(
        self, group: SequenceGroup, logprobs: tuple[TokenLogprobs, ...] | None, now: float, *, is_end: bool
    ) -> None:
        """Reports a prompt's scores; `is_end` ends a request that generates nothing."""
        if (logprobs := self._sound(group, logprobs, now)) is None:
            return
        reason = FinishReason.LENGTH if is_end else None
        self._events.append(TokenEvent(request_id=group.request_id, prompt_logprobs=logprobs, finish_reason=reason))
        if is_end:
            self._end(group, now)

    def finish_early(self, group: SequenceGroup, reason: FinishReason, now: float) -> None:
        """Ends a request between two steps, each output with the text that was held back.

        A beam search reports its best so far on a deadline with `partial_on_deadline`, and otherwise no tokens.
        """
        if self._tenants.discard(group):
            self._ledger.forget(group)
        if group.beams is not None and group.request.partial_on_deadline and reason is FinishReason.DEADLINE:
            self._report_hypotheses(group, group.beams.stop(reason), now)
            return
        try:
            if group.beams is None:
                ends = [(sequence.index, sequence.flush_text()) for sequence in group.sequences]
            else:
                ends = [(index, None) for index in range(group.request.num_outputs)]
        except Exception as cause:  # of the decoder: no other request is concerned
            self._fail_text(group, cause, now)
            return
        self._events += [
            TokenEvent(request_id=group.request_id, output_index=index, text=text, finish_reason=reason)
            for index, text in ends
        ]
        self._end(group, now)

    def fail(self, group: SequenceGroup, error: RequestError, now: float) -> None:
        """Ends a live request with an error; others are ignored."""
        if group.request_id in self.live:
            self._tenants.discard(group)
            self._events.append(TokenEvent(request_id=group.request_id, error=error))
            self._end(group, now)

    def release(self) -> None:
        """Frees the rows of all sequences that ended since the last call."""
        if self._changed:
            self._ledger.release(self._changed)
            self._changed = {}

    def take_events(self) -> tuple[TokenEvent, ...]:
        """All events since the last call."""
        events, self._events = tuple(self._events), []
        return events

    def _append(self, sequence: Sequence, result: SampledToken | None, now: float) -> None:
        """Appends a sampled token and reports it."""
        group = sequence.group
        if (result := self._sound(group, result, now)) is None:
            return
        try:
            event = sequence.append(result.token_id, result.logprobs, now)
        except Exception as cause:  # of the decoder: other requests' K/V and tokens are sound
            self._fail_text(group, cause, now)
            return
        self._events.append(event)
        if event.finish_reason is None:
            return
        group.sequences.remove(sequence)
        self._changed[group] = None
        if not group.sequences:
            self._end(group, now)

    def _report_hypotheses(self, group: SequenceGroup, hypotheses: Collection[Hypothesis], now: float) -> None:
        """Reports the outputs of a search that is over, and ends its request."""
        if any(hypothesis.token_ids for hypothesis in hypotheses):
            group.first_token_time = now
        self._events += hypothesis_events(group, hypotheses)
        self._end(group, now)

    def _sound(self, group: SequenceGroup, result: Result | None, now: float) -> Result | None:
        """A live request's result; fails the request where that is None (`_lack`)."""
        if group.request_id not in self.live:
            return None
        if result is None:
            self.fail(group, _lack(group), now)
        return result

    def _fail_text(self, group: SequenceGroup, cause: Exception, now: float) -> None:
        self.fail(group, report_failure(f"request {group.request_id}: its text could not be decoded", cause), now)

    def _end(self, group: SequenceGroup, now: float) -> None:
        """Makes the last event the request's terminal one; `release` frees its rows."""
        del self.live[group.request_id]
        self._tenants.end(group)
        self._deadlines.discard(group)
        self._changed[group] = None
        group.sequences = []
        self._events[-1] = dataclasses.replace(
            self._events[-1],
            timings=group.timings(now),
            num_cached_tokens=group.num_cached_tokens,
            num_search_steps=0 if group.beams is None else group.beams.num_steps,
        )


def _lack(group: SequenceGroup) -> RequestError:
    """Why a request has no next token."""
    asked = group.request.structured_output
    problems = [sequence.rules.problem for sequence in group.sequences if sequence.rules is not None]
    if asked is not None and (problem := next(filter(None, problems), None)) is not None:
        return InvalidRequest(asked.field, asked.value, problem)
    return report_failure(f"request {group.request_id}: its logits are not finite")
