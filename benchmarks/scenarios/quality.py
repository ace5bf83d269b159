"""What quantization costs: the quality of a checkpoint's artifacts beside PyTorch's own, on held-out data.

    stdlib   bits per byte of held-out modules, every token predicted by the artifact's graph
    dates    share of held-out dates written exactly, by the server's engine over the artifact
    pairs    BLEU of held-out translations, by the engine; PyTorch's greedy translations beside them

The checkpoint's training data decide which of them it is. All figures of a run are of the same data; the first row is
the checkpoint in PyTorch. An artifact is computed on the device that it was exported for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.frame import models
from benchmarks.frame.engine import greedy_request, load_engine, serve
from benchmarks.frame.errors import ArgumentError
from benchmarks.frame.rounds import say
from benchmarks.frame.scenario import Run, Scenario, Settings, option
from export import text_loss
from model import checkpoint, evaluate
from model.checkpoint import Checkpoint
from model.data import dates, pairs, stdlib
from model.data.batches import Pair
from model.data.config import DataConfig, DataSource
from model.nn.transformer import DecoderOnly, EncoderDecoder
from model.spec import artifact
from model.spec.artifact import Manifest
from model.spec.tokenizer import Tokenizer
from model.training.presets import resolve
from service.engine.scheduler import EngineLimits

_DATES_SEED = 0
_ROWS = 32
_EXTRA_TOKENS = {"dates": 8, "pairs": 50}


@dataclass(frozen=True, slots=True, kw_only=True)
class QualitySettings(Settings):
    """What is compared."""

    precision: str = option("")
    checkpoint: Path = option(text="trained on stdlib, dates or pairs")  # noqa: RUF009 (a field)
    artifacts: tuple[Path, ...] = option((), "exported from it", spaced=True)
    precisions: tuple[str, ...] = option(("int8", "int4", "int4-kv8"), "exported in turn, where no artifact is given")
    text_bytes: int = option(96 * 1024, "held-out text to score, in whole modules", least=1, quick=2048)
    num_dates: int = option(500, "held-out dates", least=1, quick=20)
    recipe: str = option("", "recipe of the training, for held-out pairs")
    corpus: str = option("", "files of the pairs, if not the recipe's")
    num_pairs: int = option(1000, "held-out pairs, at most", least=1, quick=20)


@dataclass(frozen=True, slots=True)
class Row:
    """One system's figure; `num_bytes` is the size of its graphs and weights on disk."""

    system: str
    name: str
    precision: str
    kv_precision: str
    value: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of merit, the data it is taken on, and how, of the checkpoint and of an artifact."""

    name: str
    data: str
    of_checkpoint: Callable[[], float]
    of_artifact: Callable[[Path, Manifest], float]


def measure(settings: QualitySettings, run: Run) -> dict[str, Any]:
    """The checkpoint, then its artifacts.

    Raises:
        ArgumentError: if they cannot be compared.
    """
    try:
        source = checkpoint.load(settings.checkpoint)
        work = run.build / "scenarios" / "quality" / settings.checkpoint.name
        made = (models.export(settings.checkpoint, work, precision) for precision in settings.precisions)
        artifacts = [(folder, _matching(folder, source)) for folder in settings.artifacts or made]
    except (checkpoint.CheckpointError, artifact.ArtifactError) as error:
        raise ArgumentError(str(error)) from error
    how = _measure(source, settings)
    say(f"{how.name} of {how.data}")
    weights = (settings.checkpoint / checkpoint.WEIGHTS).stat().st_size
    rows = [_shown(Row("pytorch", str(settings.checkpoint), "fp32", "fp32", how.of_checkpoint(), weights))]
    for folder, manifest in artifacts:
        num_bytes = sum(entry.num_bytes for name, entry in manifest.files.items() if ".onnx" in name)
        precisions = str(manifest.precision), str(manifest.kv_cache.precision)
        rows.append(_shown(Row("onward", str(folder), *precisions, how.of_artifact(folder, manifest), num_bytes)))
    return {"measure": how.name, "data": how.data, "rows": [asdict(row) for row in rows]}


def _measure(source: Checkpoint, settings: QualitySettings) -> Measure:
    data, model = source.training.get("data", {}), source.model
    if data.get("name") == DataSource.STDLIB and isinstance(model, DecoderOnly):
        texts = held_out_text(settings.text_bytes)
        tokenizer = Tokenizer.load(source.tokenizer)
        return Measure(
            "bits_per_byte",
            f"{sum(len(text.encode()) for text in texts)} bytes of {len(texts)} held-out files, {stdlib.SOURCE}",
            lambda: evaluate.text_likelihood(model.eval(), tokenizer, texts).bits_per_byte,
            lambda folder, manifest: text_loss.bits_per_byte(folder, manifest, texts),
        )
    if not isinstance(model, EncoderDecoder):
        raise ArgumentError(f"{source.folder} was trained on {data.get('name')}, there is no measure for that")
    reader, writer = Tokenizer.load(source.tokenizer), Tokenizer.load(source.target_tokenizer)
    if data.get("name") == DataSource.DATES:
        examples = dates.held_out(settings.num_dates, _DATES_SEED)
        targets = [example.iso for example in examples]
        sources = [reader.encode(example.text) for example in examples]
        encoded = [Pair(text, writer.encode_plain(target)) for text, target in zip(sources, targets, strict=True)]
        new = [len(pair.target) + _EXTRA_TOKENS["dates"] for pair in encoded]

        def share(answers: Sequence[str]) -> float:
            return sum(answer == target for answer, target in zip(answers, targets, strict=True)) / len(targets)

        return Measure(
            "exact_match",
            f"{len(examples)} held-out dates, {dates.SOURCE}",
            lambda: evaluate.exact_match(model.eval(), encoded),
            lambda folder, _: share(translate(folder, sources, new, writer, settings.threads)),
        )
    if not settings.recipe:
        raise ArgumentError(f"{source.folder} was trained on {data.get('name')}: give --recipe for its held-out pairs")
    overrides = [f"paths={json.dumps([str(settings.corpus)])}"] if settings.corpus else []
    recipe = resolve(settings.recipe, overrides)
    held_out = hold_out(source, recipe.data, settings.num_pairs) if recipe.data else []
    if not held_out:
        raise ArgumentError(f"{settings.recipe} has no held-out pairs that fit the model")
    sources, references = [ids for ids, _ in held_out], [reference for _, reference in held_out]
    new = [len(ids) + _EXTRA_TOKENS["pairs"] for ids in sources]

    def bleu(answers: Sequence[str]) -> float:
        return float(evaluate.translation_scores(answers, references)["bleu"])

    return Measure(
        "bleu",
        f"{len(sources)} held-out pairs of {settings.recipe}",
        lambda: bleu([writer.decode(answer) for answer in evaluate.greedy(model.eval(), sources, new)]),
        lambda folder, _: bleu(translate(folder, sources, new, writer, settings.threads)),
    )


def hold_out(source: Checkpoint, data: DataConfig, count: int) -> list[tuple[list[int], str]]:
    """Source ids and reference of the first test pairs whose lengths fit the model."""
    config, corpus = source.config, pairs.load(data).test
    reader, writer = Tokenizer.load(source.tokenizer), Tokenizer.load(source.target_tokenizer)
    sources = reader.encode_batch([pair.source for pair in corpus])
    targets = writer.encode_plain_batch([pair.target for pair in corpus])
    return [
        (list(ids), pair.target)
        for ids, target, pair in zip(sources, targets, corpus, strict=True)
        if 1 <= len(ids) <= config.source_context and len(target) < config.context
    ][:count]


def translate(
    folder: Path, sources: Sequence[Sequence[int]], new: Sequence[int], writer: Tokenizer, threads: int
) -> list[str]:
    """Greedy outputs of the engine for encoder-decoder sources, all requested at once."""
    engine = load_engine(folder, EngineLimits(max_batch_size=_ROWS), threads)
    requests = [
        greedy_request(str(number), source, bound, ignore_eos=False)
        for number, (source, bound) in enumerate(zip(sources, new, strict=True))
    ]
    answers = serve(engine, ((0, request) for request in requests))
    return [writer.decode(answers.tokens[request.request_id]) for request in requests]


def held_out_text(num_bytes: int) -> list[str]:
    """Whole held-out modules, in the order of their paths, until there are so many bytes or no more modules."""
    texts: list[str] = []
    for file in stdlib.split().held_out:
        if sum(len(text.encode()) for text in texts) >= num_bytes:
            break
        texts.append(file.text)
    return texts


def _matching(folder: Path, source: Checkpoint) -> Manifest:
    manifest = artifact.load(folder)
    if manifest.config != source.config:
        raise ArgumentError(f"{folder} holds another model than {source.folder}")
    return manifest


def _shown(row: Row) -> Row:
    precision = f"{row.precision:5} over {row.kv_precision} K/V"
    say(f"{row.system:8} {precision} {row.value:.4f}  {row.num_bytes / 1e6:.2f} MB  {row.name}")
    return row


SCENARIO = Scenario(__name__, QualitySettings, measure)
