"""Quantizes a Hugging Face folder to the layout `compressed-tensors`, which vLLM reads.

For GPT-2 and Llama, from one float32 safetensors file: every matrix of the layers, rounded to the nearest. Eight bits
have a scale for each output, and vLLM quantizes activations token by token (W8A8); four bits have a scale for each
group of 32 inputs, activations stay bfloat16 unless the processor has AMX. Embeddings and head stay as they are: vLLM
has no kernel for them. Runs in vLLM's environment, which has torch and `safetensors`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 32
_PER_WORD = 8
"""Four-bit numbers in an int32."""
_CONFIGS: dict[int, dict[str, Any]] = {
    8: {
        "format": "int-quantized",
        "weights": {"strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
    },
    4: {
        "format": "pack-quantized",
        "weights": {"strategy": "group", "group_size": GROUP},
        "input_activations": None,
    },
}


def write_quantized(folder: Path, out: Path, bits: int) -> None:
    """Writes the folder `out` whole or not at all, its matrices in 8 or 4 bits."""
    import safetensors.torch

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if tensor.dim() == 2 and (".layers." in name or ".h." in name):
            tensors |= _quantized(name, tensor, bits, is_input_first=config["model_type"] == "gpt2")
        else:
            tensors[name] = tensor
    staged = out.with_suffix(".part")
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(folder, staged, ignore=shutil.ignore_patterns("*.safetensors"))
    safetensors.torch.save_file(tensors, staged / "model.safetensors", {"format": "pt"})
    config["quantization_config"] = describe(bits)
    (staged / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    staged.rename(out)


def describe(bits: int) -> dict[str, Any]:
    """The `quantization_config` of their config.json."""
    scheme = _CONFIGS[bits]
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False} | scheme["weights"]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": scheme["input_activations"]}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": scheme["format"],
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def quantize(matrix: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """`[out, in]` float32 → int8 of the same shape, and scales `[out, in / group]` float32."""
    half = 2 ** (bits - 1)
    groups = matrix.reshape(matrix.shape[0], -1, group)
    scales = (groups.abs().amax(-1, keepdim=True) / (half - 0.5)).clamp(min=1e-12)
    return (groups / scales).round().clamp(-half, half - 1).char().flatten(1), scales.squeeze(-1)


def pack(values: Tensor) -> Tensor:
    """`[out, in]` in -8 to 7 → `[out, in / 8]` int32, the first in the lowest bits."""
    import torch

    shifts = 4 * torch.arange(_PER_WORD)
    words = ((values.long() + 8).reshape(values.shape[0], -1, _PER_WORD) << shifts).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int()


def _quantized(name: str, tensor: Tensor, bits: int, *, is_input_first: bool) -> dict[str, Tensor]:
    """A matrix under their names. Of GPT-2's, vLLM transposes what is called `weight` and nothing else."""
    import torch

    matrix = tensor.T.contiguous() if is_input_first else tensor
    values, scales = quantize(matrix, bits, GROUP if bits == 4 else matrix.shape[1])
    if bits == 8:
        return {name: (values.T if is_input_first else values).contiguous(), f"{name}_scale": scales}
    return {f"{name}_packed": pack(values), f"{name}_scale": scales, f"{name}_shape": torch.tensor(matrix.shape)}
