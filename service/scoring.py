"""`Score`: a text to the engine's request for log-probabilities, and the totals of the answer.

Knows models, tokens and arithmetic; neither the engine nor protobuf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from service.errors import InvalidRequest, PromptTooLong
from service.repository.models import ServedModel, check_ids, prompt_field, require_room, text_size

Text = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCall:
    """A request, checked as far as that needs no model. `prompt` and `target` are text or raw ids, not empty.

    Without a `target` the prompt itself is scored, which only a decoder-only model can do.
    """

    request_id: str
    model: str
    prompt: Text
    target: Text | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTask:
    """What the engine scores: the decoder's tokens from position `start` on, which are `scored_token_ids`.

    `num_bytes` is the length of their text in UTF-8.
    """

    prompt_token_ids: tuple[int, ...]
    target_prefix_token_ids: tuple[int, ...]
    start: int
    scored_token_ids: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Score:
    """Scored tokens and their natural-log probabilities, one each."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_bytes: int

    @property
    def total_logprob(self) -> float:
        """Log-probability of the whole text."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """Per token; infinite on overflow."""
        try:
            return math.exp(-self.total_logprob / len(self.logprobs))
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of a compressor that uses the model; None for tokens without text."""
        return -self.total_logprob / math.log(2.0) / self.num_bytes if self.num_bytes else None


def make_task(model: ServedModel, prompt: Text, target: Text | None) -> ScoreTask:
    """Tokenizes a request; may take milliseconds, so call this off the event loop.

    Raises:
        PromptTooLong: when prompt and target together exceed the context.
        InvalidRequest: when an id is not in the vocabulary, or there is nothing to score.
    """
    if target is None:
        return _prompt_task(model, prompt)
    given = model.encode_prompt(prompt)
    config = model.manifest.config
    beginning = model.output_beginning if config.is_encoder_decoder else ()
    room = config.context - (1 + len(beginning) if config.is_encoder_decoder else len(given))
    scored = encode_target(model, target, room, "the room left in the context")
    text = target if isinstance(target, str) else model.output_tokenizer.decode(scored)
    return ScoreTask(
        prompt_token_ids=given if config.is_encoder_decoder else given + scored,
        target_prefix_token_ids=beginning + scored if config.is_encoder_decoder else (),
        start=1 + len(beginning) if config.is_encoder_decoder else len(given),
        scored_token_ids=scored,
        num_bytes=len(text.encode()),
    )


def _prompt_task(model: ServedModel, prompt: Text) -> ScoreTask:
    """Scores a prompt itself, which may fill the context."""
    config, tokenizer = model.manifest.config, model.output_tokenizer
    if config.is_encoder_decoder:
        raise InvalidRequest("target", None, f"must be set, as {model.name} is an encoder-decoder")
    given = model.encode_prompt(prompt, config.context)
    scored = given[1:]
    if not scored:
        limit = "must have at least 2 tokens, as the first has nothing before it"
        raise InvalidRequest(prompt_field(prompt), prompt, limit)
    # Tokens may not spell the text exactly; if all of it is scored, its own bytes count.
    text = prompt
    if not isinstance(text, str) or scored != tuple(tokenizer.encode_plain(text)):
        text = tokenizer.decode(scored)
    return ScoreTask(
        prompt_token_ids=given,
        target_prefix_token_ids=(),
        start=1,
        scored_token_ids=scored,
        num_bytes=len(text.encode()),
    )


def encode_target(model: ServedModel, target: Text, room: int, why: str) -> tuple[int, ...]:
    """Token ids of a given output, without control tokens; text may take milliseconds. `why` is the reason of `room`.

    Raises:
        PromptTooLong: when it has more than `room` tokens.
        InvalidRequest: when an id is not in the vocabulary, or the text has no tokens.
    """
    if isinstance(target, str):
        field = "target.target_text"
        require_room(field, text_size(target), model.output_tokenizer, room)
        token_ids = tuple(model.output_tokenizer.encode_plain(target))
    else:
        field, token_ids = "target.target_token_ids.ids", target
    if not token_ids:
        raise InvalidRequest(field, target, "must have at least 1 token")
    if len(token_ids) > room:
        raise PromptTooLong(field, len(token_ids), f"must have at most {room} tokens, {why}")
    check_ids(field, token_ids, model.manifest.config.vocab_size)
    return token_ids
