"""The oracle of a quantized export: PyTorch with the stored weights and the graph's own rounding of rows.

Near PyTorch in float32 is a wide target in few bits. Here PyTorch computes what the quantized graph is meant to: its
own modules, with matrices and tables dequantized from the files, rows rounded before every product of bytes, and keys
and values where they are stored in eight bits. Rounding is chaotic, as a last bit may decide an integer and all that
follows. So each product takes the rows that the graph gave to it, and attention the bytes that the graph stored, once
PyTorch's own are found to be the same but for float32's rounding: what is built wrongly in between shows there, and is
named.

Source of the layouts and of the rounding: `export.operators`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper
from torch import Tensor, nn

from export.operators import LEAST_PEAK
from export.replay import PROVIDER, Replayer, fetch_in_place
from export.stored_matrix import StoredMatrix, stored_matrices
from export.stored_weights import REARRANGED
from model import kernels
from model.nn.attention import Score, attend, dot_scores
from model.nn.transformer import EncoderDecoder, Transformer
from model.spec.artifact import DECODER, ENCODER, KVPrecision, Manifest, Precision
from model.spec.config import Activation
from model.spec.golden import Float32, GoldenCase, Step

MAX_TOKENS = 200
"""Of all cases together: PyTorch computes them in float32, with one matrix dequantized at a time."""
MAX_GAP = 1e-3
"""Largest difference of a product's rows, in units of the row's largest magnitude."""
MAX_ERROR = 1e-3
"""Largest difference of the logits, in standard deviations."""
MAX_STEP = 0.51
"""Largest difference of a key or value from its byte, in steps of its scale: half of one, and float32's rounding."""
MIN_PEAK = 64
"""What the largest key or value of a layer must reach, of 127 steps; calibration, which sees more tokens, has 127."""

_HEAD = "head"
_TOKENS = "embedding.tokens.weight"
_INT8_LIMIT = 127.0
_POSITIVE_LIMIT = 255.0
"""Of rows after a ReLU, in int8."""
Array = npt.NDArray[Any]
Place = tuple[int, int]
"""A row of all cases together, and a position in it."""


