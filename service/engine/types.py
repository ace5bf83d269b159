"""Requests, events and step statistics of the engine. All immutable.

Knows no protobuf, asyncio or ONNX Runtime. Times are `time.monotonic()` seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from service.engine.sampling.grammar import Grammar


class FinishReason(StrEnum):
    """Why an output ended; the wire's names and the metric label derive from it."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP = "stop"
    LENGTH = "length"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


class Device(StrEnum):
    """Where the engine runs: CPU, first CUDA device, or the artifact's own device."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class PrefillProvider(StrEnum):
    """What computes prompts: ONNX Runtime's CPU provider, or the fastest supported one (the same today)."""

    AUTO = "auto"
    CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled; names and defaults are vLLM's. `temperature` 0 is greedy, `top_k` 0 is off.

    `seed` None draws a fresh one; the same seed gives the same tokens in any batch, and output i of `n` is the same
    for every n. `logit_bias` pairs token ids with biases, each id once; empty `allowed_token_ids` allow all tokens.
    What each rule does: `service.engine.logits`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingArrays:
    """The tokens of `SamplingParams` as arrays, made by `make_sampling_arrays`: `[B]` biased, `[B]` biases, `[A]`."""

    biased_token_ids: npt.NDArray[np.int64]
    biases: npt.NDArray[np.float32]
    allowed_token_ids: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingParams:
    """When an output ends, besides at the context's end.

    Stop strings are cut from the text unless included. Before `min_tokens`, tokens that end an output are masked, and
    stop strings are ignored.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_in_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Beam search instead of sampling (`service.engine.sampling.beam`). A `patience` of None is the model's own."""

    beam_size: int
    num_hypotheses: int = 1
    length_penalty: float = 1.0
    patience: float | None = 1.0
    no_repeat_ngram_size: int = 0


