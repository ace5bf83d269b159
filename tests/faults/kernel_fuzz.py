"""Fuzzes a kernels' library built with sanitizers: models of one node with hostile attributes, shapes and values.

    python -m tests.faults.kernel_fuzz LIBRARY SECONDS MIN_CASES [FIRST_SEED]

Each seed is a case: a valid model with its inputs, usually spoiled in up to three places. A case must be refused by an
error status, or give the same bits twice, by one thread and by four; an unspoiled case must be computed. The seed is
printed before its case runs, so the last line names the case of a crash. The final line is JSON: how many cases were
computed, and how many were refused with which message.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from export.operators import (
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    ATTENTION,
    BF16_LINEAR,
    BIASED,
    DOMAIN,
    GATHER,
    INT4_LINEAR,
    INT8_ATTENTION,
    INT8_LINEAR,
    LINEAR,
    SWIGLU,
)
from export.panels import BFLOAT16, INT4_BLOCK, pack_int4_panels, pack_int4_scales, pack_panels

Array = npt.NDArray[Any]

_INTS = (0, 1, -1, 2, 3, 7, 31, 32, 33, 255, 256, -(1 << 31), 1 << 16, (1 << 16) + 1, (1 << 31) - 1, 1 << 31, 1 << 32)
_WIDE_INTS = ((1 << 32) + 128, 1 << 58, 1 << 62, (1 << 63) - 1, -(1 << 63))
_FLOATS = (0.0, -0.0, 1e-45, 1e-30, 1 / 127, 1.0, 2.0, 3e38, -1.0, float("nan"), float("inf"), float("-inf"))
_POSITIONS = (-(1 << 31), -2, -1, 0, 1, (1 << 31) - 1)
_TYPES = (np.float32, np.float64, np.float16, np.int8, np.uint8, np.int32, np.int64)
_SPOILED = 0.8  # of all cases
_ZERO_BESIDE = (1 << 40, 1 << 62)  # what other dimensions may be where one is zero
# A kernel's own error message; without one, ONNX Runtime refused the model.
_OWN_WORDS = re.compile(
    r"(?:Status Message|during initialization): ([^/\n]*\b(?:must be|must have|must divide|must)\b.*)"
)
_NUMBER = re.compile(r"(?<= )-?(?:\d[\d.e+-]*|nan|inf)(?=[ ,])")


@dataclass(slots=True)
class Case:
    """A node and its inputs in order, None for omitted ones; those in `stored` are constants of the graph."""

    op_type: str
    attributes: dict[str, Any]
    inputs: list[Array | None]
    stored: set[int]
    num_outputs: int
    # Outputs that are not float32.
    cache_type: int = TensorProto.FLOAT


class Refused(Exception):
    """ONNX Runtime's error message."""


def draw(rng: np.random.Generator, operators: Sequence[str]) -> tuple[Case, bool]:
    """A case, and whether it is spoiled."""
    kind = str(rng.choice(operators))
    if kind in (ATTENTION, INT8_ATTENTION):
        case = _attention(rng, kind)
    elif kind.endswith(GATHER):
        case = _gather(rng, kind)
    elif kind in (SWIGLU, ADD_RMS_NORM, ADD_LAYER_NORM):
        case = _rows(rng, kind)
    else:
        case = _product(rng, kind)
    is_spoiled = rng.random() < _SPOILED
    for _ in range(rng.integers(1, 4) if is_spoiled else 0):
        if not case.inputs:
            break
        rng.choice([_spoil_attribute, _spoil_shape, _spoil_values, _spoil_values, _spoil_input, _spoil_heads])(
            rng, case
        )
    return case, is_spoiled