class OracleError(Exception):
    """A quantized graph computes something else than PyTorch with its weights; `problems` says where."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))


@dataclass(frozen=True, slots=True)
class OracleReport:
    """What was compared: `num_tokens`, over `num_products` products.

    Attributes:
        num_tokens: of the rows.
        num_products: quantized matrices.
        max_gap: largest difference of rows before a product, relative to the row's largest magnitude.
        max_error: largest difference of the logits, in standard deviations.
        limit: of `max_error`.
    """

    num_tokens: int
    num_products: int
    max_gap: float
    max_error: float
    limit: float


def check(folder: Path, manifest: Manifest, model: Transformer, cases: Sequence[GoldenCase]) -> OracleReport:
    """Compares an artifact's graphs over slots with PyTorch, on the shortest golden cases.

    Raises:
        OracleError: naming the first product whose rows differ, or the logits.
        ReplayError: when ONNX Runtime fails.
    """
    products = {name: _products(folder, manifest, name) for name in (DECODER, ENCODER) if name in manifest.graphs}
    chosen = _short(cases)
    trace = _Trace()
    found: list[Float32] = []
    with _traced(folder, manifest, products) as sessions:
        tracer = _Tracer(manifest, sessions, products, trace)
        for case in chosen:
            found.append(tracer.run(case))
            trace.num_rows += len(case.sequences)
        stored = tracer.stored(_kv_scales(folder, manifest)) if manifest.kv_cache.precision is KVPrecision.INT8 else []
    _check_range(stored)
    oracle = _Oracle(model, {**products.get(ENCODER, {}), **products[DECODER]}, _tables(folder, manifest), trace)
    logits = oracle.run(chosen, stored)
    error, first = 0.0, 0
    for case, answers in zip(chosen, found, strict=True):
        wanted = np.stack([logits[first + feed.row, feed.start + feed.count - 1] for feed in case.compared_feeds])
        error = max(error, float(np.abs(answers - wanted).max() / wanted.std()))
        first += len(case.sequences)
    # Written so that a NaN fails.
    if not error <= MAX_ERROR:
        raise OracleError([f"logits differ from PyTorch's with the same weights by {error:.2g} of their spread"])
    num_tokens = sum(len(row) for case in chosen for row in (*case.sequences, *case.sources))
    return OracleReport(num_tokens, len(oracle.products), oracle.max_gap, error, MAX_ERROR)


def _check_range(stored: Sequence[tuple[str, Tensor, Tensor]]) -> None:
    """Checks that keys and values use their bytes' range, as PyTorch takes their scales from the graph.

    Scales that are too fine cost more than an export may lose.

    Raises:
        OracleError: naming those whose scales are too coarse.
    """
    for name, _, values in stored:
        if (peak := float(values.abs().max())) < MIN_PEAK:
            raise OracleError(
                [f"{name} reaches {peak:g} of 127 steps, must reach {MIN_PEAK}: its scales are too coarse"]
            )


def _short(cases: Sequence[GoldenCase]) -> list[GoldenCase]:
    """The shortest cases that feed several tokens or rows at once, as many as `MAX_TOKENS` allow, at least one."""
    lengths = [tuple(map(len, (*case.sequences, *case.sources))) for case in cases]
    # Cases of the same lengths are the same tokens, split otherwise.
    each = dict(zip(lengths, cases, strict=True))
    chosen: list[GoldenCase] = []
    room = MAX_TOKENS
    for key in sorted(each, key=sum):
        if sum(key) > room and chosen:
            break
        if sum(key) > 2:
            chosen.append(each[key])
            room -= sum(key)
    return chosen or list(cases[:1])


@dataclass(frozen=True, slots=True)
class _Product:
    """A quantized product: its graph, its rows' tensor, its matrix, and how rows are rounded.

    `step` is a row's scale over its largest magnitude, 0 for rows that are not rounded; `block` the numbers with a
    scale of their own, 0 for whole rows.
    """

    graph: str
    rows: str
    matrix: StoredMatrix
    step: float
    block: int = 0

    def rounded(self, rows: Tensor) -> Tensor:
        """Rows `[..., K]` after rounding to bytes and back."""
        if not self.step:
            return rows
        parts = rows.reshape(*rows.shape[:-1], -1, self.block) if self.block else rows
        peaks = parts.abs().amax(-1, keepdim=True).clamp(min=float(LEAST_PEAK))
        if self.block:
            # ONNX Runtime multiplies by this: a tie may be rounded otherwise than by a division.
            inverse = torch.tensor(_INT8_LIMIT) / peaks  # of a number, PyTorch would multiply the reciprocal
            return (torch.round(parts * inverse) * (peaks / _INT8_LIMIT)).reshape(rows.shape)
        scales = peaks * self.step
        return torch.round(parts / scales) * scales


def _products(folder: Path, manifest: Manifest, name: str) -> dict[str, _Product]:
    """A graph's quantized products, by the name of PyTorch's module."""
    found = {}
    for matrix in stored_matrices(folder, manifest.graphs[name].file):
        if matrix.is_looked_up:
            continue
        stem = REARRANGED.sub("", matrix.stem)
        is_int8, is_int4 = matrix.precision is Precision.INT8, matrix.precision is Precision.INT4
        # Standard operators round rows of int4 products block by block.
        is_blockwise = is_int4 and not (matrix.is_own and matrix.node.op_type in kernels.operators())
        # A head that is tied to a token table has its name.
        module = _HEAD if stem.endswith(_TOKENS) else stem.removesuffix(".weight")
        is_positive = is_int8 and manifest.config.activation is Activation.RELU and module.endswith(".down")
        step = 1 / (_POSITIVE_LIMIT if is_positive else _INT8_LIMIT) if is_int8 or is_int4 else 0.0
        block = matrix.shape[1] // matrix.scales.shape[1] if is_blockwise else 0
        found[module] = _Product(name, matrix.node.input[0], matrix, step, block)
    return found


def _tables(folder: Path, manifest: Manifest) -> dict[str, StoredMatrix]:
    """The tables of token embeddings in fewer bits, by the name of PyTorch's module."""
    return {
        matrix.stem.removesuffix(".weight"): matrix
        for name in (DECODER, ENCODER)
        if name in manifest.graphs
        for matrix in stored_matrices(folder, manifest.graphs[name].file)
        if matrix.is_looked_up
    }


