"""Which provider computes a model's prompts: the operator's wish, held against the artifact and the machine.

OpenVINO is worth its memory where its products run on AMX, the matrix unit of recent Intel processors, which ONNX
Runtime's own do not use: in bfloat16, that is, and so for artifacts that are rounded anyway. One in float32 keeps
float32, as its tolerance asks, which AMX has not got: 512 tokens of `llama-110m` then took 0.96 of the decoder graph's
time, which is not worth having the weights in memory twice.

Knows Linux only; elsewhere no AMX is found.
"""

from __future__ import annotations

import logging
from pathlib import Path

from model.spec.artifact import PREFILL, KVPrecision, Manifest, Precision
from service.engine.sessions.session import OpenVino, find_openvino_device, has_openvino_package
from service.engine.types import PrefillProvider
from service.errors import StartupError

_LOGGER = logging.getLogger(__name__)


def choose_prefill_provider(wanted: PrefillProvider, manifest: Manifest, root: Path = Path("/")) -> PrefillProvider:
    """The provider of a model's prompts, `CPU` or `OPENVINO`.

    An encoder-decoder has no prompts to prefill: it is `CPU`, whatever is wanted.

    Args:
        wanted: `AUTO` is OpenVINO where it is possible and computes on AMX.
        manifest: the artifact's.
        root: where `proc` is found.

    Raises:
        StartupError: when OpenVINO is wanted and impossible, naming all that is missing.
    """
    if wanted is PrefillProvider.CPU or manifest.config.is_encoder_decoder:
        return PrefillProvider.CPU
    if wanted is PrefillProvider.AUTO and not (
        PREFILL in manifest.graphs and _precision(manifest) == "bf16" and has_amx_bf16(root)
    ):
        return PrefillProvider.CPU
    problems = _obstacles(manifest)
    if not problems:
        return PrefillProvider.OPENVINO
    if wanted is PrefillProvider.OPENVINO:
        raise StartupError([f"prefill_provider is {wanted}: {problem}" for problem in problems])
    _LOGGER.info("prompts could be faster, but for this: %s", "; ".join(problems))
    return PrefillProvider.CPU


def openvino_for(manifest: Manifest) -> OpenVino:
    """How OpenVINO computes the prompts of a model that it was chosen for."""
    return OpenVino(find_openvino_device(), _precision(manifest))


def has_amx_bf16(root: Path = Path("/")) -> bool:
    """Whether the processor multiplies matrices of bfloat16 in hardware, as Linux tells it."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    flags = next((line.partition(":")[2] for line in text.splitlines() if line.startswith("flags")), "")
    return "amx_bf16" in flags.split()


def _precision(manifest: Manifest) -> str:
    """What OpenVINO is asked to multiply in."""
    return "f32" if manifest.precision is Precision.FP32 else "bf16"


def _obstacles(manifest: Manifest) -> list[str]:
    problems = []
    if PREFILL not in manifest.graphs:
        problems.append("the artifact has no prefill graph, export it with --prefill-graph")
    if manifest.kv_cache.precision is not KVPrecision.FP32:
        problems.append(f"keys and values are {manifest.kv_cache.precision}, a prefill graph writes {KVPrecision.FP32}")
    if not has_openvino_package():
        problems.append("the package onnxruntime-ep-openvino is not installed, the extra `openvino` brings it")
        return problems
    try:
        if find_openvino_device() is None:
            problems.append("OpenVINO's provider offers no processor here, it offers Intel's only")
    except StartupError as error:
        problems += error.problems
    return problems
