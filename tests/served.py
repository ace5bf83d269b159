"""Engines over tiny artifacts with the bits of their logits on record, and a pool of requests for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from model.spec import artifact
from model.spec.artifact import KVPrecision, Precision
from model.spec.config import Architecture, ModelConfig
from model.spec.tokenizer import Tokenizer
from service.engine.batch import (
    KVOperation,
    KVRetain,
    ScheduledBatch,
)
from service.engine.engine import Engine, LastRun
from service.engine.factory import build_runner, model_shape
from service.engine.interfaces import Runner
from service.engine.kv.reservations import KVBudget
from service.engine.sampling.sampler import Sampler
from service.engine.scheduler import EngineLimits, Scheduler
from service.engine.sessions.session import SessionOptions
from service.engine.types import (
    GenerationRequest,
    SamplingParams,
    StepOutput,
    StoppingParams,
)
from tests.artifacts import ADDITIVE, LEARNED, tiny_artifact
from tests.fakes import drain, events_of, tokens_of

Float32 = npt.NDArray[np.float32]
Logits = dict[tuple[int, int, int], bytes]

THREADS = SessionOptions(intra_op_threads=2, allow_spinning=False)
DECODER_ONLY, ENCODER_DECODER = Architecture.DECODER_ONLY, Architecture.ENCODER_DECODER

# The second of each family differs from the first in all that chooses kernels: positions, norm, heads, odd widths. The
# third has no fused attention at all. The rest are quantized, and one of them has heads too narrow for our attention:
# there ONNX Runtime's own computes beside our products.
_ENCODER_ROTARY: Mapping[str, Any] = {
    "positions": "rotary",
    "d_model": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 499,
    "d_ff": 200,
}
_NARROW: Mapping[str, Any] = {"d_model": 72, "num_heads": 9, "num_kv_heads": 1, "d_ff": 130}
_WINDOWED: Mapping[str, Any] = {
    "sliding_window": 19,
    "layer_types": ("sliding", "full"),
    "query_key_norm": True,
    "rope_scaling": "yarn",
    "rope_factor": 2.0,
    "rope_original_context": 48,
    "rope_attention_factor": 1.1,
    "num_heads": 3,
    "num_kv_heads": 1,
    "head_dim": 16,
}
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "rotary": (DECODER_ONLY, {}),
    "learned": (DECODER_ONLY, LEARNED),
    "sinusoidal": (ENCODER_DECODER, {}),
    "encoder-rotary": (ENCODER_DECODER, _ENCODER_ROTARY),
    "windowed": (DECODER_ONLY, _WINDOWED),
    "additive": (DECODER_ONLY, ADDITIVE[DECODER_ONLY]),
    "encoder-additive": (ENCODER_DECODER, ADDITIVE[ENCODER_DECODER]),
    "encoder-narrow-bf16": (ENCODER_DECODER, {**_NARROW, "precision": Precision.BF16}),
    "learned-int8": (DECODER_ONLY, {**LEARNED, "precision": Precision.INT8}),
    "encoder-rotary-int8": (ENCODER_DECODER, {**_ENCODER_ROTARY, "precision": Precision.INT8}),
    "rotary-int4": (DECODER_ONLY, {"precision": Precision.INT4}),
    "rotary-kv-int8": (DECODER_ONLY, {"kv_precision": KVPrecision.INT8}),
    "rotary-int4-kv-int8": (DECODER_ONLY, {"precision": Precision.INT4, "kv_precision": KVPrecision.INT8}),
    "encoder-rotary-int8-kv-int8": (
        ENCODER_DECODER,
        {**_ENCODER_ROTARY, "precision": Precision.INT8, "kv_precision": KVPrecision.INT8},
    ),
    "learned-int8-kv-int8": (DECODER_ONLY, {**LEARNED, "precision": Precision.INT8, "kv_precision": KVPrecision.INT8}),
}


_WIDE: Mapping[str, Any] = {"d_model": 768, "num_heads": 12, "d_ff": 2048, "vocab_size": 32_000}
"""Sizes at which kernels divide their work among threads."""
_OF_SETUPS = (
    "rotary",
    "sinusoidal",
    "encoder-narrow-bf16",
    "learned-int8",
    "encoder-rotary-int8",
    "rotary-int4",
    "rotary-int4-kv-int8",
)
SETUPS = tuple(
    "+".join((variant, operators, threads, *width))
    for variant in _OF_SETUPS
    for operators in ("kernels", "standard")
    for threads in ("1", "3")
    for width in ((), ("wide",))
    if not width or "narrow" not in variant
)
"""Variants by what computes them, on so many threads, tiny or wide: names that `served` knows, too."""


class Recorder:
    """A runner that records the bits of every sampled row, by (seed, output, position), and its operations."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.logits: Logits = {}
        self.operations: list[KVOperation] = []
        self.max_rows = 0
        self.num_padding_rows = 0

    def own_weights(self) -> None:
        self._runner.own_weights()

    def run(self, batch: ScheduledBatch) -> Float32:
        logits = self._runner.run(batch)
        self.operations += batch.kv_operations
        self.max_rows = max(self.max_rows, len(batch.decode))
        self.num_padding_rows += sum(row.is_padding for row in batch.decode)
        for sample in batch.samples:
            self.logits[sample.seed, sample.output_index, sample.position] = logits[sample.slot].tobytes()
        return logits


