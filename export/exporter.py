"""From a checkpoint to an artifact: graphs, tokenizers, golden cases, proof, manifest, then one rename.

    export          checks the request, makes golden cases, runs one pipeline, writes the report and the manifest
    slots, blocks   the two pipelines: each writes its graphs and returns the draft of the manifest
    job             what a pipeline works on: emit a graph, draft a manifest, prove it
    staging         the atomic swap of the folder

An export that fails its proof leaves the target as it was.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from export import blocks, slots, text_loss
from export.golden_cases import make_attention_cases, make_cases
from export.job import Job, ParityError
from export.loss import max_relative_rms
from export.oracle import check
from export.paged import DTYPES
from export.staging import replacing
from export.stored_weights import compare
from export.verify import ParityReport, arithmetic_of, load_checked
from model.checkpoint import Checkpoint
from model.nn.transformer import DecoderOnly
from model.spec import artifact, golden, golden_attention, golden_origin, golden_texts
from model.spec.artifact import EXPLAIN, Device, FileEntry, KVFormat, KVLayout, KVPrecision, Precision
from model.spec.chat import ChatSettings
from model.spec.reading import read_text
from model.spec.tokenizer import Tokenizer, TokenizerError

_IN_SLOTS = KVFormat()


class Refused(Exception):
    """The request cannot be exported; `problems` lists every reason."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))


