"""The contract's answers as Python has them: whole generations, and what streams are made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from onward.errors import IncompleteStream
from onward.v1 import generation_pb2 as pb

_PREFIX = "FINISH_REASON_"


class FinishReason(StrEnum):
    """Why an output ended."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP = "stop"
    LENGTH = "length"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """One that a newer server knows and this client does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One generated text.

    Attributes:
        index: position among the request's outputs, from 0.
        text: the text, without special tokens.
        token_ids: the tokens, the one that ended the output included.
        logprobs: one entry for each token, if asked for.
        finish_reason: why it ended.
        matched_stop: the stop text, or the stop token's id, if that is why.
        score: length-normalised log-probability of a hypothesis; None without beam search.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[pb.TokenLogprobs, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    score: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A whole answer.

    Attributes:
        request_id: given, or drawn by the server.
        model: the model that answered.
        outputs: by index; at least one.
        usage: tokens used.
        timings: where the time went.
        cost: what it cost, if asked for.
        prompt_logprobs: one entry for each token that was asked about.
    """

    request_id: str
    model: str
    outputs: tuple[Output, ...]
    usage: pb.Usage
    timings: pb.Timings
    cost: pb.Cost | None
    prompt_logprobs: tuple[pb.TokenLogprobs, ...]

    @property
    def text(self) -> str:
        """The first output's text."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first output ended."""
        return self.outputs[0].finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """More of one output.

    Attributes:
        output_index: which output.
        text: to append; may be empty while a character or a possible stop is incomplete.
        token_ids: to append.
        logprobs: one entry for each token, if asked for.
        finish_reason: why the output ended, in its last chunk; None in all before.
        matched_stop: the stop text, or the stop token's id, if that is why.
        score: length-normalised log-probability of a hypothesis, in its last chunk.
    """

    output_index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[pb.TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    score: float | None = None


class StreamFacts:
    """What a stream tells beside its chunks, and where it stands.

    Attributes:
        request_id: given, or drawn by the server and told with its first event.
        model: the model that answers; None until the first event.
        prompt_logprobs: those that came until now, if asked for; all of them with the first chunk.
        usage: tokens used; None until the end, as `timings` and `cost`.
        timings: where the time went.
        cost: what it cost, if asked for.
    """

    def __init__(self, request_id: str | None) -> None:
        self.request_id = request_id
        self.model: str | None = None
        self.prompt_logprobs: tuple[pb.TokenLogprobs, ...] = ()
        self.usage: pb.Usage | None = None
        self.timings: pb.Timings | None = None
        self.cost: pb.Cost | None = None
        self._has_begun = False
        self._is_over = False

    @property
    def is_complete(self) -> bool:
        """Whether the stream has come to its summary: all of the answer is there."""
        return self.usage is not None

    def _take(self, event: pb.GenerateStreamResponse) -> Chunk | None:
        """Keeps what an event tells of the whole, hands on what it tells of an output."""
        self._has_begun = True
        match event.WhichOneof("event"):
            case "accepted":
                self.request_id, self.model = event.accepted.request_id, event.accepted.model
            case "prompt":
                self.prompt_logprobs += tuple(event.prompt.logprobs)
            case "delta":
                delta = event.delta
                return Chunk(
                    output_index=delta.output_index,
                    text=delta.text,
                    token_ids=tuple(delta.token_ids),
                    logprobs=tuple(delta.logprobs),
                )
            case "finished":
                end = event.finished
                return Chunk(
                    output_index=end.output_index,
                    finish_reason=_finish_reason(end.finish_reason),
                    matched_stop=_matched_stop(end),
                    score=end.score if end.HasField("score") else None,
                )
            case "summary":
                summary = event.summary
                self.usage, self.timings = summary.usage, summary.timings
                self.cost = summary.cost if summary.HasField("cost") else None
        return None

    def _end(self) -> None:
        """There is no next event.

        Raises:
            IncompleteStream: when there should have been one, and nobody has closed the stream.
        """
        was_closed, self._is_over = self._is_over, True
        if not was_closed and not self.is_complete:
            raise IncompleteStream(self.request_id)


def generation(answer: pb.GenerateResponse) -> Generation:
    """The whole answer."""
    return Generation(
        request_id=answer.request_id,
        model=answer.model,
        outputs=tuple(_output(each) for each in answer.outputs),
        usage=answer.usage,
        timings=answer.timings,
        cost=answer.cost if answer.HasField("cost") else None,
        prompt_logprobs=tuple(answer.prompt_logprobs),
    )


def _output(message: pb.GenerationOutput) -> Output:
    return Output(
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(message.logprobs),
        finish_reason=_finish_reason(message.finish_reason),
        matched_stop=_matched_stop(message),
        score=message.score if message.HasField("score") else None,
    )


def _finish_reason(value: pb.FinishReason.ValueType) -> FinishReason:
    try:
        return FinishReason(pb.FinishReason.Name(value).removeprefix(_PREFIX).lower())
    except ValueError:
        return FinishReason.UNKNOWN


def _matched_stop(message: pb.GenerationOutput | pb.GenerateStreamResponse.Finished) -> str | int | None:
    match message.matched_stop.WhichOneof("match"):
        case "text":
            return message.matched_stop.text
        case "token_id":
            return message.matched_stop.token_id
        case _:
            return None
