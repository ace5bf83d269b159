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


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid(name: str) -> None:
    recipe = resolve(name)
    assert recipe.name == name
    assert (recipe.data is None) == (recipe.train is None)


def test_the_demo_models_have_their_documented_contexts() -> None:
    dates, stdlib = resolve("dates"), resolve("stdlib")
    assert dates.data is not None
    assert stdlib.data is not None
    assert (dates.data.source, dates.data.tokenizer) == (DataSource.DATES, TokenizerKind.CHARACTERS)
    assert (dates.model.context, dates.model.is_encoder_decoder) == (128, True)
    assert (stdlib.data.source, stdlib.data.tokenizer) == (DataSource.STDLIB, TokenizerKind.BPE)
    assert (stdlib.model.context, stdlib.model.positions) == (1024, Positions.ROTARY)
    assert stdlib.train is not None
    assert 0 < stdlib.train.long_steps < stdlib.train.steps


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


def test_overrides_reach_the_data() -> None:
    recipe = resolve("paper", ['paths=["a.tsv", "b"]', "min_words=3", "tokenizer=bytes", "shared_tokenizer=false"])
    assert recipe.data == DataConfig(
        source=DataSource.TSV,
        paths=("a.tsv", "b"),
        min_words=3,
        tokenizer=TokenizerKind.BYTES,
        shared_tokenizer=False,
    )


def test_one_path_needs_no_list() -> None:
    assert resolve("paper", ["paths=a.tsv"]) == resolve("paper", ['paths=["a.tsv"]'])


def test_what_only_pairs_have_is_refused_for_text() -> None:
    assert problems("stdlib", "min_words=4", "shared_tokenizer=false", 'target_tokenizer_file="a.json"') == (
        "min_words is 4, only pairs for an encoder-decoder have it",
        "shared_tokenizer is False, only pairs for an encoder-decoder have it",
        "target_tokenizer_file is a.json, only pairs for an encoder-decoder have it",
    )


def test_a_sources_name_alone_stands_for_a_table_with_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**PRESETS["stdlib"], "data": "stdlib"}), encoding="utf-8")
    assert resolve(str(path)).data == resolve("stdlib").data


def test_only_a_source_that_reads_files_lacks_them() -> None:
    lacking = {name for name in PRESETS if (data := resolve(name).data) is not None and data.lacks_files}
    assert lacking == {"paper"}
    recipe = resolve("paper", ['paths=["a.tsv"]'])
    assert recipe.data is not None
    assert not recipe.data.lacks_files


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["paths=1"], "paths is 1, must be a string or a list of strings"),
        (["paths=[1]"], "paths is [1], must be a string or a list of strings"),
        (["paths="], "paths holds an empty path"),
        (['test_paths=["a.tsv", ""]'], "test_paths holds an empty path"),
        (["source=csv"], "source is 'csv', must be one of dates, stdlib, text, tsv, gettext, jsonl"),
        (["validation_fraction=1"], "validation_fraction is 1, must be in [0, 1)"),
        (["min_words=-1"], "min_words is -1, must not be negative"),
        (["source=text"], "architecture is encoder-decoder, text needs decoder-only"),
        (["target_tokenizer_file=a.json"], "target_tokenizer_file is given, shared_tokenizer must then be false"),
    ],
)
def test_problems_of_data_are_said(overrides: list[str], problem: str) -> None:
    assert problem in problems("paper", *overrides)


def test_data_without_files_takes_no_paths_and_dates_need_a_number() -> None:
    assert problems("dates", 'paths=["a"]') == ("paths are given, dates reads no files",)
    assert problems("dates", "max_examples=0") == ("max_examples is 0, dates needs at least 1",)


def test_json_lines_suit_both_families() -> None:
    for preset in ("dates", "stdlib"):
        recipe = resolve(preset, ["source=jsonl", 'paths=["a.jsonl"]'])
        assert recipe.data is not None
        assert recipe.data.source is DataSource.JSONL


