"""The least time that a step can take on a device whose bandwidth and product rate are known. Pure arithmetic.

    decode    max(bytes / bandwidth, operations / GEMM rate): a step reads every weight once, and all keys and values
              of every sequence
    prefill   the same over the whole prompt, with the causal half of the pairs; and of one position
              alone what follows the last layer's attention, logits and all

A token table that is only looked up is not read: an untied model's input table is no weight of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.spec import cost
from model.spec.config import ModelConfig, Positions


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device does at most: bytes read a second, and floating-point operations of matrix products a second."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a step must move and compute at least."""

    num_bytes: float
    flops: float

    def seconds(self, ceilings: Ceilings) -> float:
        """At best."""
        return max(self.num_bytes / ceilings.bytes_per_second, self.flops / ceilings.flops_per_second)


def decode_work(config: ModelConfig, batch: int, length: int, itemsize: int) -> Work:
    """One token for each of so many sequences, each of which then has `length`; numbers of `itemsize` bytes."""
    one = cost.forward_flops(config, length)
    flops = batch * (one.linear + one.attention) / length
    return Work(weight_bytes(config, itemsize) + batch * length * kv_token_bytes(config, itemsize), flops)


def prefill_work(config: ModelConfig, length: int, itemsize: int) -> Work:
    """A whole prompt, its keys and values written, and the logits behind its last token."""
    attention = cost.pair_flops(config) * cost.attended_pairs(config, length)
    num_bytes = weight_bytes(config, itemsize) + length * kv_token_bytes(config, itemsize)
    return Work(num_bytes, cost.prompt_linear_flops(config, length) + attention)


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Weights that a step reads whole."""
    looked_up = 0 if config.tie_embeddings else config.d_model * config.vocab_size
    if config.positions is Positions.LEARNED:
        looked_up += config.d_model * config.context
    return (cost.num_parameters(config) - looked_up) * itemsize


def kv_token_bytes(config: ModelConfig, itemsize: int) -> float:
    """Keys and values of a token."""
    return config.kv_bytes_per_token * itemsize / 4
