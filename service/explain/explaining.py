"""The request and answer of `Explain`: which matrices a call selects, its tokens, and the answer's size.

Knows neither protobuf nor how the weights are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model.spec.artifact import AttentionKind, attention_layers, attention_output
from model.spec.config import ModelConfig
from model.spec.tokenizer import Tokenizer
from service.errors import InvalidRequest
from service.repository.models import ServedModel
from service.scoring import Text, encode_target

Float32 = npt.NDArray[np.float32]

_WEIGHT_BYTES = 4
# Bounds: a matrix's bytes in a message beside its weights, and, as a rule, a token's spelling.
_MATRIX_BYTES = 32
_TOKEN_BYTES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainCall:
    """A request, checked as far as possible without its model. `prompt` and `target` are not empty.

    Without `target` the model generates one of at most `max_tokens`. Empty `kinds`, `layers` or `heads` mean all.
    """

    request_id: str
    model: str
    prompt: Text
    target: Text | None
    kinds: tuple[AttentionKind, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected matrices: heads of layers, each layer by kind and number."""

    layers: tuple[tuple[AttentionKind, int], ...]
    heads: tuple[int, ...]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The explain graph's outputs that contain them."""
        return tuple(attention_output(kind, layer) for kind, layer in self.layers)

    def num_bytes(self, num_decoder_tokens: int, num_source_tokens: int) -> int:
        """Size of the weights in a message."""
        pairs = {
            AttentionKind.ENCODER: num_source_tokens**2,
            AttentionKind.DECODER: num_decoder_tokens**2,
            AttentionKind.CROSS: num_decoder_tokens * num_source_tokens,
        }
        return _WEIGHT_BYTES * len(self.heads) * sum(pairs[kind] for kind, _ in self.layers)


@dataclass(frozen=True, slots=True)
class ExplainTask:
    """The input of an explain graph, `decoder` and `source`, and the tokens that the decoder chose, `target`.

    `source` is empty for a decoder-only model, whose `decoder` begins with the prompt.
    """

    prompt: tuple[int, ...]
    decoder: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]

    @classmethod
    def of(cls, model: ServedModel, prompt: tuple[int, ...], target: tuple[int, ...]) -> ExplainTask:
        """The decoder reads all but the last token of the target."""
        if model.manifest.config.is_encoder_decoder:
            return cls(prompt, (model.manifest.decoder_start_id, *target[:-1]), prompt, target)
        return cls(prompt, (*prompt, *target[:-1]), (), target)


@dataclass(frozen=True, slots=True)
class AttentionMatrix:
    """One head's weights `[queries, keys] float32`, rows summing to one."""

    kind: AttentionKind
    layer: int
    head: int
    weights: Float32


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer: tokens as the vocabularies spell them, and matrices by kind, layer and head."""

    prompt_tokens: tuple[str, ...]
    target_tokens: tuple[str, ...]
    decoder_tokens: tuple[str, ...]
    matrices: tuple[AttentionMatrix, ...]


def select(model: ServedModel, call: ExplainCall) -> Selection:
    """The matrices that a call selects, in order and each once.

    Raises:
        InvalidRequest: names the first kind, layer or head that the model does not have.
    """
    config = model.manifest.config
    counts = attention_layers(config)
    for index, kind in enumerate(call.kinds):
        if kind not in counts:
            limit = f"must be one of {', '.join(counts)}, as {model.name} is {config.architecture}"
            raise InvalidRequest(f"kinds[{index}]", str(kind), limit)
    num_layers = max(counts[kind] for kind in call.kinds or counts)
    layers = _chosen("layers", call.layers, num_layers)
    heads = _chosen("heads", call.heads, config.num_heads)
    kinds = [kind for kind in counts if not call.kinds or kind in call.kinds]
    return Selection(tuple((kind, layer) for kind in kinds for layer in layers if layer < counts[kind]), heads)


def encode(model: ServedModel, call: ExplainCall, max_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of a call's prompt and target (empty if it is to be generated). Runs off the event loop.

    Args:
        model: the call's.
        call: its text may take milliseconds to tokenize.
        max_tokens: most tokens of a source, and most that a decoder reads and chooses.

    Raises:
        PromptTooLong: the prompt or the target is too long.
        InvalidRequest: an id is not in the vocabulary, or a text has no tokens.
    """
    config = model.manifest.config
    # After a prompt there must be room for a token; a source needs none.
    most = max_tokens if config.is_encoder_decoder else max_tokens - 1
    prompt = model.encode_prompt(call.prompt, min(most, model.max_prompt_tokens))
    if call.target is None:
        return prompt, ()
    room = target_room(config, len(prompt), max_tokens)
    why = f"the room left in the context and in the {max_tokens} that are explained"
    return prompt, encode_target(model, call.target, room, why)


def target_room(config: ModelConfig, num_prompt_tokens: int, max_tokens: int) -> int:
    """The longest target, in tokens, with its prompt or source."""
    if config.is_encoder_decoder:
        return min(config.context - 1, max_tokens)
    return min(config.context, max_tokens) - num_prompt_tokens


def fitting_room(selection: Selection, num_prompt_tokens: int, room: int, limit: int, *, has_source: bool) -> int:
    """The longest target, up to `room` tokens, whose answer has at most `limit` bytes; 0 when none has.

    Args:
        selection: the answer's matrices.
        num_prompt_tokens: of the prompt or source.
        room: other limits of the target.
        limit: of the message, in bytes.
        has_source: whether the prompt is a source.
    """
    num_matrices = len(selection.layers) * len(selection.heads)
    taken, source = (0, num_prompt_tokens) if has_source else (num_prompt_tokens - 1, 0)
    for length in range(room, 0, -1):
        decoder = taken + length
        num_tokens = num_prompt_tokens + length + decoder
        if selection.num_bytes(decoder, source) + _MATRIX_BYTES * num_matrices + _TOKEN_BYTES * num_tokens <= limit:
            return length
    return 0


def explanation(model: ServedModel, task: ExplainTask, selection: Selection, weights: Sequence[Float32]) -> Explanation:
    """Assembles an answer. `weights` `[H, queries, keys]` are the selection's outputs, in order."""
    matrices = (
        AttentionMatrix(kind, layer, head, matrix[head])
        for (kind, layer), matrix in zip(selection.layers, weights, strict=True)
        for head in selection.heads
    )
    return Explanation(
        prompt_tokens=tuple(_spell(model.prompt_tokenizer, task.prompt)),
        target_tokens=tuple(_spell(model.output_tokenizer, task.target)),
        decoder_tokens=tuple(_spell(model.output_tokenizer, task.decoder)),
        matrices=tuple(matrices),
    )


def _chosen(field: str, given: Sequence[int], count: int) -> tuple[int, ...]:
    if len(given) > count:
        raise InvalidRequest(field, len(given), f"must have at most {count} entries, the number of {field}")
    for index, number in enumerate(given):
        if number >= count:
            raise InvalidRequest(f"{field}[{index}]", number, f"must be below {count}, the number of {field}")
    return tuple(sorted(set(given))) or tuple(range(count))


def _spell(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Iterator[str]:
    return (tokenizer.token(token_id) or "" for token_id in token_ids)
