"""Models for the checks of a card: graphs over blocks, engines, and PyTorch's answers in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.frame.paged import block_size, stirred
from model.nn import reference
from model.nn.transformer import EncoderDecoder, Transformer, build
from model.spec.artifact import BLOCK_SIZE, Device, GraphSpec, Manifest, Precision
from model.spec.config import Activation, Architecture, ModelConfig, Norm, Positions
from model.spec.golden import Float32, Tolerance, tolerance_of
from model.training.presets import resolve
from service.engine.engine import Engine, LastRun
from service.engine.factory import build_engine
from service.engine.kv.budget import plan_kv_memory
from service.engine.scheduler import EngineLimits
from service.engine.sessions.session import Bindable, Binding, Cuda, GraphSession, SessionOptions
from tests.environment import ROOT

OPTIONS = SessionOptions(intra_op_threads=1, allow_spinning=False)
DTYPES = {Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


def configs() -> dict[str, ModelConfig]:
    """Models by name: two tiny ones, and two of real sizes."""
    tiny = ModelConfig(
        architecture=Architecture.DECODER_ONLY, vocab_size=288, context=3 * BLOCK_SIZE, d_model=128, num_layers=2,
        num_heads=2, num_kv_heads=1, d_ff=128,
    )  # fmt: skip
    encoder_decoder = replace(
        tiny, architecture=Architecture.ENCODER_DECODER, context=64, source_context=64, source_vocab_size=288,
        num_encoder_layers=1, num_kv_heads=2, positions=Positions.SINUSOIDAL, norm=Norm.LAYER,
        activation=Activation.RELU,
    )  # fmt: skip
    recipe = str(ROOT / "examples" / "recipes" / "en-de-gpu.toml")
    return {
        "tiny": tiny,
        "tiny-encoder-decoder": encoder_decoder,
        "llama-110m": resolve("llama-110m").model,
        "en-de-25m": resolve(recipe).model,
    }


@dataclass(frozen=True)
class Subject:
    """A model in a precision on a device."""

    name: str
    device: Device
    precision: Precision
    model: Transformer
    folder: Path
    manifest: Manifest

    @property
    def config(self) -> ModelConfig:
        return self.manifest.config

    @property
    def is_tiny(self) -> bool:
        return self.name.startswith("tiny")

    @property
    def rows(self) -> int:
        return 4 if self.is_tiny else 8

    @property
    def block_size(self) -> int:
        return block_size(self.device)

    @property
    def tolerance(self) -> Tolerance:
        return tolerance_of(self.precision, self.manifest.kv_cache.precision)

    @property
    def limits(self) -> EngineLimits:
        """Chunks of one block, so that prompts have several; room for what preempted rows save, in whole blocks."""
        size, room = self.block_size, plan_kv_memory(self.manifest, 2 * self.rows, None).num_bytes
        return EngineLimits(
            max_batch_size=self.rows, prefill_chunk=size, max_prefill_tokens=2 * size, kv_memory_bytes=room
        )

    def engine(self) -> Engine:
        """As a server has it, without text."""
        return build_engine(self.folder, self.manifest, lambda _: "", self.limits, OPTIONS, LastRun())

    def torch_model(self, precision: Precision = Precision.FP32) -> Transformer:
        """A fresh copy on the device."""
        model = stirred(build(self.config, 0))
        return model.to(device=str(self.device), dtype=DTYPES[precision])

    def prompt(self, length: int, *seed: int) -> list[int]:
        """Random ids of a prompt, or of a source, that leave room for answers."""
        is_source = self.config.is_encoder_decoder
        limit = self.config.source_context if is_source else self.config.context - 32
        vocab_size = self.config.source_vocab_size if is_source else self.config.vocab_size
        ids: list[int] = np.random.default_rng(seed).integers(3, vocab_size, min(length, limit)).tolist()
        return ids


class EagerSession(GraphSession):
    """A graph whose runs are never captured, whatever number they have."""

    def bind(self, inputs: Mapping[str, Bindable], outputs: Mapping[str, Bindable]) -> Binding:
        return _EagerBinding(super().bind(inputs, outputs))


class _EagerBinding(Binding):
    def __init__(self, binding: Binding) -> None:
        self._of = binding

    def bind_inputs(self, inputs: Mapping[str, Bindable]) -> None:
        self._of.bind_inputs(inputs)

    def bind_outputs(self, outputs: Mapping[str, Bindable]) -> None:
        self._of.bind_outputs(outputs)

    def run(self, number: int | None = None) -> None:
        self._of.run()


def load_session(
    subject: Subject, name: str, *, records: bool, kind: type[GraphSession] = GraphSession
) -> GraphSession:
    """One of the graphs; `records` says whether numbered runs are captured on a card."""
    spec: GraphSpec = subject.manifest.graphs[name]
    cuda = Cuda(records=records) if subject.device is Device.CUDA else None
    return kind(subject.folder, spec, OPTIONS, cuda=cuda)


@dataclass(frozen=True)
class Choices:
    """Greedy choices beside the oracle's after the same tokens; wrong ones are no ties."""

    num: int = 0
    num_alike: int = 0
    num_wrong: int = 0

    @property
    def agreement(self) -> float:
        return self.num_alike / self.num

    def __add__(self, other: Choices) -> Choices:
        return Choices(self.num + other.num, self.num_alike + other.num_alike, self.num_wrong + other.num_wrong)


