"""FLOPs of the measured requests, by `model.spec.cost`, to compare time with arithmetic.

`model.spec.cost` counts logits at every position, as in training. A server computes logits, and everything behind the
last layer's attention, only at the last position. A kernel may skip the pairs that the causal mask forbids, half of the
square for long texts; chunked prefill never computes that half, because a token attends only up to its chunk's end.
"""

from __future__ import annotations

from model.spec import cost
from model.spec.config import ModelConfig
from model.spec.cost import Flops


def prefill(config: ModelConfig, length: int, chunk: int) -> Flops:
    """FLOPs of a decoder-only model's prefill of `length` tokens in chunks of at most `chunk`."""
    whole = cost.forward_flops(config, length)
    pairs = sum(min(chunk, length - start) * min(start + chunk, length) for start in range(0, length, chunk))
    # All queries of a chunk attend to all keys up to its end.
    return Flops(cost.prompt_linear_flops(config, length), whole.attention * pairs // length**2)


def crossover(config: ModelConfig) -> float:
    """The whole prompt's length at which attention takes half of the FLOPs, masked pairs included.

    If a kernel skips masked pairs it is twice that.
    """
    one, two = prefill(config, 1, 1), prefill(config, 2, 2)
    return (two.linear - one.linear) / one.attention
