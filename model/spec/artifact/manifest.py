"""The manifest of an artifact: its fields, their types and enums, and manifest.json as text.

Standard library only; opens no file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from model.spec.config import AttentionScore, ConfigError, ModelConfig
from model.spec.generation import NO_RULES, GenerationDefaults, GenerationError, GenerationRules, read_defaults

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
TARGET_TOKENIZER = "target_tokenizer.json"
CHAT = "chat.json"
GOLDEN_TEXTS = "golden_texts.json"
GOLDEN = "golden.npz"
GOLDEN_ATTENTION = "attention.npz"
PARITY = "parity.json"
DECODER = "decoder"
ENCODER = "encoder"
PREFILL = "prefill"
EXPLAIN = "explain"
MOVE = "move"


class Device(StrEnum):
    """The execution provider a graph was built for."""

    CPU = "cpu"
    CUDA = "cuda"


class Precision(StrEnum):
    """The arithmetic of the graph's matrix products with weights; attention and norms are float32 on a CPU.

    `int8` quantizes weights and activations to eight bits, `int4` weights to four, `bf16` on a CPU rounds weights alone
    (`export.quantize`). The tolerance of each: `model.spec.golden.TOLERANCES`.
    """

    FP32 = "fp32"
    INT8 = "int8"
    INT4 = "int4"
    FP16 = "fp16"
    BF16 = "bf16"


class KVPrecision(StrEnum):
    """The number format of cached K/V, self-attention's and cross-attention's; arithmetic on it stays float32.

    `int8` has one scale per channel and head, fixed at export (`export.quantize_kv`). `fp16` and `bf16` are a CUDA
    graph's own precision.
    """

    FP32 = "fp32"
    INT8 = "int8"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def dtype(self) -> str:
        """The ONNX and NumPy name of a buffer's type."""
        return _KV_TYPES[self][0]

    @property
    def itemsize(self) -> int:
        """Bytes of a number; NumPy has no bfloat16."""
        return _KV_TYPES[self][1]


_KV_TYPES = {
    KVPrecision.FP32: ("float32", 4),
    KVPrecision.INT8: ("int8", 1),
    KVPrecision.FP16: ("float16", 2),
    KVPrecision.BF16: ("bfloat16", 2),
}


class KVLayout(StrEnum):
    """The memory layout of cached K/V.

    `slots`: each row has a contiguous buffer of the context's length. `paged`: each row has a list of blocks in a
    shared pool, and the tokens of all rows are packed without padding (`paged_decoder_signature`).
    """

    SLOTS = "slots"
    PAGED = "paged"


class AttentionKind(StrEnum):
    """Encoder self-attention, decoder self-attention, or the decoder's attention to the encoder's output."""

    ENCODER = "encoder"
    DECODER = "decoder"
    CROSS = "cross"


