"""The reference decoder: slow decoding without a cache, by the paper's formula; the oracle of parity tests.

Each call runs the whole model over one whole sequence, unpadded, in evaluation mode and float32, with `attend` and no
fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from model.nn.attention import Attend, Score, attend, attend_and_weigh, dot_scores
from model.nn.transformer import EncoderDecoder, Transformer
from model.spec.artifact import AttentionKind, attention_layers


def logits(model: Transformer, sequence: Sequence[int], source: Sequence[int] | None = None) -> Tensor:
    """Logits of the token after each position of one sequence.

    Args:
        model: any device, float32.
        sequence: 1…context decoder tokens, the start token of an encoder-decoder included.
        source: 1…source_context encoder tokens; None for a decoder-only model.

    Returns:
        `[T, V] float32` on the CPU.

    Raises:
        ValueError: for an empty or too long sequence or source, a missing or an unexpected source, or a model that is
            not float32.
    """
    _check(model, sequence, source)
    device = model.embedding.tokens.weight.device
    target_ids = torch.tensor([sequence], device=device)
    with _evaluating(model), torch.no_grad(), torch.autocast(device.type, enabled=False):
        if isinstance(model, EncoderDecoder):
            source_ids = torch.tensor([source], device=device)
            source_lengths = torch.tensor([source_ids.shape[1]], device=device)
            out: Tensor = model(source_ids, source_lengths, target_ids, attend)
        else:
            out = model(target_ids, attend)
    return out[0].cpu()


def greedy(
    model: Transformer,
    prompt: Sequence[int],
    source: Sequence[int] | None = None,
    *,
    max_tokens: int,
    eos_ids: Collection[int] = (),
    start_id: int | None = None,
) -> list[int]:
    """Greedy decoding with everything recomputed for each token; the lowest id wins a tie.

    Returns the new tokens, the ending one included. The context may end the output before `max_tokens`. `start_id`
    precedes the prompt, which may be empty then. Other arguments and errors as in `logits`.
    """
    sequence = [*(() if start_id is None else (start_id,)), *prompt]
    num_given = len(sequence)
    while len(sequence) < min(num_given + max_tokens, model.config.context):
        # NumPy guarantees the first of equal maxima, torch does not.
        token = int(logits(model, sequence, source)[-1].numpy().argmax())
        sequence.append(token)
        if token in eos_ids:
            break
    return sequence[num_given:]


def attention(
    model: Transformer, sequence: Sequence[int], source: Sequence[int] | None = None
) -> dict[AttentionKind, list[Tensor]]:
    """Attention weights of every layer over one whole sequence; arguments and errors as in `logits`.

    Returns:
        By kind and layer `[H, S, T] float32` on the CPU: row i is query i's distribution over the keys.
    """
    _check(model, sequence, source)
    device = model.embedding.tokens.weight.device
    found: dict[AttentionKind, list[Tensor]] = {kind: [] for kind in attention_layers(model.config)}
    target_ids = torch.tensor([sequence], device=device)
    with _evaluating(model), torch.no_grad(), torch.autocast(device.type, enabled=False):
        if isinstance(model, EncoderDecoder):
            source_ids = torch.tensor([source], device=device)
            lengths = torch.tensor([source_ids.shape[1]], device=device)
            memory = model.encode(source_ids, lengths, _keeping(lambda _: found[AttentionKind.ENCODER]))
            kinds = {True: AttentionKind.DECODER, False: AttentionKind.CROSS}
            model.decode_hidden(memory, lengths, target_ids, _keeping(lambda is_causal: found[kinds[is_causal]]))
        else:
            model(target_ids, _keeping(lambda _: found[AttentionKind.DECODER]))
    return found


def _keeping(place: Callable[[bool], list[Tensor]]) -> Attend:
    """`attend` that also appends its weights to the list `place(is_causal)`."""

    def attend_and_keep(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        score: Score = dot_scores,
    ) -> Tensor:
        y, weights = attend_and_weigh(q, k, v, mask, is_causal=is_causal, score=score)
        place(is_causal).append(weights[0].cpu())
        return y

    return attend_and_keep


def _check(model: Transformer, sequence: Sequence[int], source: Sequence[int] | None) -> None:
    config = model.config
    if not 1 <= len(sequence) <= config.context:
        raise ValueError(f"sequence has {len(sequence)} tokens, must have 1 to {config.context}")
    if (source is not None) != config.is_encoder_decoder:
        raise ValueError(f"{config.architecture} model {'with no' if source is None else 'given a'} source")
    if source is not None and not 1 <= len(source) <= config.source_context:
        raise ValueError(f"source has {len(source)} tokens, must have 1 to {config.source_context}")
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        raise ValueError("the reference is float32, the model is not")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode in the block; restores the previous mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
