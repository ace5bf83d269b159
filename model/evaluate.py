"""How good a model is, on data it never saw, beside what needs no model at all.

Dates are right or wrong: exact match. A translation is compared with a person's: BLEU and chrF. Any target has a
likelihood: nats per token and their exponential, the perplexity, which compare models of one tokenizer only. Text is
scored in bits per byte, -Σ log2 p(token) over the bytes of the text, which does not depend on the tokenizer and is what
a compressor achieves too; so `xz` stands beside it.

Everything runs where the model's weights are. Models are in evaluation mode: their callers see to that.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from torch import Tensor, nn

from model.data.batches import IGNORED, Pair, pad
from model.data.vocabulary import encode_documents
from model.nn.attention import Attend, attend_fused
from model.nn.transformer import DecoderOnly, EncoderDecoder
from model.spec.tokenizer import BOS_ID, EOS_ID, PAD_ID, Tokenizer

_BATCH_TOKENS = 4096
"""Decoder positions of a batch whose logits are all wanted: 512 MiB of float32 for a vocabulary of 32,000."""
_BATCH_ROWS = 128
"""Sources decoded together; of each only the last position's logits are computed."""


class SequenceToSequence(Protocol):
    """What predicts a target from a source by teacher forcing: `EncoderDecoder`, or any other network that does."""

    def __call__(
        self, source_ids: Tensor, source_lengths: Tensor, target_ids: Tensor, attend: Attend = attend_fused
    ) -> Tensor:
        """`[B, S] int64` right-padded, `[B]` lengths, `[B, T] int64` → logits `[B, T, V]`."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weights; where they are is where the model runs."""
        ...


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How improbable the tokens were, together: `nats` is -Σ ln p(token).

    `num_bytes` is the UTF-8 length of the text that the tokens spell, 0 where nobody counted it.
    """

    nats: float
    num_tokens: int
    num_bytes: int = 0

    @property
    def loss(self) -> float:
        """Nats per token: the cross-entropy that training minimises."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp(loss): among how many equally likely tokens the model chooses; infinite past the largest float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the text.

        Raises:
            ValueError: when the bytes were not counted.
        """
        if not self.num_bytes:
            raise ValueError("these tokens have no bytes counted")
        return self.nats / math.log(2.0) / self.num_bytes


@dataclass(frozen=True, slots=True)
class Compression:
    """Bits per byte of the held-out text under xz, by itself and after having seen the training text."""

    xz_bits_per_byte: float
    xz_primed_bits_per_byte: float


def compressors(training: bytes, held_out: bytes) -> Compression:
    """What xz (preset 9e) makes of the held-out text: 8·len(xz(held))/len(held), and primed with the training text.

    Primed is 8·(len(xz(training + held)) - len(xz(training)))/len(held). The preset's window of 64 MiB sees all of it.

    Raises:
        ValueError: when there is no held-out text.
    """
    if not held_out:
        raise ValueError("held_out is empty")
    # The compressor releases the interpreter's lock, so the two long runs take two cores.
    with ThreadPoolExecutor(max_workers=2) as pool:
        alone, seen, both = pool.map(_xz_size, (held_out, training, training + held_out))
    return Compression(8.0 * alone / len(held_out), 8.0 * (both - seen) / len(held_out))


def exact_match(model: SequenceToSequence, pairs: Sequence[Pair]) -> float:
    """Share of sources whose greedy answer is the target, to the token and not a token more.

    Greedy decoding writes the target exactly when, fed the target, the model ranks each of its tokens first, end
    included: up to the first difference both see the same. So one teacher-forced pass decides.

    Raises:
        ValueError: when there are no pairs.
    """
    num_right = 0
    for labels, logits in _teacher_forced(model, pairs):
        # The lowest of equal maxima, as in greedy decoding.
        right = (logits.argmax(dim=-1) == labels) | (labels == IGNORED)
        num_right += int(right.all(dim=1).sum())
    return num_right / len(pairs)


def pair_loss(model: SequenceToSequence, pairs: Sequence[Pair]) -> Likelihood:
    """How improbable the targets are, given their sources; each target's end counts as one of its tokens.

    Raises:
        ValueError: when there are no pairs.
    """
    nats, num_tokens = 0.0, 0
    for labels, logits in _teacher_forced(model, pairs):
        nats += _nats(logits, labels)
        num_tokens += int((labels != IGNORED).sum())
    return Likelihood(nats, num_tokens)


def text_likelihood(model: DecoderOnly, tokenizer: Tokenizer, texts: Sequence[str]) -> Likelihood:
    """How improbable whole texts are, each by itself from its first byte to its last.

    Each text follows a bos token, and every one of its tokens is scored exactly once. Texts longer than the context are
    read in windows of the whole context that overlap by half, so that a token is predicted from at least half a context
    wherever that much text precedes it. The end of the text is not scored, as it is no byte.

    Args:
        model: any device.
        tokenizer: must give the text back unchanged, or bits per byte mean nothing.
        texts: at least one byte in all.

    Raises:
        ValueError: when there is nothing to score.
    """
    num_bytes = sum(len(text.encode()) for text in texts)
    if not num_bytes:
        raise ValueError("no text to score")
    context, device = model.config.context, _device(model)
    rows = [
        row
        for ids in encode_documents(tokenizer, texts)
        for row in windows([BOS_ID, *ids.tolist()], context, context // 2)
    ]
    rows.sort(key=lambda row: len(row[0]))
    nats, num_tokens = 0.0, 0
    per_batch = max(1, _BATCH_TOKENS // context)
    with torch.inference_mode():
        for start in range(0, len(rows), per_batch):
            inputs, labels = (part.to(device) for part in _pad_right(rows[start : start + per_batch]))
            nats += _nats(model(inputs), labels)
            num_tokens += int((labels != IGNORED).sum())
    return Likelihood(nats, num_tokens, num_bytes)


def windows(tokens: list[int], context: int, stride: int) -> Iterator[tuple[list[int], list[int]]]:
    """Inputs and labels of windows that between them predict each token after the first exactly once.

    A window's inputs are at most `context` tokens and the next one begins `stride` later; labels of what an earlier
    window has predicted are `IGNORED`, which leaves those at its end.
    """
    num_predicted = 0
    for start in range(0, len(tokens) - 1, max(1, stride)):
        inputs, labels = tokens[start : start + context], tokens[start + 1 : start + context + 1]
        fresh = start + len(labels) - num_predicted
        yield inputs[: len(labels)], [IGNORED] * (len(labels) - fresh) + labels[len(labels) - fresh :]
        num_predicted += fresh
        if num_predicted == len(tokens) - 1:
            return


def greedy(model: EncoderDecoder, sources: Sequence[Sequence[int]], max_tokens: int | Sequence[int]) -> list[list[int]]:
    """The most likely token after the most likely token, many sources at a time; the lowest id wins a tie.

    What `reference.greedy` writes, but for rounding. Sources of like lengths are decoded together, each source is
    encoded once, and a row leaves its batch when it ends. There is no cache: a score does not need one.

    Args:
        model: any device.
        sources: token ids with their control tokens, 1…source_context each.
        max_tokens: how many tokens an output may have, for all or for each; the context may end it earlier.

    Returns:
        The outputs in the sources' order, without the end token.

    Raises:
        ValueError: naming the first source that is empty or too long, or for `max_tokens` below 1.
    """
    bounds = [max_tokens] * len(sources) if isinstance(max_tokens, int) else list(max_tokens)
    if len(bounds) != len(sources):
        raise ValueError(f"{len(sources)} sources have {len(bounds)} max_tokens")
    if (least := min(bounds, default=1)) < 1:
        raise ValueError(f"max_tokens is {least}, must be at least 1")
    limit = model.config.source_context
    for index, source in enumerate(sources):
        if not 1 <= len(source) <= limit:
            raise ValueError(f"source {index} has {len(source)} tokens, must have 1 to {limit}")
    # The context counts the start token.
    bounds = [min(bound, model.config.context - 1) for bound in bounds]
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    outputs: list[list[int]] = [[] for _ in sources]
    with torch.inference_mode():
        for start in range(0, len(order), _BATCH_ROWS):
            chosen = order[start : start + _BATCH_ROWS]
            written = _greedy(model, [sources[index] for index in chosen], [bounds[index] for index in chosen])
            for index, output in zip(chosen, written, strict=True):
                outputs[index] = output
    return outputs


def translation_scores(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float | str]:
    """Corpus BLEU (Papineni et al., 2002) and chrF (Popović, 2015) by sacrebleu, 0 to 100, with their signatures.

    A signature says how a figure came about (tokenisation, case, smoothing, version), without which two figures of the
    same name cannot be compared: Post (2018).

    Raises:
        ValueError: when there is nothing to score, or not one reference for each hypothesis.
    """
    if not hypotheses:
        raise ValueError("no translations to score")
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} translations have {len(references)} references")
    scores: dict[str, float | str] = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        scores[name] = metric.corpus_score(hypotheses, [references]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores


def _xz_size(data: bytes) -> int:
    return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def _pad_right(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    longest = max(len(inputs) for inputs, _ in rows)
    inputs = [row + [PAD_ID] * (longest - len(row)) for row, _ in rows]
    labels = [row + [IGNORED] * (longest - len(row)) for _, row in rows]
    return torch.tensor(inputs), torch.tensor(labels)


def _teacher_forced(model: SequenceToSequence, pairs: Sequence[Pair]) -> Iterator[tuple[Tensor, Tensor]]:
    """Labels `[B, T]` and logits `[B, T, V]`, batch by batch, the pairs in whatever order wastes least on padding."""
    if not pairs:
        raise ValueError("no pairs to score")
    device = _device(model)
    for chosen in _batches(sorted(pairs, key=lambda pair: (len(pair.target), len(pair.source)))):
        source_ids, source_lengths, input_ids, labels = (part.to(device) for part in _arrays(chosen))
        with torch.inference_mode():
            logits = model(source_ids, source_lengths, input_ids)
        yield labels, logits


def _batches(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Pairs, shortest targets first, as many at a time as the last one's target leaves room for."""
    chosen: list[Pair] = []
    for pair in pairs:
        if chosen and (len(chosen) + 1) * (len(pair.target) + 1) > _BATCH_TOKENS:
            yield chosen
            chosen = []
        chosen.append(pair)
    yield chosen


