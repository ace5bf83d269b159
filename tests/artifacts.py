"""Tiny artifacts for tests: random weights, real export, a tokenizer that can spell any text.

Made once for each set of sizes in a run, in whichever of its processes asks first, and removed when the run ends.
Importing this module is cheap; the first call loads torch.
"""

from __future__ import annotations

import atexit
import dataclasses
import fcntl
import hashlib
import json
import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from model.spec import artifact, golden_origin
from model.spec.artifact import TOKENIZER, Device, GraphSpec, KVFormat, KVLayout, KVPrecision, Precision
from model.spec.config import Architecture, ModelConfig

if TYPE_CHECKING:
    from export.backend import Graph
    from model.nn.transformer import Transformer

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SPECIALS = (PAD, BOS, EOS)
STORE = "ONWARD_TEST_ARTIFACTS"
"""The variable that names the folder of what all processes of a run share."""
_SPEC = "spec.pickle"

_TINY: dict[str, Any] = {
    "vocab_size": 288,
    "context": 96,
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "d_ff": 64,
}
_TINY_ENCODER: dict[str, Any] = {
    "num_encoder_layers": 2,
    "source_context": 64,
    "positions": "sinusoidal",
    "norm": "layernorm",
    "activation": "relu",
}


LEARNED: Mapping[str, Any] = {
    "positions": "learned",
    "norm": "layernorm",
    "activation": "gelu",
    "d_model": 96,
    "num_heads": 6,
    "num_kv_heads": 6,
    "vocab_size": 1021,
    "d_ff": 160,
    "attention_bias": True,
    "mlp_bias": True,
}
"""Of a decoder-only model that differs from the tiny one in all that chooses kernels."""

# Additive scores at sizes that suit no kernel: heads seven wide, in groups or alone, and odd buffers. Untied, so that
# outputs are more than an echo. One layer, as every layer of such a graph takes a while to write.
_TINY_ADDITIVE: dict[str, Any] = {
    "attention_score": "additive",
    "vocab_size": 301,
    "context": 93,
    "d_model": 42,
    "num_layers": 1,
    "head_dim": 7,
    "d_ff": 97,
    "tie_embeddings": False,
}
ADDITIVE: Mapping[str, Mapping[str, Any]] = {
    Architecture.DECODER_ONLY: {**_TINY_ADDITIVE, "positions": "learned", "num_heads": 6, "num_kv_heads": 3},
    Architecture.ENCODER_DECODER: {
        **_TINY_ADDITIVE,
        "num_encoder_layers": 1,
        "source_context": 61,
        "num_heads": 1,
        "num_kv_heads": 1,
    },
}


def tiny_config(family: str, **overrides: Any) -> ModelConfig:
    """A configuration of either family ("decoder-only", "encoder-decoder") that runs in well under a millisecond."""
    encoder = _TINY_ENCODER if family == Architecture.ENCODER_DECODER else {}
    return ModelConfig(**{"architecture": Architecture(family), **_TINY, **encoder, **overrides})


def tiny_artifact(
    family: str,
    precision: Precision = Precision.FP32,
    kv_precision: KVPrecision = KVPrecision.FP32,
    *,
    explain_graph: bool = False,
    **overrides: Any,
) -> Path:
    """An artifact folder of `tiny_config`; equal arguments give the same folder, which tests must not write to."""
    config, kv = tiny_config(family, **overrides), KVFormat(kv_precision)
    return _export(config, precision, kv, Device.CPU, explain_graph=explain_graph)


def paged_artifact(
    family: str,
    device: Device = Device.CPU,
    precision: Precision = Precision.FP32,
    block_size: int = 16,
    **overrides: Any,
) -> Path:
    """The same over blocks; on a CPU by standard operators, with the weights of `tiny_artifact`."""
    kv = KVFormat(layout=KVLayout.PAGED, block_size=block_size)
    return _export(tiny_config(family, **overrides), precision, kv, device)


def tiny_checkpoint(folder: Path, config: ModelConfig, seed: int = 0) -> Path:
    """Writes a checkpoint of random weights, as the trainer leaves one, and returns its folder."""
    from model import checkpoint

    tokenizer = tiny_tokenizer(config.vocab_size, ends_with_eos=config.is_encoder_decoder)
    model = random_model(config, seed)
    checkpoint.save(folder, model, config, {TOKENIZER: tokenizer.to_str()}, {"seed": seed})
    return folder