class Oracle:
    """PyTorch in float32 on the same device, without a cache.

    A choice that differs is a tie while the oracle's logit of its own choice exceeds the other's by at most twice the
    tolerance of a logit: both may be off, in opposite directions.
    """

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def judge(self, prompt: Sequence[int], chosen: Sequence[int], tolerance: Tolerance) -> Choices:
        """Choices after a prompt, or source."""
        return _judge(self._logits(prompt, chosen), chosen, tolerance)

    def judge_model(
        self, model: Transformer, prompt: Sequence[int], chosen: Sequence[int], tolerance: Tolerance
    ) -> Choices:
        """What another model, in its own precision, would choose at the same places."""
        sequence, source = _ids(model, prompt, chosen)
        device = model.embedding.tokens.weight.device
        ids = torch.tensor([sequence], device=device)
        with torch.inference_mode():
            if isinstance(model, EncoderDecoder):
                sources = torch.tensor([source], device=device)
                logits = model(sources, torch.tensor([sources.shape[1]], device=device), ids)
            else:
                logits = model(ids)
        theirs = logits[0].argmax(-1).tolist()[-len(chosen) :]
        return _judge(self._logits(prompt, chosen), theirs, tolerance)

    def is_tie(self, prompt: Sequence[int], first: Sequence[int], second: Sequence[int], tolerance: Tolerance) -> bool:
        """Whether two answers part at a tie. What follows is another text, and not judged."""
        pairs = enumerate(zip(first, second, strict=False))
        parting = next((index for index, (mine, theirs) in pairs if mine != theirs), None)
        if parting is None:
            return len(first) == len(second)
        logits = self._logits(prompt, first[: parting + 1])
        both = logits[parting, [first[parting], second[parting]]]
        # The worse one beside the best of all: two wrong answers may lie side by side.
        return float(logits[parting].max() - both.min()) <= 2 * tolerance.of(logits)

    def _logits(self, prompt: Sequence[int], chosen: Sequence[int]) -> Float32:
        """From which each chosen token comes, `[len(chosen), V]`."""
        logits: Float32 = reference.logits(self._model, *_ids(self._model, prompt, chosen)).numpy()
        return logits[-len(chosen) :]


def _ids(
    model: Transformer, prompt: Sequence[int], chosen: Sequence[int]
) -> tuple[Sequence[int], Sequence[int] | None]:
    if model.config.is_encoder_decoder:
        return [model.config.bos_id, *chosen[:-1]], prompt
    return [*prompt, *chosen[:-1]], None


def _judge(logits: Float32, chosen: Sequence[int], tolerance: Tolerance) -> Choices:
    gaps = logits.max(-1) - logits[np.arange(len(chosen)), chosen]
    return Choices(len(chosen), int((gaps == 0).sum()), int((gaps > 2 * tolerance.of(logits)).sum()))
