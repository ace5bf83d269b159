"""Each check runs on a CPU with tiny models, on graphs of standard operators, and on a card in fp16 and bf16.

Without `--whole` two of its cases on the CPU are drawn.

`-m gpu` is the card, `-m "gpu and not slow"` the card with tiny models alone.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.frame.paged import emit_model, stirred
from model.nn.transformer import Transformer, build
from model.spec.artifact import CUDA_PRECISIONS, Device, Precision, read_manifest
from tests.artifacts import keep_operator_table, once
from tests.gpu.subjects import Subject, configs

CARD = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device that answers"))
TINY, _LARGE = ("tiny", "tiny-encoder-decoder"), ("llama-110m", "en-de-25m")
_CASES = [
    *((name, Device.CPU, Precision.FP32, (pytest.mark.sampled(2),)) for name in TINY),
    *((name, Device.CUDA, precision, CARD) for name in TINY for precision in CUDA_PRECISIONS),
    *((name, Device.CUDA, each, (*CARD, pytest.mark.slow)) for name in _LARGE for each in CUDA_PRECISIONS),
]


@cache
def _model(name: str) -> Transformer:
    return stirred(build(configs()[name], 0))


@pytest.fixture(scope="session", autouse=True)
def quick_exports() -> None:
    keep_operator_table()


@pytest.fixture(
    scope="session",
    params=[
        pytest.param((name, device, precision), id=f"{name}-{device}-{precision}", marks=marks)
        for name, device, precision, marks in _CASES
    ],
)
def subject(request: pytest.FixtureRequest) -> Subject:
    """A model with random weights, and its graphs."""
    name, device, precision = request.param
    model = _model(name)

    def make(folder: Path) -> None:
        emit_model(model, folder, precision, device)

    # A parametrized fixture is made again at each change of its parameter, which tests in a random order are.
    folder = once(("subject", *request.param), make)
    return Subject(name, device, precision, model, folder, read_manifest(folder))
