"""What an exported model *is* on disk: one folder, its manifest, its graphs' signatures, its checksums.

The exporter writes an artifact, the server reads it and nothing else. Standard library only; nothing is unpickled and
no path leaves the folder; a file that the manifest does not list is refused like a damaged one. Every file must be a
regular one, and no larger than its kind allows (`max_file_bytes`). What the graphs compute is proven elsewhere
(`model.spec.golden`).

    manifest.json      this module's `Manifest`
    decoder.onnx       + decoder.onnx.data
    encoder.onnx       + encoder.onnx.data, encoder-decoder only
    prefill.onnx       decoder-only and optional, float32 always; its weights are those in decoder.onnx.data, or where
                       the decoder's are rounded its own: prefill.onnx.data
    explain.onnx       optional; its weights are those in decoder.onnx.data and encoder.onnx.data
    move.onnx          where K/V are in blocks: copies them, and has no weights
    tokenizer.json     (+ target_tokenizer.json where source and target differ)
    chat.json          where the model has a template for conversations (`model.spec.chat`)
    golden.npz         inputs and PyTorch's outputs, in float32 whatever the graphs' precision
    attention.npz      the same for explain.onnx, where there is one: PyTorch's attention weights
    parity.json        how the exported graphs compared with them, and the tolerance of their precision
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from model.spec.config import ConfigError, ModelConfig
from model.spec.cost import num_parameters
from model.spec.generation import NO_WISHES, GenerationError, GenerationRules
from model.spec.reading import UnfitFile, check_size, open_regular, read_text

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
TARGET_TOKENIZER = "target_tokenizer.json"
CHAT = "chat.json"
GOLDEN = "golden.npz"
GOLDEN_ATTENTION = "attention.npz"
PARITY = "parity.json"
DECODER = "decoder"
ENCODER = "encoder"
PREFILL = "prefill"
EXPLAIN = "explain"
MOVE = "move"
MIN_OPSET = 23
"""The first ONNX operator set with RMSNormalization and Attention."""
MAX_OPSET = 26
"""The last that ONNX Runtime 1.31 reads."""


MAX_MANIFEST_BYTES = 4 << 20
MAX_TOKENIZER_BYTES = 128 << 20
MAX_CHAT_BYTES = 4 << 20
MAX_ARRAYS_BYTES = 256 << 20
"""Of golden.npz and of attention.npz, packed as well as unpacked."""
MAX_OTHER_BYTES = 256 << 20
"""Of any other file that holds no weights, graphs among them."""
_MAX_BYTES = {
    TOKENIZER: MAX_TOKENIZER_BYTES,
    TARGET_TOKENIZER: MAX_TOKENIZER_BYTES,
    CHAT: MAX_CHAT_BYTES,
    GOLDEN: MAX_ARRAYS_BYTES,
    GOLDEN_ATTENTION: MAX_ARRAYS_BYTES,
}
_WEIGHTS_SUFFIX = ".onnx.data"
_LEAST_WEIGHTS_BYTES = 64 << 20
_MAX_ENTRIES = 4096
_MAX_PROBLEMS = 20
_MAX_PROBLEM_CHARACTERS = 1000
Stamp = Mapping[str, tuple[int, ...]]
"""By a file's name: its device, inode, bytes and time of the last change."""


class ArtifactError(Exception):
    """An artifact is damaged, foreign or incomplete.

    `problems` lists what was found, up to a bound: the first 20, each cut where it is long, and how many more there
    are. A manifest that is made to have many would else be a message of megabytes to a client.
    """

    def __init__(self, folder: Path, problems: Sequence[str]) -> None:
        self.folder = folder
        self.problems = _first(problems)
        super().__init__(f"{folder}: " + "; ".join(self.problems))


def _first(problems: Sequence[str]) -> tuple[str, ...]:
    cut = _MAX_PROBLEM_CHARACTERS
    shown = [each if len(each) <= cut else f"{each[: cut - 1]}…" for each in problems[:_MAX_PROBLEMS]]
    more = len(problems) - len(shown)
    return (*shown, f"and {more} more problems") if more else tuple(shown)


class Device(StrEnum):
    """The execution provider a graph was built for."""

    CPU = "cpu"
    CUDA = "cuda"


