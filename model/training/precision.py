"""In which arithmetic matrix products are done; weights, gradients, norms and losses stay float32 always.

bfloat16 has float32's range and needs no care. float16 has not: small gradients would vanish, so the loss is multiplied
by a large factor first, and updates in which something overflowed are left out (Micikevicius et al., 2018).
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
_TRIAL = """
import torch
with torch.autocast("cpu", torch.bfloat16):
    torch.nn.Linear(64, 64)(torch.ones(8, 64))
"""


def resolve_precision(precision: TrainPrecision, device: torch.device) -> TrainPrecision:
    """Settles `auto`: bfloat16 where the device multiplies it in hardware, as emulating it is slower than float32.

    A GPU that has no bfloat16 has float16.
    """
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
    """Keeps oneDNN from AMX where the processor announces it and its first instruction ends the process with SIGILL.

    Some virtual machines do so. A child process tries it, once, before this one's first product in bfloat16.
    """
    if not torch.cpu.get_capabilities().get("amx_bf16", False):
        return
    if subprocess.run([sys.executable, "-c", _TRIAL], check=False).returncode == -signal.SIGILL:  # noqa: S603 (ourselves)
        _LOGGER.warning("AMX is announced and does not work here: bfloat16 is computed by AVX-512")
        os.putenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # where oneDNN reads it


def autocast(precision: TrainPrecision, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Matrix products in the given precision; nothing at all for float32."""
    dtype = _DTYPES.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def make_scaler(precision: TrainPrecision, device: torch.device) -> torch.amp.GradScaler | None:
    """What keeps float16's gradients in range; None where nothing has to."""
    return torch.amp.GradScaler(device.type) if precision is TrainPrecision.FP16 else None
