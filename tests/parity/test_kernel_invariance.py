"""Batch invariance of the kernels: a row's results have the same bits alone and in any batch.

The graphs run as in a server: by our kernels where they are built, rows as a prefix of shared buffers bound in place.
K/V beyond a row's length are NaN, so that reading them shows; int8 K/V, which have no NaN, are random. Sizes are
awkward for vectorized kernels: odd vocabularies, inner widths and buffers, few heads. In int4 widths are multiples of
16.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest

from export.emit import emit
from export.fusion import fuse_file
from export.graphs import DecoderGraph, EncoderGraph
from export.quantize import quantize_file
from export.quantize_kv import calibrate, quantize_kv_file, quantize_sources_file
from model import kernels
from model.spec.artifact import DECODER, ENCODER, KVPrecision, Precision
from model.spec.config import AttentionScore, ModelConfig
from tests.artifacts import ADDITIVE, once, random_model, tiny_artifact, tiny_config

Buffers = dict[str, npt.NDArray[Any]]

NUM_ROWS = 8
CONTEXT = 79
SOURCE_CONTEXT = 61
BATCHES: tuple[Sequence[int], ...] = (
    [0, 1],
    [1, 0],
    [3, 2, 1],
    [6, 3, 0, 2, 5, 1],
    range(NUM_ROWS),
    range(NUM_ROWS - 1, -1, -1),
    [4, 4, 4],
)
STYLES: dict[str, dict[str, Any]] = {
    "paper": {"norm": "layernorm", "activation": "relu", "positions": "sinusoidal"},
    "gpt2": {
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary"},
    "windowed": {"positions": "rotary", "query_key_norm": True, "sliding_window": 23},
}
Shape = tuple[int, int, int, int, int, str]
# Additive scores have one shape in each family, as awkward: `tests.artifacts.ADDITIVE`.
ADDITIVE_SHAPE = None
SHAPES: list[Shape] = [
    # d_model, query heads, KV heads, inner width, vocabulary, style
    (64, 4, 2, 97, 97, "llama"),
    (128, 4, 4, 512, 1003, "gpt2"),
    (192, 3, 1, 515, 1003, "llama"),
    (192, 12, 4, 768, 97, "paper"),
    (72, 9, 1, 130, 33, "gpt2"),
]
# For a decoder alone: queries and keys normed by themselves, and a window that is shorter than the rows.
WINDOWED_SHAPE: Shape = (96, 3, 1, 130, 97, "windowed")


FP32, BF16, INT8, INT4 = Precision.FP32, Precision.BF16, Precision.INT8, Precision.INT4
KV_FP32, KV_INT8 = KVPrecision.FP32, KVPrecision.INT8


by_decoder = pytest.mark.parametrize(
    ("family", "shape", "precision"),
    [
        *(("decoder-only", shape, FP32) for shape in SHAPES[:3]),
        *(("encoder-decoder", shape, FP32) for shape in (SHAPES[0], *SHAPES[3:])),
        ("decoder-only", WINDOWED_SHAPE, FP32),
        ("decoder-only", ADDITIVE_SHAPE, FP32),
        ("encoder-decoder", ADDITIVE_SHAPE, FP32),
        *(("decoder-only", shape, INT8) for shape in SHAPES[:3]),
        *(("encoder-decoder", shape, INT8) for shape in (SHAPES[0], *SHAPES[3:])),
        ("decoder-only", ADDITIVE_SHAPE, INT8),
        ("decoder-only", SHAPES[2], BF16),
        ("encoder-decoder", SHAPES[0], BF16),
        ("decoder-only", SHAPES[1], INT4),
        ("encoder-decoder", SHAPES[3], INT4),
    ],
    ids=lambda value: value if isinstance(value, str) else _name(value),
)


def _name(shape: Shape | None) -> str:
    if shape is None:
        return "additive"
    d_model, num_heads, num_kv_heads, _, vocab_size, _ = shape
    return f"d{d_model}-h{num_heads}-kv{num_kv_heads}-v{vocab_size}"


def _config(family: str, shape: Shape | None) -> ModelConfig:
    if shape is None:
        return tiny_config(family, **ADDITIVE[family])
    d_model, num_heads, num_kv_heads, d_ff, vocab_size, style = shape
    values: dict[str, Any] = {"architecture": family, "vocab_size": vocab_size, "context": CONTEXT, "num_layers": 1}
    values |= {"d_model": d_model, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "d_ff": d_ff}
    if family == "encoder-decoder":
        values |= {"num_encoder_layers": 1, "source_context": SOURCE_CONTEXT}
    return ModelConfig(**values, **STYLES[style])


def _session(
    config: ModelConfig,
    graph: type[DecoderGraph | EncoderGraph],
    precision: Precision,
    kv_precision: KVPrecision = KV_FP32,
    *,
    by_kernels: bool = True,
) -> ort.InferenceSession:
    name = DECODER if graph is DecoderGraph else ENCODER
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.onnx"
        if config.attention_score is AttentionScore.ADDITIVE:
            # Slow to write: these are the graphs that other tests have, too.
            for file in tiny_artifact(config.architecture, **ADDITIVE[config.architecture]).glob(f"{name}.*"):
                shutil.copy(file, folder)
        else:
            _copy_graph(config, graph, path)
        if kv_precision is KV_INT8:
            _quantize_kv(path, config)
        quantize_file(path, precision)
        fuse_file(path)
        return _open(path, by_kernels=by_kernels)


def _copy_graph(config: ModelConfig, graph: type[DecoderGraph | EncoderGraph], path: Path) -> None:
    """The graph in float32: what is done to it afterwards is done each time."""

    def make(folder: Path) -> None:
        emit(graph(random_model(config)), folder / path.name)

    for file in once(("invariance", config, graph), make).iterdir():
        shutil.copy(file, path.parent)


def _quantize_kv(path: Path, config: ModelConfig) -> None:
    """Rewrites one graph; calibration takes both where there are two."""
    graphs = {DECODER: DecoderGraph, ENCODER: EncoderGraph} if config.is_encoder_decoder else {DECODER: DecoderGraph}
    paths = {name: path.with_name(f"{name}.onnx") for name in graphs}
    for name, graph in graphs.items():
        if not paths[name].exists():
            _copy_graph(config, graph, paths[name])
    scales, _ = calibrate(paths[DECODER], config, paths.get(ENCODER))
    (quantize_kv_file if path == paths[DECODER] else quantize_sources_file)(path, scales)


def _open(path: Path, *, by_kernels: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    if by_kernels and (library := kernels.library()) is not None:
        options.register_custom_ops_library(str(library))
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@cache
def _decoder(
    family: str,
    shape: Shape | None,
    precision: Precision = FP32,
    kv_precision: KVPrecision = KV_FP32,
    *,
    by_kernels: bool = True,
) -> Decoder:
    return Decoder(_config(family, shape), precision, kv_precision, by_kernels=by_kernels)


class Decoder:
    """A decoder graph and `NUM_ROWS` sequences of different lengths."""

    def __init__(
        self, config: ModelConfig, precision: Precision, kv_precision: KVPrecision, *, by_kernels: bool
    ) -> None:
        rng = np.random.default_rng(0)
        self.config = config
        self.kv_precision = kv_precision
        self.session = _session(config, DecoderGraph, precision, kv_precision, by_kernels=by_kernels)
        self.tokens = rng.integers(0, config.vocab_size, NUM_ROWS)
        self.past = rng.integers(0, CONTEXT - 1, NUM_ROWS)
        self.past[:2] = (0, CONTEXT - 1)
        self.source_lengths = rng.integers(1, SOURCE_CONTEXT + 1, NUM_ROWS)
        self.buffers = {name: self._random(rng, CONTEXT, self.past) for name in self._names("past")}
        if config.is_encoder_decoder:
            lengths = self.source_lengths
            self.buffers |= {name: self._random(rng, SOURCE_CONTEXT, lengths) for name in self._names("cross")}

    def decode(self, rows: Sequence[int], total: int | None = None) -> tuple[npt.NDArray[np.float32], Buffers]:
        """One step for these rows, in this order: logits `[rows, V]` and the buffers after it."""
        chosen = list(rows)
        buffers = {name: values[chosen] for name, values in self.buffers.items()}
        longest = int(self.past[chosen].max()) + 1
        return self.run(self.tokens[chosen, None], self.past[chosen], buffers, total or longest, chosen), buffers

    def run(
        self,
        ids: npt.NDArray[np.int64],
        past: npt.NDArray[np.int64],
        buffers: Buffers,
        total: int,
        rows: Sequence[int],
        wanted: npt.NDArray[np.int64] | None = None,
    ) -> npt.NDArray[np.float32]:
        """One run of the graph with `buffers` bound in place; the logits of every row's last token, or those wanted."""
        batch, count = ids.shape
        inputs: dict[str, npt.NDArray[np.generic]] = {
            "input_ids": ids,
            "seqlens_k": (past + count - 1).astype(np.int32),
            "total_sequence_length": np.array(total, np.int32),
            "logits_indices": np.arange(batch) * count + count - 1 if wanted is None else wanted,
        }
        if self.config.positions != "rotary":
            inputs["position_ids"] = past[:, None] + np.arange(count)
        if self.config.is_encoder_decoder:
            inputs["source_lengths"] = self.source_lengths[list(rows)].astype(np.int32)
        binding = self.session.io_binding()
        binding.bind_output("logits")
        for name, values in inputs.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(values))
        for name, values in buffers.items():
            kind, part, layer = name.split("_")
            shared = ort.OrtValue.ortvalue_from_numpy(values)
            binding.bind_ortvalue_input(name, shared)
            output = f"present_{part}_{layer}" if kind == "past" else f"cross_{part}_out_{layer}"
            binding.bind_ortvalue_output(output, shared)
        self.session.run_with_iobinding(binding)
        return binding.get_outputs()[0].numpy()

    def empty_buffers(self, num_rows: int, stale: int = 127) -> Buffers:
        """Unwritten K/V: NaN, or `stale` in int8."""
        shape = (num_rows, self.config.num_kv_heads, CONTEXT, self.config.head_dim)
        if self.kv_precision is KV_INT8:
            return {name: np.full(shape, stale, np.int8) for name in self._names("past")}
        return {name: np.full(shape, np.nan, np.float32) for name in self._names("past")}

    def _names(self, kind: str) -> list[str]:
        return [f"{kind}_{part}_{layer}" for layer in range(self.config.num_layers) for part in ("key", "value")]

    def _random(self, rng: np.random.Generator, capacity: int, lengths: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        shape = (NUM_ROWS, self.config.num_kv_heads, capacity, self.config.head_dim)
        if self.kv_precision is KV_INT8:
            return rng.integers(-128, 128, shape, np.int8)
        values = rng.standard_normal(shape, dtype=np.float32)
        for row, length in enumerate(lengths):
            values[row, :, length:] = np.nan
        return values


@by_decoder
@pytest.mark.sampled(4)
def test_decoded_row_has_the_same_bits_alone_and_in_any_batch(
    family: str, shape: Shape | None, precision: Precision
) -> None:
    decoder = _decoder(family, shape, precision)
    alone = decode_alone_and_batched(decoder, BATCHES)
    assert all(np.isfinite(logits).all() for logits in alone)
    for row in range(NUM_ROWS):
        longest = decoder.decode([row], total=CONTEXT)[0]
        assert longest.tobytes() == alone[row].tobytes(), "another row's length must not matter"


def decode_alone_and_batched(decoder: Decoder, batches: Iterable[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
    """Asserts that logits and K/V have the same bits in all batches; returns each row's logits alone."""
    alone = [decoder.decode([row]) for row in range(NUM_ROWS)]
    for batch in batches:
        logits, buffers = decoder.decode(batch)
        for index, row in enumerate(batch):
            assert logits[index].tobytes() == alone[row][0][0].tobytes(), f"row {row} in {list(batch)}"
            for name, values in buffers.items():
                assert values[index].tobytes() == alone[row][1][name][0].tobytes(), f"{name} of row {row}"
    return [logits for logits, _ in alone]


@pytest.mark.parametrize(
    ("shape", "precision"),
    [
        *((shape, FP32) for shape in (*SHAPES[:3], WINDOWED_SHAPE, ADDITIVE_SHAPE)),
        *((shape, INT8) for shape in SHAPES[:3]),
        (SHAPES[1], INT4),
    ],
    ids=lambda value: value if isinstance(value, str) else _name(value),
)
@pytest.mark.sampled(3)
def test_prefill_has_the_same_bits_in_any_slot(shape: Shape | None, precision: Precision) -> None:
    decoder = _decoder("decoder-only", shape, precision)
    ids = np.random.default_rng(1).integers(0, decoder.config.vocab_size, (1, 61))
    slots = decoder.empty_buffers(NUM_ROWS)
    answers = set()
    for slot in range(NUM_ROWS):
        view = {name: values[slot : slot + 1] for name, values in slots.items()}
        start = np.zeros(1, np.int64)
        first = decoder.run(ids[:, :32], start, view, 32, [slot])
        second = decoder.run(ids[:, 32:], start + 32, view, 61, [slot])
        answers.add(first.tobytes() + second.tobytes() + b"".join(values.tobytes() for values in view.values()))
    assert len(answers) == 1


KV_SHAPES: list[tuple[Shape, Precision]] = [
    *((shape, FP32) for shape in (*SHAPES[:3], WINDOWED_SHAPE)),
    *((shape, INT8) for shape in SHAPES[:3]),
    (SHAPES[1], INT4),
]


@pytest.mark.parametrize(
    ("family", "shape", "precision"),
    [
        *(("decoder-only", *each) for each in KV_SHAPES),
        *(("encoder-decoder", shape, FP32) for shape in (SHAPES[0], *SHAPES[3:])),
        ("encoder-decoder", SHAPES[3], INT8),
    ],
    ids=lambda value: value if isinstance(value, str) else _name(value),
)
@pytest.mark.sampled(4)
def test_decoded_row_over_int8_kv_has_the_same_bits_alone_and_among_up_to_33(
    family: str, shape: Shape, precision: Precision
) -> None:
    decoder = _decoder(family, shape, precision, KV_INT8)
    rng = np.random.default_rng(3)
    larger = (rng.integers(0, NUM_ROWS, size).tolist() for size in (2, 7, 16, 17, 31, 32, 33))
    alone = decode_alone_and_batched(decoder, (*BATCHES, *larger))
    for row in range(NUM_ROWS):
        loud = {name: values[[row]] for name, values in decoder.buffers.items()}
        for name, values in loud.items():
            values[:, :, (decoder.past if name.startswith("past") else decoder.source_lengths)[row] :] = 127
        again = decoder.run(decoder.tokens[[row], None], decoder.past[[row]], loud, CONTEXT, [row])
        assert again.tobytes() == alone[row].tobytes(), "K/V beyond a row's length must not matter"


@pytest.mark.parametrize(
    ("shape", "precision"), KV_SHAPES, ids=lambda value: value if isinstance(value, str) else _name(value)
)
@pytest.mark.sampled(3)
def test_prefill_over_int8_kv_has_the_same_bits_in_any_slot_and_in_any_chunks(
    shape: Shape, precision: Precision
) -> None:
    decoder = _decoder("decoder-only", shape, precision, KV_INT8)
    length = 61
    ids = np.random.default_rng(1).integers(0, decoder.config.vocab_size, (1, length))
    whole: set[bytes] = set()
    for slot, bounds in enumerate([(0, 61), (0, 32, 61), (0, 16, 32, 48, 61), (0, 59, 61), (0, 2, 61)]):
        slots = decoder.empty_buffers(NUM_ROWS, stale=(-128, 127)[slot % 2])
        view = {name: values[slot : slot + 1] for name, values in slots.items()}
        for start, end in pairwise(bounds):
            logits = decoder.run(ids[:, start:end], np.array([start]), view, end, [slot])
        whole.add(logits.tobytes() + b"".join(values[:, :, :length].tobytes() for values in view.values()))
    assert len(whole) == 1


# Behind the last attention a product has as many rows as prompts are computed together, and not as they have tokens.
@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize(
    ("shape", "precision", "kv_precision"),
    [
        *((shape, precision, KV_FP32) for precision in (FP32, INT8) for shape in (*SHAPES[:3], ADDITIVE_SHAPE)),
        (SHAPES[1], INT4, KV_FP32),
        (WINDOWED_SHAPE, FP32, KV_FP32),
        (SHAPES[0], FP32, KV_INT8),
        (SHAPES[1], INT8, KV_INT8),
        (SHAPES[1], INT4, KV_INT8),
    ],
    ids=lambda value: value if isinstance(value, str) else _name(value),
)
@pytest.mark.sampled(8)
def test_short_prompt_has_the_same_bits_alone_and_together_whatever_pads_it(
    shape: Shape | None, precision: Precision, kv_precision: KVPrecision, by_kernels: bool
) -> None:
    decoder = _decoder("decoder-only", shape, precision, kv_precision, by_kernels=by_kernels)
    rng = np.random.default_rng(4)
    for padded in (4, 12, 32):
        lengths = rng.integers(max(2, padded - 3), padded + 1, NUM_ROWS)
        prompts = rng.integers(0, decoder.config.vocab_size, (NUM_ROWS, padded))
        alone = [_prefill_together(decoder, prompts[[row]], lengths[[row]])[0] for row in range(NUM_ROWS)]
        prompts[np.arange(padded) >= lengths[:, None]] = 1
        for batch in BATCHES:
            rows = list(batch)
            together = _prefill_together(decoder, prompts[rows], lengths[rows])
            assert together == [alone[row] for row in rows], f"rows {rows}, width {padded}"


def _prefill_together(decoder: Decoder, ids: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> list[bytes]:
    """Each row's logits after its last token, and its K/V up to there, in buffers as wide as the padding."""
    rows, padded = ids.shape
    buffers = {
        name: np.ascontiguousarray(values[:, :, :padded]) for name, values in decoder.empty_buffers(rows).items()
    }
    wanted = np.arange(rows) * padded + lengths - 1
    logits = decoder.run(ids, np.zeros(rows, np.int64), buffers, padded, range(rows), wanted)
    return [
        logits[row].tobytes() + b"".join(values[row, :, : lengths[row]].tobytes() for values in buffers.values())
        for row in range(rows)
    ]


@pytest.mark.parametrize(
    ("shape", "kv_precision"),
    [(SHAPES[0], KV_FP32), (ADDITIVE_SHAPE, KV_FP32), (SHAPES[0], KV_INT8)],
    ids=lambda value: value if isinstance(value, str) else _name(value),
)
@pytest.mark.sampled(1)
def test_cross_attention_leaves_the_source_as_it_is(shape: Shape | None, kv_precision: KVPrecision) -> None:
    decoder = _decoder("encoder-decoder", shape, kv_precision=kv_precision)
    _, buffers = decoder.decode(range(NUM_ROWS))
    for name in (name for name in buffers if name.startswith("cross")):
        assert buffers[name].tobytes() == decoder.buffers[name].tobytes()
    for name in (name for name in buffers if name.startswith("past")):
        assert buffers[name].tobytes() != decoder.buffers[name].tobytes()


@pytest.mark.parametrize(
    ("shape", "precision", "kv_precision"),
    [
        *((shape, FP32, KV_FP32) for shape in (*SHAPES, ADDITIVE_SHAPE)),
        *((shape, INT8, KV_FP32) for shape in SHAPES),
        (SHAPES[3], INT4, KV_FP32),
        (SHAPES[0], FP32, KV_INT8),
        (SHAPES[3], INT8, KV_INT8),
    ],
    ids=lambda value: value if isinstance(value, str) else _name(value),
)
@pytest.mark.sampled(4)
def test_encoded_source_has_the_same_bits_alone_and_batched(
    shape: Shape | None, precision: Precision, kv_precision: KVPrecision
) -> None:
    config = _config("encoder-decoder", shape)
    session = _session(config, EncoderGraph, precision, kv_precision)
    rng = np.random.default_rng(2)
    for padded in (1, 16, 48, SOURCE_CONTEXT):
        ids = rng.integers(0, config.source_vocab_size, (NUM_ROWS, padded))
        lengths = rng.integers(max(1, padded - 15), padded + 1, NUM_ROWS).astype(np.int32)
        alone = [_encode(session, ids[[row]], lengths[[row]]) for row in range(NUM_ROWS)]
        for batch in BATCHES:
            rows = list(batch)
            together = _encode(session, ids[rows], lengths[rows])
            for index, row in enumerate(rows):
                for batched, single in zip(together, alone[row], strict=True):
                    assert batched[index].tobytes() == single[0].tobytes(), f"row {row} among {rows}, width {padded}"


def _encode(
    session: ort.InferenceSession, ids: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32]
) -> list[npt.NDArray[np.float32 | np.int8]]:
    return session.run(None, {"source_ids": ids, "source_lengths": lengths})
