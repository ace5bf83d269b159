"""What the engine knows of one request while it lives: its outputs, their tokens and text, how far they are computed.

Mutable, and touched by the engine thread alone: the scheduler is the only mutator. Both families look the same from
here: a sequence is the *decoder's* tokens, which for a decoder-only model begin with the prompt and for an
encoder-decoder with the start token and the target prefix, while its prompt is the source that is encoded once.
`num_computed_tokens` catches up with `num_tokens`; there is no prefill phase and no decode phase (as in vLLM's v1
scheduler).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from service.engine.chunks import CachedChunk
from service.engine.logits import LogitsRules
from service.engine.sampling.beam import BeamSearch
from service.engine.sampling.text import TextStream
from service.engine.types import FinishReason, GenerationRequest, PromptScoring, RequestTimings


@dataclass(frozen=True, slots=True)
class Appended:
    """What one more token meant: the text it settled (None where nobody asked), and why the output ends, if it does.

    `is_mute` says that the token itself has no text: an end of sequence, or a stop token that is not to be included.
    """

    text: str | None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    is_mute: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceGroup:
    """One request in the engine.

    `sequences` are its outputs that still grow: those of `sampling.n`, or the beams of `beams`, best first. Until the
    first token is chosen there is one K/V row for all of them, the first one's; `is_forked` says that each has its own.

    `order` is its place in the order in which requests were queued, `due` when its turn should have come: see
    `service.engine.queueing.waiting`. `max_num_tokens` is where an output must end at the latest.
    `source_token_ids` are an encoder-decoder's prompt, `has_source` says whether their K/V are in the rows.
    `prompt_token_ids` are the decoder's as they were given: where nothing is to be generated, the last of them is
    scored but never fed, so that the sequence ends before it. `handles` are where the rows of a preempted request are
    kept, by sequence; `kept` is the last of the chunks that are kept of its prompt. Until the step `spared_until` no
    other tenant's request of its priority takes its rows (`service.engine.queueing.tenants`).
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
        """The request's."""
        return self.request.request_id

    @property
    def rank(self) -> tuple[int, float, int]:
        """Who goes first: the higher priority, then who is due earlier, then who came earlier. Smaller is sooner."""
        return -self.request.priority, self.due, self.order

    @property
    def rows(self) -> list[Sequence]:
        """The sequences that have K/V rows of their own when the request runs."""
        return self.sequences if self.is_forked else self.sequences[:1]

    @property
    def num_computed_tokens(self) -> int:
        """Decoder tokens in the longest row; all have the same number."""
        return self.sequences[0].num_computed_tokens if self.sequences else 0

    @property
    def generates(self) -> bool:
        """Whether there is an output; otherwise the request is over when its prompt is computed."""
        return self.request.stopping.max_tokens > 0

    @property
    def is_in_prompt(self) -> bool:
        """Whether more than the next token is still to be computed."""
        return self.sequences[0].num_tokens - self.num_computed_tokens > 1

    def scored_by(self, scoring: PromptScoring, start: int, count: int) -> tuple[int, tuple[int, ...]]:
        """What feeding `count` tokens from position `start` on scores: the first position whose logits do, and tokens.

        Logits at a position score the token that follows it.
        """
        first = max(start, scoring.start - 1)
        return first, self.prompt_token_ids[first + 1 : start + count + 1]

    def is_mute(self, reason: FinishReason) -> bool:
        """Whether the token that ends an output for this reason has no text."""
        is_stop = reason is FinishReason.STOP and not self.request.stopping.include_stop_in_output
        return is_stop or reason is FinishReason.END_OF_SEQUENCE

    def timings(self, now: float) -> RequestTimings:
        """When things happened, for a request that ends at `now`."""
        return RequestTimings(
            arrival_time=self.request.arrival_time,
            scheduled_time=self.scheduled_time,
            first_token_time=self.first_token_time,
            finished_time=now,
        )


@dataclass(slots=True, eq=False, kw_only=True, weakref_slot=True)
class Sequence:
    """One output, or one beam, of a request.

    `token_ids` are the decoder's, of which the first `num_computed_tokens` are in the KV cache; the output begins after
    the prompt. `text` is there only for requests with stop strings; everyone else's tokens become text outside the
    engine. `rules` is None for a request that asks for none.
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
        """Decoder tokens known so far, prompt and output."""
        return len(self.token_ids)

    def fork(self) -> Sequence:
        """Another beam with the same past."""
        rules = None if self.rules is None else self.rules.fork()
        return dataclasses.replace(self, token_ids=self.token_ids.copy(), rules=rules)

    def extend(self, token_id: int) -> None:
        """Adds a token of which nothing follows: a beam's."""
        self.token_ids.append(token_id)
        if self.rules is not None:
            self.rules.add(token_id)

    def append(self, token_id: int, now: float) -> Appended:
        """Adds a generated token and decides whether the output ends with it."""
        self.extend(token_id)
        group = self.group
        if group.first_token_time is None:
            group.first_token_time = now
        stopping = group.request.stopping
        if token_id in group.eos_ids:
            return Appended(self.flush_text(), FinishReason.END_OF_SEQUENCE, is_mute=True)
        if token_id in stopping.stop_token_ids:
            is_mute = group.is_mute(FinishReason.STOP)
            text = None if is_mute else self._push_text(token_id)
            return Appended(_join(text, self.flush_text()), FinishReason.STOP, token_id, is_mute)
        text = self._push_text(token_id)
        if self.text is not None and self.text.matched_stop is not None:
            return Appended(text, FinishReason.STOP, self.text.matched_stop)
        if self.num_tokens >= group.max_num_tokens:
            return Appended(_join(text, self.flush_text()), FinishReason.LENGTH)
        return Appended(text)

    def flush_text(self) -> str | None:
        """The text held back so far; None for requests whose text is made elsewhere."""
        return None if self.text is None else self.text.flush()

    def num_tokens_shared_with(self, other: Sequence) -> int:
        """How many tokens both begin with: two beams of one request and of one length."""
        start = len(self.group.prompt_token_ids)
        pairs = zip(self.token_ids[start:], other.token_ids[start:], strict=True)
        return next((at for at, (one, two) in enumerate(pairs, start) if one != two), self.num_tokens)

    def _push_text(self, token_id: int) -> str | None:
        if self.text is None:
            return None
        num_generated = self.num_tokens - len(self.group.prompt_token_ids)
        return self.text.push(token_id, may_stop=num_generated > self.group.request.stopping.min_tokens)


def _join(first: str | None, second: str | None) -> str | None:
    """Two optional pieces of one text."""
    if first is None or second is None:
        return second if first is None else first
    return first + second