def export(
    checkpoint: Checkpoint,
    out: Path,
    device: Device,
    precision: Precision,
    on_stage: Callable[[str], None],
    kv_cache: KVFormat = _IN_SLOTS,
    *,
    explain_graph: bool = False,
    text: str = "",
) -> ParityReport:
    """Writes the artifact folder `out`, replacing an artifact that is already there.

    Args:
        checkpoint: what to export.
        out: made if missing; a folder that is neither empty nor an artifact is refused.
        device: the provider to build for.
        precision: the arithmetic of products with weights.
        on_stage: called with the name of each stage before it begins.
        kv_cache: how K/V is stored and laid out; on CUDA always in blocks, of `BLOCK_SIZE` tokens by default.
        explain_graph: also write a graph of attention weights, for `Explain`.
        text: measures what quantization costs in bits per byte of it; a decoder-only model over slots.

    Raises:
        Refused: when device, precision, model or folder cannot be exported.
        ParityError: when the graphs fail their proof, or quantization costs too much; nothing is written.
        StoredWeightsError: when a stored weight is not the checkpoint's; nothing is written.
        OracleError: when a quantized graph does not compute what PyTorch does with its weights; nothing is written.
        GoldenCaseError: when the checkpoint's own logits are not finite.
        EmitError: when a written graph differs from its signature.
    """
    config, kv_precision = checkpoint.config, kv_cache.precision
    is_paged = device is Device.CUDA or kv_cache.layout is KVLayout.PAGED
    if is_paged:
        problems = blocks.unsupported(config, device, precision, kv_precision)
        problems += [f"{EXPLAIN} graphs go with K/V in slots"] if explain_graph else []
        problems += ["a text is scored by graphs over slots"] if text else []
    else:
        problems = slots.unsupported(config, precision, kv_precision, explain_graph=explain_graph)
    if text and config.is_encoder_decoder:
        problems.append("a text is scored by a decoder-only model, this is an encoder-decoder")
    problems += [*_check_tokenizers(checkpoint), *_check_folder(out)]
    if problems:
        raise Refused(problems)
    with replacing(out) as folder:
        on_stage("golden cases by the reference")
        cases = make_cases(checkpoint.model, is_quantized=max_relative_rms(precision, kv_precision) is not None)
        attention = make_attention_cases(checkpoint.model) if explain_graph else ()
        if explain_graph:
            golden_attention.save(folder / artifact.GOLDEN_ATTENTION, attention)
        _copy_texts(checkpoint, folder)
        job = Job(checkpoint, folder, cases, attention, on_stage)
        if is_paged:
            draft = blocks.write(job, device, precision, kv_cache.block_size)
        else:
            draft = slots.write(job, precision, kv_precision, explain_graph=explain_graph)
        on_stage("reading the stored weights back")
        graph_files = [graph.file for graph in draft.graphs.values()]
        dtype = DTYPES.get(draft.kv_cache.precision, torch.float32)
        matrices = Precision.FP32 if is_paged else precision
        weights = compare(folder, graph_files, checkpoint.model, dtype, matrices)
        report = job.prove(draft)
        if report.answers:
            arithmetic, answers = arithmetic_of(draft), zip(cases, report.answers, strict=True)
            cases = tuple(dataclasses.replace(case, exported=found, arithmetic=arithmetic) for case, found in answers)
            # Sessions of their own must give the same answers before a server has to.
            report = dataclasses.replace(job, cases=cases).prove(draft)
        oracle = None
        if not is_paged and (precision, kv_precision) != (Precision.FP32, KVPrecision.FP32):
            on_stage("PyTorch with the stored weights")
            oracle = check(folder, draft, checkpoint.model, cases)
        report = dataclasses.replace(report, weights=weights, oracle=oracle)
        if text and isinstance(checkpoint.model, DecoderOnly):
            on_stage("scoring the text")
            report = dataclasses.replace(report, text=text_loss.measure(folder, draft, checkpoint.model, text))
            if report.failed:
                raise ParityError(report)
        golden_texts.save(folder / artifact.GOLDEN_TEXTS, _record_texts(checkpoint))
        files = _hashed(folder.iterdir())
        origin = golden_origin.of(dataclasses.replace(draft, files=files))
        golden.save(folder / artifact.GOLDEN, cases, origin)
        (folder / artifact.PARITY).write_text(report.to_json(), encoding="utf-8")
        # Weights are hashed once.
        files |= _hashed(folder / name for name in (artifact.GOLDEN, artifact.PARITY))
        manifest = dataclasses.replace(draft, files=dict(sorted(files.items())))
        (folder / artifact.MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        on_stage("checking the artifact as a server would")
        load_checked(folder, (device,))
    return report


def _check_tokenizers(checkpoint: Checkpoint) -> list[str]:
    """A tokenizer must not produce ids that the model has no embedding for."""
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


def _hashed(paths: Iterable[Path]) -> dict[str, FileEntry]:
    return {path.name: artifact.hash_file(path) for path in paths}


def _is_artifact(folder: Path) -> bool:
    """Whether a folder's manifest.json is one of ours, of whatever format version."""
    try:
        manifest = json.loads(read_text(folder / artifact.MANIFEST, artifact.MAX_MANIFEST_BYTES))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and {"format_version", "graphs"} <= manifest.keys()


def _record_texts(checkpoint: Checkpoint) -> golden_texts.Record:
    """By the checkpoint's own files and settings, not by the artifact's."""
    chat = checkpoint.chat and ChatSettings.from_json(read_text(checkpoint.chat, artifact.MAX_CHAT_BYTES))
    config, generation = checkpoint.config, checkpoint.generation
    ids = golden_texts.special_ids(config.pad_id, config.bos_id, generation.eos_ids, generation.rules)
    prompts, outputs = map(Tokenizer.load, (checkpoint.tokenizer, checkpoint.target_tokenizer))
    return golden_texts.record(prompts, outputs, chat or None, ids, golden_texts.texts_for(prompts, outputs))


def _copy_texts(checkpoint: Checkpoint, folder: Path) -> None:
    """The tokenizers, and the template for conversations if there is one."""
    shutil.copyfile(checkpoint.tokenizer, folder / artifact.TOKENIZER)
    if checkpoint.chat is not None:
        shutil.copyfile(checkpoint.chat, folder / artifact.CHAT)
    if checkpoint.target_tokenizer != checkpoint.tokenizer:
        shutil.copyfile(checkpoint.target_tokenizer, folder / artifact.TARGET_TOKENIZER)
