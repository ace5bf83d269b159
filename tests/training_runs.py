"""Tiny training runs for tests: sequences of a small arithmetic world, either family, a few steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model import checkpoint
from model.data.batches import Batch, LengthBuckets, Pair, Windows
from model.data.config import DataConfig
from model.nn.transformer import Transformer
from model.spec.artifact import TOKENIZER
from model.spec.config import Architecture, ModelConfig
from model.spec.recurrent import NetworkConfig
from model.tokenizer_training import one_word_per_id
from model.training import curves
from model.training.config import TrainConfig
from model.training.loop import batch_loss
from model.training.presets import Recipe
from model.training.progress import Progress, Reporter
from model.training.task import Criterion, Scores
from model.training.trainer import TrainResult, train

FAMILIES = tuple(Architecture)
VOCABULARY = 24
CLOCK = frozenset({"seconds", "tokens_per_second"})
"""What a point of the curve has from the clock, and no two runs alike."""


class Quiet(Reporter):
    """A reporter that remembers."""

    def __init__(self) -> None:
        super().__init__(None)
        self.lines: list[str] = []
        self.updates: list[Progress] = []

    def update(self, progress: Progress) -> None:
        self.updates.append(progress)

    def say(self, line: str) -> None:
        self.lines.append(line)


class PowerCut(BaseException):
    """Stands for the end of the process: nothing that handles errors handles it."""


class FakeTask:
    """A real task in all but its data; `at` runs before a micro-batch is handed out, `scores` replace the losses."""

    def __init__(
        self,
        recipe: Recipe,
        at: Mapping[int, Callable[[], object]] | None = None,
        scores: Sequence[float] | None = None,
    ) -> None:
        assert recipe.train is not None
        self._at = at or {}
        self._scores = None if scores is None else iter(scores)
        self._batches = make_batches(recipe.model, recipe.train)
        self.tokenizers = {TOKENIZER: one_word_per_id(VOCABULARY, recipe.model.family)}
        self.facts: Mapping[str, Any] = {"name": "fake", "sha256": "0" * 64, "notes": ["a small world"]}
        self.criterion = Criterion("loss", higher_is_better=False)

    def batch(self, index: int) -> Batch:
        self._at.get(index, lambda: None)()
        return self._batches(index)

    def validate(self, model: Transformer) -> Scores:
        assert not model.training
        if self._scores is not None:
            return {"loss": next(self._scores)}
        with torch.inference_mode():
            return {"loss": batch_loss(model, self._batches(10_000)).item()}

    def test(self, model: Transformer) -> Scores:
        assert not model.training
        with torch.inference_mode():
            return {"test_loss": batch_loss(model, self._batches(20_000)).item(), "how": "computed"}

    def baselines(self) -> Scores:
        return {"baseline": 0.25}


def make_batches(model: NetworkConfig, config: TrainConfig) -> Callable[[int], Batch]:
    if model.is_encoder_decoder:
        pairs = [Pair([4 + i % 7, 4 + i % 5, 2], [4 + (i % 7 + i % 5) % 11] * (1 + i % 3)) for i in range(35)]
        return LengthBuckets(pairs, config.batch_tokens, config.seed).batch
    return Windows(np.arange(400) * 7 % 20 + 4, 16, config.batch_tokens, config.seed).batch


def make_model_config(architecture: Architecture, **changes: object) -> ModelConfig:
    values: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": VOCABULARY,
        "context": 32,
        "d_model": 32,
        "num_layers": 2,
        "num_heads": 2,
        "d_ff": 64,
        "num_encoder_layers": 1 if architecture is Architecture.ENCODER_DECODER else 0,
    }
    return ModelConfig(**values | changes)


def make_recipe(architecture: Architecture, *, dropout: float = 0.0, **changes: object) -> Recipe:
    values: dict[str, Any] = {"steps": 12, "batch_tokens": 64, "precision": "fp32", "log_every": 4, "device": "cpu"}
    data = DataConfig(source="dates", max_examples=1)  # type: ignore[arg-type]
    return Recipe("fake", make_model_config(architecture, dropout=dropout), data, TrainConfig(**values | changes))


def run(
    recipe: Recipe,
    folder: Path,
    *,
    at: Mapping[int, Callable[[], object]] | None = None,
    scores: Sequence[float] | None = None,
    reporter: Quiet | None = None,
    **options: Any,
) -> TrainResult:
    return train(recipe, folder, reporter or Quiet(), make=lambda recipe: FakeTask(recipe, at, scores), **options)


def cut_power() -> None:
    raise PowerCut


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(checkpoint.load(folder).model.named_parameters())


def points(folder: Path) -> list[dict[str, Any]]:
    """The curve without what the clock says."""
    lines = (folder / curves.CURVES).read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in CLOCK} for line in lines]


def assert_same_bits(first: Path, second: Path) -> None:
    """Equal weights, to the byte of their files, and equal curves."""
    assert points(first) == points(second)
    for folder in (Path(), Path("best")):
        mine, other = (root / folder / checkpoint.WEIGHTS for root in (first, second))
        assert mine.exists() == other.exists()
        if mine.exists():
            assert mine.read_bytes() == other.read_bytes()
            assert checkpoint.load_any(first / folder).config == checkpoint.load_any(second / folder).config


def write_recipe(folder: Path, steps: int = 60) -> Path:
    """A text file and a recipe for it: small steps, and many of them."""
    text = folder / "text.txt"
    text.write_text("".join(f"{n} and {n * n % 97} make {n + n * n % 97}.\n" for n in range(1500)), encoding="utf-8")
    recipe = {
        "data": {"source": "text", "paths": [str(text)], "tokenizer": "characters"},
        "model": {
            "architecture": "decoder-only",
            "vocab_size": 64,
            "context": 32,
            "d_model": 48,
            "num_layers": 1,
            "num_heads": 2,
            "d_ff": 96,
            "dropout": 0.1,
        },
        "train": {
            "steps": steps,
            "batch_tokens": 128,
            "log_every": 1,
            "evaluate_every": 25,
            "checkpoint_every": 4,
            "device": "cpu",
        },
    }
    path = folder / "tiny.json"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return path
