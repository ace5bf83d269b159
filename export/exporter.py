"""From a checkpoint to an artifact: graphs, tokenizers, golden cases, proof, manifest, then one rename.

Everything is made in a folder beside the target, flushed to the disk and moved into place when it is proven, so that a
reader meets a whole artifact or none, and one that fails its proof never appears. What an export that was killed leaves
behind, the next one to the same place clears away.

A graph of lower precision is a rewritten float32 graph, and one with K/V of lower precision too. Each is held to its
tolerance before it is rewritten: so what the next, wider tolerance gives room to is rounding and nothing else. Graphs
that share weights have their own until all are rewritten. Graphs for CUDA have a twin that is proven in their place and
then thrown away; their own proof needs the device.
"""

from __future__ import annotations

import dataclasses
import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path

import onnx
import torch

from export import explain, operators, paged, quantize, quantize_kv
from export.emit import emit, read_signature, share_weights
from export.explain import ExplainGraph
from export.golden_cases import make_attention_cases, make_cases
from export.graphs import OPSET, DecoderGraph, EncoderGraph, unsupported
from export.paged import CONTRIB, STAND_IN, MoveGraph, PagedDecoderGraph, PagedEncoderGraph
from export.verify import ParityReport, Verdict, replay, runtime_versions
from model.checkpoint import Checkpoint
from model.nn.transformer import EncoderDecoder
from model.spec import artifact, golden, golden_attention
from model.spec.artifact import (
    BLOCK_SIZE,
    CPU_PRECISIONS,
    CUDA_PRECISIONS,
    DECODER,
    ENCODER,
    EXPLAIN,
    MIN_BLOCK_SIZE,
    MOVE,
    Device,
    GraphSpec,
    KVFormat,
    KVLayout,
    KVPrecision,
    Manifest,
    Precision,
)
from model.spec.golden import GoldenCase
from model.spec.golden_attention import AttentionCase
from model.spec.reading import read_text
from model.spec.tokenizer import Tokenizer, TokenizerError

_NEW = "new"
_OLD = "old"
_TWIN = "twin"
_IN_SLOTS = KVFormat()
_FILE_MODE = 0o666


