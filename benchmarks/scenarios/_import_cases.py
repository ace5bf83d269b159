"""Cases of `imports`: configurations of transformers' classes, and folders of random weights as it saves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model.hf.importer import FAMILIES
from model.spec.artifact import TOKENIZER
from model.spec.config import Architecture
from model.tokenizer_training import one_word_per_id

NUM_BEAMS = 4
_END_TOKENS = 18
_MAX_SHARD = "24KB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration.

    `model` has the fields of transformers' configuration that differ from the family's base, `says` describes them,
    `generation` has fields of its generation configuration. `is_old`: as transformers 4 wrote it. `dtype`: as saved.
    """

    name: str
    family: str
    says: str
    model: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    is_sharded: bool = False
    is_old: bool = False


_DECODER: Mapping[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN = {name: value for name, value in _DECODER.items() if name != "head_dim"}
_SEQ2SEQ: Mapping[str, Any] = {
    "vocab_size": 160,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 72,
}
_BASES: Mapping[str, Mapping[str, Any]] = {
    "llama": _DECODER,
    "mistral": {**_DECODER, "sliding_window": None},
    "qwen2": _QWEN,
    "qwen3": _DECODER,
    "gpt2": {
        "vocab_size": 160,
        "n_positions": 96,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "bart": _SEQ2SEQ,
    "marian": {**_SEQ2SEQ, "pad_token_id": 159, "decoder_start_token_id": 159, "eos_token_id": 0}
    | {"forced_eos_token_id": 0},
}
_YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 3.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
_TAGGED = {"forced_bos_token_id": 7, "bad_words_ids": [[159]]}

CASES: tuple[Case, ...] = (
    Case(name="llama-odd-heads", family="llama", says="3 query heads on 1, untied, bf16, rope_theta on top",
         is_old=True, dtype=torch.bfloat16, model={"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}),
    Case(name="llama-llama3", family="llama", says="llama3 scaling, tied, in shards", is_sharded=True,
         model={"rope_parameters": _LLAMA3, "tie_word_embeddings": True, "num_attention_heads": 4,
                "num_key_value_heads": 2, "hidden_size": 64}),
    Case(name="llama-yarn", family="llama", says="YaRN, biases everywhere, 5 heads",
         model={"rope_parameters": _YARN, "attention_bias": True, "mlp_bias": True, "num_attention_heads": 5,
                "num_key_value_heads": 5, "hidden_size": 80}),
    Case(name="llama-linear", family="llama", says="linear scaling under rope_scaling, fp16", is_old=True,
         dtype=torch.float16, model={"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}}),
    Case(name="llama-dynamic", family="llama", says="dynamic scaling, heads wider than d / heads",
         model={"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}, "head_dim": 32}),
    Case(name="mistral-window", family="mistral", says="a window of 8, heads wider than d / heads",
         model={"sliding_window": 8, "head_dim": 32}),
    Case(name="mistral-no-window", family="mistral", says="no window, tied, as many key heads as query heads",
         model={"tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64}),
    Case(name="mistral-yarn", family="mistral", says="a window of 33 and YaRN without whole bounds, two ends",
         model={"sliding_window": 33, "eos_token_id": [2, 5], "rope_parameters": {**_YARN, "truncate": False}}),
    Case(name="qwen2-untied", family="qwen2", says="3 query heads on 1, untied", model={}),
    Case(name="qwen2-tied", family="qwen2", says="tied, 4 query heads on 2, bf16", dtype=torch.bfloat16,
         model={"tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}),
    Case(name="qwen2-upper-window", family="qwen2", says="a window of 12 over the upper of two layers, YaRN",
         model={"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1, "rope_parameters": _YARN}),
    Case(name="qwen3-wide-heads", family="qwen3", says="heads of 32 on a width of 48",
         model={"head_dim": 32}),
    Case(name="qwen3-tied", family="qwen3", says="tied, 4 query heads on 2, in shards", is_sharded=True,
         model={"tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 2}),
    Case(name="qwen3-biases", family="qwen3", says="biases, a window of 10 over both layers, linear scaling",
         model={"attention_bias": True, "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 0,
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}}),
    Case(name="gpt2-tied", family="gpt2", says="3 heads, tied", model={}),
    Case(name="gpt2-untied", family="gpt2", says="5 heads, untied, a narrow network",
         model={"n_head": 5, "n_embd": 80, "n_inner": 56, "tie_word_embeddings": False}),
    Case(name="gpt2-exact-gelu", family="gpt2", says="exact GELU, fp16, saved without a prefix", is_old=True,
         dtype=torch.float16, model={"activation_function": "gelu"}),
    Case(name="bart-plain", family="bart", says="exact GELU, first token forced",
         generation={"forced_bos_token_id": 0}),
    Case(name="bart-scaled", family="bart", says="scaled embeddings, ReLU, 3 + 1 layers, in shards", is_sharded=True,
         model={"scale_embedding": True, "activation_function": "relu", "encoder_layers": 3, "decoder_layers": 1}),
    Case(name="bart-untied", family="bart", says="untied, 2 heads of 24, bf16, early stopping", dtype=torch.bfloat16,
         generation={"early_stopping": True, "num_beams": NUM_BEAMS},
         model={"tie_word_embeddings": False, "encoder_attention_heads": 2, "decoder_attention_heads": 2}),
    Case(name="marian-shared", family="marian", says="one vocabulary, scaled embeddings, SiLU, a word forbidden",
         model={"scale_embedding": True, "activation_function": "swish"}, generation={"bad_words_ids": [[159]]}),
    Case(name="marian-apart", family="marian", says="two vocabularies, ReLU, 5 heads of 8, renormalized",
         model={"share_encoder_decoder_embeddings": False, "vocab_size": 140, "decoder_vocab_size": 160,
                "activation_function": "relu", "d_model": 40, "encoder_attention_heads": 5,
                "decoder_attention_heads": 5, "pad_token_id": 139, "decoder_start_token_id": 139},
         generation={"bad_words_ids": [[139]], "renormalize_logits": True}),
    Case(name="marian-untied", family="marian", says="untied head, fp16, forced first token",
         dtype=torch.float16, model={"tie_word_embeddings": False}, generation=_TAGGED),
)  # fmt: skip


def make_folder(case: Case, folder: Path) -> Any:
    """Saves a case as transformers does; returns what transformers loads again, in float32."""
    import transformers

    kind = FAMILIES[case.family].architecture
    config_class = getattr(transformers, _CONFIGS[case.family])
    config = config_class(**{**_BASES[case.family], **case.model})
    model = getattr(transformers, kind)(config).eval()
    _draw(model, seed=len(case.name) + sum(map(ord, case.name)))
    model.to(case.dtype)
    for name, value in case.generation.items():
        setattr(model.generation_config, name, value)
    size = _MAX_SHARD if case.is_sharded else "1GB"
    model.save_pretrained(folder, max_shard_size=size)
    words = one_word_per_id(model.config.vocab_size, Architecture.DECODER_ONLY)
    (folder / TOKENIZER).write_text(words.to_json(), encoding="utf-8")
    if case.is_old:
        _age(folder)
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()


_CONFIGS = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gpt2": "GPT2Config",
    "bart": "BartConfig",
    "marian": "MarianConfig",
}


# Standard deviations of matrices, times the root of their width: with too even attention, or one dominant token,
# outputs would be of one word.
_GAINS = {"q_proj": 1.8, "k_proj": 1.8, "v_proj": 1.0, "o_proj": 1.5, "out_proj": 1.0, "fc1": 3.0, "fc2": 3.0}
_GAIN = 2.0
_POSITIONS = 0.5


def _draw(model: Any, seed: int) -> None:
    """Weights that all matter, so that outputs are of many words."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            *_, module, part = name.split(".")
            if module == "embed_positions" and not parameter.requires_grad:
                continue  # sinusoids
            if parameter.ndim == 1:
                is_norm = "norm" in module or module.startswith("ln_")
                parameter.copy_(float(is_norm and part == "weight") + (0.1 if is_norm else 0.3) * normal(parameter))
            elif module in ("embed_positions", "wpe"):
                parameter.copy_(_POSITIONS * normal(parameter))
            elif module in ("embed_tokens", "shared", "wte", "lm_head"):
                parameter.copy_(_token_deviation(model.config) * normal(parameter))
            else:
                parameter.copy_(_GAINS.get(module, _GAIN) * parameter.shape[1] ** -0.5 * normal(parameter))
        model.tie_weights()
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(0.2 * normal(model.final_logits_bias))
            _let_it_end(model)


def _token_deviation(config: Any) -> float:
    """Beside positions: sinusoids are larger than learned ones, and √d is a gain of its own."""
    if getattr(config, "scale_embedding", False):
        return 0.2
    return 0.7 if config.model_type == "marian" else 0.3


def _let_it_end(model: Any) -> None:
    """Biases the end of sequence so that about one output in ten ends with each token."""
    rng = np.random.default_rng(7)
    ends, start = model.generation_config.eos_token_id, model.generation_config.decoder_start_token_id
    sources = torch.from_numpy(np.stack([rng.integers(3, 130, 12) for _ in range(10)]))
    lengths = {"max_new_tokens": _END_TOKENS, "min_new_tokens": _END_TOKENS}
    answers = model.generate(sources, attention_mask=torch.ones_like(sources), do_sample=False, num_beams=1, **lengths)
    fed = torch.cat((torch.full((10, 1), start), answers[:, 1:-1]), dim=1)
    logits = model(input_ids=sources, decoder_input_ids=fed, use_cache=False).logits.float().numpy()
    leads = logits.max(axis=-1) - logits[:, :, ends]
    model.final_logits_bias[0, ends] += float(np.quantile(leads, 0.04))


def _age(folder: Path) -> None:
    """Rewrites a folder as transformers 4 did: rotary settings in two places, GPT-2 without a prefix."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if (rope := config.pop("rope_parameters", None)) is not None:
        config["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    path.write_text(json.dumps(config))
    if config["model_type"] == "gpt2":
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        save_file(
            {name.removeprefix("transformer."): tensor for name, tensor in weights.items()},
            folder / "model.safetensors",
        )