class Precision(StrEnum):
    """The arithmetic of the graph's matrix products with weights; attention and norms are float32 on a CPU.

    `int8` rounds weights and activations to eight bits, `int4` weights to four (`export.quantize` defines both). What
    an artifact's logits are held to depends on its precision: `model.spec.golden.TOLERANCES`.
    """

    FP32 = "fp32"
    INT8 = "int8"
    INT4 = "int4"
    FP16 = "fp16"
    BF16 = "bf16"


class KVPrecision(StrEnum):
    """How a decoder's K/V is stored, its own and its source's; what is computed from it stays float32.

    `int8` has one scale for each channel of each head, fixed at export (`export.quantize_kv`). `fp16` and `bf16` are a
    CUDA graph's own precision.
    """

    FP32 = "fp32"
    INT8 = "int8"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def dtype(self) -> str:
        """The ONNX and NumPy name of what a buffer holds."""
        return _KV_DTYPES[self]

    @property
    def itemsize(self) -> int:
        """Bytes of each number in it; NumPy knows no bfloat16 to ask for its own."""
        return _KV_ITEMSIZES[self]


_KV_DTYPES = {
    KVPrecision.FP32: "float32",
    KVPrecision.INT8: "int8",
    KVPrecision.FP16: "float16",
    KVPrecision.BF16: "bfloat16",
}
_KV_ITEMSIZES = {KVPrecision.FP32: 4, KVPrecision.INT8: 1, KVPrecision.FP16: 2, KVPrecision.BF16: 2}


class KVLayout(StrEnum):
    """How a graph finds K/V.

    `slots`: each row has a buffer of its own, as long as the context. `paged`: rows are lists of blocks in a pool that
    all share, and tokens of any rows are packed behind each other (`paged_decoder_signature`).
    """

    SLOTS = "slots"
    PAGED = "paged"


class AttentionKind(StrEnum):
    """Who attends to whom: the encoder to its source, the decoder to itself, the decoder to the encoder's output."""

    ENCODER = "encoder"
    DECODER = "decoder"
    CROSS = "cross"


CPU_PRECISIONS = (Precision.FP32, Precision.INT8, Precision.INT4)
"""What is exported for a CPU and served on one; others gain nothing there, or have no kernels."""
CUDA_PRECISIONS = (Precision.FP16, Precision.BF16)
"""What is exported for CUDA: PagedAttention computes in these."""
MIN_BLOCK_SIZE = 16
"""The smallest that PagedAttention takes; any power of two from there on will do."""
BLOCK_SIZE = 256
"""Tokens in a block: what FlashAttention's tiles divide for heads of every width."""
MAX_CANDIDATES = 64
"""How many of the highest logits a paged graph singles out."""


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
    """What K/V buffers hold, and how they are laid out.

    `calibration` says, for people, what the scales were taken from, if there are any; `block_size` is how many tokens a
    block has where the layout is paged, else 0.
    """

    precision: KVPrecision = KVPrecision.FP32
    calibration: str = ""
    layout: KVLayout = KVLayout.SLOTS
    block_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that a reader must know about an artifact before it opens anything else.

    `eos_ids` end a sequence; `pad_id` fills; `decoder_start_id` opens an encoder-decoder's output; `generation` is what
    the model wants of outputs besides. `training` is the checkpoint's run manifest and `versions` the software that
    exported, both for people. A manifest without `kv_cache` or `generation`, as all were written once, means float32 in
    slots and no wishes.
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
    generation: GenerationRules = NO_WISHES
    training: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """The text of manifest.json."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["config"] = self.config.to_dict()
        values["kv_cache"] = dataclasses.asdict(self.kv_cache)
        values["generation"] = self.generation.to_dict()
        values["graphs"] = {name: dataclasses.asdict(spec) for name, spec in self.graphs.items()}
        values["files"] = {name: dataclasses.asdict(entry) for name, entry in sorted(self.files.items())}
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parses manifest.json.

        Raises:
            ValueError: with every problem, separated by "; ".
        """
        fields, problems = _parse(text)
        if problems:
            raise ValueError("; ".join(problems))
        return cls(**fields)


def _parse(text: str) -> tuple[dict[str, Any], list[str]]:
    """The fields of manifest.json that can be read, and what is wrong with the others."""
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


def _graphs(values: Mapping[str, Any]) -> dict[str, GraphSpec]:
    return {name: _graph(spec) for name, spec in values.items()}


