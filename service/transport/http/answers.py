"""Answers of chat and of completions: whole, or as the chunks of a stream."""

from __future__ import annotations

import codecs
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf import json_format

from model.spec.tokenizer import Tokenizer
from service.engine.types import FinishReason, SamplingParams, TokenLogprobs
from service.generator import Accepted, Finished, Outcome, Part, Piece
from service.repository.models import ServedModel
from service.transport import codec
from service.transport.http.exchange import encode
from service.transport.http.requests import Asked
from service.transport.http.thoughts import FIELD, ThoughtParser
from service.transport.http.tools import CALL_TAG, CallParser

Values = dict[str, Any]

FINISH_REASONS: Mapping[FinishReason, str] = {
    FinishReason.END_OF_SEQUENCE: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.DEADLINE: "length",
    FinishReason.CANCELLED: "length",  # never sent
}
# Of the JSON of a token with its log-probability, in chat also of each alternative, which completions have as a key.
_LEAST_ENTRY_BYTES, _LEAST_TOKEN_BYTES, _LEAST_KEY_BYTES = 36, 16, 4
# JSON has no infinity; OpenAI sends this for improbable tokens.
_LEAST_LOGPROB = -9999.0


class Answer:
    """Builds the answer to one request.

    Args:
        asked: the request.
        sampling: what it was sampled by, the model's defaults included.
        resolve: finds its model, whose tokenizer spells tokens' text.
    """

    prefix = ""
    kind = chunk_kind = ""
    describes_text_alone = False
    """Whether thoughts and calls have no log-probabilities."""
    num_repeated_bytes = 0
    """Of what a stream's last events have again, so far."""

    def __init__(self, asked: Asked, sampling: SamplingParams, resolve: Callable[[str], ServedModel]) -> None:
        self._asked = asked
        self._sampling = sampling
        self._resolve = resolve
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._num_prompt_tokens = self._num_generated_tokens = 0
        self._thoughts: dict[int, ThoughtParser] = {}
        self._may_think = self._begins_within_thoughts = False
        self.request_id = self.model = ""

    def accepted(self, part: Accepted) -> None:
        """Names the request and its model, which may have thoughts: not in an answer that follows a form."""
        self.request_id, self.model = part.request_id, part.model
        self._num_prompt_tokens = part.num_prompt_tokens
        model = self._resolve(part.model)
        self._tokenizer = model.output_tokenizer
        self._has_tagged_calls = model.chat is not None and model.chat.has_tagged_calls
        asked = self._asked
        has_form = asked.request.HasField("structured_output") and (asked.tools is None or asked.tools.must_call)
        if model.chat is not None and model.chat.has_thoughts and not has_form:
            self._may_think = True
            self._begins_within_thoughts = model.chat.begins_within_thoughts[asked.enable_thinking]

    def chunks(self, part: Part) -> Iterator[Values]:
        """The chunks of a stream for one part."""
        match part:
            case Piece(index):
                logprobs = self._logprobs(index, part) if part.logprobs else None
                has_more = part.text or logprobs or self._asked.returns_token_ids
                if index not in self._begun or has_more:
                    yield from self._first(index)
                self._num_generated_tokens += len(part.token_ids)
                if has_more:
                    yield self._chunk(self._choice(index, part.text, logprobs, part.token_ids))
            case Finished(index):
                yield from self._first(index)
                yield self._chunk(self._ended(self._choice(index, "", None, ()), part))
            case Outcome():
                if part.cost is not None and not self._asked.includes_usage:
                    yield self._named(self.chunk_kind, [], cost=_cost(part))
                if self._asked.includes_usage:
                    costs = {} if part.cost is None else {"cost": _cost(part)}
                    yield self._named(self.chunk_kind, [], usage=self._totals(part), **costs)

    def least_bytes(self, part: Piece) -> int:
        """Of JSON, that a part adds to the whole answer at least."""
        if self.describes_text_alone and (self._may_think or self._asked.tools is not None):
            return len(part.text)
        return len(part.text) + _LEAST_ENTRY_BYTES * sum(1 + len(own.top_token_ids) for own in part.logprobs)

    def encode(self, value: Values) -> bytes:
        """The JSON of a chunk, before the next one is taken, or of the whole answer."""
        return encode(value)

    def failed(self, error: Mapping[str, Any]) -> Iterator[Values]:  # noqa: ARG002 (responses')
        """What precedes an error as the last event of a stream."""
        return iter(())

    def whole(self, parts: Sequence[Part]) -> Values:
        """The answer from all parts of a request."""
        pieces: defaultdict[int, list[Piece]] = defaultdict(list)
        ends: dict[int, Finished] = {}
        totals: Values = {}
        outcome: Outcome | None = None
        for part in parts:
            match part:
                case Piece(index):
                    pieces[index].append(part)
                case Finished(index):
                    ends[index] = part
                case Outcome():
                    outcome = part
        choices = []
        for index, end in sorted(ends.items()):
            own = pieces[index]
            text = "".join(piece.text for piece in own)
            token_ids = tuple(token_id for piece in own for token_id in piece.token_ids)
            logprobs = tuple(each for piece in own for each in piece.logprobs)
            joined = Piece(index, text, token_ids, logprobs)
            described = self._logprobs(index, joined) if self._asked.num_top is not None else None
            choices.append(self._ended(self._whole_choice(index, text, described, token_ids), end))
        if outcome is not None:
            totals = {"usage": self._totals(outcome)} | ({} if outcome.cost is None else {"cost": _cost(outcome)})
        return self._named(self.kind, choices, **totals)

    def _totals(self, outcome: Outcome) -> Values:
        return usage(outcome)

    def _named(self, kind: str, choices: list[Values], **others: Any) -> Values:
        named = {"id": f"{self.prefix}{self.request_id}", "object": kind, "created": self._created}
        return {**named, "model": self.model, "choices": choices, **others}

    def _chunk(self, choice: Values) -> Values:
        if not self._asked.includes_usage:
            return self._named(self.chunk_kind, [choice])
        given, generated = self._num_prompt_tokens, self._num_generated_tokens
        so_far = {"prompt_tokens": given, "completion_tokens": generated, "total_tokens": given + generated}
        return self._named(self.chunk_kind, [choice], usage=so_far if self._asked.continues_usage else None)

    def _first(self, index: int) -> Iterator[Values]:
        """What precedes an output's first chunk."""
        self._begun.add(index)
        return iter(())

    def _thinking(self, index: int) -> ThoughtParser:
        if (parser := self._thoughts.get(index)) is None:
            tag = CALL_TAG if self._asked.tools is not None and self._has_tagged_calls else None
            parser = self._thoughts[index] = ThoughtParser(is_within=self._begins_within_thoughts, call_tag=tag)
        return parser

    def _count(self, index: int, token_ids: Sequence[int]) -> None:
        """Counts the tokens of thoughts."""
        if not self._may_think:
            return
        parser = self._thinking(index)
        for token_id in token_ids:
            if not parser.is_counting:
                return
            parser.count(self._tokenizer.token_bytes(token_id))

    def _thinking_usage(self) -> Values:
        return {"reasoning_tokens": sum(each.num_tokens for each in self._thoughts.values())}

    def _token_ids(self, token_ids: Sequence[int]) -> Values:
        return {"token_ids": list(token_ids)} if self._asked.returns_token_ids else {}

    def _ended(self, choice: Values, end: Finished) -> Values:
        """A choice with why it ended."""
        return {**choice, **_end(end)}

    def _choice(self, index: int, text: str, logprobs: Values | None, token_ids: Sequence[int]) -> Values:
        raise NotImplementedError

    def _whole_choice(self, index: int, text: str, logprobs: Values | None, token_ids: Sequence[int]) -> Values:
        return self._choice(index, text, logprobs, token_ids)

    def _logprobs(self, index: int, piece: Piece) -> Values:
        raise NotImplementedError