class Served:
    """An engine over an artifact, with its logits on record. Tests share its K/V buffers."""

    def __init__(
        self, family: str, overrides: Mapping[str, Any], limits: EngineLimits, options: SessionOptions = THREADS
    ) -> None:
        self.folder = tiny_artifact(family, **overrides)
        self.manifest = artifact.load(self.folder)
        self.limits = limits
        self.decode = Tokenizer.load(self.folder / artifact.TOKENIZER).decode
        runner = build_runner(self.folder, self.manifest, limits, options)
        self.kv = runner.kv
        self.recorder = Recorder(runner)

    @property
    def config(self) -> ModelConfig:
        return self.manifest.config

    def engine(self, kv_budget: KVBudget | None = None) -> Engine:
        """Fresh sequences over stale K/V, as after other requests."""
        self.recorder.logits, self.recorder.operations = {}, []
        scheduler = Scheduler(self.limits, model_shape(self.manifest), self.decode, kv_budget)
        return Engine(scheduler, self.recorder, Sampler(), LastRun())

    def drop_saved(self) -> None:
        """Drops saved copies of earlier engines: handles are free again."""
        self.kv.apply(KVRetain(frozenset()))


@cache
def served(variant: str, max_batch_size: int = 8, max_prefill_tokens: int = 32) -> Served:
    """An engine of a variant, or of one of `SETUPS`."""
    limits = EngineLimits(max_batch_size=max_batch_size, prefill_chunk=16, max_prefill_tokens=max_prefill_tokens)
    return Served(*sizes(variant), limits, options_of(variant))


def sizes(setup: str) -> tuple[str, Mapping[str, Any]]:
    """Family and configuration of a variant or set-up."""
    variant, *_ = setup.split("+")
    family, overrides = VARIANTS[variant]
    if not setup.endswith("+wide"):
        return family, overrides
    is_encoder_decoder = family == ENCODER_DECODER
    sources = {"source_vocab_size": _WIDE["vocab_size"]} if is_encoder_decoder else {}
    return family, {**overrides, **_WIDE, **sources, "num_kv_heads": 12 if is_encoder_decoder else 4}


def options_of(setup: str) -> SessionOptions:
    """What computes a variant or set-up."""
    _, *how = setup.split("+")
    if not how:
        return THREADS
    return SessionOptions(intra_op_threads=int(how[1]), allow_spinning=False, own_kernels=how[0] == "kernels")


def crowd(variant: str) -> Served:
    """As many rows as the default, all of which can start at once."""
    return served(variant, max_batch_size=32, max_prefill_tokens=4096)


def make_request(config: ModelConfig, number: int, length: int, **sampling: float) -> GenerationRequest:
    """Request `number` of a pool: random prompt, greedy unless told; its seed is its number."""
    longest = config.source_context if config.is_encoder_decoder else config.context - 1
    vocab_size = config.source_vocab_size if config.is_encoder_decoder else config.vocab_size
    prompt = np.random.default_rng(number).integers(0, vocab_size, min(length, longest))
    params = SamplingParams(seed=number, **(sampling or {"temperature": 0.0}))  # type: ignore[arg-type]
    return GenerationRequest(
        request_id=f"r{number}",
        model="tiny",
        prompt_token_ids=tuple(prompt.tolist()),
        sampling=params,
        stopping=StoppingParams(max_tokens=5 + number % 9, ignore_eos=number % 2 == 0),
    )


def len_of_prompt(request: GenerationRequest) -> int:
    return len(request.prompt_token_ids)


# Chunks are 16 long: prompts of one token, within a chunk, at its end, over several, with a remainder of one.
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 33, 40, 48, 61, 64)
KINDS: tuple[dict[str, float], ...] = ({}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40})


def pool(config: ModelConfig) -> list[GenerationRequest]:
    return [make_request(config, number, length, **KINDS[number % len(KINDS)]) for number, length in enumerate(LENGTHS)]


@cache
def alone(variant: str) -> tuple[dict[str, list[int]], Logits]:
    """Every request of the pool by itself: its tokens, and the bits of all its logits."""
    host = served(variant)
    tokens: dict[str, list[int]] = {}
    logits: Logits = {}
    for request in pool(host.config):
        engine = host.engine()
        engine.add_request(request)
        tokens[request.request_id] = tokens_of(drain(engine), request.request_id)
        logits |= host.recorder.logits
    return tokens, logits


def run(
    engine: Engine, arrivals: Sequence[tuple[int, GenerationRequest]], aborts: Mapping[str, int]
) -> list[StepOutput]:
    """Requests join after so many steps each; those in `aborts` are cancelled that many steps later."""
    outputs: list[StepOutput] = []
    for delay, request in arrivals:
        outputs += [engine.step() for _ in range(delay)]
        engine.add_request(request)
        if request.request_id in aborts:
            outputs += [engine.step() for _ in range(aborts[request.request_id])]
            engine.abort(request.request_id)
    return outputs + drain(engine)


def ask(host: Served, *requests: GenerationRequest) -> list[StepOutput]:
    """The outputs of a new engine for these requests at once."""
    engine = host.engine()
    for request in requests:
        engine.add_request(request)
    return drain(engine)


def answer_of(outputs: Sequence[StepOutput], request: GenerationRequest) -> list[tuple[object, ...]]:
    """What a client receives, by output, to the last bit; the order between outputs is not promised."""
    events = sorted(events_of(outputs, request.request_id), key=lambda event: event.output_index)
    return [(event.output_index, event.token_id, event.logprobs, event.finish_reason, event.score) for event in events]
