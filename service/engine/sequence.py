"""A live request in the engine: its outputs, their tokens and text, and how far they are computed.

Mutable; the scheduler is the only mutator. For both model families a sequence is the *decoder's* tokens: they begin
with a decoder-only model's prompt, or with an encoder-decoder's start token and target prefix, whose prompt is the
source that is encoded once. `num_computed_tokens` catches up with `num_tokens`; there is no prefill phase and no decode
phase (as in vLLM's v1 scheduler).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from service.engine.chunks import CachedChunk
from service.engine.logits import LogitsRules
from service.engine.sampling.beam import BeamSearch
from service.engine.sampling.text import TextStream
from service.engine.types import (
    FinishReason,
    GenerationRequest,
    PromptScoring,
    RequestTimings,
    TokenEvent,
    TokenLogprobs,
)


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceGroup:
    """One request in the engine.

    `sequences` are its unfinished outputs: those of `sampling.n`, or the beams of `beams`, best first. Until the first
    token is chosen they share one K/V row, the first one's; `is_forked` says that each has its own.

    `order` numbers arrivals, `due` is explained in `service.engine.queueing.waiting`. An output ends at
    `max_num_tokens` at the latest. `source_token_ids` are an encoder-decoder's prompt; `has_source`: their K/V are in
    the rows. `prompt_token_ids` are the decoder's; where nothing is generated, the last is scored but never fed, so the
    sequence ends before it. `handles` are a preempted request's saved rows, by sequence; `kept` is the last cached
    chunk of its prompt. Until step `spared_until` no equal of another tenant preempts it
    (`service.engine.queueing.tenants`).
    """

    request: GenerationRequest
    order: int
    due: float
    source_token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    max_num_tokens: int
    eos_ids: frozenset[int]
    beams: BeamSearch | None
    sequences: list[Sequence] = field(default_factory=list)
    is_forked: bool = False
    has_source: bool = False
    handles: tuple[int, ...] = ()
    kept: CachedChunk | None = None
    num_cached_tokens: int = 0
    spared_until: int = 0
    scheduled_time: float | None = None
    first_token_time: float | None = None

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def rank(self) -> tuple[int, float, int]:
        """Place in a queue, smaller first: higher priority, then earlier due, then earlier arrival."""
        return -self.request.priority, self.due, self.order

    @property
    def rows(self) -> list[Sequence]:
        """The sequences that have K/V rows of their own when the request runs."""
        return self.sequences if self.is_forked else self.sequences[:1]

    @property
    def num_computed_tokens(self) -> int:
        """Decoder tokens computed in each row."""
        return self.sequences[0].num_computed_tokens if self.sequences else 0

    @property
    def generates(self) -> bool:
        """Whether anything is generated; otherwise the request ends when its prompt is computed."""
        return self.request.stopping.max_tokens > 0

    @property
    def is_in_prompt(self) -> bool:
        """Whether more than one token is still to be computed."""
        return self.sequences[0].num_tokens - self.num_computed_tokens > 1

    def scored_by(self, scoring: PromptScoring, start: int, count: int) -> tuple[int, tuple[int, ...]]:
        """Prompt tokens scored by feeding `count` tokens from `start` on, after the position of the first's logits.

        Logits at a position score the token that follows it.
        """
        first = max(start, scoring.start - 1)
        return first, self.prompt_token_ids[first + 1 : start + count + 1]

    def is_mute(self, reason: FinishReason) -> bool:
        """Whether the token that ends an output for this reason has no text."""
        is_stop = reason is FinishReason.STOP and not self.request.stopping.include_stop_in_output
        return is_stop or reason is FinishReason.END_OF_SEQUENCE

    def timings(self, now: float) -> RequestTimings:
        """Times of a request that ends at `now`."""
        return RequestTimings(
            arrival_time=self.request.arrival_time,
            scheduled_time=self.scheduled_time,
            first_token_time=self.first_token_time,
            finished_time=now,
        )


@dataclass(slots=True, eq=False, kw_only=True, weakref_slot=True)
class Sequence:
    """One output, or one beam, of a request.

    `token_ids` are the decoder's, of which the first `num_computed_tokens` are in the KV cache; the output follows the
    prompt. `text` is there only for requests with stop strings, `rules` only for requests that have any.
    """

    group: SequenceGroup
    index: int
    token_ids: list[int]
    seed: int
    text: TextStream | None
    rules: LogitsRules | None
    num_computed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Decoder tokens, prompt and output."""
        return len(self.token_ids)

    def fork(self) -> Sequence:
        """Another beam with the same past."""
        rules = None if self.rules is None else self.rules.fork()
        return dataclasses.replace(self, token_ids=self.token_ids.copy(), rules=rules)

    def extend(self, token_id: int) -> None:
        """Appends a token without deciding whether the output ends: a beam's."""
        self.token_ids.append(token_id)
        if self.rules is not None:
            self.rules.add(token_id)

    def append(self, token_id: int, logprobs: TokenLogprobs | None, now: float) -> TokenEvent:
        """Appends a generated token, and decides whether the output ends with it; returns the event of both."""
        self.extend(token_id)
        group = self.group
        if group.first_token_time is None:
            group.first_token_time = now
        text, reason, matched = self._settle(token_id)
        # A token that completes a stop string is not mute: some of its text may come before the string. Nor is one that
        # completes a grammar, where nothing matched.
        is_text_only = reason is FinishReason.STOP and not isinstance(matched, int)
        is_mute = reason is not None and not is_text_only and group.is_mute(reason)
        return TokenEvent(
            request_id=group.request_id,
            output_index=self.index,
            token_id=token_id,
            is_mute=is_mute,
            text=text,
            logprobs=logprobs,
            finish_reason=reason,
            matched_stop=matched,
            num_cached_tokens=group.num_cached_tokens,
        )

    def flush_text(self) -> str | None:
        """The text held back so far; None without a text stream."""
        return None if self.text is None else self.text.flush()

    def num_tokens_shared_with(self, other: Sequence) -> int:
        """Length of the common beginning of two beams of one request and one length."""
        start = len(self.group.prompt_token_ids)
        pairs = zip(self.token_ids[start:], other.token_ids[start:], strict=True)
        return next((at for at, (one, two) in enumerate(pairs, start) if one != two), self.num_tokens)

    def _settle(self, token_id: int) -> tuple[str | None, FinishReason | None, str | int | None]:
        """Text that the last token made certain, why the output ends with it, and the stop that matched."""
        group = self.group
        if token_id in group.eos_ids:
            return self.flush_text(), FinishReason.END_OF_SEQUENCE, None
        if token_id in group.request.stopping.stop_token_ids:
            text = None if group.is_mute(FinishReason.STOP) else self._push_text(token_id)
            return _join(text, self.flush_text()), FinishReason.STOP, token_id
        text = self._push_text(token_id)
        if self.text is not None and self.text.matched_stop is not None:
            return text, FinishReason.STOP, self.text.matched_stop
        if self.rules is not None and self.rules.is_complete:
            return _join(text, self.flush_text()), FinishReason.STOP, None
        if self.num_tokens >= group.max_num_tokens:
            return _join(text, self.flush_text()), FinishReason.LENGTH, None
        return text, None, None

    def _push_text(self, token_id: int) -> str | None:
        if self.text is None:
            return None
        num_generated = self.num_tokens - len(self.group.prompt_token_ids)
        return self.text.push(token_id, may_stop=num_generated > self.group.request.stopping.min_tokens)


def _join(first: str | None, second: str | None) -> str | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
