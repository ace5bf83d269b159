"""Golden cases: PyTorch's logits for small schedules, which the exported graphs must reproduce.

Each step of a schedule is either one row that feeds several tokens (prefill, whole or chunked) or several rows that
feed one token each (ragged decoding). The logits after every row's last fed token are compared. The exporter makes the
cases; `export.verify` and the server replay them with their own runners. NumPy only.

A replay answers two questions. Is the graph near PyTorch in float32? Within the tolerance of its precision. Is it the
graph that was exported? It must answer as it did at export (`GoldenCase.exported`): the same where the same arithmetic
computes, nearly the same elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from model.spec.arrays import ArrayFile, save_arrays
from model.spec.artifact import MAX_ARRAYS_BYTES, KVPrecision, Precision
from model.spec.config import ModelConfig

MAX_STEPS = 1 << 14
"""The limit for all cases of a file together; the exporter's longest case has half as many."""

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest error of a logit: `absolute`, plus `relative` times the spread of its case's golden logits.

    The spread is the standard deviation of all logits of the case.
    """

    absolute: float = 0.0
    relative: float = 0.0

    def of(self, logits: Float32) -> float:
        """The largest absolute error that passes for these golden logits."""
        return self.absolute + self.relative * float(logits.std())


TOLERANCES: Mapping[Precision, Tolerance] = {
    Precision.FP32: Tolerance(absolute=1e-4),
    Precision.INT8: Tolerance(relative=0.4),
    Precision.INT4: Tolerance(relative=2.5),
    Precision.FP16: Tolerance(relative=2e-2),
    Precision.BF16: Tolerance(relative=0.16),
}
"""The tolerance of each precision that can be served.

Float32 rounding uses a tenth of its tolerance in a trained model. Quantization errors grow with the logits, so their
tolerance is relative to the spread, which also decides whether an error can change a token. The presets' trained models
reach at most 0.2 in int8 and 0.7 in int4, twelve layers of random weights 0.3 and 1.9; unrelated logits are off by four
and more. bfloat16 rounds eight times as coarsely as float16 and has eight times its tolerance. The cases' tokens are
random: the loss of quality is measured on held-out data (`benchmarks run quality`).
"""

KV_TOLERANCES: Mapping[KVPrecision, Tolerance] = {
    KVPrecision.FP32: Tolerance(),
    KVPrecision.INT8: Tolerance(relative=0.3),
    KVPrecision.FP16: Tolerance(),
    KVPrecision.BF16: Tolerance(),
}
"""The tolerance added for quantized K/V: a trained model reaches 0.03, twelve layers of random weights 0.15.

Sixteen bits are the graph's own precision, so they add nothing.
"""


def tolerance_of(precision: Precision, kv_precision: KVPrecision) -> Tolerance:
    """The tolerance of a graph: the sum of both, as errors may have the same sign."""
    own, kv = TOLERANCES[precision], KV_TOLERANCES[kv_precision]
    return Tolerance(own.absolute + kv.absolute, own.relative + kv.relative)


MAX_DRIFT = 1e-3
"""The largest difference from the logits of the export, in standard deviations of the golden ones. Bits are equal."""
MAX_OTHER_DRIFT = 0.5
"""The same where other arithmetic computes: activations and K/V are rounded otherwise, weights are the same.

Standard operators differ from our kernels by at most 0.19 in int8, 0.22 in int4 and 0.27 with int8 K/V besides, twelve
layers of random weights (`llama-110m`, 2026-11-26). A wrong matrix in int4 shows here that the tolerance would pass.
"""
_MAX_ARITHMETIC = 256


@dataclass(frozen=True, slots=True)
class Feed:
    """In one step, row `row` feeds tokens `[start, start + count)` of its sequence."""

    row: int
    start: int
    count: int


Step = tuple[Feed, ...]


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """`sequences[row]` are decoder tokens, `sources[row]` encoder tokens (empty for a decoder-only model).

    `logits` is `[feeds, V] float32`: PyTorch's, cache-less, after each feed in the order of the steps, or only after
    those whose numbers are in `compared`: a wrong key or value shows in later logits, too.
    `exported` is the same of the graphs at export, by the `arithmetic` of that machine (`model.kernels.arithmetic`);
    None where that is unknown.
    """

    name: str
    sequences: tuple[Int64, ...]
    sources: tuple[Int64, ...]
    steps: tuple[Step, ...]
    logits: Float32
    exported: Float32 | None = None
    arithmetic: str = ""
    compared: tuple[int, ...] | None = None

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """All, in the order of the steps."""
        return tuple(feed for step in self.steps for feed in step)

    @property
    def compared_feeds(self) -> tuple[Feed, ...]:
        """Those with logits."""
        feeds = self.feeds
        return feeds if self.compared is None else tuple(feeds[number] for number in self.compared)

    def select(self, steps: Iterable[Float32]) -> Float32:
        """Of the logits of all steps, `[len(step), V]` each, those that are compared."""
        wanted = None if self.compared is None else set(self.compared)
        rows = (row for logits in steps for row in logits)
        return np.stack([row.copy() for number, row in enumerate(rows) if wanted is None or number in wanted])


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The comparison of one case. Errors are maxima over its logits; `agreement` is the share of equal arg-maxima.

    `drift` is the largest difference from the logits of the export, divided by the spread, `max_drift` its limit; None
    where those are unknown.
    """

    name: str
    max_abs_error: float
    max_relative_error: float
    agreement: float
    tolerance: float
    passed: bool
    drift: float | None = None
    max_drift: float | None = None


