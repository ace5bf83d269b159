"""The linear baseline of the scaling study: a recurrent language model of a transformer's size, in ONNX Runtime.

    python -m benchmarks.training.recurrence --config '{"architecture": …}' --threads 2 --chunk 128

    tokens → embedding → GRU → GRU → projection → the embedding again, as output head → logits after the last token

It has the transformer's number of decoder layers, width and vocabulary, and about as many parameters. Every token costs
the same, so its times must be linear in the length. Weights are random: times do not depend on them. Texts are read in
chunks, as the server reads them, with a state of fixed size between chunks.

A child process over pipes: the first line on stdout describes the model; then each line on stdin is JSON token ids, and
each answer their seconds. Source of the recurrence: Cho et al., "Learning Phrase Representations using RNN
Encoder-Decoder" (2014), with the reset gate after the product, as in cuDNN.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from model.spec import cost
from model.spec.config import ModelConfig

_OPSET = 22
_IR_VERSION = 10
_GATES = 3
_MAX_UNITS = 1 << 16

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """`units` wide GRUs, `num_layers` of them, between embeddings `[vocab_size, d_model]`."""

    vocab_size: int
    d_model: int
    num_layers: int
    units: int

    @property
    def num_parameters(self) -> int:
        """Trained parameters."""
        inputs = [self.d_model, *[self.units] * (self.num_layers - 1)]
        layers = sum(_GATES * self.units * (width + self.units + 2) for width in inputs)
        return self.vocab_size * self.d_model + layers + self.units * self.d_model


def equal_size(config: ModelConfig) -> RecurrentShape:
    """The recurrent model nearest in parameters to a decoder-only transformer.

    Raises:
        ValueError: for an encoder-decoder, or when no number of units comes near.
    """
    if config.is_encoder_decoder:
        raise ValueError("equal_size compares with a decoder-only model")
    wanted = cost.num_parameters(config)

    def shape(units: int) -> RecurrentShape:
        return RecurrentShape(
            vocab_size=config.vocab_size, d_model=config.d_model, num_layers=config.num_layers, units=units
        )

    low, high = 1, _MAX_UNITS
    if not shape(low).num_parameters <= wanted <= shape(high).num_parameters:
        raise ValueError(f"no number of units in {low}…{high} comes near {wanted} parameters")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if shape(middle).num_parameters <= wanted else (low, middle)
    return min((shape(low), shape(high)), key=lambda each: abs(each.num_parameters - wanted))


def make_weights(shape: RecurrentShape, seed: int) -> dict[str, Float32]:
    """Uniform in ±1/√units; `w`, `r` and `b` of a layer in the ONNX operator's layout."""
    rng = np.random.default_rng(seed)
    bound = shape.units**-0.5

    def draw(*sizes: int) -> Float32:
        return rng.uniform(-bound, bound, sizes).astype(np.float32)

    weights = {"embedding": draw(shape.vocab_size, shape.d_model), "projection": draw(shape.units, shape.d_model)}
    for layer in range(shape.num_layers):
        width = shape.units if layer else shape.d_model
        weights[f"w_{layer}"] = draw(1, _GATES * shape.units, width)
        weights[f"r_{layer}"] = draw(1, _GATES * shape.units, shape.units)
        weights[f"b_{layer}"] = draw(1, 2 * _GATES * shape.units)
    return weights


def make_graph(shape: RecurrentShape, weights: Mapping[str, Float32]) -> onnx.ModelProto:
    """One chunk of a text: `token_ids` `[n] int64` and `state_i` → `logits` `[1, V]` after the last of them, `next_i`.

    The state of layer i is `[1, 1, units] float32`.
    """
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    initializers.append(numpy_helper.from_array(np.array([0], np.int64), "axis_0"))
    initializers.append(numpy_helper.from_array(np.array([1], np.int64), "axis_1"))
    nodes = [
        helper.make_node("Gather", ["embedding", "token_ids"], ["embedded"]),
        helper.make_node("Unsqueeze", ["embedded", "axis_1"], ["hidden_0"]),
    ]
    for layer in range(shape.num_layers):
        # The last layer's output for the last token is its state.
        is_last = layer == shape.num_layers - 1
        inputs = [f"hidden_{layer}", f"w_{layer}", f"r_{layer}", f"b_{layer}", "", f"state_{layer}"]
        outputs = ["" if is_last else f"all_{layer}", f"next_{layer}"]
        nodes.append(helper.make_node("GRU", inputs, outputs, hidden_size=shape.units, linear_before_reset=1))
        if not is_last:
            nodes.append(helper.make_node("Squeeze", [f"all_{layer}", "axis_1"], [f"hidden_{layer + 1}"]))
    nodes += [
        helper.make_node("Squeeze", [f"next_{shape.num_layers - 1}", "axis_0"], ["last"]),
        helper.make_node("MatMul", ["last", "projection"], ["projected"]),
        helper.make_node("Gemm", ["projected", "embedding"], ["logits"], transB=1),
    ]
    state = [1, 1, shape.units]
    graph = helper.make_graph(
        nodes,
        "recurrence",
        [
            helper.make_tensor_value_info("token_ids", TensorProto.INT64, ["length"]),
            *(helper.make_tensor_value_info(f"state_{i}", TensorProto.FLOAT, state) for i in range(shape.num_layers)),
        ],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, shape.vocab_size]),
            *(helper.make_tensor_value_info(f"next_{i}", TensorProto.FLOAT, state) for i in range(shape.num_layers)),
        ],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
    onnx.checker.check_model(model)
    return model


def open_session(model: onnx.ModelProto, threads: int) -> Any:
    """A session on the CPU provider."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def read(session: Any, shape: RecurrentShape, token_ids: npt.NDArray[np.int64], chunk: int) -> Float32:
    """Reads a text `[n]` in chunks; logits after its last token, `[V]`."""
    state = [np.zeros((1, 1, shape.units), np.float32)] * shape.num_layers
    logits = np.zeros((1, shape.vocab_size), np.float32)
    for start in range(0, len(token_ids), chunk):
        feeds = {f"state_{layer}": array for layer, array in enumerate(state)}
        logits, *state = session.run(None, {"token_ids": token_ids[start : start + chunk], **feeds})
    last: Float32 = logits[0]
    return last


def answer(session: Any, shape: RecurrentShape, questions: Iterable[str], chunk: int) -> Iterator[float]:
    """The seconds that each line of token ids took."""
    for question in questions:
        token_ids = np.array(json.loads(question), np.int64)
        began = time.perf_counter()
        read(session, shape, token_ids, chunk)
        yield time.perf_counter() - began


def main(arguments: list[str]) -> int:
    """Answers until stdin ends."""
    parser = argparse.ArgumentParser(description="A recurrent baseline.")
    parser.add_argument("--config", required=True, help="the transformer's configuration, as JSON")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--chunk", type=int, required=True, help="tokens of a run, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    shape = equal_size(ModelConfig.from_dict(json.loads(options.config)))
    session = open_session(make_graph(shape, make_weights(shape, options.seed)), options.threads)
    print(json.dumps({"units": shape.units, "num_parameters": shape.num_parameters}), flush=True)
    for seconds in answer(session, shape, sys.stdin, options.chunk):
        print(seconds, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
