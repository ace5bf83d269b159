"""What each system loses at each of its precisions: bits per byte of one text, by one trained model.

A decoder-only checkpoint trained on `stdlib`, or a recipe that is trained first, is converted for every system as
`bench` does it. All score the same held-out modules in the same windows. `excess` is relative to PyTorch in float32.
What cannot be installed, converted, loaded or scored is a row with its error. Systems that share their conversion have
one row for all. `bench` counts a precision of a peer only if its loss here is no larger than ours.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.frame.errors import ArgumentError
from benchmarks.frame.models import digest
from benchmarks.frame.rounds import say
from benchmarks.frame.scenario import Run, Scenario, Settings, option
from benchmarks.frame.tables import table
from benchmarks.peers import hf_folder
from benchmarks.peers.child import SystemFailed
from benchmarks.peers.protocol import Window, nats_of
from benchmarks.peers.systems import SYSTEMS, InstallError, SystemSpec, python_of
from benchmarks.scenarios.quality import held_out_text
from benchmarks.scenarios.translation import one_line
from loadtest.child import run_module
from model import checkpoint, evaluate
from model.data.config import DataSource
from model.data.stdlib import SOURCE
from model.data.vocabulary import encode_documents
from model.nn.transformer import DecoderOnly
from model.spec.tokenizer import BOS_ID, Tokenizer
from model.training.presets import resolve

CONVERTED = tuple(name for name, spec in SYSTEMS.items() if spec.files == name)
"""One of those that share a conversion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings(Settings):
    """What is scored, by whom."""

    precision: str = option("")
    source: Path = option(text="a checkpoint trained on stdlib, or a recipe file, trained first")  # noqa: RUF009
    systems: tuple[str, ...] = option(CONVERTED, ", ".join(CONVERTED), choices=CONVERTED)
    precisions: tuple[str, ...] = option(("fp32", "bf16", "int8", "int4", "int8-kv8", "int4-kv8"), "by our names")
    text_bytes: int = option(96 * 1024, "held-out text to score, in whole modules", least=1, quick=2048)
    window: int = option(512, "tokens of a window; the next begins half of them later", least=2)
    install_timeout: float = option(3600.0, "seconds to install a system", above=0.0)
    call_timeout: float = option(1800.0, "seconds of a conversion, a load or a score", above=0.0)


@dataclass(frozen=True, slots=True)
class Weights:
    """The trained model in two formats."""

    checkpoint: Path
    hugging_face: Path
    context: int


def measure(settings: LossSettings, run: Run) -> dict[str, Any]:
    """PyTorch, then every system at every precision.

    Raises:
        ArgumentError: if the model is not trained on stdlib, is of no family that peers know, or has a context that is
            too short.
    """
    work = run.build / "scenarios" / "loss"
    folder = trained(settings.source, work)
    try:
        source = checkpoint.load(folder)
        hf_folder.family(source.config)
    except (checkpoint.CheckpointError, hf_folder.UnknownFamily) as error:
        raise ArgumentError(str(error)) from error
    if source.training.get("data", {}).get("name") != DataSource.STDLIB or not isinstance(source.model, DecoderOnly):
        raise ArgumentError(f"{folder} was not trained on {DataSource.STDLIB}")
    if settings.window >= source.config.context:
        raise ArgumentError(f"a window of {settings.window} tokens needs a context that is longer than it")
    texts = held_out_text(settings.text_bytes)
    num_bytes = sum(len(text.encode()) for text in texts)
    windows = windows_of(Tokenizer.load(source.tokenizer), texts, settings.window)
    reference = _nats(source.model.eval(), windows) / math.log(2.0) / num_bytes
    say(f"pytorch fp32: {reference:.4f} bits per byte of {num_bytes} bytes in {len(windows)} windows")
    shutil.rmtree(work / "converted", ignore_errors=True)
    weights = Weights(folder, work / "converted" / "hugging_face", source.config.context)
    hf_folder.write(folder, weights.hugging_face)
    rows = []
    for name in settings.systems:
        for precision in settings.precisions:
            if precision in SYSTEMS[name].precisions:
                row: dict[str, Any] = {"system": name, "precision": precision}
                row |= _score(SYSTEMS[name], precision, weights, windows, settings, run.build)
                if "nats" in row:
                    row["bits_per_byte"] = row.pop("nats") / math.log(2.0) / num_bytes
                    row["excess"] = row["bits_per_byte"] / reference - 1.0
                say(" ".join(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()))
                rows.append(row)
    data = f"{num_bytes} bytes of {len(texts)} held-out files, {SOURCE}"
    return {"measure": "bits_per_byte", "data": data, "reference": reference, "rows": rows}