def _numbers(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def _leading(rng: np.random.Generator) -> tuple[int, ...]:
    """Dimensions before the last: about twenty rows, sometimes none."""
    return tuple(int(rng.integers(0 if rng.random() < 0.1 else 1, 6)) for _ in range(rng.integers(0, 4)))


def _product(rng: np.random.Generator, kind: str) -> Case:
    inner, outer = int(rng.integers(1, 200)), int(rng.integers(1, 100))
    if rng.random() < 0.1:
        inner, outer = 1024, 70  # large enough to be copied
    if kind.endswith(SWIGLU):
        outer = -(-outer // 64) * 64
    attributes: dict[str, Any] = {}
    inputs: list[Array | None]
    if INT4_LINEAR in kind:
        inner = -(-inner // INT4_BLOCK) * INT4_BLOCK
        codes = rng.integers(0, 16, (outer, inner // INT4_BLOCK, INT4_BLOCK)).astype(np.uint8)
        scales = rng.uniform(-1, 1, codes.shape[:2]).astype(np.float32)
        inputs = [pack_int4_panels(codes), pack_int4_scales(scales)]
        attributes = {"K": inner, "N": outer}
    elif INT8_LINEAR in kind:
        panels = pack_panels(rng.integers(-127, 128, (inner, outer)).astype(np.int8))
        inputs = [panels, rng.uniform(0.001, 0.1, outer).astype(np.float32)]
        attributes = {"step": 1 / 127, "zero": 128, "K": inner}
    else:
        weight = _numbers(rng, outer, inner)
        inputs = [weight.astype(BFLOAT16) if BF16_LINEAR in kind else weight]
    inputs += [_numbers(rng, outer)] if kind.startswith(BIASED) else []
    inputs.insert(0, _numbers(rng, *_leading(rng), inner))
    is_stored = INT8_LINEAR in kind or rng.random() < 0.8
    return Case(kind, attributes, inputs, set(range(1, len(inputs))) if is_stored else set(), 1)


def _gather(rng: np.random.Generator, kind: str) -> Case:
    """Columns of a product's matrix."""
    case = _product(rng, kind.replace(GATHER, LINEAR))
    last = case.inputs[-1]  # scales or, of floats, the matrix
    outer = case.attributes.get("N", 0 if last is None else len(last))
    attributes = {name: value for name, value in case.attributes.items() if name in ("K", "N")}
    ids = rng.integers(0, outer, _leading(rng))
    return Case(kind, attributes, [ids, *case.inputs[1:]], case.stored, 1)


def _rows(rng: np.random.Generator, kind: str) -> Case:
    shape = (*_leading(rng), int(rng.integers(1, 200)))
    if kind == SWIGLU:
        return Case(kind, {}, [_numbers(rng, *shape[:-1], 2 * shape[-1])], set(), 1)
    weights = [_numbers(rng, shape[-1]) for _ in range(1 + (kind == ADD_LAYER_NORM))]
    inputs: list[Array | None] = [_numbers(rng, *shape), _numbers(rng, *shape), *weights]
    return Case(kind, {"epsilon": 1e-5}, inputs, set(range(2, len(inputs))), 2)


def _attention(rng: np.random.Generator, kind: str) -> Case:
    kv_heads, group = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    heads, dim = kv_heads * group, int(rng.choice([16, 32, 48, 64, 80, 128]))
    batch, capacity = int(rng.integers(1, 5)), int(rng.integers(1, 150))
    most = int(rng.choice([60, 150]))
    count = int(rng.integers(1, min(capacity, most) + 1)) if rng.random() < 0.6 else 1
    is_source, is_packed = rng.random() < 0.15, rng.random() < 0.6
    if is_source:
        is_packed = False
    last = rng.integers(count - 1, capacity, batch).astype(np.int32)
    if rng.random() < 0.3:
        last[:] = rng.integers(0, count, batch)  # a ragged first prompt
    total = int(last.max()) + 1
    widths = [(heads + 2 * kv_heads) * dim] if is_packed else [heads * dim, kv_heads * dim, kv_heads * dim]
    new: list[Array | None] = [_numbers(rng, batch, count, width) for width in widths]
    if is_packed:
        new += [None, None]
    elif is_source:
        new[1:] = [np.zeros((batch, 0, width), np.float32) for width in widths[1:]]
    shape = (batch, kv_heads, capacity, dim)
    is_int8 = kind == INT8_ATTENTION
    cache = [rng.integers(-128, 128, shape).astype(np.int8) if is_int8 else _numbers(rng, *shape) for _ in range(2)]
    rotary = not is_source and rng.random() < 0.5
    angles: list[Array | None] = [_numbers(rng, capacity, dim // 2) if rotary else None for _ in range(2)]
    inputs = [*new, *cache, last, np.array(total, np.int32), *angles]
    if is_int8:
        sinks = _numbers(rng, heads) if rng.random() < 0.5 else None
        inputs += [sinks, *(rng.uniform(0.01, 0.1, (1, kv_heads, 1, dim)).astype(np.float32) for _ in range(2))]
    window = int(rng.choice([-1, -1, 0, 1, 5, 40]))
    attributes = {
        "num_heads": heads,
        "kv_num_heads": kv_heads,
        "do_rotary": int(rotary),
        "local_window_size": window,
    }
    stored = {index for index in range(7, len(inputs)) if inputs[index] is not None and rng.random() < 0.7}
    return Case(kind, attributes, inputs, stored, 3, TensorProto.INT8 if is_int8 else TensorProto.FLOAT)


def _spoil_attribute(rng: np.random.Generator, case: Case) -> None:
    if not case.attributes:
        return
    name = str(rng.choice(list(case.attributes)))
    change = rng.random()
    if change < 0.05:
        del case.attributes[name]
    elif change < 0.1:
        case.attributes[name] = rng.choice(["", "1", "x" * 1000])
    elif isinstance(case.attributes[name], float) != (change < 0.15):
        case.attributes[name] = float(rng.choice(_FLOATS))
    elif change < 0.4 and not isinstance(case.attributes[name], str):  # which it may have been spoiled to be
        case.attributes[name] += int(rng.choice([-1, 1, 16, 32]))
    else:
        case.attributes[name] = [*_INTS, *_WIDE_INTS][rng.integers(len(_INTS) + len(_WIDE_INTS))]


def _spoil_heads(rng: np.random.Generator, case: Case) -> None:
    """A number of heads whose width overflows 64 bits to the valid one."""
    past = case.inputs[3] if "num_heads" in case.attributes and len(case.inputs) > 3 else None
    heads = case.attributes.get("num_heads", 0)
    if past is None or not past.ndim or past.shape[-1] < 4 or not isinstance(heads, int) or heads >= 1 << 32:
        return
    case.attributes["num_heads"] = (1 << 64) // past.shape[-1] + heads * int(rng.integers(0, 2))


def _spoil_shape(rng: np.random.Generator, case: Case) -> None:
    index = int(rng.integers(len(case.inputs)))
    array = case.inputs[index]
    if array is None:
        return
    shape = list(array.shape)
    axis = int(rng.integers(len(shape))) if shape else 0
    change = rng.random()
    if not shape or change < 0.1:
        shape.insert(axis, int(rng.choice([0, 1, 2])))
    elif change < 0.2:
        shape.pop(axis)
    elif change < 0.3:
        shape[axis] = int(rng.choice(_ZERO_BESIDE))
        shape.insert(int(rng.integers(len(shape) + 1)), 0)
    elif change < 0.4:
        shape = [1] * int(rng.integers(1, 8)) + shape
    elif change < 0.5:
        shape[axis] = 0
    elif change < 0.6:
        rng.shuffle(shape)
    else:
        shape[axis] = max(0, shape[axis] + int(rng.choice([-16, -1, 1, 16, 32])))
    if np.prod(shape, dtype=object) < 1 << 22:
        try:
            case.inputs[index] = np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)
        except (ValueError, MemoryError):  # more than NumPy can count
            return


def _spoil_values(rng: np.random.Generator, case: Case) -> None:
    index = int(rng.integers(len(case.inputs)))
    array = case.inputs[index]
    if array is None or not array.size:
        return
    array = case.inputs[index] = array.copy()
    places = rng.integers(0, array.size, int(rng.choice([1, 3, array.size])))
    if array.dtype == BFLOAT16:
        array.reshape(-1)[places] = rng.choice(np.float32(_FLOATS), len(places)).astype(BFLOAT16)
        return
    if array.dtype.kind == "f":
        values: Sequence[float] = _FLOATS
    elif array.dtype == np.int32:
        values = [*_POSITIONS, *(int(size) for each in case.inputs if each is not None for size in each.shape[:3])]
    else:
        info = np.iinfo(array.dtype)
        values = [info.min, info.max, 0]
    info_max = np.finfo(array.dtype).max if array.dtype.kind == "f" else np.iinfo(array.dtype).max
    with np.errstate(over="ignore"):
        drawn = rng.choice(np.minimum(values, info_max) if array.dtype.kind != "f" else values, len(places))
        array.reshape(-1)[places] = drawn.astype(array.dtype)


def _spoil_input(rng: np.random.Generator, case: Case) -> None:
    index = int(rng.integers(len(case.inputs)))
    change = rng.random()
    if change < 0.3:
        case.inputs[index] = None
    elif change < 0.5:
        array = case.inputs[index]
        if array is not None and array.size < 1 << 16:
            with np.errstate(all="ignore"):
                case.inputs[index] = array.astype(rng.choice(_TYPES))
    elif change < 0.8:
        case.stored ^= {index}
    elif change < 0.9:
        del case.inputs[index:]
    else:
        case.inputs.append(np.zeros(1, np.float32))


def run(case: Case, library: str, *, threads: int, leaves_weights: bool) -> list[bytes]:
    """A case's outputs, twice by one session."""
    names = ["" if each is None else f"i{index}" for index, each in enumerate(case.inputs)]
    outputs = [f"o{index}" for index in range(case.num_outputs)]
    there = {name: each for name, each in zip(names, case.inputs, strict=True) if each is not None}
    stored = {names[index] for index in case.stored if index < len(names)} - {""}
    try:
        node = helper.make_node(case.op_type, names, outputs, domain=DOMAIN, **case.attributes)
    except (TypeError, ValueError, OverflowError) as error:  # not representable in a file
        raise Refused(str(error)) from error
    graph = helper.make_graph(
        [node],
        "fuzz",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(each.dtype), [None] * each.ndim)
            for name, each in there.items()
            if name not in stored
        ],
        [
            helper.make_tensor_value_info(name, case.cache_type if case.num_outputs == 3 and index else 1, None)
            for index, name in enumerate(outputs)
        ],
        [numpy_helper.from_array(there[name], name) for name in stored],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Each tensor has its own memory, so that out-of-bounds reads are found.
    options.enable_cpu_mem_arena = options.enable_mem_pattern = options.enable_mem_reuse = False
    options.add_session_config_entry("session.disable_prepacking", str(int(leaves_weights)))
    options.register_custom_ops_library(library)
    feeds = {name: _fed(each) for name, each in there.items() if name not in stored}
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        once = [each.tobytes() for each in session.run(None, feeds)]
        again = [each.tobytes() for each in session.run(None, {name: _fed(there[name].copy()) for name in feeds})]
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        raise Refused(str(error)) from error
    assert once == again, "the same inputs gave other bits"
    return once


def _fed(array: Array) -> Any:
    """What a session takes: bfloat16 is no type of NumPy's own."""
    if array.dtype != BFLOAT16:
        return array
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), TensorProto.BFLOAT16)


def main(argv: Sequence[str]) -> None:
    """Runs at least `min_cases` cases, and further ones until the time is up."""
    library, seconds, min_cases = argv[0], float(argv[1]), int(argv[2])
    first = int(argv[3]) if len(argv) > 3 else 0
    ask = ctypes.CDLL(library).OnwardOperators
    ask.restype = ctypes.c_char_p
    operators = ask().decode().split(",")
    computed: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    seed, end = first, time.monotonic() + seconds
    while seed - first < min_cases or time.monotonic() < end:
        print(seed, flush=True)
        rng = np.random.default_rng(seed)
        case, is_spoiled = draw(rng, operators)
        leaves_weights = bool(rng.integers(2))
        try:
            found = run(case, library, threads=4, leaves_weights=leaves_weights)
            if seed % 4 == 0:
                alone = run(case, library, threads=1, leaves_weights=not leaves_weights)
                assert found == alone, "one thread gives other bits than four"
            computed[case.op_type] += 1
        except Refused as refused:
            if not is_spoiled:
                raise
            words = _OWN_WORDS.search(str(refused))
            refusals[_NUMBER.sub("…", words.group(1)) if words else "by ONNX Runtime itself"] += 1
        seed += 1
    print(json.dumps({"cases": seed - first, "computed": computed, "refused": refusals}, ensure_ascii=False))


if __name__ == "__main__":
    main(sys.argv[1:])
