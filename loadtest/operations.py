"""The operations behind what the study times, by `model.spec.cost`: so that time can be seen beside arithmetic.

`model.spec.cost` counts logits at every position, as training has them; a server computes them, and whatever follows
the last layer's attention, at the last one alone. Of the square a kernel may skip what the causal mask forbids, which
is half of it for long texts; in chunks that half is never there, as a token attends to its chunk's end and no further.
"""

from __future__ import annotations

from model.spec import cost
from model.spec.config import ModelConfig
from model.spec.cost import Flops


def prefill(config: ModelConfig, length: int, chunk: int) -> Flops:
    """Operations of a decoder-only model's prefill.

    Args:
        config: the model.
        length: of the prompt, in tokens.
        chunk: how many tokens a run of the graph computes at most.
    """
    whole = cost.forward_flops(config, length)
    pairs = sum(min(chunk, length - start) * min(start + chunk, length) for start in range(0, length, chunk))
    # All of a chunk's queries meet all keys up to its end.
    return Flops(cost.prompt_linear_flops(config, length), whole.attention * pairs // length**2)


def decode(config: ModelConfig, context: int) -> Flops:
    """Operations of one more token of a decoder-only model, the last of `context`."""
    once = cost.forward_flops(config, 1)
    return Flops(once.linear, once.attention * context)


def crossover(config: ModelConfig) -> float:
    """From how many tokens of a whole prompt on attention takes half the operations, all pairs counted.

    Where a kernel skips what the causal mask forbids it is twice as many.
    """
    one, two = prefill(config, 1, 1), prefill(config, 2, 2)
    return (two.linear - one.linear) / one.attention