CPU_PRECISIONS = (Precision.FP32, Precision.BF16, Precision.INT8, Precision.INT4)
"""What is exported for a CPU and served on one; the others gain nothing there, or have no kernels."""
CUDA_PRECISIONS = (Precision.FP16, Precision.BF16)
"""What is exported for CUDA: the precisions of PagedAttention."""
MIN_BLOCK_SIZE = 16
"""The smallest block that PagedAttention accepts; larger ones must be powers of two."""
BLOCK_SIZE = 256
"""Tokens in a block: a multiple of FlashAttention's tiles for heads of every width."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One graph input or output: name, ONNX dtype name ("int64", "float32"), axes (sizes or symbolic names)."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One ONNX graph: its file inside the folder and its signature."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file's checksum (lower-case hex) and size in bytes."""

    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Precision and layout of K/V buffers.

    `calibration` describes, for people, the data that the scales come from, if any. `block_size` is in tokens, 0 unless
    the layout is paged.
    """

    precision: KVPrecision = KVPrecision.FP32
    calibration: str = ""
    layout: KVLayout = KVLayout.SLOTS
    block_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that a reader must know about an artifact before it opens anything else.

    `eos_ids` end a sequence; `pad_id` fills; `decoder_start_id` opens an encoder-decoder's output; `generation` holds
    the model's further rules. `training` is the checkpoint's run manifest and `versions` the software that exported,
    both for people except for `generation_defaults`. `kv_cache` and `generation` are optional: manifests of earlier
    versions lack them.
    """

    config: ModelConfig
    device: Device
    precision: Precision
    opset: int
    eos_ids: tuple[int, ...]
    pad_id: int
    decoder_start_id: int
    graphs: Mapping[str, GraphSpec]
    files: Mapping[str, FileEntry]
    kv_cache: KVFormat = KVFormat()
    generation: GenerationRules = NO_RULES
    training: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def is_reproducible(self) -> bool:
        """Whether the same kernels give the same logits in any batch and chunks: slots on a CPU, dot-product scores."""
        in_slots = self.device is Device.CPU and self.kv_cache.layout is KVLayout.SLOTS
        return in_slots and self.config.attention_score is AttentionScore.DOT

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """The model's own defaults of a request's fields.

        Read from the import's record in `training`: earlier versions would refuse a new field.
        """
        imported = self.training.get("imported")
        recorded = imported.get("generation_defaults") if isinstance(imported, Mapping) else None
        own = recorded if isinstance(recorded, Mapping) else {}
        return read_defaults(own, is_encoder_decoder=self.config.is_encoder_decoder)

    def to_json(self) -> str:
        """The text of manifest.json."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["config"] = self.config.to_dict()
        values["kv_cache"] = dataclasses.asdict(self.kv_cache)
        values["generation"] = self.generation.to_dict()
        values["graphs"] = {name: dataclasses.asdict(spec) for name, spec in self.graphs.items()}
        values["files"] = {name: dataclasses.asdict(entry) for name, entry in sorted(self.files.items())}
        return json.dumps(values, indent=2, sort_keys=True) + "\n"


def parse_fields(text: str) -> tuple[dict[str, Any], list[str]]:
    """Parses manifest.json: the valid fields of a `Manifest`, and the problems of the others."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {}, [str(error)]
    if not isinstance(values, dict):
        return {}, ["manifest is not a JSON object"]
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        return {}, [f"format_version is {version!r}, this version reads {FORMAT_VERSION}"]
    values = _DEFAULTS | values
    problems = [f"missing field {name!r}" for name in sorted(_PARSERS.keys() - values.keys())]
    problems += [f"unknown field {name!r}" for name in sorted(values.keys() - _PARSERS.keys())]
    fields: dict[str, Any] = {}
    for name, parse in _PARSERS.items():
        if name not in values:
            continue
        try:
            fields[name] = parse(values[name])
        except (ConfigError, GenerationError) as error:
            problems += [f"{name}: {problem}" for problem in error.problems]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            problems.append(f"{name} is malformed: {error!r}")
    return fields, problems


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not an integer")
    return value


def _graph(values: Mapping[str, Any]) -> GraphSpec:
    def specs(items: Sequence[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(str(i["name"]), str(i["dtype"]), tuple(i["shape"])) for i in items)

    return GraphSpec(str(values["file"]), specs(values["inputs"]), specs(values["outputs"]))


def _file_entry(values: Mapping[str, Any]) -> FileEntry:
    return FileEntry(str(values["sha256"]), _integer(values["num_bytes"]))


def _kv_format(values: Mapping[str, Any]) -> KVFormat:
    return KVFormat(
        KVPrecision(values["precision"]),
        str(values["calibration"]),
        KVLayout(values.get("layout", KVLayout.SLOTS)),
        _integer(values.get("block_size", 0)),
    )


_DEFAULTS = {"kv_cache": dataclasses.asdict(KVFormat()), "generation": NO_RULES.to_dict()}
_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "format_version": _integer,
    "config": ModelConfig.from_dict,
    "device": Device,
    "precision": Precision,
    "opset": _integer,
    "eos_ids": lambda values: tuple(map(_integer, values)),
    "pad_id": _integer,
    "decoder_start_id": _integer,
    "graphs": lambda values: {name: _graph(graph) for name, graph in values.items()},
    "files": lambda values: {name: _file_entry(entry) for name, entry in values.items()},
    "kv_cache": _kv_format,
    "generation": GenerationRules.from_dict,
    "training": dict,
    "versions": dict,
}
