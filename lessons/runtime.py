"""A function or module of tensors in ONNX Runtime, exported by `torch.onnx.export` on the way."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

OPSET = 23


class Computation(nn.Module):
    """A function of tensors as a module, so that it can be exported."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        """Calls the function."""
        return self.function(*inputs)


def run_onnx_runtime(module: nn.Module, *inputs: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """The module's output for these inputs, computed by ONNX Runtime."""
    # It reports operators of libraries that are not installed.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns of its own internals
        program = torch.onnx.export(
            module.eval(), tuple(map(torch.from_numpy, inputs)), dynamo=True, opset_version=OPSET, verbose=False
        )
    if program is None:
        raise RuntimeError("torch exported nothing")
    return run_graph(program.model_proto, inputs)


def run_graph(model: onnx.ModelProto, inputs: tuple[npt.NDArray[np.generic], ...]) -> npt.NDArray[np.float32]:
    """The first output of a graph, computed on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {value.name: array for value, array in zip(session.get_inputs(), inputs, strict=True)}
    found: npt.NDArray[np.float32] = session.run(None, feeds)[0]
    return found
