"""Reads an artifact's folder and checks it: manifest, files, checksums, signatures, special tokens.

Nothing is unpickled and no path leaves the folder. A file that the manifest does not list is refused like a damaged
one. Every file must be a regular one, and no larger than its kind allows (`max_file_bytes`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from model.spec.artifact.manifest import (
    CHAT,
    CPU_PRECISIONS,
    CUDA_PRECISIONS,
    EXPLAIN,
    GOLDEN,
    GOLDEN_ATTENTION,
    GOLDEN_TEXTS,
    MANIFEST,
    MIN_BLOCK_SIZE,
    PARITY,
    PREFILL,
    TARGET_TOKENIZER,
    TOKENIZER,
    Device,
    FileEntry,
    GraphSpec,
    KVLayout,
    KVPrecision,
    Manifest,
    Precision,
    TensorSpec,
    parse_fields,
)
from model.spec.artifact.signatures import graph_signatures
from model.spec.config import ModelConfig
from model.spec.cost import num_parameters
from model.spec.reading import UnfitFile, check_size, open_regular, read_text

MIN_OPSET = 23
"""The first ONNX operator set with RMSNormalization and Attention."""
MAX_OPSET = 26
"""The last that ONNX Runtime 1.31 reads."""

MAX_MANIFEST_BYTES = 4 << 20
MAX_TOKENIZER_BYTES = 128 << 20
MAX_CHAT_BYTES = 4 << 20
MAX_TEXTS_BYTES = 1 << 20
MAX_ARRAYS_BYTES = 256 << 20
"""For golden.npz and attention.npz, packed and unpacked."""
MAX_OTHER_BYTES = 256 << 20
"""For any other file without weights, graphs included."""
_MAX_BYTES = {
    TOKENIZER: MAX_TOKENIZER_BYTES,
    TARGET_TOKENIZER: MAX_TOKENIZER_BYTES,
    CHAT: MAX_CHAT_BYTES,
    GOLDEN_TEXTS: MAX_TEXTS_BYTES,
    GOLDEN: MAX_ARRAYS_BYTES,
    GOLDEN_ATTENTION: MAX_ARRAYS_BYTES,
}
_WEIGHTS_SUFFIX = ".onnx.data"
_MIN_WEIGHTS_LIMIT = 64 << 20
_MAX_ENTRIES = 4096
_MAX_PROBLEMS = 20
_MAX_PROBLEM_CHARACTERS = 1000
Stamp = Mapping[str, tuple[int, ...]]
"""Device, inode, bytes and modification time of each file, by name."""


class ArtifactError(Exception):
    """An artifact is damaged, foreign or incomplete.

    `problems` has the first 20, each truncated, and the number of the others: the bound keeps a hostile manifest from
    making a message of megabytes.
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


def hash_file(path: Path) -> FileEntry:
    """Checksum and size of a regular file, read in chunks.

    Raises:
        UnfitFile: when it is no regular file.
        OSError: when it cannot be read.
    """
    with open_regular(path) as stream:
        return FileEntry(hashlib.file_digest(stream, "sha256").hexdigest(), stream.tell())


def max_file_bytes(name: str, config: ModelConfig | None) -> int | None:
    """The size limit of an artifact's file; None for weights of an unknown model.

    The limit of weights follows from the model's sizes: each parameter in float32, twice, as a graph may store one
    matrix both ways, and tables for every position. Graphs of the exporter stay far below it.
    """
    if not name.endswith(_WEIGHTS_SUFFIX):
        return _MAX_BYTES.get(name, MAX_OTHER_BYTES)
    if config is None:
        return None
    tables = (config.context + config.source_context) * config.d_model
    return 8 * (num_parameters(config) + tables) + _MIN_WEIGHTS_LIMIT


def stamp(folder: Path, manifest: Manifest) -> Stamp:
    """A value that changes when a file of the artifact is replaced or written to; a missing file has an empty entry."""
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

    A file above its size limit is not read. `checksums` hashes the files, which takes a second per gigabyte.
    `memory_bytes` limits the weights of a CPU's graph.

    Raises:
        ArtifactError: listing every problem, up to a bound.
    """
    fields, problems = _read(folder)
    # A manifest with problems elsewhere can still list the files.
    if "files" in fields:
        if fields.get("device") is not Device.CPU:
            memory_bytes = None
        problems += _check_files(folder, fields, checksums=checksums, memory_bytes=memory_bytes)
    if fields.keys() == Manifest.__dataclass_fields__.keys():
        manifest = Manifest(**fields)
        problems += [*_check_target(manifest, devices), *_check_signatures(manifest), *_check_tokens(manifest)]
    if problems:
        raise ArtifactError(folder, problems)
    return manifest


def _read(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The manifest's valid fields, and the problems of the others or of the file."""
    path = folder / MANIFEST
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            return {}, [f"{MANIFEST!r} leaves the artifact's folder"]
        fields, problems = parse_fields(read_text(path, MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        return {}, [f"{MANIFEST} is missing: not an artifact"]
    except UnfitFile as error:
        return {}, [f"{MANIFEST} {error}"]
    except (OSError, ValueError, RuntimeError) as error:  # unreadable; not UTF-8; a loop of links
        return {}, [f"{MANIFEST}: {error}"]
    return fields, [f"{MANIFEST}: {problem}" for problem in problems]


def _check_files(folder: Path, fields: Mapping[str, Any], *, checksums: bool, memory_bytes: int | None) -> list[str]:
    """The problems of an artifact's files, judged by the manifest's valid fields."""
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
    # A graph may name further files, and one without a checksum could change the computation.
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
            if max_bytes is None:  # without a limit, reading could take arbitrarily long
                return None
            check_size(actual, max_bytes)
            if checksum and hashlib.file_digest(stream, "sha256").hexdigest() != expected.sha256:
                return f"{name} does not match its sha256 in the manifest"
    except UnfitFile as error:
        return f"{name} {error}"
    return None


def _check_target(manifest: Manifest, devices: Collection[Device]) -> list[str]:
    """Devices, precisions and operator sets that cannot be run or proven, and invalid combinations."""
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
    kv, size, problems = manifest.kv_cache, manifest.kv_cache.block_size, []
    allowed: Sequence[KVPrecision]
    if kv.layout is KVLayout.SLOTS:
        allowed = (KVPrecision.FP32, KVPrecision.INT8)
        if size:
            problems.append(f"kv_cache.block_size is {size}, must be 0 in {kv.layout}")
        if manifest.device is Device.CUDA:
            problems.append(f"kv_cache.layout is {kv.layout}, must be {KVLayout.PAGED} for {manifest.device}")
    else:
        allowed = (KVPrecision.FP32,)
        if size < MIN_BLOCK_SIZE or size & (size - 1):
            problems.append(f"kv_cache.block_size is {size}, must be a power of two and at least {MIN_BLOCK_SIZE}")
        if manifest.device is Device.CUDA:
            # A CUDA graph caches in its own precision.
            own = [each for each in CUDA_PRECISIONS if each is manifest.precision] or CUDA_PRECISIONS
            allowed = tuple(map(KVPrecision, own))
        elif manifest.precision is not Precision.FP32:
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
    expected = graph_signatures(manifest)
    # A prefill graph of a former release, which had them beside K/V in slots, is not read.
    ignored = set() if manifest.kv_cache.layout is KVLayout.PAGED else {PREFILL}
    unknown = manifest.graphs.keys() - expected.keys() - ignored
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
