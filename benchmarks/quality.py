"""What fewer bits cost: the quality of one checkpoint's artifacts beside PyTorch's own, on data it never saw.

    stdlib   bits per byte of held-out modules, every token of them predicted by the artifact's graph
    dates    share of held-out dates written exactly, by the server's own engine over the artifact

Which of the two it is, the checkpoint says. All figures of a run are of the same data; the first row is the checkpoint
itself in PyTorch. Progress goes to stderr; the last line of stdout is one JSON object.

    python -m benchmarks.quality CHECKPOINT ARTEFACT... [--text-bytes N] [--num-dates N] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from model import checkpoint, evaluate
from model.checkpoint import Checkpoint
from model.data import dates, stdlib
from model.data.batches import Pair
from model.data.config import DataSource
from model.data.vocabulary import encode_documents
from model.nn.transformer import DecoderOnly, EncoderDecoder
from model.spec import artifact
from model.spec.artifact import DECODER, TARGET_TOKENIZER, TOKENIZER, Manifest
from model.spec.config import Positions
from model.spec.tokenizer import BOS_ID, Tokenizer
from service.engine.engine import Engine, LastRun
from service.engine.factory import build_engine
from service.engine.scheduler import EngineLimits
from service.engine.sessions.session import GraphSession, SessionOptions
from service.engine.types import GenerationRequest, SamplingParams, StoppingParams, TokenEvent

TEXT_BYTES = 96 * 1024
NUM_DATES = 500
_DATES_SEED = 0
_ROWS = 32
_EXTRA_TOKENS = 8


class QualityError(Exception):
    """What was given cannot be compared."""


@dataclass(frozen=True, slots=True)
class Row:
    """One system's figure; `num_bytes` is what its graphs and weights take on the disk."""

    system: str
    name: str
    precision: str
    kv_precision: str
    value: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of merit: its name, on what it is taken, and how, of the checkpoint and of an artifact."""

    name: str
    data: str
    of_checkpoint: Callable[[], float]
    of_artifact: Callable[[Path, Manifest], float]


def main(arguments: Sequence[str]) -> int:
    """Measures and prints; 0, or 2 when what was given cannot be compared."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("artifacts", type=Path, nargs="+", metavar="ARTEFACT")
    parser.add_argument("--text-bytes", type=int, default=TEXT_BYTES, help="held-out text to score, in whole modules")
    parser.add_argument("--num-dates", type=int, default=NUM_DATES, help="held-out dates to ask for")
    parser.add_argument("--threads", type=int, default=0, help="0 is one for each physical core")
    given = parser.parse_args(arguments)
    try:
        source = checkpoint.load(given.checkpoint)
        artifacts = [(folder, _matching(folder, source)) for folder in given.artifacts]
        options = SessionOptions(intra_op_threads=given.threads)
        measure = _measure(source, given.text_bytes, given.num_dates, options)
    except (QualityError, checkpoint.CheckpointError, artifact.ArtifactError) as error:
        print(error, file=sys.stderr)
        return 2
    _say(f"{measure.name} of {measure.data}")
    weights = (given.checkpoint / checkpoint.WEIGHTS).stat().st_size
    rows = [_shown(Row("pytorch", str(given.checkpoint), "fp32", "fp32", measure.of_checkpoint(), weights))]
    for folder, manifest in artifacts:
        num_bytes = sum(entry.num_bytes for name, entry in manifest.files.items() if ".onnx" in name)
        value = measure.of_artifact(folder, manifest)
        precisions = str(manifest.precision), str(manifest.kv_cache.precision)
        rows.append(_shown(Row("onward", str(folder), *precisions, value, num_bytes)))
    print(json.dumps({"measure": measure.name, "data": measure.data, "rows": [asdict(row) for row in rows]}))
    return 0