def random_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """A model whose biases and norms are random too: one that a graph forgot would otherwise go unnoticed."""
    import torch

    from model.nn.transformer import build

    model = build(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model.eval()


def tiny_tokenizer(vocab_size: int, *, ends_with_eos: bool) -> Tokenizer:
    """One token for each byte, after the special tokens; filler words take the ids that are left.

    A vocabulary too small for all bytes keeps the printable ones first. A prompt begins with `<bos>`, a source ends
    with `<eos>`.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda letter: (letter != "Ġ", ord(letter)))
    pieces = [*SPECIALS, *letters, *(f"Ġword{number}" for number in range(vocab_size))][:vocab_size]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template, special = (f"$A {EOS}", (EOS, 2)) if ends_with_eos else (f"{BOS} $A", (BOS, 1))
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[special])
    return tokenizer


def change_tensor(folder: Path, file: str, name: str, change: Callable[[Any], Any]) -> None:
    """Replaces a stored tensor of an artifact by what `change` makes of its values, and makes its checksums fit."""
    import numpy as np
    import onnx
    from onnx import numpy_helper

    model = onnx.load(folder / file)
    (tensor,) = (each for each in model.graph.initializer if each.name == name)
    values = numpy_helper.to_array(tensor)
    changed = np.ascontiguousarray(change(values.copy()), values.dtype)
    tensor.CopyFrom(numpy_helper.from_array(changed, name))
    (folder / f"{file}.data").unlink()
    onnx.save(model, folder / file, save_as_external_data=True, location=f"{file}.data")
    rehash(folder)


def rehash(folder: Path) -> None:
    """Writes checksums that fit an artifact's files as they are now, as one who means to deceive would.

    Those in golden.npz, too: what is refused then is refused for its answers.
    """
    write_checksums(folder)
    _rewrite_origin(folder / artifact.GOLDEN, golden_origin.of(artifact.read_manifest(folder)))
    write_checksums(folder)


def write_checksums(folder: Path) -> None:
    """Writes a manifest that fits an artifact's files, and leaves golden.npz as it is."""
    manifest = artifact.read_manifest(folder)
    files = {name: artifact.hash_file(folder / name) for name in manifest.files}
    (folder / artifact.MANIFEST).write_text(dataclasses.replace(manifest, files=files).to_json())


def _rewrite_origin(path: Path, origin: dict[str, Any]) -> None:
    """Replaces the origin of golden cases, if they have one."""
    import numpy as np

    # What a test has spoiled is left alone, and not unpacked.
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        if f"{golden_origin.MEMBER}.npy" not in archive.namelist():
            return
    with np.load(path) as arrays:
        members = dict(arrays)
    members[golden_origin.MEMBER] = np.frombuffer(json.dumps(origin).encode(), np.uint8)
    np.savez_compressed(path, allow_pickle=False, **members)


@cache
def keep_operator_table() -> None:
    """Has torch's exporter build its table of operators once: it is the same for every graph, and costs a sixth of one.

    Nothing changes a table but translations of one's own, which are given to no export here.
    """
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    ONNXRegistry.from_torchlib = staticmethod(cache(ONNXRegistry.from_torchlib))  # type: ignore[method-assign]


@cache
def _export(config: ModelConfig, precision: Precision, kv: KVFormat, device: Device, **besides: bool) -> Path:
    from export.exporter import export
    from model import checkpoint

    keep_operator_table()
    # Over slots, graphs are written in float32 whatever becomes of them.
    of = (config,) if kv.layout is KVLayout.SLOTS and device is Device.CPU else (config, precision, kv, device)

    def make(root: Path) -> None:
        source = checkpoint.load(tiny_checkpoint(root / "checkpoint", config))
        with _graphs_written_once(of):
            export(source, root / config.architecture, device, precision, lambda _: None, kv, **besides)

    return once(("artifact", config, precision, kv, device, besides), make) / config.architecture


def once(key: object, make: Callable[[Path], None]) -> Path:
    """The folder that `make` filled, in any process of this run; for equal keys, by their `repr`, it is the same."""
    place = Path(_root()) / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    with Path(f"{place}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            work = Path(tempfile.mkdtemp(dir=_root()))
            make(work)
            work.rename(place)
    return place


@contextmanager
def _graphs_written_once(of: object) -> Iterator[None]:
    """Has an export take each graph from the first one that wrote it, of those that write the same, as `of` tells.

    That is nearly all of the time that a tiny export takes. Whatever is done to graphs afterwards is done each time.
    """
    from export.emit import emit

    def write_once(graph: Graph, path: Path, *opset: int) -> GraphSpec:
        def make(kept: Path) -> None:
            spec = emit(graph, kept / path.name, *opset)
            (kept / _SPEC).write_bytes(pickle.dumps(spec))

        kept = once(("graph", of, type(graph), path.parent.name, path.name, opset), make)
        for file in kept.glob(f"{path.name}*"):
            shutil.copy(file, path.parent)
        spec: GraphSpec = pickle.loads((kept / _SPEC).read_bytes())
        return spec

    with patch("export.job.emit", write_once):
        yield


@cache
def _root() -> str:
    if shared := os.environ.get(STORE):
        return shared
    folder = tempfile.TemporaryDirectory(prefix="onward-tiny-")
    atexit.register(folder.cleanup)
    return folder.name
