"""Hugging Face folders in the true shapes of published models, with random weights: nothing is downloaded.

    python -m benchmarks.scenarios._shape_folders NAME FOLDER

The tokenizer has as many tokens as the model: bytes, then pairs and triples of letters. Its memory is a real one's,
while its texts say nothing.
"""

from __future__ import annotations

import itertools
import json
import string
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.spec.artifact import TOKENIZER

_END = "<|end|>"
# Transformers' names of matrices that write to the residual stream of pre-norm layers.
_OUTPUTS = ("o_proj.weight", "down_proj.weight")
_EMBEDDINGS, _LAST_NORM = "model.embed_tokens.weight", "model.norm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One model: transformers' classes, the fields of its configuration, and the context that it is imported with."""

    config_class: str
    model_class: str
    context: int
    fields: Mapping[str, Any] = field(default_factory=dict)


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES: Mapping[str, Shape] = {
    "opus-mt": Shape(
        config_class="MarianConfig",
        model_class="MarianMTModel",
        context=512,
        fields={"vocab_size": 58101, "d_model": 512, "encoder_layers": 6, "decoder_layers": 6,
                "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 2048,
                "decoder_ffn_dim": 2048, "max_position_embeddings": 512, "activation_function": "swish",
                "scale_embedding": True},
    ),
    "smollm2-360m": Shape(
        config_class="LlamaConfig",
        model_class="LlamaForCausalLM",
        context=8192,
        fields={"vocab_size": 49152, "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
                "num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 64, "max_position_embeddings": 8192,
                "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    ),
    "qwen3-0.6b": Shape(
        config_class="Qwen3Config",
        model_class="Qwen3ForCausalLM",
        context=8192,
        fields={"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
                "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    ),
    "llama-3.2-1b": Shape(
        config_class="LlamaConfig",
        model_class="LlamaForCausalLM",
        context=8192,
        fields={"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
                "tie_word_embeddings": True, "rope_parameters": _LLAMA3},
    ),
    # To try the program with, and the documents' commands.
    "tiny-mt": Shape(
        config_class="MarianConfig",
        model_class="MarianMTModel",
        context=64,
        fields={"vocab_size": 600, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
                "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 128,
                "decoder_ffn_dim": 128, "max_position_embeddings": 64, "activation_function": "swish",
                "scale_embedding": True},
    ),
    "tiny": Shape(
        config_class="LlamaConfig",
        model_class="LlamaForCausalLM",
        context=256,
        fields={"vocab_size": 600, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
                "tie_word_embeddings": True},
    ),
}  # fmt: skip


def make_folder(name: str, folder: Path) -> None:
    """Saves the model with random weights in bfloat16 and its tokenizer.

    Weights are drawn as transformers initializes, but for the residual stream of pre-norm layers: what its layers write
    is in sum about as large as the embeddings, and these are about 1. Otherwise the layers outweigh the embeddings, and
    rounding errors grow with depth beyond those of a trained model.
    """
    import torch
    import transformers

    shape = SHAPES[name]
    size = shape.fields["vocab_size"]
    ends = {"bos_token_id": size - 1, "eos_token_id": size - 1}
    if shape.config_class == "MarianConfig":
        ends = {"eos_token_id": size - 1, "pad_token_id": 0, "decoder_start_token_id": 0}
        ends["forced_eos_token_id"] = size - 1
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = getattr(transformers, shape.config_class)(**shape.fields, **ends)
    model = getattr(transformers, shape.model_class)(config)
    _balance(model)
    model.save_pretrained(folder)
    (folder / TOKENIZER).write_text(json.dumps(tokenizer(size)), encoding="utf-8")


def _balance(model: Any) -> None:
    weights = dict(model.named_parameters())
    outputs = [weight for name, weight in weights.items() if name.endswith(_OUTPUTS)]
    for weight in outputs:
        weight.data.mul_(len(outputs) ** -0.5)  # GPT-2's rule: norms bring the inputs of these matrices to about 1
    if outputs:
        weights[_EMBEDDINGS].data.div_(model.config.initializer_range)
        weights[_LAST_NORM].data.mul_(model.config.initializer_range)  # the head is the embeddings' table


def tokenizer(size: int) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE with exactly `size` tokens, the last of which ends a text."""
    from tokenizers import pre_tokenizers

    letters = ["Ġ", *string.ascii_lowercase, *string.ascii_uppercase]
    pairs = list(itertools.product(letters, letters))
    triples = ((first + second, third) for (first, second), third in itertools.product(pairs, letters))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: Sequence[tuple[str, str]] = list(itertools.islice((*pairs, *triples), size - len(alphabet) - 1))
    words = [*alphabet, *map("".join, merges)]
    if len(words) != size - 1:
        raise ValueError(f"there are {len(words) + 1} tokens, {size} are wanted")
    vocabulary = {word: number for number, word in enumerate(words)}
    bytes_only: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    bytes_only["use_regex"] = True
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": size - 1, "content": _END, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
        ],
        "normalizer": None,
        "pre_tokenizer": bytes_only,
        "post_processor": None,
        "decoder": bytes_only,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocabulary, "merges": list(map(list, merges))},
    }  # fmt: skip


if __name__ == "__main__":
    make_folder(sys.argv[1], Path(sys.argv[2]))