def test_data_and_training_go_together(tmp_path: Path) -> None:
    for missing in ("data", "train"):
        path = tmp_path / "half.json"
        path.write_text(
            json.dumps({key: value for key, value in PRESETS["dates"].items() if key != missing}), encoding="utf-8"
        )
        assert problems(str(path)) == ("data and train go together: one is missing",)


def test_gpt2_is_gpt2s_shape() -> None:
    model = resolve("gpt2-124m").model
    assert (model.num_layers, model.d_model, model.num_heads, model.vocab_size, model.context) == (
        12,
        768,
        12,
        50257,
        1024,
    )
    assert (model.positions, model.norm, model.activation) == (Positions.LEARNED, Norm.LAYER, Activation.GELU)


def test_llama_is_llamas_shape() -> None:
    model = resolve("llama-110m").model
    assert (model.num_layers, model.d_model, model.num_heads, model.num_kv_heads) == (12, 768, 12, 4)
    assert (model.d_ff, model.vocab_size, model.context, model.tie_embeddings) == (2048, 32000, 4096, True)
    assert (model.positions, model.norm, model.activation) == (Positions.ROTARY, Norm.RMS, Activation.SWIGLU)


def test_law_is_the_scaling_studys_shape() -> None:
    model = resolve("law").model
    assert (model.num_layers, model.d_model, model.num_heads, model.d_ff, model.context) == (2, 128, 4, 512, 8192)


def test_overrides_reach_model_and_training() -> None:
    recipe = resolve("stdlib", ["d_model=96", "steps=7", "optimizer=adamw", "learning_rate=1e-4", "activation=swiglu"])
    assert recipe.train is not None
    assert (recipe.model.d_model, recipe.model.head_dim, recipe.model.activation) == (96, 32, Activation.SWIGLU)
    assert (recipe.train.steps, recipe.train.optimizer, recipe.train.learning_rate) == (7, OptimizerName.ADAMW, 1e-4)


def test_the_last_override_of_a_field_wins() -> None:
    recipe = resolve("dates", ["steps=5", "steps=6"])
    assert recipe.train is not None
    assert recipe.train.steps == 6


def test_problems_of_overrides_model_and_training_come_together() -> None:
    found = problems("dates", "steps=0", "num_heads=3", "colour=blue", "seed")
    assert found == (
        "override 'colour' is a field of neither the model nor its data nor the training",
        "override 'seed' is not key=value",
        "d_model 128 is not a multiple of num_heads 3",
        "steps is 0, must be at least 1",
    )


def test_a_recipe_without_training_takes_no_training_overrides() -> None:
    assert problems("law", "steps=3") == ("override 'steps': this recipe is not trained",)


def test_a_preset_is_not_changed_by_overrides() -> None:
    before = resolve("dates")
    resolve("dates", ["steps=5", "d_model=64"])
    assert resolve("dates") == before


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


def test_a_name_that_is_neither_preset_nor_file_lists_the_presets() -> None:
    (problem,) = problems("detas")
    assert all(name in problem for name in PRESETS)


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"model": 3}', '{"model": {}, "extra": 1}'])
def test_a_malformed_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content, encoding="utf-8")
    assert problems(str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert problems(str(tmp_path / "none.toml"))


def test_data_must_suit_the_architecture() -> None:
    assert "architecture is decoder-only, dates needs encoder-decoder" in problems(
        "dates", "architecture=decoder-only", "num_encoder_layers=0"
    )


def test_rows_must_fit_the_context() -> None:
    assert problems("stdlib", "context=64") == ("row_tokens is 128, must be at most the context of 64",)


@pytest.mark.parametrize("name", PRESETS)
def test_control_tokens_must_be_those_of_our_tokenizers(name: str) -> None:
    assert problems(name, "pad_id=5") == ("pad_id, bos_id, eos_id must be 0, 1, 2 where the tokenizer is made here",)