class Refused(Exception):
    """What was asked for cannot be exported; `problems` lists every reason."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))


class ParityError(Exception):
    """The exported graphs do not answer as PyTorch does; `report` says where."""

    def __init__(self, report: ParityReport) -> None:
        self.report = report
        failed, num_cases = report.failed, len(report.cases) + len(report.attention)
        arithmetic = f"{report.precision} over {report.kv_precision} K/V"
        super().__init__(f"parity in {arithmetic} failed in {len(failed)} of {num_cases} cases: {', '.join(failed)}")


def export(
    checkpoint: Checkpoint,
    out: Path,
    device: Device,
    precision: Precision,
    on_stage: Callable[[str], None],
    kv_cache: KVFormat = _IN_SLOTS,
    *,
    explain_graph: bool = False,
) -> ParityReport:
    """Writes the artifact folder `out`, replacing an artifact that is there already.

    Args:
        checkpoint: what to export.
        out: made if missing; a folder that is neither empty nor an artifact is left alone and refused.
        device: the provider to build for.
        precision: the arithmetic of products with weights.
        on_stage: told what is being done, before it is done.
        kv_cache: how K/V is stored and laid out; on CUDA it is in blocks whatever is said here, and blocks are of
            `BLOCK_SIZE` tokens unless it says another size.
        explain_graph: whether to write a graph that answers with attention weights besides, for `Explain`.

    Raises:
        Refused: when the device, the precision, the model or the folder is not one that can be exported to or from.
        ParityError: when the graphs fail their proof; nothing is written.
        GoldenCaseError: when the checkpoint's own logits are not finite.
        EmitError: when the graphs do not come out as they must.
    """
    config, kv_precision = checkpoint.config, kv_cache.precision
    if device is Device.CUDA or kv_cache.layout is KVLayout.PAGED:
        size = kv_cache.block_size or BLOCK_SIZE
        kv = KVFormat(_paged_precision(precision), layout=KVLayout.PAGED, block_size=size)
        problems = paged.unsupported(config, device, precision, kv_precision)
        problems += [f"{EXPLAIN} graphs go with K/V in slots"] if explain_graph else []
    else:
        kv = _IN_SLOTS
        problems = [*_check_precision(precision), *unsupported(config), *quantize.unsupported(config, precision)]
        problems += quantize_kv.unsupported(config) if kv_precision is KVPrecision.INT8 else []
        problems += explain.unsupported(kv_precision) if explain_graph else []
    problems += [*_check_tokenizers(checkpoint), *_check_folder(out)]
    if problems:
        raise Refused(problems)
    with _replacing(out) as folder:
        on_stage("golden cases by the reference")
        cases = make_cases(checkpoint.model)
        golden.save(folder / artifact.GOLDEN, cases)
        attention = make_attention_cases(checkpoint.model) if explain_graph else ()
        if explain_graph:
            golden_attention.save(folder / artifact.GOLDEN_ATTENTION, attention)
        _copy_texts(checkpoint, folder)
        if device is Device.CUDA:
            _prove_twin(checkpoint, folder.parent / _TWIN, cases, on_stage)
        if kv.layout is KVLayout.PAGED:
            graphs = _write_paged_graphs(checkpoint, folder, on_stage, device, kv)
        else:
            graphs = _write_graphs(checkpoint, folder, on_stage, explain_graph=explain_graph)
        draft = _draft(checkpoint, device, graphs, kv)
        prove = partial(_prove, folder, cases=cases, attention=attention, on_stage=on_stage)
        if kv.layout is KVLayout.PAGED:
            draft = dataclasses.replace(draft, precision=precision)
        elif kv_precision is not draft.kv_cache.precision:
            prove(draft)
            draft = _quantize_kv(folder, draft, kv_precision, on_stage)
        if precision is not draft.precision:
            prove(draft)
            draft = _quantize(folder, draft, precision, on_stage)
        if kv.layout is not KVLayout.PAGED:
            _use_own_operators(folder, draft)
        _share_weights(folder, draft)
        report = prove(draft)
        (folder / artifact.PARITY).write_text(report.to_json(), encoding="utf-8")
        files = {path.name: artifact.hash_file(path) for path in sorted(folder.iterdir())}
        manifest = dataclasses.replace(draft, files=files)
        (folder / artifact.MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        on_stage("checking the artifact as a server would")
        artifact.load(folder, devices=(device,))
    return report


def _check_precision(precision: Precision) -> list[str]:
    if precision in CPU_PRECISIONS:
        return []
    return [f"precision {precision} is not for {Device.CPU}, only {', '.join(CPU_PRECISIONS)}"]


def _paged_precision(precision: Precision) -> KVPrecision:
    """What K/V in blocks are in: what the graph computes in."""
    return KVPrecision(precision) if precision in CUDA_PRECISIONS else KVPrecision.FP32


def _check_tokenizers(checkpoint: Checkpoint) -> list[str]:
    """A tokenizer must not make ids that the model has no embedding for."""
    config = checkpoint.config
    sizes = [(checkpoint.tokenizer, config.source_vocab_size if config.is_encoder_decoder else config.vocab_size)]
    if config.is_encoder_decoder:
        sizes.append((checkpoint.target_tokenizer, config.vocab_size))
    elif checkpoint.target_tokenizer != checkpoint.tokenizer:
        return [f"{artifact.TARGET_TOKENIZER} is there, a decoder-only model reads and writes with one tokenizer"]
    problems = []
    for path, limit in sizes:
        try:
            size = Tokenizer.load(path).vocab_size
        except TokenizerError as error:
            problems.append(str(error))
            continue
        if size > limit:
            problems.append(f"{path.name} has ids up to {size - 1}, the model embeds {limit}")
    return list(dict.fromkeys(problems))


def _check_folder(out: Path) -> list[str]:
    if not out.exists():
        return []
    if not out.is_dir():
        return [f"{out} is a file"]
    if any(out.iterdir()) and not _is_artifact(out):
        return [f"{out} is neither empty nor an artifact: it is not overwritten"]
    return []


def _is_artifact(folder: Path) -> bool:
    """Whether a folder's manifest.json is one of ours, of whatever format version."""
    try:
        manifest = json.loads(read_text(folder / artifact.MANIFEST, artifact.MAX_MANIFEST_BYTES))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and {"format_version", "graphs"} <= manifest.keys()


