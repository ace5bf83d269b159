"""What is known of a model from its artifact, and the checks of a request that depend on the model.

A `ServedModel` is immutable. What changes while it is served is `service.repository.entry`'s. Knows neither engines nor
protobuf.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from model.spec.artifact import EXPLAIN, Manifest, Stamp
from model.spec.chat import Chat, ConversationError, Message
from model.spec.golden import CaseResult, GoldenCase
from model.spec.tokenizer import Tokenizer
from service.engine.interfaces import StepEngine
from service.engine.kv.budget import plan_kv_memory
from service.engine.sampling.grammar import Vocabulary
from service.engine.types import SamplingParams, StoppingParams
from service.errors import InvalidRequest, PromptTooLong, UnsupportedFeature
from service.forecasting.costing import CostModel


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, at least one, that the model's chat template turns into a prompt.

    `tools` are those that the answer may call; `extra_bytes` is the size of them and of messages' calls.
    `enable_thinking` is a variable of templates, left out where it is None.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    extra_bytes: int = 0
    enable_thinking: bool | None = None


Prompt = str | tuple[int, ...] | Conversation
"""Text, raw ids, or a conversation."""


class ModelState(StrEnum):
    """Whether a model answers."""

    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Parity:
    """Results of the golden cases on the provider in use.

    `batch_invariant`: whether a case has the same bits alone and in a batch; None if not checked.
    """

    cases: tuple[CaseResult, ...]
    batch_invariant: bool | None = None

    @property
    def passed(self) -> bool:
        """Whether every case passed; False without cases."""
        return bool(self.cases) and all(case.passed for case in self.cases)

    @property
    def max_abs_error(self) -> float:
        """Largest absolute difference of a logit."""
        return max((case.max_abs_error for case in self.cases), default=float("inf"))

    @property
    def min_agreement(self) -> float:
        """Smallest share of equal greedy choices in a case."""
        return min((case.agreement for case in self.cases), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What is known of one model. `chat` is its template; `stamp` is that of its files before they were checked.

    `vocabulary` is that of structured output; None where llguidance is not installed, or the bytes of its tokens are
    unknown.
    """

    name: str
    manifest: Manifest
    prompt_tokenizer: Tokenizer
    output_tokenizer: Tokenizer
    golden_cases: tuple[GoldenCase, ...]
    chat: Chat | None = None
    stamp: Stamp | None = None
    vocabulary: Vocabulary | None = None

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for a token, or longest source."""
        config = self.manifest.config
        return config.source_context if config.is_encoder_decoder else config.context - 1

    @property
    def max_target_prefix_tokens(self) -> int:
        """Longest target prefix that leaves room for the start token before it and a token after it."""
        config = self.manifest.config
        return config.context - 2 if config.is_encoder_decoder else 0

    @property
    def output_beginning(self) -> tuple[int, ...]:
        """The token that the model forces at the beginning of every output, if any; a target prefix follows it."""
        first = self.manifest.generation.forced_first_id
        return () if first is None else (first,)

    @property
    def prompt_vocab_size(self) -> int:
        """Number of ids a prompt may hold."""
        config = self.manifest.config
        return config.source_vocab_size if config.is_encoder_decoder else config.vocab_size

    @property
    def explains(self) -> bool:
        """Whether its artifact has a graph of attention weights."""
        return EXPLAIN in self.manifest.graphs

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the K/V of one token, the decoder's or its source's."""
        return plan_kv_memory(self.manifest, 1, None).token_bytes

    def cost_model(self, engine: StepEngine) -> CostModel:
        """Counts the work of its requests on this engine."""
        return CostModel(self.manifest.config, engine.chunk_rules, self.kv_token_bytes)

    def encode_prompt(self, prompt: Prompt, max_tokens: int | None = None) -> tuple[int, ...]:
        """Token ids of a prompt. Text may take milliseconds: call this off the event loop.

        Raises:
            PromptTooLong: when it has more than `max_tokens`, by default `max_prompt_tokens`.
            InvalidRequest: when an id is not in the vocabulary, the text has no tokens, or the template refuses.
            UnsupportedFeature: for a conversation with a model that has no template.
        """
        field = prompt_field(prompt)
        most = self.max_prompt_tokens if max_tokens is None else max_tokens
        match prompt:
            case str():
                require_room(field, text_size(prompt), self.prompt_tokenizer, most)
                token_ids = tuple(self.prompt_tokenizer.encode(prompt))
            case Conversation():
                token_ids = self._encode_chat(field, prompt, most)
            case _:
                token_ids = prompt
        if not token_ids:
            raise InvalidRequest(field, prompt, "must have at least 1 token")
        if len(token_ids) > most:
            raise PromptTooLong(field, len(token_ids), f"must have at most {most} tokens")
        check_ids(field, token_ids, self.prompt_vocab_size)
        return token_ids

    def _encode_chat(self, field: str, prompt: Conversation, most: int) -> tuple[int, ...]:
        if self.chat is None:
            raise UnsupportedFeature("prompt.chat", f"needs a chat template, {self.name} has none: send text")
        require_room(field, text_size(prompt), self.prompt_tokenizer, most)
        try:
            written = self.chat.render(prompt.messages, prompt.tools, enable_thinking=prompt.enable_thinking)
        except ConversationError as error:
            roles = [message.role for message in prompt.messages]
            raise InvalidRequest(f"prompt.chat.messages{error.place}", roles, error.reason) from error
        require_room(field, text_size(written), self.prompt_tokenizer, most)
        return tuple(self.chat.tokenize(written))

    def encode_target_prefix(self, text: str) -> tuple[int, ...]:
        """Token ids of a target prefix, after the token that the model forces first. Call this off the event loop.

        Raises:
            InvalidRequest: when the model is decoder-only: its prompt is what the output continues.
            PromptTooLong: when it leaves no room in the context.
        """
        if not text:
            return ()
        config = self.manifest.config
        if not config.is_encoder_decoder:
            raise InvalidRequest("target_prefix", text, f"must be empty, as {self.name} is decoder-only")
        most = self.max_target_prefix_tokens
        require_room("target_prefix", text_size(text), self.output_tokenizer, most)
        token_ids = self.output_beginning + tuple(self.output_tokenizer.encode_plain(text))
        if len(token_ids) > most:
            raise PromptTooLong("target_prefix", len(token_ids), f"must have at most {most} tokens")
        check_ids("target_prefix", token_ids, config.vocab_size)
        return token_ids

    def check_stop_token_ids(self, token_ids: Iterable[int]) -> None:
        """Refuses stop tokens that the model cannot generate.

        Raises:
            InvalidRequest: naming the largest.
        """
        vocab_size = self.manifest.config.vocab_size
        if (largest := max(token_ids, default=0)) >= vocab_size:
            limit = f"must be below the vocabulary's size {vocab_size}"
            raise InvalidRequest("stopping.stop_token_ids", largest, limit)

    def check_logits_rules(self, sampling: SamplingParams, stopping: StoppingParams) -> None:
        """Refuses rules with tokens that the model does not have, or that leave none to choose.

        Many allowed ids may take milliseconds: call this off the event loop.

        Raises:
            InvalidRequest: naming the first entry out of range, or the field that leaves nothing.
        """
        vocab_size = self.manifest.config.vocab_size
        for token_id, _ in sampling.logit_bias:
            if token_id >= vocab_size:
                limit = f"its token id must be below the vocabulary's size {vocab_size}"
                raise InvalidRequest(f"sampling.logit_bias[{token_id}]", token_id, limit)
        allowed = sampling.allowed_token_ids
        if len(allowed) > vocab_size:
            limit = f"must have at most {vocab_size} entries, as many as the vocabulary"
            raise InvalidRequest("sampling.allowed_token_ids", len(allowed), limit)
        check_ids("sampling.allowed_token_ids", allowed, vocab_size)
        suppressed = frozenset(self.manifest.generation.suppressed_ids)
        if allowed and suppressed.issuperset(allowed):
            limit = f"must have a token that {self.name} does not suppress"
            raise InvalidRequest("sampling.allowed_token_ids", allowed, limit)
        ends = stopping.stop_token_ids.union(self.manifest.eos_ids, suppressed)
        if stopping.min_tokens and ends.issuperset(allowed or range(vocab_size)):
            limit = "must be 0 where every allowed token ends the output"
            raise InvalidRequest("stopping.min_tokens", stopping.min_tokens, limit)