def trained(source: Path, work: Path) -> Path:
    """The checkpoint's folder; a recipe is trained once.

    Raises:
        RuntimeError: with the trainer's last words.
    """
    if source.is_dir():
        return source
    try:
        recipe = resolve(str(source))
    except ValueError as error:
        raise ArgumentError(str(error)) from error
    folder = work / f"{recipe.name}-{digest(recipe.model)}"
    record = folder / "run.json"
    if not record.exists() or not json.loads(record.read_text(encoding="utf-8")).get("finished"):
        say(f"training {recipe.name}")
        shutil.rmtree(folder, ignore_errors=True)
        run_module("model", "train", str(source), "--out", str(folder))
    return folder


def windows_of(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> list[Window]:
    """Windows of at most `length` + 1 ids that together score each token of each text exactly once."""
    return [
        ([*inputs, labels[-1]], sum(label >= 0 for label in labels))
        for ids in encode_documents(tokenizer, texts)
        for inputs, labels in evaluate.windows([BOS_ID, *ids.tolist()], length, length // 2)
    ]


def _nats(model: DecoderOnly, windows: Sequence[Window]) -> float:
    with torch.inference_mode():
        return sum(nats_of(model(torch.tensor([ids[:-1]]))[0].numpy(), ids, scored) for ids, scored in windows)


def _score(
    spec: SystemSpec, precision: str, weights: Weights, windows: Sequence[Window], settings: LossSettings, build: Path
) -> dict[str, Any]:
    """A system's version and nats, or its error."""
    found: dict[str, Any] = {}
    try:
        python = Path(sys.executable) if spec.is_ours else python_of(spec, build / "venvs", settings.install_timeout)
        with spec.started(
            python,
            weights.checkpoint if spec.is_ours else weights.hugging_face,
            weights.hugging_face.parent / spec.files,
            build / "logs" / f"loss-{spec.name}-{precision}.log",
            precision=precision,
            threads=settings.threads,
            max_batch=1,
            context=weights.context,
        ) as child:
            child.ask({"do": "prepare"}, settings.call_timeout)
            found["version"] = child.ask({"do": "load"}, settings.call_timeout)["version"]
            question = {"do": "score", "windows": windows}
            found["nats"] = child.ask(question, settings.call_timeout)["nats"]
    except (InstallError, SystemFailed, OSError) as error:
        found["error"] = one_line(error)
    return found


def render(results: Mapping[str, Any]) -> str:
    """The document."""
    rows = [row for row in results["rows"] if "bits_per_byte" in row]
    lines = [
        (row["system"], row["version"], row["precision"], f"{row['bits_per_byte']:.4f}", f"{row['excess']:+.2%}")
        for row in rows
    ]
    failures = [
        f"- **{row['system']}**, {row['precision']}: `{row['error'].replace('`', chr(39))}`"
        for row in results["rows"]
        if "error" in row
    ]
    return "\n".join(
        [
            "# Loss by system and precision",
            "",
            f"Bits per byte of {results['data']}. PyTorch in float32 has {results['reference']:.4f}.",
            "",
            *table("system|version|precision|bits per byte|over PyTorch", lines, text_columns=3),
            *(["", "## Failures", "", *failures] if failures else []),
        ]
    )


SCENARIO = Scenario(__name__, LossSettings, measure, render)
