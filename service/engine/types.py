"""The engine's vocabulary: requests in, events out, all immutable.

Knows nothing of protobuf, asyncio, ONNX Runtime or text encodings. Times are `time.monotonic()` seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt


class FinishReason(StrEnum):
    """Why an output ended; the wire's `FINISH_REASON_…` and the metric label are derived from these."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP = "stop"
    LENGTH = "length"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


class Device(StrEnum):
    """What computes: the processor, the first CUDA device, or whichever of them artifacts and machine allow."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class PrefillProvider(StrEnum):
    """What computes prompts: ONNX Runtime's CPU provider, or the fastest supported one (the same today)."""

    AUTO = "auto"
    CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen; names and defaults are vLLM's. `temperature` 0 is greedy, `top_k` 0 is off.

    `seed` None lets the engine draw one; the same seed gives the same tokens in any company. `n` outputs are drawn,
    each by itself: output i is the same whatever `n` is. `logit_bias` is pairs of token id and bias, each id once; no
    `allowed_token_ids` allow all. What each rule does: `service.engine.logits`.
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
    """The tokens that `SamplingParams` names, as arrays: `[B]` of `logit_bias`, with their `biases`, and `[A]` allowed.

    `service.engine.logits.make_sampling_arrays` makes them.
    """

    biased_token_ids: npt.NDArray[np.int64]
    biases: npt.NDArray[np.float32]
    allowed_token_ids: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingParams:
    """When an output ends, apart from the context's end. Stop strings are cut from the text unless included.

    Before `min_tokens` were generated nothing but the context's end stops it: tokens that would are not chosen, strings
    that would are let pass.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_in_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Beam search in place of sampling. What each value does: `service.engine.sampling.beam`.

    A `patience` of None is the model's own (`model.spec.generation`).
    """

    beam_size: int
    num_hypotheses: int = 1
    length_penalty: float = 1.0
    patience: float | None = 1.0
    no_repeat_ngram_size: int = 0


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Asks how probable the decoder's own prompt is: each of its tokens from position `start` on, given those before.

    The prompt is that of a decoder-only model, or the start token and target prefix of an encoder-decoder; its first
    token has nothing before it, so `start` is 1 at least. `num_top` is how many alternatives to report for each.
    """

    num_top: int = 0
    start: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One validated request.

    `prompt_token_ids` is the prompt of a decoder-only model, the source of an encoder-decoder, whose output is made to
    begin with `target_prefix_token_ids`, which are not generated; `logprobs` is how many alternatives to report per
    generated token, None for no logprobs. A request with `scoring` may ask for `max_tokens` 0: nothing is generated.
    With `beam_search` nothing is drawn, and `sampling` is left alone. A higher `priority` goes first, and takes the
    place of a lower one that runs.

    At its `deadline` a request ends, wherever it is; with `partial_on_deadline` what it has by then is its answer. One
    with `end_by` ends rather than take part in a step that might end later than that; one with `start_by` ends if it
    still waits for its first step by then, as it could not be over in time. Moments in `time.monotonic()` seconds, as
    is `arrival_time`.

    Of several tenants each gets a share of the engine by its `weight`, which is above 0
    (`service.engine.queueing.tenants`). An id is unique among all tenants.

    `sampling_arrays` are those of `sampling`, where they were made off the engine thread; None leaves them to that.
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

    @property
    def num_outputs(self) -> int:
        """How many outputs it asks for."""
        return self.sampling.n if self.beam_search is None else self.beam_search.num_hypotheses

    @property
    def num_rows(self) -> int:
        """How many outputs grow at once: each has K/V of its own."""
        return self.sampling.n if self.beam_search is None else self.beam_search.beam_size

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens given: prompt or source, and target prefix."""
        return len(self.prompt_token_ids) + len(self.target_prefix_token_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities before temperature and truncation: the chosen token's, then the top k."""

    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """When things happened to one request; None is "never", as for a request cancelled in the queue."""

    arrival_time: float
    scheduled_time: float | None
    first_token_time: float | None
    finished_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """What one step did for one of a request's outputs: at most one new token, and on its last event why it ended.

    `prompt_logprobs` are of the next tokens of a prompt that is scored, in order; the last come before the first token
    does, or with the terminal event where nothing is generated.

    `text` is set only where the engine detokenises (requests with stop strings); elsewhere the consumer does, and
    `is_mute` says that the token has no text: an end of sequence, or a stop token that is not to be included.
    Every output of a request that does not fail has one event with `finish_reason`, its last; with beam search that has
    the hypothesis's `score`, and where fewer hypotheses exist than were asked for, nothing is told of the others.
    Exactly one event of a request is terminal, the last one: it has `timings`, and an `error` where the request failed,
    which ends all its outputs at once. `num_cached_tokens` is told there and with every token: tokens given whose K/V
    were at hand. `num_search_steps` is told there: how often a beam search extended its beams.
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
    """One step in numbers, for metrics and forecasts: what did work, padding that did not, seconds spent.

    `start_time` is when its run began, and `host_seconds` how long the graphs had stood still by then while there was
    work for them: sampling, events, new requests, waiting for the interpreter's lock; None for the first run after a
    pause. A step that failed counts as no work. `num_preemptions` counts requests that lost their place to more urgent
    ones before the step. `num_running` and `num_waiting`, in requests, and `kv_usage_ratio` describe the moment after
    the step.

    The work, by what computes it, none of it padding: `num_prefill_tokens` of prompts in `num_prefill_runs` runs of a
    graph, `num_encoder_tokens` of sources in `num_encoder_runs`, one token for each of `num_decode_rows` in one run.
    Pairs are those of a query and a key that the masks let meet, in one layer and for each head: those of a decoding
    row are its tokens, the one that is fed included, and its source's. Windows, which some layers may have, are left
    aside: the operators compute what lies before them and throw it away.

    A row that decodes alone may be fed `num_draft_tokens` guesses besides (`service.engine.speculation.prompt_lookup`),
    of which `num_accepted_tokens` came true: as many steps were saved, and these are in `num_tokens` and have their
    pairs reported. The others were computed in vain, as padding is.
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
    """What `Engine.step` returns: events in schedule order, the step's numbers; of one that failed, the log's id."""

    events: tuple[TokenEvent, ...]
    stats: StepStats
    error_id: str | None = None

    @property
    def is_failed(self) -> bool:
        """Whether the step failed."""
        return self.error_id is not None
