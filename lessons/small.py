"""Small models of the product's own parts, trained by its own loop in seconds; the same seed gives the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model.data.batches import Batch
from model.nn.transformer import Decoder
from model.spec.config import Architecture, ModelConfig
from model.training.config import TrainConfig
from model.training.loop import Loop

_DEFAULTS: dict[str, Any] = {
    "architecture": Architecture.DECODER_ONLY,
    "vocab_size": 16,
    "context": 32,
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 2,
    "d_ff": 64,
    "positions": "sinusoidal",
    "norm": "layernorm",
    "activation": "relu",
    "mlp_bias": True,
    "scale_embeddings": True,
}

_TRAINING = {"learning_rate": 1e-2, "warmup_fraction": 0.1, "device": "cpu", "precision": "fp32"}


def config(**changes: Any) -> ModelConfig:
    """A decoder-only model of two narrow layers, with changes."""
    return ModelConfig(**{**_DEFAULTS, **changes})


def pair_config(vocab_size: int, **changes: Any) -> ModelConfig:
    """An encoder-decoder of one narrow layer on each side, with changes."""
    sides = {"architecture": Architecture.ENCODER_DECODER, "num_encoder_layers": 1, "num_layers": 1}
    return config(**{**sides, "vocab_size": vocab_size, **changes})


def train(model: nn.Module, batch: Callable[[int], Batch], *, steps: int, seed: int = 0, **changes: Any) -> list[float]:
    """Trains on the CPU and returns the loss of every step in nats per label; leaves the model in evaluation mode.

    `changes` are fields of `TrainConfig`; by default Muon with half a cosine to zero, as the presets have it.
    """
    settings = {**_TRAINING, **changes, "steps": steps, "batch_tokens": 1, "seed": seed}
    loop = Loop(model, batch, TrainConfig.from_dict(settings))
    losses = [loop.update().loss for _ in range(steps)]
    model.eval()
    return losses


def normal(seed: int, *shape: int, deviation: float = 1.0) -> Tensor:
    """Normal numbers that depend on seed and shape alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * deviation


def hidden_states(model: Decoder, run: Callable[[], object]) -> list[Tensor]:
    """What enters the decoder's first layer, and what leaves each layer, while `run` runs the model."""
    states: list[Tensor] = []
    hooks = [
        model.layers[0].register_forward_pre_hook(lambda _, inputs: states.append(inputs[0])),
        *(layer.register_forward_hook(lambda *step: states.append(step[2])) for layer in model.layers),
    ]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return states


def cosine(a: Tensor, b: Tensor) -> float:
    """The cosine of the angle between two vectors."""
    return float(torch.nn.functional.cosine_similarity(a, b, dim=-1))


def words_to_ids(vocabulary: Sequence[str], words: Sequence[str]) -> list[int]:
    """Each word's place in the vocabulary."""
    return [vocabulary.index(word) for word in words]
