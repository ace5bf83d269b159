"""What a call for attention comes to: which matrices, which tokens, how many bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from model.spec.artifact import AttentionKind
from service.errors import InvalidRequest, PromptTooLong
from service.explain import explaining
from service.explain.explaining import ExplainCall, ExplainTask, Selection
from service.repository.models import ServedModel
from service.transport import analysis_codec
from tests.fakes import BOS, CONTEXT, EOS, spell
from tests.servers import served_model

ENCODER, DECODER, CROSS = AttentionKind.ENCODER, AttentionKind.DECODER, AttentionKind.CROSS


def call(**fields: Any) -> ExplainCall:
    bare = {"prompt": "ab", "target": None, "kinds": (), "layers": (), "heads": (), "max_tokens": 64}
    return ExplainCall(**{"request_id": "r", "model": "fake", **bare, **fields})


def model(*, encoder_decoder: bool = True, **sizes: int) -> ServedModel:
    """Three layers of two heads, and an encoder of two layers."""
    served = served_model(encoder_decoder=encoder_decoder)
    sizes = {"num_layers": 3, "num_heads": 2, "num_kv_heads": 0, "head_dim": 0} | sizes
    sizes |= {"num_encoder_layers": 2} if encoder_decoder else {}
    config = dataclasses.replace(served.manifest.config, **sizes)
    return dataclasses.replace(served, manifest=dataclasses.replace(served.manifest, config=config))


@pytest.mark.parametrize(
    ("fields", "kinds", "heads"),
    [
        ({}, {ENCODER: (0, 1), DECODER: (0, 1, 2), CROSS: (0, 1, 2)}, (0, 1)),
        ({"layers": (2, 0, 2), "heads": (1,)}, {ENCODER: (0,), DECODER: (0, 2), CROSS: (0, 2)}, (1,)),
        ({"kinds": (CROSS, ENCODER), "layers": (1,), "heads": (1, 0)}, {ENCODER: (1,), CROSS: (1,)}, (0, 1)),
    ],
)
def test_selection_is_in_order_and_has_nothing_twice(
    fields: dict[str, Any], kinds: dict[AttentionKind, tuple[int, ...]], heads: tuple[int, ...]
) -> None:
    layers = tuple((kind, layer) for kind, numbers in kinds.items() for layer in numbers)
    assert explaining.select(model(), call(**fields)) == Selection(layers, heads)


def test_selection_of_a_decoder_only_model_is_its_own_attention() -> None:
    selection = explaining.select(model(encoder_decoder=False), call(layers=(1,)))
    assert selection.outputs == ("decoder_attention_1",)
    with pytest.raises(InvalidRequest, match="must be one of decoder, as fake is decoder-only, got 'cross'") as refusal:
        explaining.select(model(encoder_decoder=False), call(kinds=(CROSS,)))
    assert refusal.value.field == "kinds[0]"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"layers": (0, 3)}, "layers[1]"),
        ({"layers": (2,), "kinds": (ENCODER,)}, "layers[0]"),
        ({"heads": (2,)}, "heads[0]"),
        ({"heads": (0, 1, 0)}, "heads"),
    ],
)
def test_missing_layers_and_heads_are_refused_by_their_index(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        explaining.select(model(), call(**fields))
    assert refusal.value.field == field


def test_bytes_of_the_weights_are_counted_before_there_are_any() -> None:
    selection = explaining.select(model(), call(heads=(1,)))
    # Four bytes each: two matrices of the source, three of the decoder, three between them.
    assert selection.num_bytes(5, 7) == 4 * (2 * 7 * 7 + 3 * 5 * 5 + 3 * 5 * 7)


@pytest.mark.parametrize("limit", [300, 1000, 5000, 20_000])
@pytest.mark.parametrize("encoder_decoder", [False, True])
def test_room_for_a_target_fits_the_encoded_answer(limit: int, encoder_decoder: bool) -> None:
    served = model(encoder_decoder=encoder_decoder)
    selection = explaining.select(served, call(heads=(0,)))
    prompt = (BOS, *spell("abc"))

    def num_bytes(length: int) -> int:
        task = ExplainTask.of(served, prompt, (5,) * length)
        sides = {ENCODER: (task.source, task.source), DECODER: (task.decoder,) * 2, CROSS: (task.decoder, task.source)}
        weights = [np.ones((2, *map(len, sides[kind])), np.float32) for kind, _ in selection.layers]
        return analysis_codec.encode_explanation(explaining.explanation(served, task, selection, weights)).ByteSize()

    room = explaining.fitting_room(selection, len(prompt), 60, limit, has_source=encoder_decoder)
    if room:
        assert num_bytes(room) <= limit
    if room < 60:
        # Cautious, but not by much: the spelling of tokens is not known yet.
        assert num_bytes(room + 4) > 0.5 * limit


def test_decoder_reads_all_but_the_last_token_of_the_target() -> None:
    target = (*spell("xy"), EOS)
    source = (*spell("ab"), EOS)
    assert ExplainTask.of(model(), source, target) == ExplainTask(source, (BOS, *spell("xy")), source, target)
    prompt = (BOS, *spell("ab"))
    task = ExplainTask.of(model(encoder_decoder=False), prompt, target)
    assert task == ExplainTask(prompt, (*prompt, *spell("xy")), (), target)


@pytest.mark.parametrize(
    ("encoder_decoder", "prompt", "target", "max_tokens", "field", "most"),
    [
        # Sources and outputs each have all the room, up to the context.
        (True, "a" * 9, "b" * 10, 10, None, None),
        (True, "a" * 10, "b", 10, "prompt.text", 10),
        (True, "a", "b" * 11, 10, "target.target_text", 10),
        (True, "a" * CONTEXT, "b", 1000, "prompt.text", CONTEXT),
        (True, "a", "b" * CONTEXT, 1000, "target.target_text", CONTEXT - 1),
        # Prompt and output share it.
        (False, "a" * 4, "b" * 5, 10, None, None),
        (False, "a" * 4, "b" * 6, 10, "target.target_text", 5),
        (False, "a" * 9, "b", 10, "prompt.text", 9),
        (False, "a" * CONTEXT, "b", 1000, "prompt.text", CONTEXT - 1),
        (False, "a" * 4, "b" * CONTEXT, 1000, "target.target_text", CONTEXT - 5),
    ],
)  # fmt: skip
def test_lengths_are_bounded_by_context_and_limit(
    encoder_decoder: bool, prompt: str, target: str, max_tokens: int, field: str | None, most: int | None
) -> None:
    served, asked = model(encoder_decoder=encoder_decoder), call(prompt=prompt, target=target)
    if field is None:
        given, chosen = explaining.encode(served, asked, max_tokens)
        assert chosen == spell(target)
        assert spell(prompt) in (given[1:], given[:-1])
        return
    with pytest.raises(PromptTooLong) as refusal:
        explaining.encode(served, asked, max_tokens)
    assert refusal.value.field == field
    assert f"at most {most} tokens" in refusal.value.limit


def test_no_target_is_encoded_where_none_is_given() -> None:
    assert explaining.encode(model(), call(), 10) == ((*spell("ab"), EOS), ())


def test_explanation_takes_the_heads_that_were_asked_for() -> None:
    served = model()
    selection = explaining.select(served, call(kinds=(CROSS,), layers=(0, 2), heads=(1,)))
    task = ExplainTask.of(served, (*spell("ab"), EOS), spell("xy"))
    weights = [np.random.default_rng(seed).random((2, 2, 3)).astype(np.float32) for seed in range(2)]
    found = explaining.explanation(served, task, selection, weights)
    assert [(each.kind, each.layer, each.head) for each in found.matrices] == [(CROSS, 0, 1), (CROSS, 2, 1)]
    for each, matrix in zip(found.matrices, weights, strict=True):
        np.testing.assert_array_equal(each.weights, matrix[1])
    tokens = (("a", "b", "<eos>"), ("x", "y"), ("<bos>", "x"))
    assert (found.prompt_tokens, found.target_tokens, found.decoder_tokens) == tokens