def compare(case: GoldenCase, logits: Float32, tolerance: Tolerance, arithmetic: str = "") -> CaseResult:
    """Compares replayed `logits` `[N, V]` with the case's: every absolute error must be within the tolerance.

    They must also be those of the export, to `MAX_DRIFT` if `arithmetic` computed both, else to `MAX_OTHER_DRIFT`.

    A case that passes has another arg-max only where the golden one leads by at most twice the tolerance. The relative
    error is the absolute one divided by the spread of the golden logits. A NaN or a wrong shape fails.
    """
    allowed = tolerance.of(case.logits)
    if logits.shape != case.logits.shape or not np.isfinite(logits).all():
        return CaseResult(case.name, float("inf"), float("inf"), 0.0, allowed, passed=False)
    error = float(np.abs(logits.astype(np.float64) - case.logits).max())
    spread = float(case.logits.std()) or 1.0
    agreement = float((logits.argmax(-1) == case.logits.argmax(-1)).mean())
    passed, drift, max_drift = error <= allowed, None, None
    if case.exported is not None:
        drift = float(np.abs(logits - case.exported).max()) / spread
        max_drift = MAX_DRIFT if arithmetic and arithmetic == case.arithmetic else MAX_OTHER_DRIFT
        # Written so that a NaN fails.
        passed = passed and drift <= max_drift
    return CaseResult(case.name, error, error / spread, agreement, allowed, passed, drift, max_drift)


def describe_drift(results: Iterable[CaseResult]) -> str:
    """How far answers are from the export's own, for people: the worst case, by its limit; empty if unknown."""
    known = [(each.drift / each.max_drift, each) for each in results if each.drift is not None and each.max_drift]
    if not known:
        return ""
    worst = max(known, key=lambda found: found[0])[1]
    shares = f"{worst.drift:.2g} of the logits' spread, the limit is {worst.max_drift:g}"
    return f"answers differ from the export's own by {shares}"


def check_steps(case: GoldenCase) -> None:
    """Checks that a case's schedule is in order and batches rows of one token only, and that its arrays match it.

    Raises:
        ValueError: naming the step or the mismatch.
    """
    known = range(len(case.sequences))
    computed = [0] * len(known)
    for index, step in enumerate(case.steps):
        rows = [feed.row for feed in step]
        if not step or len(set(rows)) != len(rows) or any(row not in known for row in rows):
            raise ValueError(f"{case.name}: step {index} feeds rows {rows} of {len(known)}")
        if len(step) > 1 and any(feed.count != 1 for feed in step):
            raise ValueError(f"{case.name}: step {index} batches rows of several tokens")
        for feed in step:
            end = feed.start + feed.count
            if feed.count < 1 or feed.start != computed[feed.row] or end > len(case.sequences[feed.row]):
                raise ValueError(f"{case.name}: step {index} feeds row {feed.row} out of order")
            computed[feed.row] = end
    num_feeds = num_compared = sum(len(step) for step in case.steps)
    if case.compared is not None:
        num_compared = len(case.compared)
        if any(after <= before for before, after in pairwise((-1, *case.compared, num_feeds))):
            raise ValueError(f"{case.name}: compared feeds must be numbers below {num_feeds} that rise")
    if not num_compared or case.logits.ndim != 2 or len(case.logits) != num_compared:
        raise ValueError(f"{case.name}: {num_compared} feeds, logits of shape {list(case.logits.shape)}")
    if case.exported is not None and case.exported.shape != case.logits.shape:
        raise ValueError(f"{case.name}: {num_compared} feeds, exported logits of shape {list(case.exported.shape)}")
    if len(case.sources) not in (0, len(case.sequences)):
        raise ValueError(f"{case.name}: {len(case.sources)} sources for {len(case.sequences)} sequences")