class ChatAnswer(Answer):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl-"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, asked: Asked, sampling: SamplingParams, resolve: Callable[[str], ServedModel]) -> None:
        super().__init__(asked, sampling, resolve)
        self._parsers: dict[int, CallParser] = {}

    def _first(self, index: int) -> Iterator[Values]:
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", "content": ""}
            yield self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def _choice(self, index: int, text: str, logprobs: Values | None, token_ids: Sequence[int]) -> Values:
        self._count(index, token_ids)
        delta = self._delta(index, text) or ({"content": ""} if logprobs else {})
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None} | self._token_ids(
            token_ids
        )

    def _whole_choice(self, index: int, text: str, logprobs: Values | None, token_ids: Sequence[int]) -> Values:
        self._count(index, token_ids)
        delta = self._delta(index, text, is_last=True)
        calls = [{name: call[name] for name in ("id", "type", "function")} for call in delta.get("tool_calls", ())]
        content = delta.get("content") if calls else delta.get("content", "")
        message: Values = {"role": "assistant", "content": content, "refusal": None}
        message |= {name: delta[name] for name in (FIELD,) if name in delta}
        message |= {"tool_calls": calls} if calls else {}
        return {"index": index, "message": message, "logprobs": logprobs} | self._token_ids(token_ids)

    def _delta(self, index: int, text: str, *, is_last: bool = False) -> Values:
        """What is new in the thoughts, the text and the calls of an output."""
        calls: list[Values] = []
        thoughts, content = "", text
        if self._may_think:
            thoughts, content = self._thinking(index).take(text, is_last=is_last)
        if self._asked.tools is not None:
            if (parser := self._parsers.get(index)) is None:
                call_id = f"call_{self.request_id}_{index}"
                parser = self._parsers[index] = CallParser(is_tagged=self._has_tagged_calls, call_id=call_id)
            content, calls = parser.take(content, is_last=is_last)
        parts = {FIELD: thoughts, "content": content, "tool_calls": calls}
        return {name: value for name, value in parts.items() if value}

    def _totals(self, outcome: Outcome) -> Values:
        details = {"completion_tokens_details": self._thinking_usage()} if self._may_think else {}
        return super()._totals(outcome) | details

    def _ended(self, choice: Values, end: Finished) -> Values:
        ended = super()._ended(choice, end)
        if "delta" in ended:
            ended["delta"] = self._delta(end.output_index, "", is_last=True)
        parser = None if self._asked.tools is None else self._parsers[end.output_index]
        if parser is not None and ended["finish_reason"] == "stop":
            # A stop text may have cut the last call.
            ended["finish_reason"] = "length" if parser.is_cut else "tool_calls" if parser.num_calls else "stop"
        return ended

    def _logprobs(self, index: int, piece: Piece) -> Values:  # noqa: ARG002 (completions')
        return {"content": content_logprobs(self._tokenizer, piece.token_ids, piece.logprobs), "refusal": None}