def _file_entries(values: Mapping[str, Any]) -> dict[str, FileEntry]:
    return {name: FileEntry(str(entry["sha256"]), _integer(entry["num_bytes"])) for name, entry in values.items()}


def _kv_format(values: Mapping[str, Any]) -> KVFormat:
    return KVFormat(
        KVPrecision(values["precision"]),
        str(values["calibration"]),
        KVLayout(values.get("layout", KVLayout.SLOTS)),
        _integer(values.get("block_size", 0)),
    )


_DEFAULTS = {"kv_cache": dataclasses.asdict(KVFormat()), "generation": NO_WISHES.to_dict()}
_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "format_version": _integer,
    "config": ModelConfig.from_dict,
    "device": Device,
    "precision": Precision,
    "opset": _integer,
    "eos_ids": lambda values: tuple(map(_integer, values)),
    "pad_id": _integer,
    "decoder_start_id": _integer,
    "graphs": _graphs,
    "files": _file_entries,
    "kv_cache": _kv_format,
    "generation": GenerationRules.from_dict,
    "training": dict,
    "versions": dict,
}


def decoder_signature(
    config: ModelConfig, kv_precision: KVPrecision = KVPrecision.FP32
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs that a CPU decoder graph must have, in order.

    `seqlens_k` is each row's past length plus its new tokens minus one; `total_sequence_length` the largest such
    value plus one; `logits_indices` picks flat positions of `[batch * sequence]` whose logits are wanted. Caches are
    read and written in place: each `present_*` is bound to the very buffer of its `past_*`. An encoder-decoder also
    reads each row's cross-attention K/V, valid up to `source_lengths`, and decodes one token per row and step
    (`sequence` is 1); `cross_*_out` are the same buffers again, because the operator insists on returning them.
    """
    kv = ("batch", config.num_kv_heads, "capacity", config.head_dim)
    cross = ("batch", config.num_kv_heads, "source_capacity", config.head_dim)
    sequence: int | str = 1 if config.is_encoder_decoder else "sequence"
    inputs = [TensorSpec("input_ids", "int64", ("batch", sequence))]
    if config.positions != "rotary":
        inputs.append(TensorSpec("position_ids", "int64", ("batch", sequence)))
    inputs += [
        TensorSpec("seqlens_k", "int32", ("batch",)),
        TensorSpec("total_sequence_length", "int32", ()),
        TensorSpec("logits_indices", "int64", ("num_logits",)),
    ]
    outputs = [TensorSpec("logits", "float32", ("num_logits", config.vocab_size))]
    for layer in range(config.num_layers):
        for part in ("key", "value"):
            inputs.append(TensorSpec(f"past_{part}_{layer}", kv_precision.dtype, kv))
            outputs.append(TensorSpec(f"present_{part}_{layer}", kv_precision.dtype, kv))
    if config.is_encoder_decoder:
        inputs.append(TensorSpec("source_lengths", "int32", ("batch",)))
        for layer in range(config.num_layers):
            for part in ("key", "value"):
                inputs.append(TensorSpec(f"cross_{part}_{layer}", kv_precision.dtype, cross))
                outputs.append(TensorSpec(f"cross_{part}_out_{layer}", kv_precision.dtype, cross))
    return tuple(inputs), tuple(outputs)


def encoder_signature(
    config: ModelConfig, kv_precision: KVPrecision = KVPrecision.FP32
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs that an encoder graph must have: right-padded sources in, every layer's cross K/V out."""
    cross = ("batch", config.num_kv_heads, "source", config.head_dim)
    inputs = (
        TensorSpec("source_ids", "int64", ("batch", "source")),
        TensorSpec("source_lengths", "int32", ("batch",)),
    )
    outputs = tuple(
        TensorSpec(f"cross_{part}_{layer}", kv_precision.dtype, cross)
        for layer in range(config.num_layers)
        for part in ("key", "value")
    )
    return inputs, outputs


def paged_decoder_signature(
    config: ModelConfig, precision: KVPrecision, block_size: int
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs that a decoder graph over blocks must have, in order.

    The tokens of all rows are packed, without padding. The lengths, tables and `attention_metadata` are the inputs of
    ONNX Runtime's `com.microsoft.PagedAttention`, by its names: row b feeds tokens
    `[cumulative_sequence_length[b], cumulative_sequence_length[b + 1])` after `past_seqlens[b]` others, whose K/V lie
    in the blocks `block_table[b]`; token t's own are written to place `slot_mapping[t]`, `block * block_size + offset`,
    or to none where that is -1. `attention_metadata` holds upper bounds of the tokens that a row feeds and has, and a
    lower one of the most that a row has; an operator may read it on the host. Caches are read and written in place:
    each `*_cache_out_*` is bound to the very buffer of its `*_cache_*`. Block 0 belongs to nobody: what is in it is
    undefined.

    An encoder-decoder finds its sources' K/V in the same caches, by `source_block_table`. To the operator the tokens
    that a row feeds are behind those that it has, so `source_past_seqlens` are the sources' lengths less what is fed,
    and a row may not feed more tokens than its source has. `source_attention_metadata` is as the other one, about
    sources.

    `logits_indices` picks packed tokens whose logits are wanted. `candidate_ids` are those of the highest, in falling
    order and among equals the lowest first, `candidate_logits` what they have, and `log_normalizer` the logarithm of
    the sum of all exponentials, or not finite where a logit is not, so that few numbers need to leave a device.
    """
    cache = ("num_blocks", block_size, config.num_kv_heads, config.head_dim)
    num_candidates = min(MAX_CANDIDATES, config.vocab_size)
    inputs = [TensorSpec("input_ids", "int64", ("num_tokens",))]
    if config.positions != "rotary":
        inputs.append(TensorSpec("position_ids", "int64", ("num_tokens",)))
    inputs += [
        TensorSpec("cumulative_sequence_length", "int32", ("num_boundaries",)),
        TensorSpec("past_seqlens", "int32", ("batch",)),
        TensorSpec("block_table", "int32", ("batch", "blocks_per_row")),
        TensorSpec("slot_mapping", "int32", ("num_tokens",)),
        TensorSpec("attention_metadata", "int32", (3,)),
        TensorSpec("logits_indices", "int64", ("num_logits",)),
    ]
    if config.is_encoder_decoder:
        inputs += [
            TensorSpec("source_past_seqlens", "int32", ("batch",)),
            TensorSpec("source_block_table", "int32", ("batch", "blocks_per_source")),
            TensorSpec("source_attention_metadata", "int32", (3,)),
        ]
    outputs = [
        TensorSpec("logits", "float32", ("num_logits", config.vocab_size)),
        TensorSpec("candidate_ids", "int64", ("num_logits", num_candidates)),
        TensorSpec("candidate_logits", "float32", ("num_logits", num_candidates)),
        TensorSpec("log_normalizer", "float32", ("num_logits",)),
    ]
    for layer in range(config.num_layers):
        for part in ("key", "value"):
            inputs.append(TensorSpec(f"{part}_cache_{layer}", precision.dtype, cache))
            outputs.append(TensorSpec(f"{part}_cache_out_{layer}", precision.dtype, cache))
    return tuple(inputs), tuple(outputs)


def paged_encoder_signature(
    config: ModelConfig, precision: KVPrecision, block_size: int
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs that an encoder graph over blocks must have: right-padded sources in, their K/V in the caches.

    `slot_mapping` says where each token's K/V go, as in `paged_decoder_signature`: padding goes nowhere, so has -1.
    """
    cache = ("num_blocks", block_size, config.num_kv_heads, config.head_dim)
    names = [f"{part}_cache" for part in ("key", "value")]
    layers = range(config.num_layers)
    inputs = (
        TensorSpec("source_ids", "int64", ("batch", "source")),
        TensorSpec("source_lengths", "int32", ("batch",)),
        TensorSpec("slot_mapping", "int32", ("batch", "source")),
        *(TensorSpec(f"{name}_{layer}", precision.dtype, cache) for layer in layers for name in names),
    )
    outputs = tuple(TensorSpec(f"{name}_out_{layer}", precision.dtype, cache) for layer in layers for name in names)
    return inputs, outputs


def paged_move_signature(
    config: ModelConfig, precision: KVPrecision, block_size: int
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs of the graph that copies K/V within the caches, in place, where these lie on a device.

    What lies at place `sources[i]`, `block * block_size + offset`, goes to `targets[i]`. All are read before any is
    written, and no target may be named twice.
    """
    cache = ("num_blocks", block_size, config.num_kv_heads, config.head_dim)
    names = [(layer, f"{part}_cache") for layer in range(config.num_layers) for part in ("key", "value")]
    inputs = (
        TensorSpec("sources", "int64", ("num_places",)),
        TensorSpec("targets", "int64", ("num_places",)),
        *(TensorSpec(f"{name}_{layer}", precision.dtype, cache) for layer, name in names),
    )
    return inputs, tuple(TensorSpec(f"{name}_out_{layer}", precision.dtype, cache) for layer, name in names)


def attention_layers(config: ModelConfig) -> dict[AttentionKind, int]:
    """The kinds of attention that a model has, and in how many layers each."""
    if not config.is_encoder_decoder:
        return {AttentionKind.DECODER: config.num_layers}
    return {
        AttentionKind.ENCODER: config.num_encoder_layers,
        AttentionKind.DECODER: config.num_layers,
        AttentionKind.CROSS: config.num_layers,
    }


def attention_output(kind: AttentionKind, layer: int) -> str:
    """What an explain graph calls the weights of one layer."""
    return f"{kind}_attention_{layer}"


def explain_signature(config: ModelConfig) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs that an explain graph must have: one whole sequence in, every layer's attention weights out.

    Row i of a matrix is query i's distribution over the keys. There is no cache and no logit: of an encoder-decoder,
    `input_ids` begin with the start token.
    """
    lengths = {
        AttentionKind.ENCODER: ("source", "source"),
        AttentionKind.DECODER: ("sequence", "sequence"),
        AttentionKind.CROSS: ("sequence", "source"),
    }
    inputs = [TensorSpec("input_ids", "int64", (1, "sequence"))]
    if config.is_encoder_decoder:
        inputs.append(TensorSpec("source_ids", "int64", (1, "source")))
    outputs = (
        TensorSpec(attention_output(kind, layer), "float32", (config.num_heads, *lengths[kind]))
        for kind, num_layers in attention_layers(config).items()
        for layer in range(num_layers)
    )
    return tuple(inputs), tuple(outputs)


def hash_file(path: Path) -> FileEntry:
    """Checksum and size of a regular file, read in pieces.

    Raises:
        UnfitFile: when it is no regular file.
        OSError: when it cannot be read.
    """
    with open_regular(path) as stream:
        return FileEntry(hashlib.file_digest(stream, "sha256").hexdigest(), stream.tell())


def max_file_bytes(name: str, config: ModelConfig | None) -> int | None:
    """How large a file of an artifact may be; None for weights of an unknown model.

    Weights follow from the model's sizes: each parameter in float32, twice, as a graph may store one matrix both ways,
    and tables for every position. No graph of ours is near that.
    """
    if not name.endswith(_WEIGHTS_SUFFIX):
        return _MAX_BYTES.get(name, MAX_OTHER_BYTES)
    if config is None:
        return None
    tables = (config.context + config.source_context) * config.d_model
    return 8 * (num_parameters(config) + tables) + _LEAST_WEIGHTS_BYTES


def stamp(folder: Path, manifest: Manifest) -> Stamp:
    """What changes when a file of an artifact is replaced or written to; one that is gone has an empty entry."""
    found: dict[str, tuple[int, ...]] = {}
    for name in manifest.files:
        try:
            status = (folder / name).stat()
        except OSError:
            found[name] = ()
        else:
            found[name] = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return found


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks manifest.json alone; `load` checks the files too.

    Raises:
        ArtifactError: when it is missing or malformed.
    """
    fields, problems = _read(folder)
    if problems:
        raise ArtifactError(folder, problems)
    return Manifest(**fields)


def load(
    folder: Path,
    devices: Collection[Device] = (Device.CPU,),
    *,
    checksums: bool = True,
    memory_bytes: int | None = None,
) -> Manifest:
    """Reads an artifact's manifest and checks every file, checksum, graph signature and special token against it.

    A file that is larger than it may be is not read.

    Args:
        folder: the artifact.
        devices: what the caller can run graphs on, or need not.
        checksums: whether to read the files for them, which takes a second for each gigabyte.
        memory_bytes: what the caller has for the weights of a CPU's graph; None sets no limit.

    Raises:
        ArtifactError: listing every problem, not just the first, up to a bound.
    """
    fields, problems = _read(folder)
    # A manifest that is wrong elsewhere still says which files there must be.
    if "files" in fields:
        if fields.get("device") is not Device.CPU:
            memory_bytes = None
        problems += _check_files(folder, fields, checksums=checksums, memory_bytes=memory_bytes)
    if fields.keys() == _PARSERS.keys():
        manifest = Manifest(**fields)
        problems += [*_check_target(manifest, devices), *_check_signatures(manifest), *_check_tokens(manifest)]
    if problems:
        raise ArtifactError(folder, problems)
    return manifest


def _read(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The manifest's fields that can be read, and what is wrong with the others or with the file."""
    path = folder / MANIFEST
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            return {}, [f"{MANIFEST!r} leaves the artifact's folder"]
        fields, problems = _parse(read_text(path, MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        return {}, [f"{MANIFEST} is missing: not an artifact"]
    except UnfitFile as error:
        return {}, [f"{MANIFEST} {error}"]
    except (OSError, ValueError, RuntimeError) as error:  # unreadable; not UTF-8; a loop of links
        return {}, [f"{MANIFEST}: {error}"]
    return fields, [f"{MANIFEST}: {problem}" for problem in problems]


def _check_files(folder: Path, fields: Mapping[str, Any], *, checksums: bool, memory_bytes: int | None) -> list[str]:
    """What is wrong with an artifact's files, by those fields of its manifest that could be read."""
    files: Mapping[str, FileEntry] = fields["files"]
    if len(files) > _MAX_ENTRIES:
        return [f"files lists {len(files)} names, must list at most {_MAX_ENTRIES}"]
    graphs: Mapping[str, GraphSpec] = fields.get("graphs", {})
    config: ModelConfig | None = fields.get("config")
    needed = {TOKENIZER, GOLDEN, PARITY, *(graph.file for graph in graphs.values())}
    needed |= {GOLDEN_ATTENTION} if EXPLAIN in graphs else set()
    problems = [f"files does not list {name}" for name in sorted(needed - files.keys())]
    for name, expected in sorted(files.items()):
        max_bytes = max_file_bytes(name, config)
        if max_bytes is not None and memory_bytes is not None:
            max_bytes = min(max_bytes, memory_bytes)
        try:
            problem = _check_file(folder, name, expected, max_bytes, checksum=checksums)
        except (OSError, ValueError, RuntimeError) as error:  # unreadable; not a path at all; a loop of links
            problem = f"{name!r} cannot be read: {error}"
        problems += [problem] if problem else []
    # A graph may name further files, so one that no checksum covers could change what is computed.
    entries = list(islice(folder.rglob("*"), _MAX_ENTRIES + 1))
    if len(entries) > _MAX_ENTRIES:
        problems.append(f"the folder has more than {_MAX_ENTRIES} entries")
    present = {path.relative_to(folder).as_posix() for path in entries if path.is_symlink() or not path.is_dir()}
    problems += [f"{name} is not in the manifest" for name in sorted(present - files.keys() - {MANIFEST})]
    return problems


def _check_file(folder: Path, name: str, expected: FileEntry, max_bytes: int | None, *, checksum: bool) -> str | None:
    path = folder / name
    if PurePosixPath(name).is_absolute() or not path.resolve().is_relative_to(folder.resolve()):
        return f"{name!r} leaves the artifact's folder"
    if not path.exists():
        return f"{name} is missing"
    try:
        with open_regular(path) as stream:
            # Sizes first: a wrong one is found without reading a file that may be huge.
            if (actual := os.fstat(stream.fileno()).st_size) != expected.num_bytes:
                return f"{name} has {actual} bytes, the manifest says {expected.num_bytes}"
            if max_bytes is None:  # of which it is not known how long reading it may take
                return None
            check_size(actual, max_bytes)
            if checksum and hashlib.file_digest(stream, "sha256").hexdigest() != expected.sha256:
                return f"{name} does not match its sha256 in the manifest"
    except UnfitFile as error:
        return f"{name} {error}"
    return None


def _check_target(manifest: Manifest, devices: Collection[Device]) -> list[str]:
    """What the caller has no way to run, or no proof for, and what does not go together."""
    problems = []
    if manifest.device not in devices:
        problems.append(f"device is {manifest.device}, this version serves {', '.join(devices)}")
    precisions = CPU_PRECISIONS if manifest.device is Device.CPU else CUDA_PRECISIONS
    if manifest.precision not in precisions:
        problems.append(f"precision is {manifest.precision}, this version serves {', '.join(precisions)}")
    problems += _check_kv_format(manifest)
    if not MIN_OPSET <= manifest.opset <= MAX_OPSET:
        problems.append(f"opset is {manifest.opset}, this version serves {MIN_OPSET} to {MAX_OPSET}")
    return problems


def _check_kv_format(manifest: Manifest) -> list[str]:
    kv, size = manifest.kv_cache, manifest.kv_cache.block_size
    if kv.layout is KVLayout.SLOTS:
        problems = [f"kv_cache.block_size is {size}, must be 0 in {kv.layout}"] if size else []
        if manifest.device is Device.CUDA:
            problems.append(f"kv_cache.layout is {kv.layout}, must be {KVLayout.PAGED} for {manifest.device}")
        allowed: tuple[KVPrecision, ...] = (KVPrecision.FP32, KVPrecision.INT8)
    else:
        is_power = size > 0 and size & (size - 1) == 0
        problems = (
            []
            if is_power and size >= MIN_BLOCK_SIZE
            else [f"kv_cache.block_size is {size}, must be a power of two and at least {MIN_BLOCK_SIZE}"]
        )
        allowed = (KVPrecision.FP32,)
        if manifest.device is Device.CUDA:
            # Whatever a CUDA graph computes in.
            own = [each for each in CUDA_PRECISIONS if each is manifest.precision] or CUDA_PRECISIONS
            allowed = tuple(map(KVPrecision, own))
        if manifest.device is Device.CPU and manifest.precision is not Precision.FP32:
            problems.append(f"precision is {manifest.precision}, must be {Precision.FP32} where K/V are {kv.layout}")
    if kv.precision not in allowed:
        problems.append(f"kv_cache.precision is {kv.precision}, must be {' or '.join(allowed)}")
    return problems


def _check_tokens(manifest: Manifest) -> list[str]:
    config = manifest.config
    size = config.vocab_size
    fillable = min(size, config.source_vocab_size) if config.is_encoder_decoder else size
    named = [("pad_id", manifest.pad_id, fillable), ("decoder_start_id", manifest.decoder_start_id, size)]
    named += [("eos_ids", token, size) for token in manifest.eos_ids]
    named += [(f"generation.{name}", token, size) for name, token in manifest.generation.named_ids]
    problems = [f"{name} has {token}, must be in [0, {size})" for name, token, size in named if not 0 <= token < size]
    if len(set(manifest.generation.suppressed_ids)) >= size:
        problems.append("generation.suppressed_ids are the whole vocabulary: nothing could be generated")
    return problems if manifest.eos_ids else [*problems, "eos_ids is empty: no output would end"]


def _check_signatures(manifest: Manifest) -> list[str]:
    config, kv = manifest.config, manifest.kv_cache
    is_paged = kv.layout is KVLayout.PAGED
    if is_paged:
        expected = {
            DECODER: paged_decoder_signature(config, kv.precision, kv.block_size),
            MOVE: paged_move_signature(config, kv.precision, kv.block_size),
        }
    else:
        expected = {DECODER: decoder_signature(config, kv.precision)}
    if config.is_encoder_decoder and is_paged:
        expected[ENCODER] = paged_encoder_signature(config, kv.precision, kv.block_size)
    elif config.is_encoder_decoder:
        expected[ENCODER] = encoder_signature(config, kv.precision)
    if EXPLAIN in manifest.graphs:
        expected[EXPLAIN] = explain_signature(manifest.config)
    # A prefill graph of a former release, which had them beside K/V in slots, is not read.
    unknown = manifest.graphs.keys() - expected.keys() - (set() if is_paged else {PREFILL})
    problems = [f"graphs lists unknown {name!r}" for name in sorted(unknown)]
    for name, (inputs, outputs) in expected.items():
        graph = manifest.graphs.get(name)
        if graph is None:
            problems.append(f"graphs lacks {name!r}")
            continue
        for kind, want, have in (("inputs", inputs, graph.inputs), ("outputs", outputs, graph.outputs)):
            problems += [f"{name} {kind} lacks {_show(spec)}" for spec in want if spec not in have]
            problems += [f"{name} {kind} has unexpected {_show(spec)}" for spec in have if spec not in want]
    return problems


def _show(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype}[{', '.join(str(axis) for axis in spec.shape)}]"