def save(path: Path, cases: Iterable[GoldenCase], origin: Mapping[str, Any] | None = None) -> None:
    """Writes golden.npz: flat arrays, one JSON index, and the cases' `model.spec.golden_origin`."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    index = []
    for number, case in enumerate(cases):
        check_steps(case)
        for kind, rows in (("sequence", case.sequences), ("source", case.sources)):
            for row, ids in enumerate(rows):
                arrays[f"{number}/{kind}/{row}"] = ids
        arrays[f"{number}/logits"] = case.logits
        steps = [[[feed.row, feed.start, feed.count] for feed in step] for step in case.steps]
        entry = {"name": case.name, "sequences": len(case.sequences), "sources": len(case.sources), "steps": steps}
        if case.compared is not None:
            entry["compared"] = list(case.compared)
        if case.exported is not None:
            arrays[f"{number}/exported"] = case.exported
            entry["arithmetic"] = case.arithmetic
        index.append(entry)
    save_arrays(path, arrays, index, **({} if origin is None else {"origin": origin}))


def load(path: Path, config: ModelConfig | None = None) -> tuple[GoldenCase, ...]:
    """Reads golden.npz, and checks that its cases fit the model `config`, which untrusted files require.

    Raises:
        ValueError: when it is not a well-formed set of cases, or a case does not fit.
    """
    try:
        with ArrayFile(path, MAX_ARRAYS_BYTES) as arrays:
            entries = arrays.read_index()
            if (num_steps := sum(len(entry["steps"]) for entry in entries)) > MAX_STEPS:
                raise ValueError(f"has {num_steps} steps, must have at most {MAX_STEPS}")
            cases = tuple(_read_case(arrays, number, entry, config) for number, entry in enumerate(entries))
    except Exception as error:  # archive, decompressors, NumPy and JSON raise various errors
        raise ValueError(f"{path.name} is not a set of golden cases: {error}") from error
    for case in cases:
        check_steps(case)
    return cases


def _read_case(arrays: ArrayFile, number: int, entry: Mapping[str, Any], config: ModelConfig | None) -> GoldenCase:
    """Unpacks rows and logits, each only if its size fits the model."""
    name = str(entry["name"])
    steps = tuple(tuple(Feed(*map(int, feed)) for feed in step) for step in entry["steps"])
    logits = f"{number}/logits"
    _, vocab_size = arrays.shape(logits, np.floating, 2)
    sequence_limits = source_limits = None
    if config is not None:
        sequence_limits = config.context, config.vocab_size
        source_limits = config.source_context, config.source_vocab_size
        if config.is_encoder_decoder != bool(entry["sources"]):
            raise ValueError(f"{name}: has {entry['sources']} sources, the model is {config.architecture}")
        if config.is_encoder_decoder and any(feed.count != 1 for step in steps for feed in step):
            raise ValueError(f"{name}: feeds several tokens at once to an encoder-decoder")
        if vocab_size != config.vocab_size:
            raise ValueError(f"{name}: has logits of {vocab_size} tokens, the model has {config.vocab_size}")

    def read(kind: str, count: int, limits: tuple[int, int] | None) -> tuple[Int64, ...]:
        rows = range(count)
        if len(rows) != count:
            raise ValueError(f"{name}: has {count} rows of kind {kind}")
        return tuple(read_ids(arrays, f"{number}/{kind}/{row}", f"{name}: {kind} {row}", limits) for row in rows)

    sequences = read("sequence", entry["sequences"], sequence_limits)
    sources = read("source", entry["sources"], source_limits)
    compared = tuple(map(int, entry["compared"])) if "compared" in entry else None
    values = arrays.read(logits, np.floating, 2).astype(np.float32)
    case = GoldenCase(name, sequences, sources, steps, values, compared=compared)
    if "arithmetic" not in entry:
        return case
    arithmetic = str(entry["arithmetic"])[:_MAX_ARITHMETIC]
    exported = f"{number}/exported"
    if arrays.shape(exported, np.floating, 2) != case.logits.shape:
        raise ValueError(f"{name}: exported logits of another shape than {list(case.logits.shape)}")
    values = arrays.read(exported, np.floating, 2).astype(np.float32)
    return dataclasses.replace(case, exported=values, arithmetic=arithmetic)


def read_ids(arrays: ArrayFile, member: str, name: str, limits: tuple[int, int] | None) -> Int64:
    """Unpacks token ids if there are 1 to `limits[0]`, and checks that they are below `limits[1]`."""
    (length,) = arrays.shape(member, np.integer, 1)
    if limits is not None and not 1 <= length <= limits[0]:
        raise ValueError(f"{name} has {length} tokens, must have 1 to {limits[0]}")
    ids = arrays.read(member, np.integer, 1).astype(np.int64)
    if limits is not None and not 0 <= ids.min() <= ids.max() < limits[1]:
        raise ValueError(f"{name} has ids outside [0, {limits[1]})")
    return ids


def staggered(lengths: Sequence[int]) -> tuple[Step, ...]:
    """A ragged schedule of single-token feeds: row i joins at step i and leaves after its length."""
    steps = []
    for tick in range(max(row + length for row, length in enumerate(lengths))):
        feeds = tuple(Feed(row, tick - row, 1) for row, length in enumerate(lengths) if 0 <= tick - row < length)
        if feeds:
            steps.append(feeds)
    return tuple(steps)
