"""Recipes: model, training and data together. Named presets, files, and overrides on top of either.

A recipe file (JSON or TOML) has the shape of the presets below: a table `model` with `ModelConfig`'s fields, or with
`RecurrentConfig`'s where `architecture` is recurrent, and, for training, the tables `train` (`TrainConfig`) and `data`
(`DataConfig`). Needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.data.config import ARCHITECTURES, DataConfig, DataConfigError
from model.spec.config import ConfigError, ModelConfig
from model.spec.recurrent import NOT_EXPORTED, NetworkConfig, RecurrentConfig, config_kind
from model.spec.tokenizer import BOS_ID, EOS_ID, PAD_ID
from model.training.config import Parallelism, TrainConfig, TrainConfigError


class RecipeError(ValueError):
    """Invalid recipe or override; `problems` lists every reason."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{source}: " + "; ".join(problems))


@dataclass(frozen=True, slots=True)
class Recipe:
    """`data` and `train` are None for a model that is only ever given random weights.

    Where there are data, `model.vocab_size` bounds the vocabulary that is made; the checkpoint says what it came to.
    """

    name: str
    model: NetworkConfig
    data: DataConfig | None = None
    train: TrainConfig | None = None

    @property
    def transformer(self) -> ModelConfig:
        """The model, for those that export it.

        Raises:
            RecipeError: when it is recurrent.
        """
        if isinstance(self.model, RecurrentConfig):
            raise RecipeError(self.name, [NOT_EXPORTED])
        return self.model


_OF_PAIRS_ONLY = frozenset({"strip_markup", "min_words", "shared_tokenizer", "target_tokenizer_file"})
_TABLES = ("model", "data", "train")

# Raw values, not configurations: derived sizes (head_dim, …) follow an override of what they derive from.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "dates": {
        "data": {"source": "dates", "tokenizer": "characters", "max_examples": 40000},
        "model": {
            "architecture": "encoder-decoder",
            "vocab_size": 128,
            "context": 128,
            "d_model": 128,
            "num_encoder_layers": 2,
            "num_layers": 2,
            "num_heads": 4,
            "d_ff": 512,
            "positions": "sinusoidal",
            "activation": "relu",
            "mlp_bias": True,
            "scale_embeddings": True,
        },
        "train": {
            "steps": 1000,
            "batch_tokens": 800,
            "matrix_learning_rate": 1e-2,
            "warmup_fraction": 0.08,
        },
    },
    # Bahdanau et al. (2015) in small: a GRU with additive attention, as many parameters as `dates`.
    "dates-recurrent": {
        "data": {"source": "dates", "tokenizer": "characters", "max_examples": 40000},
        "model": {
            "architecture": "recurrent",
            "cell": "gru",
            "attention": "additive",
            "vocab_size": 128,
            "context": 128,
            "d_model": 128,
            "hidden": 181,
        },
        "train": {
            "steps": 1000,
            "batch_tokens": 800,
            "optimizer": "adamw",
            "learning_rate": 1e-3,
            "warmup_fraction": 0.08,
        },
    },
    "stdlib": {
        "data": {"source": "stdlib"},
        "model": {
            "architecture": "decoder-only",
            # A batch's float32 logits just fit 32 MiB; glibc returns larger blocks to the kernel after every use.
            "vocab_size": 4000,
            "context": 1024,
            "d_model": 192,
            "num_layers": 4,
            "num_heads": 3,
            "d_ff": 768,
            "activation": "relu",
        },
        "train": {
            "steps": 500,
            "batch_tokens": 2048,
            "row_tokens": 128,
            "long_fraction": 0.35,
            "learning_rate": 3e-2,
            "matrix_learning_rate": 1e-2,
            "warmup_fraction": 0.03,
        },
    },
    # "Attention Is All You Need", the base model of table 3 with the training of section 5: Vaswani et al. (2017). The
    # paper's rate is d^-0.5 · min(step^-0.5, step · 4000^-1.5), which peaks at (512 · 4000)^-0.5 = 6.99e-4. A batch
    # held about 25,000 source and as many target tokens, on eight cards.
    "paper": {
        "data": {"source": "tsv"},
        "model": {
            "architecture": "encoder-decoder",
            "vocab_size": 37000,
            "context": 512,
            "d_model": 512,
            "num_encoder_layers": 6,
            "num_layers": 6,
            "num_heads": 8,
            "d_ff": 2048,
            "positions": "sinusoidal",
            "norm": "layernorm",
            "norm_placement": "post",
            "activation": "relu",
            "mlp_bias": True,
            "scale_embeddings": True,
            "dropout": 0.1,
        },
        "train": {
            "steps": 100000,
            "batch_tokens": 6250,
            "gradient_accumulation": 8,
            "optimizer": "adamw",
            "learning_rate": 6.99e-4,
            "schedule": "noam",
            "warmup_fraction": 0.04,
            "beta2": 0.98,
            "epsilon": 1e-9,
            "label_smoothing": 0.1,
            "evaluate_every": 1000,
            "checkpoint_every": 1000,
        },
    },
    # GPT-2's shape: Radford et al. (2019).
    "gpt2-124m": {
        "model": {
            "architecture": "decoder-only",
            "vocab_size": 50257,
            "context": 1024,
            "d_model": 768,
            "num_layers": 12,
            "num_heads": 12,
            "d_ff": 3072,
            "positions": "learned",
            "norm": "layernorm",
            "activation": "gelu",
            "attention_bias": True,
            "mlp_bias": True,
        },
    },
    # Llama's parts at GPT-2's size: Touvron et al. (2023), grouped queries as in its successors.
    "llama-110m": {
        "model": {
            "architecture": "decoder-only",
            "vocab_size": 32000,
            "context": 4096,
            "d_model": 768,
            "num_layers": 12,
            "num_heads": 12,
            "num_kv_heads": 4,
            "d_ff": 2048,
        },
    },
    # Small except for its context, so that attention's n² dominates the time of a step.
    "law": {
        "model": {
            "architecture": "decoder-only",
            "vocab_size": 1024,
            "context": 8192,
            "d_model": 128,
            "num_layers": 2,
            "num_heads": 4,
            "d_ff": 512,
            "norm": "layernorm",
            "activation": "gelu",
        },
    },
}


