"""How good a model is, on data it never saw, beside what needs no model at all.

Dates are right or wrong: exact match. Text is scored in bits per byte, -Σ log2 p(token) over the bytes of the text,
which does not depend on the tokenizer and is what a compressor achieves too; so `xz` stands beside it.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from model.data.batches import IGNORED, Pair, pad
from model.data.dates import DateExample
from model.tokenizer import BOS_ID, PAD_ID, Tokenizer
from model.transformer import DecoderOnly, EncoderDecoder

_DATES_PER_BATCH = 100
_WINDOWS_PER_BATCH = 4


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


def exact_match(model: EncoderDecoder, tokenizer: Tokenizer, examples: Sequence[DateExample]) -> float:
    """Share of examples whose greedy answer is the ISO date, to the character and not a character more.

    Greedy decoding writes the target exactly when, fed the target, the model ranks each of its tokens first, end
    included: up to the first difference both see the same. So one teacher-forced pass decides.

    Raises:
        ValueError: when there are no examples.
    """
    if not examples:
        raise ValueError("no examples to score")
    pairs = [Pair(tokenizer.encode(example.text), tokenizer.encode_plain(example.iso)) for example in examples]
    # Neighbours of like length waste little on padding.
    pairs.sort(key=lambda pair: len(pair.source))
    num_right = 0
    with torch.inference_mode():
        for start in range(0, len(pairs), _DATES_PER_BATCH):
            batch = pad(pairs[start : start + _DATES_PER_BATCH])
            labels = torch.from_numpy(batch.labels)
            logits = model(
                torch.from_numpy(batch.source_ids),
                torch.from_numpy(batch.source_lengths),
                torch.from_numpy(batch.input_ids),
            )
            right = (logits.argmax(dim=-1) == labels) | (labels == IGNORED)
            num_right += int(right.all(dim=1).sum())
    return num_right / len(pairs)


def bits_per_byte(model: DecoderOnly, tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    """Bits per UTF-8 byte over whole texts, each by itself from its first byte to its last.

    Each text follows a bos token, and every one of its tokens is scored exactly once. Texts longer than the context are
    read in windows of the whole context that overlap by half, so that a token is predicted from at least half a context
    wherever that much text precedes it. The end of the text is not scored, as it is no byte.

    Args:
        model: float32, dropout off.
        tokenizer: must give the text back unchanged.
        texts: at least one byte in all.

    Raises:
        ValueError: when there is nothing to score.
    """
    num_bytes = sum(len(text.encode()) for text in texts)
    if not num_bytes:
        raise ValueError("no text to score")
    context = model.config.context
    rows = [
        row for ids in tokenizer.encode_plain_batch(texts) for row in _windows([BOS_ID, *ids], context, context // 2)
    ]
    rows.sort(key=lambda row: len(row[0]))
    nats = 0.0
    with torch.inference_mode():
        for start in range(0, len(rows), _WINDOWS_PER_BATCH):
            inputs, labels = _pad_right(rows[start : start + _WINDOWS_PER_BATCH])
            logits = model(inputs)
            # Summed over at most a few thousand tokens in float32, over batches in double precision.
            nats += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
    return nats / math.log(2.0) / num_bytes


def _xz_size(data: bytes) -> int:
    return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def _windows(tokens: list[int], context: int, stride: int) -> Iterator[tuple[list[int], list[int]]]:
    """Inputs and labels of windows that between them predict each token after the first exactly once."""
    num_predicted = 0
    for start in range(0, len(tokens) - 1, max(1, stride)):
        inputs, labels = tokens[start : start + context], tokens[start + 1 : start + context + 1]
        fresh = start + len(labels) - num_predicted
        yield inputs[: len(labels)], [IGNORED] * (len(labels) - fresh) + labels[len(labels) - fresh :]
        num_predicted += fresh
        if num_predicted == len(tokens) - 1:
            return


def _pad_right(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(inputs) for inputs, _ in rows)
    inputs = [row + [PAD_ID] * (longest - len(row)) for row, _ in rows]
    labels = [row + [IGNORED] * (longest - len(row)) for _, row in rows]
    return torch.tensor(inputs), torch.tensor(labels)