class CompletionAnswer(Answer):
    """`/v1/completions`."""

    prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._offsets: defaultdict[int, _Offset] = defaultdict(_Offset)

    def least_bytes(self, part: Piece) -> int:
        """As of `Answer`; alternatives are keys, and a few that are spelled alike are one."""
        num_keys = sum(len(own.top_token_ids) for own in part.logprobs)
        return len(part.text) + _LEAST_TOKEN_BYTES * len(part.logprobs) + _LEAST_KEY_BYTES * num_keys

    def _choice(self, index: int, text: str, logprobs: Values | None, token_ids: Sequence[int]) -> Values:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None} | self._token_ids(token_ids)

    def _logprobs(self, index: int, piece: Piece) -> Values:
        offset, tokens = self._offsets[index], [self._spell(token_id) for token_id in piece.token_ids]
        top = []
        for token, own in zip(tokens, piece.logprobs, strict=True):
            pairs = zip(map(self._spell, own.top_token_ids), own.top_logprobs, strict=True)
            top.append({each: finite(logprob) for each, logprob in pairs} | {token: finite(own.logprob)})
        return {
            "tokens": tokens,
            "token_logprobs": [finite(own.logprob) for own in piece.logprobs],
            "top_logprobs": top,
            "text_offset": [offset.take(self._tokenizer.token_bytes(token_id)) for token_id in piece.token_ids],
        }

    def _spell(self, token_id: int) -> str:
        """A token's text; as OpenAI does, by its bytes where it is no whole characters: each is another key."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class _Offset:
    """Where each token begins in an output's text, in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def take(self, data: bytes) -> int:
        at = self._num_characters
        self._num_characters += len(self._decoder.decode(data))
        return at


def content_logprobs(tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Values]:
    """Tokens with their log-probabilities and raw bytes, which may be a part of a character."""

    def describe(token_id: int, logprob: float) -> Values:
        data = tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(data)}

    return [
        describe(token_id, own.logprob) | {"top_logprobs": [*map(describe, own.top_token_ids, own.top_logprobs)]}
        for token_id, own in zip(token_ids, logprobs, strict=True)
    ]


def finite(logprob: float) -> float:
    """A logarithm that JSON has."""
    return max(logprob, _LEAST_LOGPROB)


def usage(outcome: Outcome) -> Values:
    """Tokens used."""
    given, generated = outcome.num_prompt_tokens, outcome.num_generated_tokens
    return {
        "prompt_tokens": given,
        "completion_tokens": generated,
        "total_tokens": given + generated,
        "prompt_tokens_details": {"cached_tokens": outcome.num_cached_tokens},
    }


def _end(end: Finished) -> Values:
    """Why an output ended; `stop_reason` is vLLM's: the stop text or stop token id that matched."""
    values: Values = {"finish_reason": FINISH_REASONS[end.finish_reason], "stop_reason": end.matched_stop}
    if end.finish_reason is FinishReason.DEADLINE:
        values["ended_by_deadline"] = True
    if end.score is not None:
        values["score"] = end.score
    return values


def _cost(outcome: Outcome) -> Values:
    """The cost as over gRPC, by the same names."""
    assert outcome.cost is not None  # noqa: S101 (callers ask)
    described: Values = json_format.MessageToDict(codec.encode_cost(outcome.cost), preserving_proto_field_name=True)
    return {name: int(value) if isinstance(value, str) else value for name, value in described.items()}