def resolve(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a preset or a file, with `key=value` overrides of its fields.

    Args:
        source: a key of `PRESETS`, or the path of a `.json` or `.toml` file.
        overrides: keys are field names of the three configurations, values JSON or, failing that, text.

    Raises:
        RecipeError: listing every problem of model, data, training and overrides.
    """
    values = PRESETS[source] if source in PRESETS else _read(source)
    problems = [f"unknown entry {key!r}" for key in values if key not in _TABLES]
    tables = {key: _table(values, key, problems) for key in _TABLES}
    given = {"model", *values.keys()}
    for override in overrides:
        problems += _override(tables, override, given)
    model = _build(config_kind(tables["model"]).from_dict, tables["model"], problems)
    data = _build(DataConfig.from_dict, tables["data"], problems) if "data" in given else None
    train = _build(TrainConfig.from_dict, tables["train"], problems) if "train" in given else None
    if ("data" in given) != ("train" in given):
        problems.append("data and train go together: one is missing")
    # Every tokenizer that is made here has these ids.
    if model and (model.pad_id, model.bos_id, model.eos_id) != (PAD_ID, BOS_ID, EOS_ID):
        problems.append(f"pad_id, bos_id, eos_id must be {PAD_ID}, {BOS_ID}, {EOS_ID} where the tokenizer is made here")
    if model and train and data:
        problems += _check(model, train, data)
    if problems or model is None:
        raise RecipeError(source, problems)
    return Recipe(Path(source).stem, model, data, train)


def _table(values: Mapping[str, Any], key: str, problems: list[str]) -> dict[str, Any]:
    table = values.get(key, {})
    if key == "data" and isinstance(table, str):
        # A source without settings may be given by its name.
        return {"source": table}
    if not isinstance(table, Mapping):
        problems.append(f"{key} is not a table")
        return {}
    return dict(table)


def _read(source: str) -> Mapping[str, Any]:
    path = Path(source)
    parsers = {".json": json.loads, ".toml": tomllib.loads}
    if path.suffix not in parsers:
        raise RecipeError(source, [f"neither a preset ({', '.join(PRESETS)}) nor a .json or .toml file"])
    try:
        values = parsers[path.suffix](path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(source, [str(error)]) from error
    if not isinstance(values, Mapping):
        raise RecipeError(source, ["not a table of model, train and data"])
    return values


def _override(tables: Mapping[str, dict[str, Any]], override: str, given: Collection[str]) -> list[str]:
    """Puts one override into the table that has its field; returns the problems."""
    key, separator, text = override.partition("=")
    if not separator:
        return [f"override {override!r} is not key=value"]
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    kinds = {"model": config_kind(tables["model"]), "data": DataConfig, "train": TrainConfig}
    for table, kind in kinds.items():
        if key in {field.name for field in dataclasses.fields(kind)}:
            if table not in given:
                return [f"override {key!r}: this recipe is not trained"]
            tables[table][key] = value
            return []
    return [f"override {key!r} is a field of neither the model nor its data nor the training"]


def _build(make: Any, values: Mapping[str, Any], problems: list[str]) -> Any:
    try:
        return make(values)
    except (ConfigError, DataConfigError, TrainConfigError) as error:
        problems += error.problems
        return None


def _check(model: NetworkConfig, train: TrainConfig, data: DataConfig) -> list[str]:
    """Constraints between model, training and data."""
    problems = []
    if model.family not in (wanted := ARCHITECTURES[data.source]):
        problems.append(f"architecture is {model.architecture}, {data.source} needs {' or '.join(wanted)}")
    if not model.is_encoder_decoder:
        problems += [
            f"{field.name} is {value}, only pairs for an encoder-decoder have it"
            for field in dataclasses.fields(data)
            if field.name in _OF_PAIRS_ONLY and (value := getattr(data, field.name)) != field.default
        ]
    if isinstance(model, RecurrentConfig) and train.parallelism is Parallelism.FSDP:
        problems.append("parallelism is fsdp, which shards a transformer's layers: recurrent networks train with ddp")
    if train.row_tokens > model.context:
        problems.append(f"row_tokens is {train.row_tokens}, must be at most the context of {model.context}")
    return problems