def bits_per_byte(folder: Path, manifest: Manifest, texts: Sequence[str], options: SessionOptions) -> float:
    """Bits per byte of whole texts, predicted by an artifact's decoder: `model.evaluate.text_likelihood` of a graph.

    Args:
        folder: a decoder-only artifact.
        manifest: its manifest.
        texts: at least one byte in all.
        options: threads.
    """
    session = GraphSession(folder, manifest.graphs[DECODER], options)
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    context = manifest.config.context
    nats = 0.0
    for ids in encode_documents(tokenizer, texts):
        for inputs, labels in evaluate.windows([BOS_ID, *ids.tolist()], context, context // 2):
            positions = np.flatnonzero(np.array(labels) >= 0)
            logits = session.run(_feeds(manifest, inputs, positions))[0].astype(np.float64)
            peaks = logits.max(axis=-1, keepdims=True)
            logprobs = logits - peaks - np.log(np.exp(logits - peaks).sum(axis=-1, keepdims=True))
            nats -= float(logprobs[np.arange(len(positions)), np.array(labels)[positions]].sum())
    return nats / math.log(2.0) / sum(len(text.encode()) for text in texts)


def exact_match(
    folder: Path, manifest: Manifest, examples: Sequence[dates.DateExample], options: SessionOptions
) -> float:
    """Share of dates that the engine writes exactly, asked greedily and all at once.

    Args:
        folder: an encoder-decoder artifact.
        manifest: its manifest.
        examples: texts and what they are in ISO 8601.
        options: threads.
    """
    source = Tokenizer.load(folder / TOKENIZER)
    target = Tokenizer.load(folder / TARGET_TOKENIZER) if TARGET_TOKENIZER in manifest.files else source
    limits = EngineLimits(max_batch_size=_ROWS)
    engine = build_engine(folder, manifest, target.decode, limits, options, LastRun())
    for number, example in enumerate(examples):
        engine.add_request(
            GenerationRequest(
                request_id=str(number),
                model=folder.name,
                prompt_token_ids=tuple(source.encode(example.text)),
                sampling=SamplingParams(temperature=0.0),
                stopping=StoppingParams(max_tokens=len(target.encode_plain(example.iso)) + _EXTRA_TOKENS),
            )
        )
    answers = _answers(engine)
    right = sum(target.decode(answers[str(number)]) == example.iso for number, example in enumerate(examples))
    return right / len(examples)


def held_out_text(num_bytes: int) -> list[str]:
    """Whole held-out modules, in the order of their paths, until there are so many bytes or no more modules."""
    texts: list[str] = []
    for file in stdlib.split().held_out:
        if sum(len(text.encode()) for text in texts) >= num_bytes:
            break
        texts.append(file.text)
    return texts


def _measure(source: Checkpoint, text_bytes: int, num_dates: int, options: SessionOptions) -> Measure:
    name = source.training.get("data", {}).get("name")
    model = source.model
    if name == DataSource.STDLIB and isinstance(model, DecoderOnly):
        texts = held_out_text(text_bytes)
        tokenizer = Tokenizer.load(source.tokenizer)
        return Measure(
            "bits_per_byte",
            f"{sum(len(text.encode()) for text in texts)} bytes of {len(texts)} held-out files, {stdlib.SOURCE}",
            lambda: evaluate.text_likelihood(model.eval(), tokenizer, texts).bits_per_byte,
            lambda folder, manifest: bits_per_byte(folder, manifest, texts, options),
        )
    if name == DataSource.DATES and isinstance(model, EncoderDecoder):
        examples = dates.held_out(num_dates, _DATES_SEED)
        reader, writer = Tokenizer.load(source.tokenizer), Tokenizer.load(source.target_tokenizer)
        pairs = [Pair(reader.encode(example.text), writer.encode_plain(example.iso)) for example in examples]
        return Measure(
            "exact_match",
            f"{len(examples)} held-out dates, {dates.SOURCE}",
            lambda: evaluate.exact_match(model.eval(), pairs),
            lambda folder, manifest: exact_match(folder, manifest, examples, options),
        )
    raise QualityError(f"{source.folder} was trained on {name}, only stdlib and dates can be scored")


def _matching(folder: Path, source: Checkpoint) -> Manifest:
    manifest = artifact.load(folder)
    if manifest.config != source.config:
        raise QualityError(f"{folder} holds another model than {source.folder}")
    return manifest


def _feeds(
    manifest: Manifest, inputs: Sequence[int], positions: npt.NDArray[np.int64]
) -> dict[str, npt.NDArray[np.generic]]:
    """A whole window at once, from an empty cache; logits of these positions."""
    config, length = manifest.config, len(inputs)
    feeds: dict[str, npt.NDArray[np.generic]] = {
        "input_ids": np.array([inputs], np.int64),
        "seqlens_k": np.array([length - 1], np.int32),
        "total_sequence_length": np.array(length, np.int32),
        "logits_indices": positions.astype(np.int64),
    }
    if config.positions is not Positions.ROTARY:
        feeds["position_ids"] = np.arange(length, dtype=np.int64)[None]
    empty = np.zeros((1, config.num_kv_heads, length, config.head_dim), manifest.kv_cache.precision.dtype)
    return feeds | {f"past_{part}_{layer}": empty for layer in range(config.num_layers) for part in ("key", "value")}


def _answers(engine: Engine) -> dict[str, list[int]]:
    """Runs until nothing is left; every request's tokens that have text."""
    answers: dict[str, list[int]] = {}
    for event in _events(engine):
        if event.error is not None:
            raise event.error
        tokens = answers.setdefault(event.request_id, [])
        if event.token_id is not None and not event.is_mute:
            tokens.append(event.token_id)
    return answers


def _events(engine: Engine) -> Iterator[TokenEvent]:
    while engine.has_work:
        yield from engine.step().events


def _shown(row: Row) -> Row:
    precision = f"{row.precision:5} over {row.kv_precision} K/V"
    _say(f"{row.system:8} {precision} {row.value:.4f}  {row.num_bytes / 1e6:.2f} MB  {row.name}")
    return row


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
