"""From a Hugging Face folder to a checkpoint: `plan` checks everything, `write` converts the weights.

`plan` reads JSON and headers alone and needs no torch, but for pickled weights; it reports all problems at once.
`write` checks the rest, whether tensors that must be equal are, before it writes.
"""

from __future__ import annotations

import dataclasses
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.hf import bart, gpt2, llama
from model.hf.folder import CONFIG, HfFolder, ImportRefused, Stored, is_pickled, read_folder
from model.hf.generation import check_tokens, read_tokens
from model.hf.layout import Described, Layout, Part
from model.hf.pickled import PickledWeights, read_header
from model.hf.texts import read_chat, read_tokenizers
from model.hf.values import Values, shorten
from model.spec.artifact import TOKENIZER
from model.spec.config import Architecture, ConfigError, ModelConfig
from model.spec.generation import GENERATION
from model.spec.recurrent import NOT_EXPORTED, RECURRENT

if TYPE_CHECKING:
    from torch import Tensor

    from model.nn.transformer import Transformer

_RECURRENT = ("mamba", "mamba2", "falcon_mamba", "recurrent_gemma", "rwkv", "xlstm")
"""Kinds that no transformer of ours can be."""
_SINUSOID_TOLERANCE = 2e-3
"""Sinusoids are at most 1, and half precision rounds them to 5e-4."""
_FLOAT32_BYTES = 4
_SECONDS_BETWEEN_LINES = 2.0


