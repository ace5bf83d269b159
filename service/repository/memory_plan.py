"""The memory plan of a CPU server: what its models take by use, and the K/V that the rest has room for.

From manifests and limits alone, before a graph is loaded. `python -m service plan` prints it; `serve` takes its default
of `--kv-memory` from it and refuses what it says cannot fit. An artifact that is yet to be exported is planned from its
checkpoint's configuration (`expected_manifest`).

    memory  =  reserve  +  process
            +  for each model: weights, tokenizers and golden cases, logits, steps
            +  K/V  +  pre-faulted memory, a share of the K/V

Weights, logits and K/V are counted. The process, tokenizers and steps are estimates from measured servers
(`python -m benchmarks run shapes` compares each plan with the measured peak); the reserve covers their error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from model.spec.artifact import (
    DECODER,
    ENCODER,
    GOLDEN,
    TARGET_TOKENIZER,
    Device,
    FileEntry,
    GraphSpec,
    KVFormat,
    KVPrecision,
    Manifest,
    Precision,
)
from model.spec.config import ModelConfig, Positions
from model.spec.cost import num_embedding_parameters, num_parameters
from service.engine.chunks import MERGED_CHUNKS
from service.engine.kv.budget import (
    MAX_PREFAULT_BYTES,
    PREFAULT_SHARE,
    graph_weight_bytes,
    logits_bytes,
    memory_needs,
    prefault_share,
)
from service.errors import StartupError

PROCESS_BYTES = 112 << 20
"""The interpreter, libraries and threads of a server without models."""
RESERVE_SHARE = 10
"""One part in so many of the memory stays free: what the estimates may be off, and requests on their way."""

_FLOAT_BYTES = 4
# A vocabulary entry in the tokenizers' tables.
_TOKEN_BYTES = 768
# Logits of golden cases, PyTorch's and the export's.
_NUM_GOLDEN_LOGITS = 96
# Bytes of a weight, with int4's float16 scale for each block of 32, without int8's scale for each column.
_WEIGHT_BYTES = {Precision.FP32: 4.0, Precision.BF16: 2.0, Precision.INT8: 1.0, Precision.INT4: 0.5 + 2 / 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """What one model takes.

    Attributes:
        weights: of its graphs.
        texts: tokenizers and golden cases.
        logits: of all rows and a step's prompt tokens.
        steps: activations of a step, and K/V of its prompts in passing.
        whole_kv: K/V with all rows at full length.
        least_kv: K/V of one row at full length, with less of which it is not served.
        is_prefaulted: whether memory is pre-faulted beside its K/V.
        context: tokens of a row at full length, the source's included.
    """

    weights: int
    texts: int
    logits: int
    steps: int
    whole_kv: int
    least_kv: int
    is_prefaulted: bool
    context: int

    @property
    def besides(self) -> int:
        """All but K/V and pre-faulted memory."""
        return self.weights + self.texts + self.logits + self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a server takes.

    Attributes:
        memory: bytes that the process may take; None if unknown.
        models: by name.
        kv_bytes: K/V of all models.
        max_batch_size: rows of each model.
    """

    memory: int | None
    models: Mapping[str, ModelMemory]
    kv_bytes: int
    max_batch_size: int

    @property
    def whole_kv(self) -> int:
        """K/V of all models with all rows at full length."""
        return self.sum_of("whole_kv")

    @property
    def least_kv(self) -> int:
        """K/V that, divided in proportion, give every model a row at full length."""
        whole = self.whole_kv
        return max((-(-each.least_kv * whole // each.whole_kv) for each in self.models.values()), default=0)

    @property
    def besides(self) -> int:
        """The process and all models, without K/V and pre-faulted memory."""
        return PROCESS_BYTES + self.sum_of("besides")

    @property
    def prefaulted(self) -> int:
        """Pre-faulted memory, with K/V divided in proportion."""
        parts = (
            min(each.whole_kv, self.kv_bytes * each.whole_kv // self.whole_kv)
            for each in self.models.values()
            if each.is_prefaulted
        )
        return sum(map(prefault_share, parts))

    @property
    def peak(self) -> int:
        """Bytes of the process once K/V are full."""
        return self.besides + self.kv_bytes + self.prefaulted

    @property
    def reserve(self) -> int:
        """Bytes that a default leaves free."""
        return (self.memory or 0) // RESERVE_SHARE

    @property
    def room(self) -> int:
        """Bytes for K/V and pre-faulted memory in known memory; negative if all else does not fit."""
        return (self.memory or 0) - self.reserve - self.besides

    @property
    def is_cut(self) -> bool:
        """Whether K/V are less than all rows at full length."""
        return self.kv_bytes < self.whole_kv

    def sum_of(self, use: str) -> int:
        """Bytes of one use over all models."""
        return sum(getattr(each, use) for each in self.models.values())

    def describe(self) -> str:
        """The uses besides K/V, for a log line or an error."""
        uses = ", ".join(f"{use} {in_units(self.sum_of(use))}" for use in ("weights", "logits", "steps", "texts"))
        return f"{in_units(self.reserve)} in reserve, process {in_units(PROCESS_BYTES)}, {uses}"


def plan_memory(
    manifests: Mapping[str, Manifest],
    max_batch_size: int,
    chunk_tokens: int,
    memory: int | None,
    kv_memory: int | None = None,
) -> MemoryPlan:
    """The plan for models on a CPU.

    Args:
        manifests: by model name.
        max_batch_size: rows of each model.
        chunk_tokens: prompt tokens of a step.
        memory: bytes that the process may take; None if unknown.
        kv_memory: bytes of K/V, if the operator sets them. By default all rows at full length, or what there is room
            for beside the reserve.

    Raises:
        StartupError: with the numbers, and the flags that would make it fit.
    """
    models = {name: model_memory(manifest, max_batch_size, chunk_tokens) for name, manifest in manifests.items()}
    plan = MemoryPlan(memory=memory, models=models, kv_bytes=0, max_batch_size=max_batch_size)
    plan = replace(plan, kv_bytes=_default_kv(plan) if kv_memory is None else kv_memory)
    if not models or memory is None:
        return plan
    if kv_memory is None and plan.kv_bytes < plan.least_kv:
        raise StartupError([_too_little_memory(plan)])
    if plan.peak > memory:
        raise StartupError([_too_much_kv(plan)])
    return plan


def model_memory(manifest: Manifest, max_batch_size: int, chunk_tokens: int) -> ModelMemory:
    """What one artifact takes on a CPU."""
    config, needs = manifest.config, memory_needs(manifest, max_batch_size, chunk_tokens)
    vocabulary = config.vocab_size
    if TARGET_TOKENIZER in manifest.files:
        vocabulary += config.source_vocab_size
    # The decoder of an encoder-decoder computes no chunks.
    num_chunked = 0 if config.is_encoder_decoder else chunk_tokens
    logits = logits_bytes(manifest, max_batch_size + num_chunked)
    return ModelMemory(
        weights=sum(graph_weight_bytes(manifest, name) for name in (DECODER, ENCODER) if name in manifest.graphs),
        texts=vocabulary * _TOKEN_BYTES + (manifest.files[GOLDEN].num_bytes if GOLDEN in manifest.files else 0),
        logits=logits,
        steps=_step_bytes(config, max_batch_size, MERGED_CHUNKS * num_chunked) + needs.besides - logits,
        whole_kv=needs.whole,
        least_kv=needs.least,
        is_prefaulted=needs.is_prefaulted,
        context=config.context + (config.source_context if config.is_encoder_decoder else 0),
    )


def expected_manifest(config: ModelConfig, precision: Precision, kv_precision: KVPrecision) -> Manifest:
    """The manifest of an export for a CPU that is yet to be made, as far as memory depends on it."""
    data = "decoder.onnx.data"
    return Manifest(
        config=config,
        device=Device.CPU,
        precision=precision,
        opset=0,
        eos_ids=(config.eos_id,),
        pad_id=config.pad_id,
        decoder_start_id=config.bos_id,
        # One entry for all graphs: only the sum matters.
        graphs={DECODER: GraphSpec("decoder.onnx", (), ())},
        files={
            data: FileEntry("", _weight_bytes(config, precision)),
            GOLDEN: FileEntry("", _NUM_GOLDEN_LOGITS * config.vocab_size * _FLOAT_BYTES),
        },
        kv_cache=KVFormat(kv_precision),
    )


def in_units(num_bytes: int) -> str:
    """Bytes for people."""
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.0f} MiB"


def as_flag(num_bytes: int) -> str:
    """Bytes as a flag's value."""
    return str(num_bytes) if num_bytes % (1 << 20) else f"{num_bytes >> 20}MiB"


def _default_kv(plan: MemoryPlan) -> int:
    """All rows at full length, or the most for which K/V and pre-faulted memory fit into the room."""
    if plan.memory is None:
        return plan.whole_kv
    num_prefaulted = sum(each.is_prefaulted for each in plan.models.values())
    room = plan.room
    if num_prefaulted:
        # Either bound of pre-faulted memory keeps it within the room.
        room = max(room - num_prefaulted * MAX_PREFAULT_BYTES, room * PREFAULT_SHARE // (PREFAULT_SHARE + 1))
    # In whole MiB, so that a flag says it in few digits.
    return max(0, min(plan.whole_kv, room - room % (1 << 20)))


def _too_little_memory(plan: MemoryPlan) -> str:
    """The refusal where not one row of each model fits."""
    names = ", ".join(plan.models)
    least = replace(plan, kv_bytes=plan.least_kv)
    needed = -(-least.peak * RESERVE_SHARE // (RESERVE_SHARE - 1))
    helps = [f"{in_units(needed)} of memory"]
    if plan.kv_bytes > 0:
        share = plan.kv_bytes / plan.least_kv
        contexts = ", ".join(f"{int(each.context * share)} for {name}" for name, each in plan.models.items())
        helps.append(f"a shorter context (python -m model import --context; {contexts} at most)")
    helps.append("int8 K/V (python -m export --kv-cache int8: a quarter)")
    return (
        f"{names}: {in_units(plan.memory or 0)} of memory are too little: {plan.describe()}; the "
        f"{in_units(plan.kv_bytes)} left for K/V must be at least {in_units(plan.least_kv)}, for one sequence of full "
        f"length; what helps: {', '.join(helps)}"
    )


def _too_much_kv(plan: MemoryPlan) -> str:
    """The refusal where the operator's K/V do not fit."""
    # Into the reserve, where one row of each model needs it.
    fitting = replace(plan, kv_bytes=max(_default_kv(plan), plan.least_kv))
    does_fit = fitting.peak <= (plan.memory or 0)
    helps = f"--kv-memory {as_flag(fitting.kv_bytes)} fits" if does_fit else "no --kv-memory fits"
    return (
        f"{', '.join(plan.models)}: {in_units(plan.memory or 0)} of memory are too little for "
        f"{in_units(plan.kv_bytes)} of K/V: {plan.describe()}, pre-faulted {in_units(plan.prefaulted)}; {helps}"
    )


def _step_bytes(config: ModelConfig, num_rows: int, num_chunked: int) -> int:
    """Activations of a step: a layer's, for all of its tokens.

    What attention reads and writes counts twice, as ONNX Runtime's memory for activations grows by doubling.
    An encoder's step also returns K/V of all layers for the decoder. It has one source of full length at most.
    """
    heads = config.num_heads * config.head_dim
    num_chunked = min(num_chunked, config.context)
    num_encoded = config.source_context if config.is_encoder_decoder else 0
    per_token = 4 * config.d_model + 8 * heads + 4 * config.d_ff
    cross = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return _FLOAT_BYTES * ((num_rows + max(num_chunked, num_encoded)) * per_token + num_encoded * cross)


def _weight_bytes(config: ModelConfig, precision: Precision) -> int:
    """Weights in an artifact's files: products with them and tables of tokens in `precision`, positions in float32.

    A head that is tied to the table shares it. The encoder's graph has a table of its own.
    """
    tokens = config.vocab_size * (1 if config.tie_embeddings else 2)
    positions = config.context
    if config.is_encoder_decoder:
        tokens += config.source_vocab_size
        positions += config.source_context
    weights = num_parameters(config) - num_embedding_parameters(config) + tokens * config.d_model
    width = config.head_dim if config.positions is Positions.ROTARY else config.d_model
    # As if each column had as many numbers as those of most matrices.
    num_scales = weights // config.d_model if precision is Precision.INT8 else 0
    return int(weights * _WEIGHT_BYTES[precision]) + _FLOAT_BYTES * (num_scales + positions * width)
