"""What an export costs on a text: bits per byte by its graph beside PyTorch's in float32.

Random weights and golden cases say how far logits move; a text says what that costs a trained model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from export.replay import Replayer
from model import evaluate
from model.data.vocabulary import encode_documents
from model.nn.transformer import DecoderOnly
from model.spec.artifact import TOKENIZER, KVPrecision, Manifest, Precision
from model.spec.tokenizer import Tokenizer

MAX_TEXT_BYTES = 32 * 1024
_MAX_CONTEXT = 512
_MAX_EXCESS = {Precision.FP32: 0.001, Precision.BF16: 0.002, Precision.INT8: 0.01, Precision.INT4: 0.05}
_MAX_KV_EXCESS = {KVPrecision.FP32: 0.0, KVPrecision.INT8: 0.01}


@dataclass(frozen=True, slots=True)
class TextLoss:
    """Bits per byte of `num_bytes` of UTF-8; the graph's may exceed PyTorch's by `limit`, a share of it."""

    num_bytes: int
    pytorch: float
    exported: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the loss is within its limit."""
        return self.exported <= self.pytorch * (1 + self.limit)


def measure(folder: Path, manifest: Manifest, model: DecoderOnly, text: str) -> TextLoss:
    """Scores a text by PyTorch and by the decoder over slots in `folder`, in windows of at most 512 tokens."""
    limit = _MAX_EXCESS[manifest.precision] + _MAX_KV_EXCESS[manifest.kv_cache.precision]
    tokenizer, context = Tokenizer.load(folder / TOKENIZER), min(_MAX_CONTEXT, manifest.config.context)
    ours = evaluate.text_likelihood(model, tokenizer, [text], context).bits_per_byte
    return TextLoss(len(text.encode()), ours, bits_per_byte(folder, manifest, [text], context), limit)


def bits_per_byte(folder: Path, manifest: Manifest, texts: Sequence[str], context: int | None = None) -> float:
    """Bits per byte of whole texts, by a decoder's graph, as `model.evaluate.text_likelihood` defines them."""
    replayer, nats = Replayer.open(folder, manifest), 0.0
    for inputs, labels in _windows(manifest, Tokenizer.load(folder / TOKENIZER), texts, context):
        positions = np.flatnonzero(labels >= 0)
        logits = replayer.prefill(inputs, positions).astype(np.float64)
        peaks = logits.max(axis=-1, keepdims=True)
        logprobs = logits - peaks - np.log(np.exp(logits - peaks).sum(axis=-1, keepdims=True))
        nats -= float(logprobs[np.arange(len(positions)), labels[positions]].sum())
    return nats / math.log(2.0) / sum(len(text.encode()) for text in texts)


def _windows(
    manifest: Manifest, tokenizer: Tokenizer, texts: Sequence[str], context: int | None
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    config = manifest.config
    longest = config.context if context is None else context
    for ids in encode_documents(tokenizer, texts):
        for inputs, labels in evaluate.windows([config.bos_id, *ids.tolist()], longest, longest // 2):
            yield np.array(inputs), np.array(labels)