def _write_graphs(
    checkpoint: Checkpoint, folder: Path, on_stage: Callable[[str], None], *, explain_graph: bool
) -> dict[str, GraphSpec]:
    """Writes the graphs that the model needs, and an explain graph if wanted, each with weights of its own."""
    model = checkpoint.model
    on_stage("decoder graph")
    graphs = {DECODER: emit(DecoderGraph(model), folder / f"{DECODER}.onnx")}
    if isinstance(model, EncoderDecoder):
        on_stage("encoder graph")
        graphs[ENCODER] = emit(EncoderGraph(model), folder / f"{ENCODER}.onnx")
    if explain_graph:
        on_stage("explain graph")
        graphs[EXPLAIN] = emit(ExplainGraph(model), folder / f"{EXPLAIN}.onnx")
    return graphs


def _write_paged_graphs(
    checkpoint: Checkpoint, folder: Path, on_stage: Callable[[str], None], device: Device, kv: KVFormat
) -> dict[str, GraphSpec]:
    """Writes the graphs over blocks, for CUDA by its own operator."""
    attention = CONTRIB if device is Device.CUDA else STAND_IN
    on_stage("decoder graph over blocks")
    model = paged.in_precision(checkpoint.model, kv.precision)
    decoder = PagedDecoderGraph(model, attention, kv.precision, kv.block_size)
    graphs = {DECODER: emit(decoder, folder / f"{DECODER}.onnx")}
    if isinstance(model, EncoderDecoder):
        on_stage("encoder graph over blocks")
        encoder = PagedEncoderGraph(model, kv.precision, kv.block_size)
        graphs[ENCODER] = emit(encoder, folder / f"{ENCODER}.onnx")
    on_stage("graph of copies")
    graphs[MOVE] = emit(MoveGraph(model.config, kv.precision, kv.block_size), folder / f"{MOVE}.onnx")
    return graphs


def _share_weights(folder: Path, draft: Manifest) -> None:
    """Leaves one copy of each weight in `folder`."""
    files = {name: folder / graph.file for name, graph in draft.graphs.items()}
    if EXPLAIN in files:
        share_weights(files[EXPLAIN], *(files[name] for name in (DECODER, ENCODER) if name in files))


def _quantize(folder: Path, draft: Manifest, precision: Precision, on_stage: Callable[[str], None]) -> Manifest:
    """Rewrites the float32 graphs in `folder`; returns the draft of what they are then."""
    for name, graph in draft.graphs.items():
        on_stage(f"{name} graph in {precision}")
        quantize.quantize_file(folder / graph.file, precision)
    return dataclasses.replace(draft, precision=precision)


def _use_own_operators(folder: Path, draft: Manifest) -> None:
    """Rewrites the graphs in `folder` to the project's own operators."""
    for graph in draft.graphs.values():
        if draft.precision is Precision.FP32:
            quantize.quantize_file(folder / graph.file, Precision.FP32)
        operators.use_own_file(folder / graph.file)


def _quantize_kv(folder: Path, draft: Manifest, kv_precision: KVPrecision, on_stage: Callable[[str], None]) -> Manifest:
    """Rewrites the float32 graphs in `folder` to keep K/V in fewer bits; the draft of what they are then."""
    paths = {name: folder / draft.graphs[name].file for name in (DECODER, ENCODER) if name in draft.graphs}
    on_stage(f"calibrating {kv_precision} K/V")
    scales, calibration = quantize_kv.calibrate(paths[DECODER], draft.config, paths.get(ENCODER))
    quantize_kv.quantize_kv_file(paths[DECODER], scales)
    if ENCODER in paths:
        quantize_kv.quantize_sources_file(paths[ENCODER], scales)
    graphs = {**draft.graphs, **{name: read_signature(path) for name, path in paths.items()}}
    return dataclasses.replace(draft, graphs=graphs, kv_cache=KVFormat(kv_precision, calibration))


