"""Evaluates models on held-out data: exact match, BLEU and chrF, likelihood, and compressors as a baseline.

Nats per token and perplexity compare models of one tokenizer only. Bits per byte, -Σ log2 p(token) / bytes, do not
depend on the tokenizer and compare with compressors, hence `xz`.

Everything runs on the model's device. Callers must put models into evaluation mode.
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
from model.nn.networks import Translator
from model.nn.transformer import DecoderOnly
from model.spec.tokenizer import BOS_ID, EOS_ID, PAD_ID, Tokenizer

_BATCH_TOKENS = 4096
"""Decoder positions of a batch that needs all logits: 512 MiB of float32 for a vocabulary of 32,000."""
_BATCH_ROWS = 128
"""Sources decoded together, with the logits of one position each."""


class SequenceToSequence(Protocol):
    """A network that predicts a target from a source by teacher forcing, as `EncoderDecoder`."""

    def __call__(
        self, source_ids: Tensor, source_lengths: Tensor, target_ids: Tensor, attend: Attend = attend_fused
    ) -> Tensor:
        """`[B, S] int64` right-padded, `[B]` lengths, `[B, T] int64` → logits `[B, T, V]`."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weights, on the model's device."""
        ...


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The negative log-likelihood of tokens: `nats` is -Σ ln p(token).

    `num_bytes` is the UTF-8 length of their text, 0 if it was not counted.
    """

    nats: float
    num_tokens: int
    num_bytes: int = 0

    @property
    def loss(self) -> float:
        """Nats per token: the cross-entropy that training minimizes."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp(loss), or infinity if it exceeds the largest float."""
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
    """Bits per byte of the held-out text under xz, alone and primed with the training text."""

    xz_bits_per_byte: float
    xz_primed_bits_per_byte: float


def compressors(training: bytes, held_out: bytes) -> Compression:
    """Compresses the held-out text with xz (preset 9e): 8·len(xz(held))/len(held), and primed with the training text.

    Primed is 8·(len(xz(training + held)) - len(xz(training)))/len(held). The preset's window is 64 MiB.

    Raises:
        ValueError: when there is no held-out text.
    """
    if not held_out:
        raise ValueError("held_out is empty")
    # The compressor releases the GIL, so the two long runs use two cores.
    with ThreadPoolExecutor(max_workers=2) as pool:
        alone, seen, both = pool.map(_xz_size, (held_out, training, training + held_out))
    return Compression(8.0 * alone / len(held_out), 8.0 * (both - seen) / len(held_out))


def exact_match(model: SequenceToSequence, pairs: Sequence[Pair]) -> float:
    """Share of sources whose greedy output equals the target, its end included.

    Greedy decoding writes the target exactly if the model, fed the target, ranks each of its tokens first. So one
    teacher-forced pass decides.

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
    """The likelihood of the targets given their sources; each target's end counts as a token.

    Raises:
        ValueError: when there are no pairs.
    """
    nats, num_tokens = 0.0, 0
    for labels, logits in _teacher_forced(model, pairs):
        nats += _nats(logits, labels)
        num_tokens += int((labels != IGNORED).sum())
    return Likelihood(nats, num_tokens)


def text_likelihood(
    model: DecoderOnly, tokenizer: Tokenizer, texts: Sequence[str], context: int | None = None
) -> Likelihood:
    """The likelihood of whole texts, each after a bos token and without its end; `context` is the model's by default.

    Each token is scored once. Longer texts than the context are read in windows that overlap by half, so that every
    token has at least half a context before it, if the text does. Bits per byte require a lossless tokenizer.

    Raises:
        ValueError: when there is nothing to score.
    """
    num_bytes = sum(len(text.encode()) for text in texts)
    if not num_bytes:
        raise ValueError("no text to score")
    context, device = context or model.config.context, _device(model)
    rows = [
        row
        for ids in encode_documents(tokenizer, texts)
        for row in windows([model.config.bos_id, *ids.tolist()], context, context // 2)
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
    """Inputs and labels of windows that together predict each token after the first exactly once.

    A window has at most `context` inputs, and the next one begins `stride` later; labels that an earlier window has
    predicted are `IGNORED`.
    """
    num_predicted = 0
    for start in range(0, len(tokens) - 1, max(1, stride)):
        inputs, labels = tokens[start : start + context], tokens[start + 1 : start + context + 1]
        fresh = start + len(labels) - num_predicted
        yield inputs[: len(labels)], [IGNORED] * (len(labels) - fresh) + labels[len(labels) - fresh :]
        num_predicted += fresh
        if num_predicted == len(tokens) - 1:
            return


def greedy(model: Translator, sources: Sequence[Sequence[int]], max_tokens: int | Sequence[int]) -> list[list[int]]:
    """Batched greedy decoding without a cache; the lowest id wins a tie. Equals `reference.greedy` up to rounding.

    Sources of similar lengths are decoded together, each is encoded once, and a row leaves its batch when it ends.

    Sources are 1…source_context token ids each, with control tokens. `max_tokens` limits all outputs or each; the
    context may end them earlier. Outputs have no end token.

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

    A signature has the settings (tokenization, case, smoothing, version) that make figures comparable: Post (2018).

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
    """Labels `[B, T]` and logits `[B, T, V]`, batch by batch, in the order of least padding."""
    if not pairs:
        raise ValueError("no pairs to score")
    device = _device(model)
    for chosen in _batches(sorted(pairs, key=lambda pair: (len(pair.target), len(pair.source)))):
        source_ids, source_lengths, input_ids, labels = (part.to(device) for part in _arrays(chosen))
        with torch.inference_mode():
            logits = model(source_ids, source_lengths, input_ids)
        yield labels, logits


def _batches(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Batches of pairs, sorted by target length, within `_BATCH_TOKENS` padded positions."""
    chosen: list[Pair] = []
    for pair in pairs:
        if chosen and (len(chosen) + 1) * (len(pair.target) + 1) > _BATCH_TOKENS:
            yield chosen
            chosen = []
        chosen.append(pair)
    yield chosen


def _arrays(pairs: Sequence[Pair]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Source ids, their lengths, decoder inputs and labels, padded to the longest, not rounded up as in training."""
    shape = max(len(pair.source) for pair in pairs), max(len(pair.target) for pair in pairs) + 1
    batch = pad(pairs, shape)
    sources, lengths, inputs, labels = (
        torch.from_numpy(np.asarray(array))
        for array in (batch.source_ids, batch.source_lengths, batch.input_ids, batch.labels)
    )
    return sources, lengths, inputs, labels


def _greedy(model: Translator, sources: Sequence[Sequence[int]], bounds: Sequence[int]) -> list[list[int]]:
    """One batch of `greedy`; a bound is 0 if the context leaves no room."""
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
    """-Σ ln p(label): softmax in float32, the sum in double precision."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.sum(dtype=torch.float64).item()


def _device(model: SequenceToSequence | DecoderOnly) -> torch.device:
    return next(model.parameters()).device