def _kv_scales(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Scales `[1, Hkv, 1, D]` by the name of a decoder's buffer, in the order in which its attentions need them."""
    graph = onnx.load(folder / manifest.graphs[DECODER].file, load_external_data=False).graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    kinds = ("past", "cross") if manifest.config.is_encoder_decoder else ("past",)
    names = [
        f"{kind}_{part}_{layer}"
        for layer in range(manifest.config.num_layers)
        for kind in kinds
        for part in ("key", "value")
    ]
    scales = (stored[f"{name.removeprefix('past_')}_scale"] for name in names)
    return {
        name: torch.from_numpy(numpy_helper.to_array(scale, base_dir=str(folder)).copy())
        for name, scale in zip(names, scales, strict=True)
    }


@contextmanager
def _traced(
    folder: Path, manifest: Manifest, products: Mapping[str, Mapping[str, _Product]]
) -> Iterator[dict[str, ort.InferenceSession]]:
    """Sessions over the graphs with the rows of all products as outputs besides."""
    settings = ort.SessionOptions()
    if (library := kernels.library()) is not None:
        settings.register_custom_ops_library(str(library))
    sessions = {}
    with ExitStack() as stack:
        for name, found in products.items():
            model = onnx.load(folder / manifest.graphs[name].file, load_external_data=False)
            known = {value.name for value in model.graph.output}
            for rows in sorted({each.rows for each in found.values()} - known):
                model.graph.output.append(helper.make_tensor_value_info(rows, onnx.TensorProto.FLOAT, None))
            # Beside the weights, to which its paths lead.
            path = folder / f".traced-{name}.onnx"
            stack.callback(path.unlink, missing_ok=True)
            onnx.save(model, path)
            sessions[name] = ort.InferenceSession(str(path), settings, providers=[PROVIDER])
        yield sessions


@dataclass(slots=True)
class _Trace:
    """Rows of every product, by its graph and tensor, and by place. `num_rows` are those of earlier cases."""

    rows: dict[tuple[str, str], dict[Place, Float32]] = field(default_factory=lambda: defaultdict(dict))
    num_rows: int = 0

    def add(self, graph: str, name: str, found: Float32, places: Iterable[Place]) -> None:
        """Adds rows `[..., K]` in the order of their places."""
        flat = found.reshape(-1, found.shape[-1])
        self.rows[graph, name] |= {
            (self.num_rows + row, at): vector for (row, at), vector in zip(places, flat, strict=True)
        }


class _Tracer(Replayer):
    """Replays cases and keeps the rows of all products."""

    def __init__(
        self,
        manifest: Manifest,
        sessions: Mapping[str, ort.InferenceSession],
        products: Mapping[str, Mapping[str, _Product]],
        trace: _Trace,
    ) -> None:
        super().__init__(manifest, sessions[DECODER], sessions.get(ENCODER))
        self._traced = {name: sorted({each.rows for each in found.values()}) for name, found in products.items()}
        self._trace = trace
        self._current: Step = ()
        self._replayed: list[Any] = []

    def stored(self, scales: Mapping[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
        """Each buffer's name, scale and bytes `[rows, Hkv, longest, D]` after all cases, in the order of scales.

        Of sources without their padding, whose keys and values nothing reads.
        """
        found = []
        for name, scale in scales.items():
            ends = [row.source_length if name.startswith("cross") else None for row in self._replayed]
            parts = [row.buffers[name][0][:, :end] for row, end in zip(self._replayed, ends, strict=True)]
            rows = [torch.from_numpy(part.astype(np.float32)) for part in parts]
            # By position first, to be padded.
            padded = nn.utils.rnn.pad_sequence([row.transpose(0, 1) for row in rows], batch_first=True)
            found.append((name, scale, padded.transpose(1, 2)))
        return found

    def _rows(self, case: GoldenCase) -> list[Any]:
        rows = super()._rows(case)
        self._replayed += rows
        return rows

    def _encode(self, sources: Sequence[npt.NDArray[np.int64]]) -> list[dict[str, Array]]:
        if self._encoder is None:
            return []
        names = self._traced[ENCODER]
        for row, source in enumerate(sources) if names else ():
            inputs = {"source_ids": source[None], "source_lengths": np.array([len(source)], np.int32)}
            for name, found in zip(names, self._encoder.run(names, inputs), strict=True):
                self._trace.add(ENCODER, name, found, ((row, at) for at in range(len(source))))
        return super()._encode(sources)

    def _outputs(self) -> list[str]:
        """K/V of sources alone: the rows of products are not the decoder's."""
        return [name for name in super()._outputs() if name not in self._traced[ENCODER]]

    def _step(self, case: GoldenCase, step: Step, rows: Sequence[Any]) -> Float32:
        self._current = step
        return super()._step(case, step, rows)

    def _run_in_place(self, inputs: Mapping[str, Array], buffers: Mapping[str, Array]) -> Float32:
        names = self._traced[DECODER]
        logits, *traced = fetch_in_place(self._decoder, inputs, buffers, ("logits", *names))
        every = [(feed.row, feed.start + at) for feed in self._current for at in range(feed.count)]
        last = [(feed.row, feed.start + feed.count - 1) for feed in self._current]
        for name, found in zip(names, traced, strict=True):
            # After the last attention only tokens whose logits are wanted are computed.
            self._trace.add(DECODER, name, found, every if found.size // found.shape[-1] == len(every) else last)
        return logits


class _Oracle:
    """PyTorch's modules with other products and tables. Changes the model while it runs."""

    def __init__(
        self, model: Transformer, products: Mapping[str, _Product], tables: Mapping[str, StoredMatrix], trace: _Trace
    ) -> None:
        self.products = products
        self._tables = tables
        self.max_gap = 0.0
        self._model = model
        self._trace = trace

    def run(self, cases: Sequence[GoldenCase], stored: Sequence[tuple[str, Tensor, Tensor]]) -> Array:
        """Logits `[rows, longest, V] float32` of all rows of the cases."""
        model = self._model
        # By all names of a module that two embeddings share: a graph has one of them.
        modules = dict(model.named_modules(remove_duplicate=False))
        attention = _StoredAttention(stored) if stored else attend
        sequences = _padded([row for case in cases for row in case.sequences])
        with ExitStack() as stack, torch.no_grad():
            for name, product in self.products.items():
                if name == _HEAD:
                    continue
                if (module := modules.get(name)) is None:
                    raise OracleError([f"the graph multiplies by {name}, which PyTorch's model lacks"])
                hook = module.register_forward_hook(
                    lambda module, given, _, name=name, product=product: self._product(
                        name, product, given[0], module.bias
                    )
                )
                stack.callback(hook.remove)
            for name, table in self._tables.items():
                # A module that both embeddings share has one hook, and both graphs one table.
                if (module := modules.get(name)) is None:
                    raise OracleError([f"the graph looks tokens up in {name}, which PyTorch's model lacks"])
                hook = module.register_forward_hook(lambda _, given, __, table=table: table.look_up(given[0]))
                stack.callback(hook.remove)
            stack.enter_context(self._own_head())
            if not isinstance(model, EncoderDecoder):
                return np.asarray(model(sequences, attention))
            sources = [row for case in cases for row in case.sources]
            lengths = torch.tensor([len(row) for row in sources])
            memory = model.encode(_padded(sources), lengths, attend)
            return np.asarray(model.decode(memory, lengths, sequences, attention))

    @contextmanager
    def _own_head(self) -> Iterator[None]:
        """The head is a matrix to PyTorch's model, its own or the token table, and no module that is called."""
        model = self._model
        if _HEAD not in self.products:
            yield
            return
        model.unembed = lambda hidden: self._product(_HEAD, self.products[_HEAD], hidden, model.logits_bias)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del model.unembed

    def _product(self, name: str, product: _Product, own: Tensor, bias: Tensor | None) -> Tensor:
        """The product of the graph's rows, where PyTorch's `own` `[rows, positions, K]` are the same.

        Raises:
            OracleError: where they are not.
        """
        given = torch.full_like(own, float("nan"))
        for (row, at), vector in self._trace.rows[product.graph, product.rows].items():
            given[row, at] = torch.from_numpy(vector)
        is_traced = ~given.isnan().all(-1, keepdim=True)
        peaks = given.abs().amax(-1, keepdim=True).clamp(min=float(LEAST_PEAK))
        gaps = ((own - given).abs() / peaks)[is_traced.expand_as(own)]
        gap = float(gaps.max()) if gaps.numel() else 0.0
        if not gap <= MAX_GAP:
            raise OracleError([f"the rows of {name} differ from PyTorch's by {gap:.2g} of a row's largest number"])
        self.max_gap = max(self.max_gap, gap)
        return F.linear(product.rounded(torch.where(is_traced, given, own)), product.matrix.read(), bias)


class _StoredAttention:
    """Attention over the bytes of keys and values that the graph stored; called once for each attention, in order."""

    def __init__(self, stored: Sequence[tuple[str, Tensor, Tensor]]) -> None:
        self._stored = iter(stored)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        score: Score = dot_scores,
    ) -> Tensor:
        """As `attend`.

        Raises:
            OracleError: where bytes are not those of PyTorch's keys or values.
        """
        return attend(q, self._read(k), self._read(v), mask, is_causal=is_causal, score=score)

    def _read(self, own: Tensor) -> Tensor:
        """What the graph stored for keys or values `[rows, Hkv, length, D]`; past a row's end nothing was."""
        name, scale, stored = next(self._stored)
        given = stored[:, :, : own.shape[2]]
        is_stored = given.abs().amax((1, 3), keepdim=True) > 0
        off = ((own / scale).clamp(-_INT8_LIMIT - 1, _INT8_LIMIT) - given).abs() * is_stored
        if not (worst := float(off.max())) <= MAX_STEP:
            raise OracleError([f"{name} is {worst:.2g} steps from PyTorch's, a byte at most {MAX_STEP}"])
        return torch.where(is_stored, given * scale, own)


def _padded(rows: Sequence[npt.NDArray[np.int64]]) -> Tensor:
    """Ids `[rows, longest]`, with zeros behind."""
    return nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