class StructureKind(StrEnum):
    """What describes a structured output; the wire's names of its fields."""

    JSON_SCHEMA = "json_schema"
    JSON = "json"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What outputs must be, or a beginning of it where `max_tokens` cuts them.

    `value` is a schema's text, nothing for any JSON, a regular expression, a grammar in Lark's notation, or texts to
    choose from.
    """

    kind: StructureKind
    value: str | tuple[str, ...] = ""

    @property
    def field(self) -> str:
        """The path of its field in the request."""
        return f"structured_output.{self.kind}"

    @property
    def num_bytes(self) -> int:
        """The size of its texts."""
        texts = (self.value,) if isinstance(self.value, str) else self.value
        return sum(len(text.encode()) for text in texts)


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Asks for log-probabilities of the decoder's prompt from position `start` on, with `num_top` alternatives each.

    The prompt is that of a decoder-only model, or the start token and target prefix of an encoder-decoder. Nothing
    precedes its first token, so `start` is at least 1.
    """

    num_top: int = 0
    start: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One validated request.

    `prompt_token_ids` is a decoder-only model's prompt, or an encoder-decoder's source; the latter's output continues
    `target_prefix_token_ids`. `logprobs` is the number of alternatives per generated token, None for no logprobs. With
    `scoring`, `max_tokens` may be 0: nothing is generated. With `beam_search`, `sampling` is ignored. A request of
    higher `priority` goes first, and may preempt.

    At its `deadline` a request ends wherever it is; with `partial_on_deadline` what it has by then is the answer. With
    `end_by` it ends rather than take part in a step that may end later; with `start_by` it ends if it still waits for
    its first step by then. Moments are `time.monotonic()` seconds, as is `arrival_time`.

    Tenants share the engine by `weight`, above 0 (`service.engine.queueing.tenants`). Ids are unique among all tenants.
    `sampling_arrays` are those of `sampling`, if they were made off the engine thread. `grammar` is `structured_output`
    compiled for the model: both are set, or neither.
    """

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stopping: StoppingParams = field(default_factory=StoppingParams)
    beam_search: BeamSearchParams | None = None
    target_prefix_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    scoring: PromptScoring | None = None
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    deadline: float | None = None
    partial_on_deadline: bool = False
    end_by: float | None = None
    start_by: float | None = None
    arrival_time: float = 0.0
    sampling_arrays: SamplingArrays | None = field(default=None, compare=False, repr=False)
    structured_output: StructuredOutput | None = None
    grammar: Grammar | None = field(default=None, compare=False, repr=False)

    @property
    def num_outputs(self) -> int:
        """Outputs to be returned."""
        return self.sampling.n if self.beam_search is None else self.beam_search.num_hypotheses

    @property
    def num_rows(self) -> int:
        """Sequences with K/V rows of their own."""
        return self.sampling.n if self.beam_search is None else self.beam_search.beam_size

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt or source, and target prefix."""
        return len(self.prompt_token_ids) + len(self.target_prefix_token_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities before temperature and truncation: the chosen token's, then the top k."""

    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """Times of one request; None where it never happened, as for a request cancelled in the queue."""

    arrival_time: float
    scheduled_time: float | None
    first_token_time: float | None
    finished_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """What one step did for one output: at most one new token, and with the last event its finish reason.

    `prompt_logprobs` are of the next tokens of a scored prompt, in order; all come before the first token, or with the
    terminal event where nothing is generated. `text` is set only where the engine detokenizes (requests with stop
    strings). `is_mute`: the token has no text, as it is an end of sequence or an excluded stop token.

    Each output of a request that does not fail has exactly one event with a `finish_reason`, its last; of a beam
    search it has the hypothesis's `score`, and a search may find fewer outputs than were asked for. Exactly one event
    of a request is terminal, its last: it has `timings`, `num_search_steps`, and the `error` of a failed request, which
    ends all its outputs. `num_cached_tokens`, on it and on every token, counts given tokens that were cache hits.
    """

    request_id: str
    output_index: int = 0
    token_id: int | None = None
    is_mute: bool = False
    text: str | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    score: float | None = None
    error: Exception | None = None
    timings: RequestTimings | None = None
    num_cached_tokens: int = 0
    num_search_steps: int = 0

    @property
    def is_terminal(self) -> bool:
        """Whether the request is over, with all its outputs."""
        return self.timings is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One step in numbers, for metrics and predictions. A failed step counts as no work.

    `start_time` is when its graphs began to run. `host_seconds` is how long no graph ran before that although there was
    work (sampling, events, new requests, waiting for the interpreter's lock); None for the first step after a pause.
    `num_preemptions` counts requests preempted before the step. `num_running`, `num_waiting` (requests) and
    `kv_usage_ratio` describe the moment after it.

    Work, padding aside: `num_prefill_tokens` of prompts in `num_prefill_runs` graph runs, `num_encoder_tokens` of
    sources in `num_encoder_runs`, one token for each of `num_decode_rows` in one run. Pairs are of a query and a key
    that the masks let meet, per layer and head; a decoding row's are its tokens, with the one that is fed, and its
    source's. Window attention is not discounted: the operators compute what lies before a window, too.

    Rows that decode may be fed `num_draft_tokens` besides, of which `num_accepted_tokens` were accepted: these
    count in `num_tokens` and in the pairs. Rejected ones were computed in vain, as padding is.
    """

    start_time: float = 0.0
    num_rows: int
    num_tokens: int
    num_padding_tokens: int
    run_seconds: float
    host_seconds: float | None
    num_preemptions: int
    num_running: int
    num_waiting: int
    kv_usage_ratio: float
    num_prefill_runs: int = 0
    num_prefill_tokens: int = 0
    num_prefill_pairs: int = 0
    num_decode_rows: int = 0
    num_decode_pairs: int = 0
    num_encoder_runs: int = 0
    num_encoder_tokens: int = 0
    num_encoder_pairs: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Events in schedule order, and the step's numbers; `error_id` is the log entry of a failed step."""

    events: tuple[TokenEvent, ...]
    stats: StepStats
    error_id: str | None = None

    @property
    def is_failed(self) -> bool:
        """Whether computing raised."""
        return self.error_id is not None