def prompt_field(prompt: Prompt) -> str:
    """The path of a prompt's field in the request."""
    match prompt:
        case str():
            return "prompt.text"
        case Conversation():
            return "prompt.chat.messages"
        case _:
            return "prompt.token_ids.ids"


def text_size(given: Prompt | None) -> int:
    """Bytes of a text or of a conversation's messages; 0 for ids, which are not tokenized."""
    match given:
        case str():
            return len(given.encode())
        case Conversation(messages):
            return given.extra_bytes + sum(len(message.content.encode()) for message in messages)
        case _:
            return 0


def require_room(field: str, num_bytes: int, tokenizer: Tokenizer, max_tokens: int) -> None:
    """Refuses a text with more bytes than `max_tokens` can hold, before any work is spent on it.

    Raises:
        PromptTooLong: with the numbers of bytes.
    """
    max_bytes = tokenizer.max_bytes(max_tokens)
    if num_bytes > max_bytes:
        limit = f"must have at most {max_tokens} tokens, which hold at most {max_bytes} bytes"
        raise PromptTooLong(field, f"{num_bytes} bytes", limit)


def check_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuses ids outside a vocabulary.

    Raises:
        InvalidRequest: naming the first, by its place in `field`.
    """
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{field}[{index}]", token_id, f"must be below the vocabulary's size {vocab_size}")
