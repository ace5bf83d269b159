"""What is refused of a Hugging Face folder, by name and before a number is read; what a good one amounts to."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from model.hf.folder import ImportRefused
from model.hf.importer import Plan, plan
from model.spec.config import ModelConfig, RopeScaling
from model.spec.generation import GENERATION as GENERATION_FILE
from model.spec.generation import GenerationSettings
from model.spec.tokenizer import Tokenizer
from tests.hf_folders import CONFIG, GENERATION, SHARDS, llama_tensors, write_folder, write_json

Break = Callable[[Path], object]


def problems_of(folder: Path, **options: Any) -> tuple[str, ...]:
    with pytest.raises(ImportRefused) as caught:
        plan(folder, **options)
    return caught.value.problems


def test_good_folder_is_planned_without_torch_and_without_a_number(tmp_path: Path) -> None:
    planned = plan(write_folder(tmp_path / "good"))
    assert planned.config == ModelConfig(
        architecture="decoder-only",  # type: ignore[arg-type]
        vocab_size=270,
        context=64,
        d_model=24,
        num_layers=2,
        num_heads=3,
        num_kv_heads=1,
        head_dim=16,
        d_ff=40,
        rope_theta=500.0,
        norm_epsilon=1e-5,
        tie_embeddings=False,
        pad_id=2,
        bos_id=1,
        eos_id=2,
    )
    settings = GenerationSettings.from_json(planned.extras[GENERATION_FILE])
    assert settings.eos_ids == (2, 7)
    assert planned.manifest["imported"]["generation_defaults"] == {"temperature": 0.6, "do_sample": True}
    assert any("temperature 0.6" in note for note in planned.notes)


def test_shards_are_one_model(tmp_path: Path) -> None:
    whole, sharded = plan(write_folder(tmp_path / "whole")), plan(write_folder(tmp_path / "shards", sharded=True))
    assert whole.config == sharded.config
    assert {name: tensor.shape for name, tensor in whole.folder.tensors.items()} == {
        name: tensor.shape for name, tensor in sharded.folder.tensors.items()
    }
    assert {tensor.file for tensor in sharded.folder.tensors.values()} == set(SHARDS)


def _with_config(**changes: Any) -> Break:
    return lambda folder: write_json(folder / "config.json", {**CONFIG, **changes})


def _with_generation(changes: dict[str, Any]) -> Break:
    return lambda folder: write_json(folder / "generation_config.json", {**GENERATION, **changes})


def _link_tokenizer(folder: Path) -> None:
    shutil.move(folder / "tokenizer.json", folder.parent / "t.json")
    (folder / "tokenizer.json").symlink_to(folder.parent / "t.json")


def _with_index(change: Callable[[dict[str, str]], object]) -> Break:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        write_json(path, index)

    return apply


def _with_tensors(change: Callable[[dict[str, Any]], object]) -> Break:
    def apply(folder: Path) -> None:
        tensors = llama_tensors()
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def _link_outside(folder: Path) -> None:
    outside = folder.parent / "elsewhere.safetensors"
    shutil.move(folder / SHARDS[0], outside)
    (folder / SHARDS[0]).symlink_to(outside)


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.pt").write_bytes(pickle.dumps({"lm_head.weight": 1}))


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"

CONFIG_PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mamba"}, "model_type is 'mamba', must be one of llama, mistral"),
    (
        {"architectures": ["LlamaForSequenceClassification"]},
        "architectures is ['LlamaForSequenceClassification'], llama must be ['LlamaForCausalLM']",
    ),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config is 'gptq'"),
    (
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        "rope_type is 'longrope', must be one of default, linear, dynamic, llama3, yarn",
    ),
    ({"rope_scaling": {"type": "linear"}}, "config.json: rope_scaling lacks factor"),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        "rope_parameters and rope_scaling are both there and differ",
    ),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters differs from layer to layer"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu', must be one of silu, swish"),
    ({"layer_types": ["full_attention"] * 2}, "llama layers are all alike"),
    ({"hidden_size": "24"}, "hidden_size is '24', must be a whole number of at least 1"),
    ({"num_key_value_heads": 2}, "num_attention_heads 3 is not a multiple of num_key_value_heads 2"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, must be"),
    ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000, must be at most 4194304"),
    ({"rope_theta": 10**400}, "must be a finite number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, must be a finite"),
    ({"vocab_size": 260}, "the model embeds 260"),
]
GENERATION_PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({"eos_token_id": [2, 270]}, "eos_token_id is 270, must be in [0, 270)"),
    ({"bad_words_ids": [[4, 5]]}, "bad_words_ids is [[4, 5]], only words of one token are supported"),
    ({"bad_words_ids": [[270]]}, "bad_words_ids or suppress_tokens is 270, must be in [0, 270)"),
    ({"sequence_bias": [[[1], 2.0]]}, "generation_config.json: sequence_bias is"),
]
# A change to the tensors of the only file.
TENSOR_PROBLEMS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda tensors: tensors.pop(Q_PROJ), f"the weights lack {Q_PROJ} [48, 24]"),
    (lambda tensors: tensors.pop("lm_head.weight"), "the weights lack lm_head.weight [270, 24]"),
    (lambda tensors: tensors.update({f"{Q_PROJ}_b": np.zeros(48, "float32")}), f"has unexpected {Q_PROJ}_b [48]"),
    (lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].T.copy()}), f"{Q_PROJ} is [24, 48], must be [48, 24]"),
    (
        lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].astype("int8")}),
        f"{Q_PROJ} is I8, must be F32, F16, BF16",
    ),
    (lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].astype("float64")}), f"{Q_PROJ} is F64"),
]
# What the index says of where tensors are.
INDEX_PROBLEMS: list[tuple[Callable[[dict[str, str]], object], str]] = [
    (lambda placed: placed.pop(Q_PROJ), f"has {Q_PROJ}, which {INDEX} does not put there"),
    (lambda placed: placed.update({"model.extra": SHARDS[0]}), f"{SHARDS[0]} lacks model.extra"),
    (lambda placed: placed.update({Q_PROJ: "../other/model.safetensors"}), "'../other/model.safetensors' leaves the"),
    (lambda placed: placed.update({Q_PROJ: "/etc/passwd"}), "'/etc/passwd' leaves the folder"),
    (lambda placed: placed.update({Q_PROJ: f"deeper/{SHARDS[0]}"}), f"'deeper/{SHARDS[0]}' leaves the folder"),
]
FILE_PROBLEMS: list[tuple[Break, str]] = [
    (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json: "),
    (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
    (_pickled, "weights are in ['model.pt']: pickled files can run programs"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64), "model.safetensors: "),
    (lambda folder: os.truncate(folder / "model.safetensors", 2000), "model.safetensors: Error"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json: "),
    (_link_tokenizer, "tokenizer.json is a link out of the folder"),
    (
        lambda folder: (folder / "chat_template.jinja").write_text("{% for message in %}"),
        "chat template: cannot be compiled",
    ),
    (
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0].content.replace('\\ufdd1', '') }}"),
        "chat template: has U+FDD1, which no text may hold",
    ),
    (lambda folder: write_json(folder / "adapter_config.json", {}), "adapter_config.json: an adapter is no model"),
]
SHARD_PROBLEMS: list[tuple[Break, str]] = [
    (lambda folder: (folder / SHARDS[1]).unlink(), f"{SHARDS[1]} is missing"),
    (
        lambda folder: write_json(folder / INDEX, {"metadata": {}}),
        "weight_map is None, must be an object of file names",
    ),
    (_link_outside, f"{SHARDS[0]}' leaves the folder"),
    (lambda folder: save_file(llama_tensors(), folder / "model.safetensors"), f"both model.safetensors and {INDEX}"),
]
# How to break a good folder, and what must be reported.
WRONG = {
    said: (spoil, is_sharded)
    for is_sharded, problems in (
        (False, [(_with_config(**changes), said) for changes, said in CONFIG_PROBLEMS]),
        (False, [(_with_generation(changes), said) for changes, said in GENERATION_PROBLEMS]),
        (False, [(_with_tensors(change), said) for change, said in TENSOR_PROBLEMS]),
        (True, [(_with_index(change), said) for change, said in INDEX_PROBLEMS]),
        (False, FILE_PROBLEMS),
        (True, SHARD_PROBLEMS),
    )
    for spoil, said in problems
}


@pytest.mark.parametrize("said", WRONG)
def test_folder_with_one_thing_wrong_is_refused_by_its_name(tmp_path: Path, said: str) -> None:
    spoil, is_sharded = WRONG[said]
    folder = write_folder(tmp_path / "folder", sharded=is_sharded)
    plan(folder)
    spoil(folder)
    problems = problems_of(folder)
    assert any(said in problem for problem in problems), problems


def test_a_missing_shard_is_reported_once_and_not_for_each_of_its_tensors(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", sharded=True)
    (folder / SHARDS[1]).unlink()
    (problem,) = problems_of(folder)
    assert problem.startswith(f"{SHARDS[1]} is missing, {INDEX} puts")


QWEN2: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def test_qwen2_is_refused_without_an_end_and_with_layers_that_are_no_names(tmp_path: Path) -> None:
    kinds = [["sliding_attention"], {}]
    folder = write_folder(tmp_path / "folder", layer_types=kinds, use_sliding_window=True, eos_token_id=None, **QWEN2)
    (folder / "generation_config.json").unlink()
    problems = problems_of(folder)
    assert any("layer_types is [['sliding_attention'], {}], must be a list of" in problem for problem in problems)
    assert any("no token ends an output" in problem for problem in problems)


def test_every_problem_is_reported_whatever_else_is_wrong(tmp_path: Path) -> None:
    def expect(folder: Path, *expected: str, **options: Any) -> None:
        problems = problems_of(folder, **options)
        for said in (*expected, "tokenizer.json is missing"):
            assert any(said in problem for problem in problems), problems

    folder = write_folder(tmp_path / "folder", rope_scaling={"type": "su"})
    write_json(folder / "generation_config.json", {"eos_token_id": "</s>"})
    (folder / "tokenizer.json").unlink()
    (folder / "chat_template.jinja").write_text("{% for message in %}")
    save_file({"stray": np.zeros(3, "int8")}, folder / "model.safetensors")
    others = ("chat template: cannot be compiled", "stray is I8, must be F32")
    expect(folder, "rope_type is 'su'", "eos_token_id is '</s>', must be a token id", *others)
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    expect(folder, "model_type is 'mamba'", *others)
    method = {"quant_method": "awq"}
    shards = write_folder(tmp_path / "shards", sharded=True, rope_theta=0.5, quantization_config=method)
    for name in (SHARDS[0], "tokenizer.json"):
        (shards / name).unlink()
    expect(shards, "rope_theta is 0.5", "awq", f"{SHARDS[0]} is missing")
    whole = write_folder(tmp_path / "whole")
    save_file({"stray": np.zeros(3, "float16")}, whole / "model.safetensors")
    write_json(whole / "generation_config.json", {"eos_token_id": 999})
    (whole / "tokenizer.json").unlink()
    expected = ("unexpected stray", "the weights lack lm_head.weight", "eos_token_id is 999", "context is 65")
    expect(whole, *expected, context=65)


def test_tensors_of_no_use_may_be_of_any_dtype(tmp_path: Path) -> None:
    useless = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = {**llama_tensors(), useless: np.zeros(8, "uint8")}
    plan(write_folder(tmp_path / "folder", tensors=tensors))
    assert problems_of(write_folder(tmp_path / "stray", tensors={**tensors, "stray": np.zeros(8, "uint8")})) == (
        "model.safetensors: stray is U8, must be F32, F16, BF16",
        "model.safetensors has unexpected stray [8]",
    )


def rope_of(tmp_path: Path, **changes: Any) -> ModelConfig:
    return plan(write_folder(tmp_path / "rope", **changes)).config


NESTED = {"rope_type": "default", "rope_theta": 800.0}


@pytest.mark.parametrize(
    ("theta", "fields", "expected"),
    [
        (700.0, {}, 700.0),
        (None, {}, 10000.0),
        (None, {"rope_parameters": NESTED}, 800.0),
        (700.0, {"rope_parameters": NESTED}, 800.0),
        (700.0, {"rope_scaling": {"type": "linear", "factor": 4}}, 700.0),
    ],
)
def test_rope_theta_is_read_from_either_place(
    tmp_path: Path, theta: float | None, fields: dict[str, Any], expected: float
) -> None:
    assert rope_of(tmp_path, rope_theta=theta, **fields).rope_theta == expected


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_rope_scaling_is_read_from_either_place(tmp_path: Path, place: str) -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = rope_of(tmp_path, **{place: llama3})
    assert (config.rope_scaling, config.rope_factor) == (RopeScaling.LLAMA3, 8.0)
    assert (config.rope_low_frequency_factor, config.rope_high_frequency_factor) == (1.5, 4.0)
    assert (config.rope_original_context, config.rope_theta) == (32, 500.0)
    linear = rope_of(tmp_path, **{place: {"type": "linear", "factor": 2.0}})
    assert (linear.rope_scaling, linear.rope_factor) == (RopeScaling.LINEAR, 2.0)


def test_yarn_lengthens_by_what_the_paper_says_unless_told(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    config = rope_of(tmp_path, rope_scaling=yarn)
    assert config.rope_attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert (config.rope_beta_fast, config.rope_beta_slow, config.rope_truncate) == (32.0, 1.0, True)
    told = rope_of(tmp_path, rope_scaling={**yarn, "attention_factor": 1.25, "truncate": False, "beta_fast": 16})
    assert (told.rope_attention_factor, told.rope_truncate, told.rope_beta_fast) == (1.25, False, 16.0)
    ratio = rope_of(tmp_path, rope_scaling={**yarn, "mscale": 1.0, "mscale_all_dim": 0.5})
    assert ratio.rope_attention_factor == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    implied = rope_of(tmp_path, rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 16})
    assert implied.rope_factor == 4.0


def test_dynamic_scaling_ends_the_context_where_it_would_begin(tmp_path: Path) -> None:
    planned = plan(write_folder(tmp_path / "dynamic", rope_scaling={"type": "dynamic", "factor": 2.0}))
    assert planned.config.rope_scaling is RopeScaling.NONE
    assert any("beyond 64 tokens" in note for note in planned.notes)


def planned_qwen(tmp_path: Path, **changes: Any) -> Plan:
    tensors = llama_tensors()
    for index in range(2):
        for part, width in (("q", 48), ("k", 16), ("v", 16)):
            tensors[f"model.layers.{index}.self_attn.{part}_proj.bias"] = np.zeros(width, "float32")
    return plan(write_folder(tmp_path / "qwen", tensors=tensors, **QWEN2, **changes))


def test_upper_layers_have_windows_only_if_they_are_used(tmp_path: Path) -> None:
    assert planned_qwen(tmp_path, sliding_window=8, max_window_layers=1).config.sliding_window == 0
    config = planned_qwen(tmp_path, use_sliding_window=True, sliding_window=8, max_window_layers=1).config
    assert [config.window(index) for index in range(2)] == [0, 8]
    kinds = ["sliding_attention", "full_attention"]
    config = planned_qwen(tmp_path, use_sliding_window=True, sliding_window=8, layer_types=kinds).config
    assert [config.window(index) for index in range(2)] == [8, 0]
    everywhere = planned_qwen(tmp_path, use_sliding_window=True, sliding_window=64, max_window_layers=0).config
    assert everywhere.sliding_window == 0, "a window as long as the context is none"


def with_null(folder: Path, name: str) -> Path:
    path = folder / "config.json"
    write_json(path, {**json.loads(path.read_text()), name: None})
    return folder


def test_null_says_what_absence_does_not(tmp_path: Path) -> None:
    """As in transformers: what is absent has its default there, and null is none, or as many as there are heads."""
    long = {"max_position_embeddings": 8192, "use_sliding_window": True, "max_window_layers": 0}
    assert planned_qwen(tmp_path, **long).config.sliding_window == 4096
    assert plan(with_null(tmp_path / "qwen", "sliding_window")).config.sliding_window == 0
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "num_key_value_heads": None}
    folder = write_folder(tmp_path / "mistral", **mistral)
    assert problems_of(folder) == ("config.json: num_attention_heads 3 is not a multiple of num_key_value_heads 8",)
    assert all("k_proj" in each or "v_proj" in each for each in problems_of(with_null(folder, "num_key_value_heads")))
    tensors = llama_tensors({**CONFIG, "num_key_value_heads": 3})
    write_folder(folder, tensors=tensors, **mistral)
    assert plan(with_null(folder, "num_key_value_heads")).config.num_kv_heads == 3


def test_a_folder_says_when_beam_searches_end(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder")
    for said, patience in ((None, 0.0), (False, 0.0), (True, 1.0), ("never", 1000.0)):
        write_json(folder / "generation_config.json", {**GENERATION, "early_stopping": said})
        assert GenerationSettings.from_json(plan(folder).extras[GENERATION_FILE]).rules.patience == patience
    write_json(folder / "generation_config.json", {**GENERATION, "early_stopping": "soon"})
    assert problems_of(folder) == ("generation_config.json: early_stopping is 'soon', must be true, false or 'never'",)


def test_context_can_be_cut(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder")
    assert plan(folder, context=32).config.context == 32
    assert "must be in [1, 64]" in problems_of(folder, context=65)[0]


def test_an_end_that_is_a_word_stays_one(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder")
    word = Tokenizer.load(folder / "tokenizer.json").encode_plain("h")[0]
    write_json(folder / "generation_config.json", {"eos_token_id": [2, word]})
    written = Tokenizer.from_json(plan(folder).tokenizers["tokenizer.json"])
    assert written.encode_plain("h") == [word]
    assert written.decode([word]) == "h"


def test_control_tokens_are_special_whoever_says_so(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder")
    described = json.loads((folder / "tokenizer.json").read_text())
    for token in described["added_tokens"]:
        token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(described))
    written = json.loads(plan(folder).tokenizers["tokenizer.json"])
    special = {token["content"] for token in written["added_tokens"] if token["special"]}
    assert special >= {"<bos>", "<eos>"}
