"""Recipes: presets as documented, files, overrides, and every problem in one message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model.data.config import DataConfig, DataSource, TokenizerKind
from model.spec.config import Activation, Norm, NormPlacement, Positions
from model.training.config import OptimizerName, Schedule
from model.training.presets import PRESETS, RecipeError, resolve


def problems(source: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        resolve(source, overrides)
    return caught.value.problems


SHAPES = {
    "dates": "encoder-decoder sinusoidal rmsnorm relu 2 128 4 4 512 128 128",
    "stdlib": "decoder-only rotary rmsnorm relu 4 192 3 3 768 4000 1024",
    "gpt2-124m": "decoder-only learned layernorm gelu 12 768 12 12 3072 50257 1024",
    "llama-110m": "decoder-only rotary rmsnorm swiglu 12 768 12 4 2048 32000 4096",
    "law": "decoder-only rotary layernorm gelu 2 128 4 4 512 1024 8192",
}


@pytest.mark.parametrize(("name", "shape"), SHAPES.items())
def test_presets_have_their_documented_shapes(name: str, shape: str) -> None:
    recipe = resolve(name)
    model = recipe.model
    kinds = (model.architecture, model.positions, model.norm, model.activation)
    sizes = (model.num_layers, model.d_model, model.num_heads, model.num_kv_heads, model.d_ff, model.vocab_size)
    assert " ".join(map(str, (*kinds, *sizes, model.context))) == shape
    assert recipe.name == name
    assert (recipe.data is None) == (recipe.train is None)


def test_the_papers_model_and_training_are_the_papers() -> None:
    recipe = resolve("paper")
    model, train = recipe.model, recipe.train
    assert train is not None
    assert (model.d_model, model.num_layers, model.num_encoder_layers, model.num_heads) == (512, 6, 6, 8)
    assert (model.d_ff, model.vocab_size, model.dropout) == (2048, 37000, 0.1)
    assert (model.norm, model.norm_placement) == (Norm.LAYER, NormPlacement.POST)
    assert (model.positions, model.activation) == (Positions.SINUSOIDAL, Activation.RELU)
    # Section 3.4: one table for source, target and output, times √d_model.
    assert model.tie_embeddings
    assert model.share_embeddings
    assert model.scale_embeddings
    assert (train.schedule, train.steps, train.warmup_steps) == (Schedule.NOAM, 100_000, 4000)
    assert train.learning_rate == pytest.approx((model.d_model * train.warmup_steps) ** -0.5, rel=1e-3)
    assert (train.optimizer, train.beta2, train.epsilon) == (OptimizerName.ADAMW, 0.98, 1e-9)
    assert train.label_smoothing == 0.1
    assert train.batch_tokens * train.gradient_accumulation == 2 * 25_000


def test_overrides_reach_model_data_and_training_and_leave_the_preset_alone() -> None:
    before = resolve("stdlib")
    recipe = resolve("stdlib", ["d_model=96", "steps=5", "steps=7", "optimizer=adamw", "learning_rate=1e-4"])
    assert recipe.train is not None
    assert (recipe.model.d_model, recipe.model.head_dim) == (96, 32)
    assert (recipe.train.steps, recipe.train.optimizer, recipe.train.learning_rate) == (7, OptimizerName.ADAMW, 1e-4)
    assert resolve("stdlib") == before
    data = ['paths=["a.tsv", "b"]', "min_words=3", "tokenizer=bytes", "shared_tokenizer=false"]
    assert resolve("paper", data).data == DataConfig(
        source=DataSource.TSV,
        paths=("a.tsv", "b"),
        min_words=3,
        tokenizer=TokenizerKind.BYTES,
        shared_tokenizer=False,
    )
    assert resolve("paper", ["paths=a.tsv"]) == resolve("paper", ['paths=["a.tsv"]'])


PROBLEMS: list[tuple[str, list[str], tuple[str, ...]]] = [
    ("paper", ["paths=1"], ("paths is 1, must be a string or a list of strings",)),
    ("paper", ["paths=[1]"], ("paths is [1], must be a string or a list of strings",)),
    ("paper", ["paths="], ("paths holds an empty path",)),
    ("paper", ['test_paths=["a.tsv", ""]'], ("test_paths holds an empty path",)),
    ("paper", ["source=csv"], ("source is 'csv', must be one of dates, stdlib, text, tsv, gettext, jsonl",)),
    ("paper", ["validation_fraction=1"], ("validation_fraction is 1, must be in [0, 1)",)),
    ("paper", ["min_words=-1"], ("min_words is -1, must not be negative",)),
    ("paper", ["source=text"], ("architecture is encoder-decoder, text needs decoder-only",)),
    ("paper", ["target_tokenizer_file=a"], ("target_tokenizer_file is given, shared_tokenizer must then be false",)),
    ("dates", ['paths=["a"]'], ("paths are given, dates reads no files",)),
    ("dates", ["max_examples=0"], ("max_examples is 0, dates needs at least 1",)),
    (
        "dates",
        ["architecture=decoder-only", "num_encoder_layers=0"],
        ("architecture is decoder-only, dates needs encoder-decoder",),
    ),
    ("stdlib", ["context=64"], ("row_tokens is 128, must be at most the context of 64",)),
    (
        "stdlib",
        ["min_words=4", "shared_tokenizer=false", 'target_tokenizer_file="a.json"'],
        (
            "min_words is 4, only pairs for an encoder-decoder have it",
            "shared_tokenizer is False, only pairs for an encoder-decoder have it",
            "target_tokenizer_file is a.json, only pairs for an encoder-decoder have it",
        ),
    ),
    ("law", ["steps=3"], ("override 'steps': this recipe is not trained",)),
    ("law", ["pad_id=5"], ("pad_id, bos_id, eos_id must be 0, 1, 2 where the tokenizer is made here",)),
    (
        "dates",
        ["steps=0", "num_heads=3", "colour=blue", "seed"],
        (
            "override 'colour' is a field of neither the model nor its data nor the training",
            "override 'seed' is not key=value",
            "d_model 128 is not a multiple of num_heads 3",
            "steps is 0, must be at least 1",
        ),
    ),
    ("detas", [], (f"neither a preset ({', '.join(PRESETS)}) nor a .json or .toml file",)),
]


@pytest.mark.parametrize(("source", "overrides", "expected"), PROBLEMS)
def test_every_problem_of_a_recipe_is_reported(source: str, overrides: list[str], expected: tuple[str, ...]) -> None:
    found = problems(source, *overrides)
    assert set(expected) <= set(found)
    assert len(found) == len(expected) or source == "paper"


def test_a_sources_name_alone_stands_for_a_table_with_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**PRESETS["stdlib"], "data": "stdlib"}), encoding="utf-8")
    assert resolve(str(path)).data == resolve("stdlib").data


def test_data_and_training_go_together(tmp_path: Path) -> None:
    for missing in ("data", "train"):
        path = tmp_path / "half.json"
        path.write_text(
            json.dumps({key: value for key, value in PRESETS["dates"].items() if key != missing}), encoding="utf-8"
        )
        assert problems(str(path)) == ("data and train go together: one is missing",)


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_file_has_the_shape_of_a_preset(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mine{suffix}"
    values = PRESETS["dates"]
    if suffix == ".json":
        path.write_text(json.dumps(values), encoding="utf-8")
    else:
        tables = [
            f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values[name].items())
            for name in ("model", "data", "train")
        ]
        path.write_text("".join(tables), encoding="utf-8")
    recipe, preset = resolve(str(path)), resolve("dates")
    assert (recipe.name, recipe.model, recipe.train, recipe.data) == ("mine", preset.model, preset.train, preset.data)


def test_a_file_of_a_model_alone_is_enough_for_random_weights(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({"model": PRESETS["law"]["model"]}), encoding="utf-8")
    recipe = resolve(str(path))
    assert (recipe.data, recipe.train) == (None, None)
    assert recipe.model == resolve("law").model


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"model": 3}', '{"model": {}, "extra": 1}'])
def test_a_missing_or_malformed_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.json"
    assert problems(str(path))
    path.write_text(content, encoding="utf-8")
    assert problems(str(path))
