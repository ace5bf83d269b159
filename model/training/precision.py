"""The arithmetic of matrix products in training; weights, gradients, norms and losses are always float32.

bfloat16 has float32's range and needs no scaling. In float16 small gradients would underflow, so the loss is scaled up
first, and updates that overflow are skipped (Micikevicius et al., 2018).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from functools import cache

import torch

from model.training.config import TrainPrecision

_LOGGER = logging.getLogger(__name__)

_DTYPES = {TrainPrecision.BF16: torch.bfloat16, TrainPrecision.FP16: torch.float16}
_PROBE = """
import torch
with torch.autocast("cpu", torch.bfloat16):
    torch.nn.Linear(64, 64)(torch.ones(8, 64))
"""


def resolve_precision(precision: TrainPrecision, device: torch.device) -> TrainPrecision:
    """Resolves `auto`: bfloat16 where the device has it in hardware, else float32, or float16 on a GPU."""
    if precision is not TrainPrecision.AUTO:
        return precision
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return TrainPrecision.BF16 if has_bf16 else TrainPrecision.FP16
    capabilities = torch.cpu.get_capabilities()
    native = any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "sve_bf16"))
    return TrainPrecision.BF16 if native else TrainPrecision.FP32


@cache
def avoid_broken_amx() -> None:
    """Disables AMX in oneDNN where the processor announces it but its first instruction raises SIGILL.

    Some virtual machines do so. A child process tests it, once, before the first product in bfloat16.
    """
    if not torch.cpu.get_capabilities().get("amx_bf16", False):
        return
    if subprocess.run([sys.executable, "-c", _PROBE], check=False).returncode == -signal.SIGILL:  # noqa: S603 (ourselves)
        _LOGGER.warning("AMX is announced and does not work here: bfloat16 is computed by AVX-512")
        os.putenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # where oneDNN reads it


def autocast(precision: TrainPrecision, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Autocast to the given precision; a null context for float32."""
    dtype = _DTYPES.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def make_scaler(precision: TrainPrecision, device: torch.device) -> torch.amp.GradScaler | None:
    """Float16's gradient scaler; None in other precisions."""
    return torch.amp.GradScaler(device.type) if precision is TrainPrecision.FP16 else None
