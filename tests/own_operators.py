"""Models of one operator of the project's own, and sessions in which kernels or standard operators compute it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.functions import add_functions
from export.fusion import fuse
from export.operators import ATTENTION, BIASED, CONTRIB, DOMAIN, GELU, INT4_LINEAR, INT8_ATTENTION, INT8_LINEAR, SWIGLU
from export.panels import pack_int4_panels, pack_int4_scales, pack_panels
from model import kernels
from model.kernels.build import COMPILERS

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Float32 = npt.NDArray[np.float32]

_HAS_NONE = kernels.library() is None and not any(map(shutil.which, COMPILERS))
NEEDS_KERNELS = [
    pytest.mark.skipif(not kernels.is_for_this_machine(), reason="there are no kernels for this kind of processor"),
    pytest.mark.skipif(_HAS_NONE, reason="the kernels are not built, and there is no C++ compiler to do it"),
]

TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.int8): TensorProto.INT8,
}


def open_session(
    model: onnx.ModelProto, *, by_kernels: bool, threads: int = 2, leaves_weights: bool = False
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", str(int(leaves_weights)))
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # refusals are asked for here
    if by_kernels:
        register_kernels(options, model)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def register_kernels(options: ort.SessionOptions, model: onnx.ModelProto) -> None:
    """Has kernels compute a model's operators; skips the test where this processor can run none for one of them."""
    library = kernels.library()
    assert library is not None, "the kernels are not built: python -m model.kernels"
    lacking = {node.op_type for node in model.graph.node if node.domain == DOMAIN} - set(kernels.operators())
    if lacking:
        pytest.skip(f"this processor can run no kernel for {', '.join(sorted(lacking))}")
    options.register_custom_ops_library(str(library))


def _shape(name: str, value: Array) -> list[int | None]:
    """Unknown, but for how wide the heads of a cache are."""
    return [*[None] * (value.ndim - 1), value.shape[-1] if name.startswith("past_") else None][: value.ndim]


