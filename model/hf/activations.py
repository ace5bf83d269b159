"""Activations of networks without a gate, by their Hugging Face names."""

from __future__ import annotations

from model.hf.values import Values
from model.spec.config import Activation

ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU_EXACT,
    "gelu_python": Activation.GELU_EXACT,
    "gelu_new": Activation.GELU,
    "gelu_fast": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}


def read_activation(values: Values, name: str, default: str) -> Activation:
    """The activation in field `name`, by default `default`."""
    return ACTIVATIONS[values.word(name, default, tuple(ACTIVATIONS))]
