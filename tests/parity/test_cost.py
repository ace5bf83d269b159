"""What the cost module computes from a configuration is what the real model has and does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.nn.attention import attend
from model.nn.transformer import EncoderDecoder, build, num_parameters
from model.spec import cost
from model.spec.config import ConfigError, ModelConfig

_SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "context": 9,
    "d_model": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    # Not d_model / num_heads, so that widths and heads cannot be confused.
    "head_dim": 6,
    "d_ff": 20,
}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "positions": ("learned", "sinusoidal", "rotary"),
    "norm": ("layernorm", "rmsnorm"),
    "norm_placement": ("pre", "post"),
    "activation": ("relu", "swiglu"),
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "tie_embeddings": (False, True),
    "attention_score": ("dot", "additive"),
}
# What checkpoints of others have besides; each changes a count of its own, so all of them together do.
_FOREIGN: tuple[dict[str, Any], ...] = (
    {"query_key_norm": True, "attention_bias": True, "attention_output_bias": False},
    {"embedding_norm": True, "logits_bias": True, "norm": "layernorm", "norm_placement": "post", "activation": "silu"},
    {
        "embedding_norm": True,
        "positions": "sinusoidal-halves",
        "activation": "gelu-exact",
        "attention_output_bias": False,
    },
)
_SOURCES: tuple[dict[str, Any], ...] = (
    {},
    {"source_vocab_size": 13, "source_context": 7},
    {"share_embeddings": False},
)
# Every choice shows in the operations too, one at a time.
_COUNTED: tuple[dict[str, Any], ...] = (
    {},
    {"activation": "relu", "attention_bias": True, "mlp_bias": True},
    {"tie_embeddings": False, "num_kv_heads": 4, "positions": "learned", "norm_placement": "post"},
    {"attention_score": "additive", "positions": "sinusoidal", "num_kv_heads": 1},
)


def configs() -> Iterator[ModelConfig]:
    """All combinations that there are, of both families."""
    for values in product(*_CHOICES.values()):
        choice = dict(zip(_CHOICES, values, strict=True))
        if (choice["positions"], choice["attention_score"]) == ("rotary", "additive"):
            with pytest.raises(ConfigError):
                ModelConfig(architecture="decoder-only", **_SMALL, **choice)
            continue
        yield ModelConfig(architecture="decoder-only", **_SMALL, **choice)
        for source in _SOURCES:
            yield ModelConfig(architecture="encoder-decoder", num_encoder_layers=3, **_SMALL, **choice, **source)


def test_parameters_are_as_many_as_the_real_model_has() -> None:
    every = list(configs())
    assert len(every) == 4 * (3 * 2 - 1) * 2**6
    for config in random.Random(0).sample(every, 60):
        with torch.device("meta"):
            model = build(config)
        assert cost.num_parameters(config) == num_parameters(model), config


@pytest.mark.parametrize("choice", _FOREIGN)
@pytest.mark.parametrize("family", ["decoder-only", "encoder-decoder"])
def test_parameters_of_others_parts_are_counted(family: str, choice: dict[str, Any]) -> None:
    encoder = {"num_encoder_layers": 3, "source_vocab_size": 13} if family == "encoder-decoder" else {}
    config = ModelConfig(architecture=family, **{**_SMALL, **encoder, **choice})
    with torch.device("meta"):
        assert cost.num_parameters(config) == num_parameters(build(config))


def inputs(config: ModelConfig, rows: int, length: int, source_length: int) -> tuple[torch.Tensor, ...]:
    target = torch.zeros(rows, length, dtype=torch.int64)
    if not config.is_encoder_decoder:
        return (target,)
    return torch.zeros(rows, source_length, dtype=torch.int64), torch.full((rows,), source_length), target


@pytest.mark.parametrize("choice", _COUNTED)
@pytest.mark.parametrize("family", ["decoder-only", "encoder-decoder"])
@pytest.mark.parametrize(("length", "source"), [(1, 1), (8, 5)])
def test_operations_are_as_many_as_torch_counts(family: str, choice: dict[str, Any], length: int, source: int) -> None:
    encoder = {"num_encoder_layers": 3, "source_vocab_size": 13} if family == "encoder-decoder" else {}
    config = ModelConfig(architecture=family, **{**_SMALL, **encoder, **choice})
    model = build(config, seed=0)
    lengths = (length, source) if isinstance(model, EncoderDecoder) else (length,)
    with FlopCounterMode(display=False) as forwards:
        logits = model(*inputs(config, 3, length, source), attend)
    assert forwards.get_total_flops() == 3 * cost.forward_flops(config, *lengths).total
    with FlopCounterMode(display=False) as backwards:
        logits.sum().backward()
    both = forwards.get_total_flops() + backwards.get_total_flops()
    assert both == 3 * cost.BACKWARD_AND_FORWARD * cost.forward_flops(config, *lengths).total


def test_attention_is_what_grows_with_the_square_in_the_real_model() -> None:
    config = ModelConfig(architecture="decoder-only", **{**_SMALL, "context": 64})
    model = build(config, seed=0)

    def counted(length: int) -> int:
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, length, dtype=torch.int64), attend)
        return counter.get_total_flops()

    # f(n) = an + bn², so that f(2n) - 2f(n) = 2bn².
    assert counted(64) - 2 * counted(32) == 2 * cost.forward_flops(config, 32).attention