def model_of(
    nodes: Sequence[onnx.NodeProto],
    feeds: Mapping[str, Array],
    outputs: Sequence[str],
    stored: Mapping[str, Array],
    types: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """A model of these nodes; its outputs are float32, but for those of other `types`."""
    types = types or {}
    inputs = [
        helper.make_tensor_value_info(name, TYPES[value.dtype], _shape(name, value)) for name, value in feeds.items()
    ]
    graph = helper.make_graph(
        list(nodes),
        "own",
        inputs,
        [helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    add_functions(model)
    return model


def name_of(kind: str, *, biased: bool, gelu: bool, swiglu: bool = False) -> str:
    return f"{BIASED if biased else ''}{kind}{SWIGLU if swiglu else GELU if gelu else ''}"


def linear(kind: str, weight: Array, bias: Float32 | None, *, gelu: bool = False) -> onnx.ModelProto:
    """A product with a weight `[N, K]` in PyTorch's layout."""
    stored = {"weight": weight} | ({} if bias is None else {"bias": bias})
    node = helper.make_node(name_of(kind, biased=bias is not None, gelu=gelu), ["x", *stored], ["y"], domain=DOMAIN)
    return model_of([node], {"x": np.zeros((1, weight.shape[1]), np.float32)}, ["y"], stored)


def int8_linear(
    inner: int,
    outer: int,
    rng: np.random.Generator,
    *,
    positive: bool = False,
    biased: bool = False,
    gelu: bool = False,
    swiglu: bool = False,
) -> onnx.ModelProto:
    stored: dict[str, Array] = {
        "panels": pack_panels(rng.integers(-127, 128, (inner, outer)).astype(np.int8)),
        "scales": rng.uniform(0.001, 0.1, outer).astype(np.float32),
    }
    stored |= {"bias": rng.standard_normal(outer).astype(np.float32)} if biased else {}
    step = np.float32(1) / np.float32(255 if positive else 127)
    name = name_of(INT8_LINEAR, biased=biased, gelu=gelu, swiglu=swiglu)
    node = helper.make_node(name, ["x", *stored], ["y"], domain=DOMAIN)
    attributes = {"step": float(step), "zero": 0 if positive else 128, "K": inner}
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    return model_of([node], {"x": np.zeros((1, inner), np.float32)}, ["y"], stored)


def int4_linear(
    codes: npt.NDArray[np.uint8],
    scales: Float32,
    bias: Float32 | None = None,
    *,
    gelu: bool = False,
    swiglu: bool = False,
) -> onnx.ModelProto:
    """Of codes `[N, K / 32, 32]` and scales `[N, K / 32]`."""
    outer, inner = len(codes), codes[0].size
    stored: dict[str, Array] = {"panels": pack_int4_panels(codes), "scales": pack_int4_scales(scales)}
    stored |= {} if bias is None else {"bias": bias}
    kind = name_of(INT4_LINEAR, biased=bias is not None, gelu=gelu, swiglu=swiglu)
    node = helper.make_node(kind, ["x", *stored], ["y"], domain=DOMAIN, K=inner, N=outer)
    return model_of([node], {"x": np.zeros((1, inner), np.float32)}, ["y"], stored)


class AttentionCase:
    """One attention over a cache, by kernels and by the operator of ONNX Runtime's own.

    `int8` keeps K/V in eight bits; `sinks` are a score of each head besides, which goes with that alone. `positions`
    bounds the context of `rotary`.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        *,
        rotary: bool,
        window: int = -1,
        packed: bool = True,
        int8: bool = False,
        sinks: float | None = None,
        positions: int = 600,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.heads, self.kv_heads, self.dim, self.packed, self.rng = heads, kv_heads, dim, packed, rng
        self.dtype = np.dtype(np.int8 if int8 else np.float32)
        angles = np.outer(np.arange(positions), 10000.0 ** (-np.arange(dim // 2) / (dim // 2)))
        stored = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)} if rotary else {}
        new = {"query": np.zeros((1, 1, 1), np.float32)}
        new |= {} if packed else {"key": new["query"], "value": new["query"]}
        cache = np.zeros((1, 1, 1, dim), self.dtype)
        feeds = new | {"past_key": cache, "past_value": cache, "last": np.zeros(1, np.int32)}
        names = [*[*new, "", ""][:3], "past_key", "past_value", "last", "total", *stored]
        # A step of a normal number's eight bits: few saturate, at either end.
        self.scales = [np.exp(rng.normal(-3.8, 0.3, (1, kv_heads, 1, dim))).astype(np.float32) for _ in range(2)]
        if int8:
            names += [""] * (11 - len(names)) + ["" if sinks is None else "sinks", "key_scale", "value_scale"]
            stored |= dict(zip(("key_scale", "value_scale"), self.scales, strict=True))
            stored |= {} if sinks is None else {"sinks": (sinks + rng.standard_normal(heads)).astype(np.float32)}
        node = helper.make_node(ATTENTION, names, ["y", "new_key", "new_value"], domain=CONTRIB)
        attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": int(rotary)}
        attributes |= {"local_window_size": window} if window > 0 else {}
        quantized = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        attributes |= quantized if int8 else {}
        node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        types = dict.fromkeys(("new_key", "new_value"), TYPES[self.dtype])
        feeds |= {"total": np.zeros((), np.int32)}
        self.standard_model = model_of([node], feeds, ["y", *types], stored, types)
        self.standard_model.opset_import.append(helper.make_opsetid(CONTRIB, 1))
        own = onnx.ModelProto()
        own.CopyFrom(self.standard_model)
        fuse(own)
        add_functions(own)
        assert [node.op_type for node in own.graph.node] == [INT8_ATTENTION if int8 else ATTENTION]
        assert own.graph.node[0].domain == DOMAIN
        self.own_model = own
        self.own, self.standard = (
            open_session(own, by_kernels=True),
            open_session(self.standard_model, by_kernels=False),
        )

    def new_tokens(self, batch: int, count: int) -> list[Float32]:
        widths = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
        widths = [sum(widths)] if self.packed else widths
        return [self.rng.standard_normal((batch, count, width)).astype(np.float32) for width in widths]

    def cache(self, batch: int, capacity: int) -> tuple[Array, Array]:
        shape = (batch, self.kv_heads, capacity, self.dim)
        key, value = (self.rng.standard_normal(shape).astype(np.float32) for _ in range(2))
        if self.dtype == np.float32:
            return key, value
        key, value = (np.rint(part / scale) for part, scale in zip((key, value), self.scales, strict=True))
        return key.clip(-128, 127).astype(np.int8), value.clip(-128, 127).astype(np.int8)

    @property
    def nothing(self) -> float:
        """What lies behind a row's end: no number where there is one such, else the largest."""
        return np.nan if self.dtype == np.float32 else -128

    def run(
        self,
        session: ort.InferenceSession,
        new: Sequence[Float32],
        cache: tuple[Array, Array],
        last: Sequence[int],
    ) -> tuple[Float32, Array, Array]:
        """Output and caches; the caches given stay as they are."""
        names = ["query"] if len(new) == 1 else ["query", "key", "value"]
        feeds: dict[str, Array] = dict(zip(names, new, strict=True))
        feeds |= {"past_key": cache[0], "past_value": cache[1], "last": np.array(last, np.int32)}
        feeds["total"] = np.array(max(last) + 1, np.int32)
        y, key, value = session.run(None, feeds)
        return y, key, value


def plain_product(weight: Float32) -> onnx.ModelProto:
    """A product that is read by another node, so that its head is not the graph's."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Identity", ["z"], ["y"])]
    x = np.zeros((1, len(weight)), np.float32)
    return model_of(nodes, {"x": x}, ["y"], {"w": weight})
