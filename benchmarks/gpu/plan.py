"""What is checked, in which sizes: the full plan for a large card, a small one that tries every step of it.

The small plan is all that a CPU is given: graphs of standard operators, in float32, in the place of CUDA's own. Knows
configurations and nothing that computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.gpu.places import RECIPE
from model.spec.artifact import BLOCK_SIZE, CUDA_PRECISIONS, MIN_BLOCK_SIZE, Device, Precision
from model.spec.config import Activation, Architecture, ModelConfig, Norm, Positions
from model.training.presets import resolve

LARGE = "llama-1.1b"
"""The model that the promises of speed are about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes, in tokens unless they say otherwise.

    Attributes:
        device: what is checked.
        is_quick: sizes that try the steps: figures that say nothing.
        block_size: of K/V.
        chunk: of prompts; at most as many of a step.
        proven: models whose answers are checked, by name.
        precisions: in which.
        timed: models whose speed is measured, first the one that promises are about.
        timed_precision: in which.
        copy_bytes: how much is read for the bandwidth.
        gemm_sides: sides of the square matrices that are multiplied for the ceiling.
        rows: sequences that run at once where answers are checked.
        agreement_tokens: how many greedy choices are compared.
        agreement_new: of each sequence.
        captured_steps: decoding steps, captured and not.
        batches: sequences that decode at once, for speed.
        decode_prompt: how long their prompts are.
        decode_new: how many each generates.
        prefill_lengths: prompts whose speed is measured.
        law_lengths: prompts whose seconds are fitted.
        repeats: of every measurement of speed; the median counts.
        train_overrides: of the recipe, as `--set` takes them.
    """

    device: Device
    is_quick: bool
    block_size: int
    chunk: int
    proven: Mapping[str, ModelConfig]
    precisions: tuple[Precision, ...]
    timed: Mapping[str, ModelConfig]
    timed_precision: Precision
    copy_bytes: int
    gemm_sides: tuple[int, ...]
    rows: int
    agreement_tokens: int
    agreement_new: int
    captured_steps: int
    batches: tuple[int, ...]
    decode_prompt: int
    decode_new: int
    prefill_lengths: tuple[int, ...]
    law_lengths: tuple[int, ...]
    repeats: int
    train_overrides: tuple[str, ...] = ()


def make_plan(device: Device, *, is_quick: bool) -> Plan:
    """The plan for a device; that of a CPU is always the quick one."""
    return _full() if device is Device.CUDA and not is_quick else _quick(device)


def _full() -> Plan:
    small = resolve("llama-110m").model
    # Room for the longest prompt and what follows it; positions are rotary, so nothing else of the models changes.
    context = 32768 + BLOCK_SIZE
    return Plan(
        device=Device.CUDA,
        is_quick=False,
        block_size=BLOCK_SIZE,
        chunk=4096,
        proven={"llama-110m": small, "en-de-25m": resolve(str(RECIPE)).model},
        precisions=CUDA_PRECISIONS,
        timed={LARGE: large_config(context), "llama-110m": replace(small, context=context)},
        timed_precision=Precision.BF16,
        copy_bytes=2 << 30,
        gemm_sides=(4096, 8192),
        rows=8,
        agreement_tokens=5000,
        agreement_new=200,
        captured_steps=50,
        batches=(1, 8, 32, 128),
        decode_prompt=128,
        decode_new=128,
        prefill_lengths=(512, 1024, 2048, 4096, 8192, 16384),
        law_lengths=(512, 1024, 2048, 4096, 8192, 16384, 24576, 32768),
        repeats=3,
    )


def _quick(device: Device) -> Plan:
    is_cuda = device is Device.CUDA
    size = BLOCK_SIZE if is_cuda else MIN_BLOCK_SIZE
    decoder = ModelConfig(
        architecture=Architecture.DECODER_ONLY,
        vocab_size=288,
        context=3 * BLOCK_SIZE,
        d_model=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        d_ff=128,
    )
    encoder = replace(
        decoder,
        architecture=Architecture.ENCODER_DECODER,
        context=64,
        source_context=64,
        source_vocab_size=288,
        num_encoder_layers=1,
        num_kv_heads=2,
        positions=Positions.SINUSOIDAL,
        norm=Norm.LAYER,
        activation=Activation.RELU,
    )
    return Plan(
        device=device,
        is_quick=True,
        block_size=size,
        chunk=size,
        proven={"tiny": decoder, "tiny-encoder-decoder": encoder},
        precisions=CUDA_PRECISIONS if is_cuda else (Precision.FP32,),
        timed={"tiny": decoder},
        timed_precision=Precision.BF16 if is_cuda else Precision.FP32,
        copy_bytes=1 << 22,
        gemm_sides=(128,),
        rows=4,
        agreement_tokens=60,
        agreement_new=20,
        captured_steps=20,
        batches=(1, 4),
        decode_prompt=8,
        decode_new=12,
        prefill_lengths=(24, 48),
        law_lengths=(16, 32, 48, 64, 96),
        repeats=1,
        train_overrides=(
            *("steps=3", "batch_tokens=400", "evaluate_every=2", "checkpoint_every=2", "vocab_size=400"),
            *("d_model=64", "num_heads=2", "num_layers=1", "num_encoder_layers=1", "d_ff=64", "context=64"),
            *("source_context=64", "max_examples=200", "validation_fraction=0.01", "test_fraction=0.01"),
        ),
    )


def large_config(context: int) -> ModelConfig:
    """1.10 B parameters, of which a decoding step reads 1.03 B: the shape of TinyLlama (Zhang et al., 2024)."""
    return ModelConfig(
        architecture=Architecture.DECODER_ONLY,
        vocab_size=32000,
        context=context,
        d_model=2048,
        num_layers=22,
        num_heads=32,
        num_kv_heads=4,
        d_ff=5632,
        tie_embeddings=False,
    )