@dataclass(frozen=True, slots=True)
class Family:
    """A `model_type`: its transformers class, its architecture, and the function that reads its configuration."""

    architecture: str
    kind: Architecture
    describe: Callable[[Values, Mapping[str, Stored], list[str]], Described | None]


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", Architecture.DECODER_ONLY, llama.describe),
    "mistral": Family("MistralForCausalLM", Architecture.DECODER_ONLY, llama.describe),
    "qwen2": Family("Qwen2ForCausalLM", Architecture.DECODER_ONLY, llama.describe),
    "qwen3": Family("Qwen3ForCausalLM", Architecture.DECODER_ONLY, llama.describe),
    "gpt2": Family("GPT2LMHeadModel", Architecture.DECODER_ONLY, gpt2.describe),
    "bart": Family("BartForConditionalGeneration", Architecture.ENCODER_DECODER, bart.describe),
    "marian": Family("MarianMTModel", Architecture.ENCODER_DECODER, bart.describe),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that will be written except the weights.

    `tokenizers` and `extras` are texts by file name, `manifest` the contents of run.json; `notes` are for people.
    """

    folder: HfFolder
    config: ModelConfig
    layout: Layout
    tokenizers: Mapping[str, str]
    extras: Mapping[str, str]
    manifest: Mapping[str, Any]
    notes: tuple[str, ...]


def plan(path: Path, *, context: int | None = None, chat: bool = True) -> Plan:
    """Checks a whole folder.

    Args:
        path: the folder.
        context: shortens the checkpoint's contexts to this many tokens.
        chat: whether to import a chat template.

    Raises:
        ImportRefused: listing everything that is wrong or not supported.
    """
    problems: list[str] = []
    notes: list[str] = []
    folder = read_folder(path, problems, read_header)
    if not path.is_dir():
        raise ImportRefused(path, problems)
    # Each part is checked as far as possible whatever is wrong with the others, to report all problems at once.
    family = _family(folder)
    described = _describe(folder, family, problems) if folder.config else None
    problems += (Layout() if described is None else described.layout).check_dtypes(folder.tensors)
    if described is not None and folder.tensors:
        problems += described.layout.check(folder.tensors, folder.unread)
    tokens = None
    if family is not None:
        is_pair = family.kind is Architecture.ENCODER_DECODER
        tokens = read_tokens(folder, problems, notes, is_encoder_decoder=is_pair)
    if described is not None and tokens is not None:
        problems += check_tokens(tokens, described.config)
    eos_ids = () if tokens is None else tokens.settings.eos_ids
    tokenizers = read_tokenizers(folder, None if described is None else described.config, eos_ids, problems, notes)
    templates = read_chat(folder, tokenizers.get(TOKENIZER), problems, notes) if chat else {}
    if described is not None and context is not None and not 1 <= context <= described.config.context:
        problems.append(f"context is {context}, must be in [1, {described.config.context}]")
    if problems or described is None or tokens is None:
        raise ImportRefused(path, problems)
    config = dataclasses.replace(
        _cut(described.config, context or described.config.context),
        pad_id=tokens.pad_id,
        bos_id=tokens.start_id,
        eos_id=tokens.settings.eos_ids[0],
    )
    notes = [*described.notes, *notes]
    manifest = {
        "imported": {
            "folder": folder.name,
            "model_type": folder.config["model_type"],
            "transformers_version": folder.config.get("transformers_version"),
            "dtypes": sorted({tensor.dtype for tensor in folder.tensors.values()}),
            "generation_defaults": dict(tokens.defaults),
            "notes": notes,
        },
        "versions": {"python": platform.python_version()},
    }
    return Plan(
        folder=folder,
        config=config,
        layout=described.layout,
        tokenizers=tokenizers,
        extras={GENERATION: tokens.settings.to_json(), **templates},
        manifest=manifest,
        notes=tuple(notes),
    )


def write(plan: Plan, out: Path, say: Callable[[str], None] = lambda _: None) -> int:
    """Reads the weights as float32 and writes or replaces the checkpoint `out`; returns the number of parameters.

    Args:
        plan: what is written.
        out: the folder.
        say: gets a line at each stage, and every few seconds while weights are read.

    Raises:
        ImportRefused: when tensors that must be equal differ.
        OSError: when a file cannot be read or written.
        ValueError: when `out` is another program's folder.
    """
    from model import checkpoint
    from model.spec.files import StagedFiles

    if (out / checkpoint.CONFIG).exists() and not (out / checkpoint.RUN).exists():
        raise ValueError(f"{out} holds a {checkpoint.CONFIG} that is no checkpoint's: it is not overwritten")
    say(f"checking weights of {plan.folder.path}")
    with _Weights.open(plan.folder) as weights:
        problems = weights.check(plan.layout)
        if problems:
            raise ImportRefused(plan.folder.path, problems)
        tensors = weights.assemble(plan.layout, _shapes(plan.config), say)
    say(f"writing {out}")
    with StagedFiles(out) as files:
        checkpoint.stage(files, tensors, plan.config, plan.tokenizers, plan.manifest, plan.extras)
        files.commit()
    checkpoint.tidy(out, {**plan.tokenizers, **plan.extras})
    return sum(tensor.numel() for tensor in tensors.values())


def _family(folder: HfFolder) -> Family | None:
    kind = folder.config.get("model_type")
    return FAMILIES.get(kind) if isinstance(kind, str) else None


def _describe(folder: HfFolder, family: Family | None, problems: list[str]) -> Described | None:
    values = Values(CONFIG, folder.config, problems)
    kind = folder.config.get("model_type")
    quantization = folder.config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        problems.append(f"{CONFIG}: quantization_config is {shorten(method)}: bring the weights that it was made of")
    if family is None:
        problems.append(f"{CONFIG}: model_type is {shorten(kind)}, must be one of {', '.join(FAMILIES)}")
        if kind in _RECURRENT or folder.config.get("architecture") == RECURRENT:
            problems.append(f"{CONFIG}: {NOT_EXPORTED}")
        return None
    architectures = folder.config.get("architectures")
    if architectures is not None and architectures != [family.architecture]:
        values.refuse("architectures", f"{kind} must be [{family.architecture!r}]")
    # Problems elsewhere must not hide those of the configuration.
    own: list[str] = []
    try:
        described = family.describe(Values(CONFIG, folder.config, own), folder.tensors, own)
    except ConfigError as error:
        described = None
        own += [f"{CONFIG}: {problem}" for problem in error.problems]
    problems += own
    return described


def _cut(config: ModelConfig, context: int) -> ModelConfig:
    """With a shorter context, and without a window that covers all of it."""
    changes: dict[str, Any] = {"context": context}
    if config.is_encoder_decoder:
        changes["source_context"] = context
    if config.sliding_window >= context:
        changes |= {"sliding_window": 0, "layer_types": ()}
    return dataclasses.replace(config, **changes)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters, without allocating them."""
    import torch

    from model.nn.transformer import build

    with torch.device("meta"):
        model: Transformer = build(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@dataclass(frozen=True, slots=True)
class _Weights:
    """Open weight files, read tensor by tensor to bound memory."""

    stored: Mapping[str, Stored]
    files: Mapping[str, Any]

    @classmethod
    @contextmanager
    def open(cls, folder: HfFolder) -> Iterator[_Weights]:
        from safetensors import SafetensorError, safe_open

        names = sorted({tensor.file for tensor in folder.tensors.values()})
        files: dict[str, Any] = {}
        with ExitStack() as stack:
            try:
                for name in names:
                    if is_pickled(name):
                        files[name] = PickledWeights(folder.path / name)
                    else:
                        files[name] = stack.enter_context(safe_open(folder.path / name, framework="pt"))
                yield cls(folder.tensors, files)
            except SafetensorError as error:
                raise OSError(f"{folder.path}: {error}") from error

    def check(self, layout: Layout) -> list[str]:
        """Duplicate tensors that differ, and stored sinusoids that are not sinusoids."""
        import torch

        from model.nn.positions import sinusoidal_table

        problems = [
            f"{self.stored[name].file}: {name} is not what {part.name} is, though they are tied"
            for name, part in layout.copies.items()
            if name in self.stored and not torch.equal(self._read(name), self._read(part.name))
        ]
        for name, shape in layout.sinusoids.items():
            if name not in self.stored:
                continue
            error = (self._read(name).float() - sinusoidal_table(*shape, interleaved=False)).abs().max().item()
            if not error < _SINUSOID_TOLERANCE:
                problems.append(f"{self.stored[name].file}: {name} is off the sinusoids by {error:.2g}")
        return problems

    def assemble(
        self, layout: Layout, shapes: Mapping[str, tuple[int, ...]], say: Callable[[str], None]
    ) -> dict[str, Tensor]:
        """All of our tensors in float32."""
        if layout.tensors.keys() != shapes.keys():
            raise ValueError(f"the layout is of another model: {sorted(layout.tensors.keys() ^ shapes.keys())}")
        total, done, said = _FLOAT32_BYTES * sum(map(math.prod, shapes.values())), 0, time.monotonic()
        say(f"reading {len(shapes)} tensors, {total / 1e9:.2f} GB in float32")
        tensors: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            tensors[name] = self._assemble(layout.tensors[name], shape)
            done += _FLOAT32_BYTES * math.prod(shape)
            if time.monotonic() - said >= _SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                say(f"read {done / 1e9:.2f} GB, {100 * done // total} %")
        return tensors

    def _assemble(self, parts: tuple[Part, ...], shape: tuple[int, ...]) -> Tensor:
        import torch

        read = []
        for part in parts:
            tensor = self._read(part.name).float()
            tensor = tensor.T if part.transposed else tensor
            read.append(tensor[part.skipped_rows :])
        whole = read[0] if len(read) == 1 else torch.cat(read)
        if whole.dim() == len(shape):
            # A shorter context keeps the first positions.
            whole = whole[: shape[0]]
        return whole.reshape(shape).contiguous()

    def _read(self, name: str) -> Tensor:
        tensor: Tensor = self.files[self.stored[name].file].get_tensor(name)
        return tensor