def _arrays(pairs: Sequence[Pair]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Source ids, their lengths, decoder inputs and labels, as wide as the longest.

    No wider: rounded up, for training's sake, rows as long as the context would no longer fit into it.
    """
    shape = max(len(pair.source) for pair in pairs), max(len(pair.target) for pair in pairs) + 1
    batch = pad(pairs, shape)
    sources, lengths, inputs, labels = (
        torch.from_numpy(np.asarray(array))
        for array in (batch.source_ids, batch.source_lengths, batch.input_ids, batch.labels)
    )
    return sources, lengths, inputs, labels


def _greedy(model: EncoderDecoder, sources: Sequence[Sequence[int]], bounds: Sequence[int]) -> list[list[int]]:
    """One batch of `greedy`; bounds may be 0 where the context leaves no room."""
    device = _device(model)
    lengths = torch.tensor([len(source) for source in sources], device=device)
    longest = max(map(len, sources))
    padded = [[*source, *[PAD_ID] * (longest - len(source))] for source in sources]
    memory = model.encode(torch.tensor(padded, device=device), lengths)
    written = torch.full((len(sources), 1), BOS_ID, device=device)
    outputs: list[list[int]] = [[] for _ in sources]
    rows = list(range(len(sources)))
    ended: set[int] = set()
    while True:
        kept = [position for position, row in enumerate(rows) if row not in ended and len(outputs[row]) < bounds[row]]
        if not kept:
            return outputs
        if len(kept) < len(rows):
            chosen = torch.tensor(kept, device=device)
            memory, lengths, written = memory[chosen], lengths[chosen], written[chosen]
            rows = [rows[position] for position in kept]
        tokens = model.unembed(model.decode_hidden(memory, lengths, written)[:, -1]).argmax(dim=-1)
        written = torch.cat((written, tokens[:, None]), dim=1)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            if token == EOS_ID:
                ended.add(row)
            else:
                outputs[row].append(token)


def _nats(logits: Tensor, labels: Tensor) -> float:
    """-Σ ln p(label): softmax in float32 whatever the logits are, the sum in double precision."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.sum(dtype=torch.float64).item()


def _device(model: SequenceToSequence | DecoderOnly) -> torch.device:
    return next(model.parameters()).device
