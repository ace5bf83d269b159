"""What the engine knows of one request while it lives: its tokens, how far they are computed, its text.

Mutable, and touched by the engine thread alone: the scheduler is the only mutator. Both families look the same from
here: a sequence is the *decoder's* tokens, which for a decoder-only model begin with the prompt and for an
encoder-decoder with the start token and the target prefix, while its prompt is the source that is encoded once.
`num_computed_tokens` catches up with `num_tokens`; there is no prefill phase and no decode phase (as in vLLM's v1
scheduler).
"""

from __future__ import annotations

from dataclasses import dataclass

from service.engine.logits import LogitsRules
from service.engine.text import TextStream
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
class Sequence:
    """One request in the engine.

    `token_ids` are the decoder's, of which the first `num_computed_tokens` are in the KV cache; the output begins after
    the first `num_prompt_tokens`. `max_num_tokens` is where it must end at the latest. `text` is there only for
    requests with stop strings; everyone else's tokens become text outside the engine. `rules` is None for a request
    that asks for none. `prompt_token_ids` are the decoder's as they were given: where nothing is to be generated, the
    last of them is scored but never fed, so that `token_ids` ends before it.
    """

    request: GenerationRequest
    token_ids: list[int]
    source_token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    max_num_tokens: int
    eos_ids: frozenset[int]
    seed: int
    text: TextStream | None
    rules: LogitsRules | None
    num_computed_tokens: int = 0
    scheduled_time: float | None = None
    first_token_time: float | None = None

    @property
    def num_tokens(self) -> int:
        """Decoder tokens known so far, prompt and output."""
        return len(self.token_ids)

    @property
    def generates(self) -> bool:
        """Whether there is an output; otherwise the sequence is over when its prompt is computed."""
        return self.request.stopping.max_tokens > 0

    def scored_by(self, scoring: PromptScoring, start: int, count: int) -> tuple[int, tuple[int, ...]]:
        """What feeding `count` tokens from position `start` on scores: the first position whose logits do, and tokens.

        Logits at a position score the token that follows it.
        """
        first = max(start, scoring.start - 1)
        return first, self.prompt_token_ids[first + 1 : start + count + 1]

    def append(self, token_id: int, now: float) -> Appended:
        """Adds a generated token and decides whether the output ends with it."""
        self.token_ids.append(token_id)
        if self.rules is not None:
            self.rules.add(token_id)
        if self.first_token_time is None:
            self.first_token_time = now
        stopping = self.request.stopping
        if token_id in self.eos_ids:
            return Appended(self.flush_text(), FinishReason.END_OF_SEQUENCE, is_mute=True)
        if token_id in stopping.stop_token_ids:
            is_mute = not stopping.include_stop_in_output
            text = None if is_mute else self._push_text(token_id)
            return Appended(_join(text, self.flush_text()), FinishReason.STOP, token_id, is_mute)
        text = self._push_text(token_id)
        if self.text is not None and self.text.matched_stop is not None:
            return Appended(text, FinishReason.STOP, self.text.matched_stop)
        if self.num_tokens >= self.max_num_tokens:
            return Appended(_join(text, self.flush_text()), FinishReason.LENGTH)
        return Appended(text)

    def flush_text(self) -> str | None:
        """The text held back so far; None for requests whose text is made elsewhere."""
        return None if self.text is None else self.text.flush()

    def timings(self, now: float) -> RequestTimings:
        """When things happened, for a sequence that ends at `now`."""
        return RequestTimings(
            arrival_time=self.request.arrival_time,
            scheduled_time=self.scheduled_time,
            first_token_time=self.first_token_time,
            finished_time=now,
        )

    def _push_text(self, token_id: int) -> str | None:
        if self.text is None:
            return None
        num_generated = self.num_tokens - len(self.prompt_token_ids)
        return self.text.push(token_id, may_stop=num_generated > self.request.stopping.min_tokens)


def _join(first: str | None, second: str | None) -> str | None:
    """Two optional pieces of one text."""
    if first is None or second is None:
        return second if first is None else first
    return first + second