def _prove(
    folder: Path,
    draft: Manifest,
    cases: tuple[GoldenCase, ...],
    attention: tuple[AttentionCase, ...],
    on_stage: Callable[[str], None],
) -> ParityReport:
    report = replay(folder, draft, cases, lambda name: on_stage(f"replaying {name} in {draft.precision}"), attention)
    # What is for another device is proven there.
    if report.verdict is not (Verdict.PASSED if draft.device is Device.CPU else Verdict.NOT_RUN):
        raise ParityError(report)
    return report


def _prove_twin(
    checkpoint: Checkpoint, folder: Path, cases: tuple[GoldenCase, ...], on_stage: Callable[[str], None]
) -> None:
    """Proves what a CUDA graph shares with its twin, in float32 with standard operators in the place of its own.

    That is everything but the operator and the rounding, which are proven where the operator runs. Nothing stays.
    """
    folder.mkdir()
    kv = KVFormat(layout=KVLayout.PAGED, block_size=MIN_BLOCK_SIZE)
    graphs = _write_paged_graphs(checkpoint, folder, on_stage, Device.CPU, kv)
    _prove(folder, _draft(checkpoint, Device.CPU, graphs, kv), cases, (), on_stage)
    shutil.rmtree(folder)


def _copy_texts(checkpoint: Checkpoint, folder: Path) -> None:
    """The tokenizers, and the template for conversations if there is one."""
    shutil.copyfile(checkpoint.tokenizer, folder / artifact.TOKENIZER)
    if checkpoint.chat is not None:
        shutil.copyfile(checkpoint.chat, folder / artifact.CHAT)
    if checkpoint.target_tokenizer != checkpoint.tokenizer:
        shutil.copyfile(checkpoint.target_tokenizer, folder / artifact.TARGET_TOKENIZER)


def _draft(checkpoint: Checkpoint, device: Device, graphs: Mapping[str, GraphSpec], kv: KVFormat) -> Manifest:
    """The manifest of the float32 graphs, but for its checksums, which come last."""
    config = checkpoint.config
    return Manifest(
        config=config,
        device=device,
        precision=Precision.FP32,
        opset=OPSET,
        eos_ids=checkpoint.generation.eos_ids,
        pad_id=config.pad_id,
        decoder_start_id=config.bos_id,
        graphs=graphs,
        files={},
        kv_cache=kv,
        generation=checkpoint.generation.rules,
        training=checkpoint.training,
        versions={
            **runtime_versions(),
            "onward": _own_version(),
            "torch": torch.__version__,
            "onnx": onnx.__version__,
        },
    )


def _own_version() -> str:
    try:
        return metadata.version("onward")
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "uninstalled"


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """A folder beside `out` to fill; it takes `out`'s place if the block ends well and vanishes if not."""
    out.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{out.name}.export-"
    for stranded in out.parent.glob(f"{glob.escape(prefix)}*"):
        _clear(stranded, out)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=out.parent) as workshop, _locked(Path(workshop)):
        folder, old = Path(workshop) / _NEW, Path(workshop) / _OLD
        folder.mkdir()
        yield folder
        # What writes weights may leave a file that its owner alone can read, and a server is often somebody else. The
        # folder has what the umask allows.
        allowed = folder.stat().st_mode & _FILE_MODE
        for path in folder.iterdir():
            path.chmod(allowed)
        for path in (*folder.iterdir(), folder):
            _flush(path)
        if out.exists():
            out.rename(old)
        try:
            folder.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
        _flush(out.parent)


def _clear(workshop: Path, out: Path) -> None:
    """Removes the workshop of an export that was killed, after giving back an artifact it had just put aside."""
    try:
        with _locked(workshop):
            if not out.exists() and (workshop / _OLD).is_dir():
                (workshop / _OLD).rename(out)
            shutil.rmtree(workshop)
    except BlockingIOError:  # that export is at work
        return


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a folder's lock, which the system lets go when the process ends, however it ends.

    Raises:
        BlockingIOError: when another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _flush(path: Path) -> None:
    """Has a file's or folder's contents on the disk before anything that relies on them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
