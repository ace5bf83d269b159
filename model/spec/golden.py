"""Golden cases: what PyTorch answered, so that whoever runs the exported graphs can check that they answer the same.

A case is a small schedule over a few sequences. Each step is either one row that feeds several tokens (a prefill, whole
or in chunks) or several rows that feed one token each (decoding, ragged). The logits after every row's last fed token
are compared. The exporter makes the cases, `export.verify` and the server replay them, each with its own runner.
NumPy only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from model.spec.arrays import ArrayFile
from model.spec.artifact import MAX_ARRAYS_BYTES, KVPrecision, Precision
from model.spec.config import ModelConfig

MAX_STEPS = 1 << 14
"""Of all cases in a file. The exporter's longest case has half as many, and others have few."""

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a logit may be off and pass, whatever its row and however large its neighbours.

    `absolute`, plus `relative` times the spread (standard deviation) of all golden logits of its case.
    """

    absolute: float = 0.0
    relative: float = 0.0

    def of(self, logits: Float32) -> float:
        """As one number, the largest absolute error that passes beside these golden logits."""
        return self.absolute + self.relative * float(logits.std())


TOLERANCES: Mapping[Precision, Tolerance] = {
    Precision.FP32: Tolerance(absolute=1e-4),
    Precision.INT8: Tolerance(relative=0.4),
    Precision.INT4: Tolerance(relative=2.5),
    Precision.FP16: Tolerance(relative=2e-2),
    Precision.BF16: Tolerance(relative=0.16),
}
"""What each precision that is served is held to; one that is not here has no proof.

Float32 rounding leaves a tenth of its tolerance in a trained model. One whose logits are so large that rounding alone
exceeds it fails its proof rather than being given more room.

Rounding weights and activations to a few bits leaves an error that grows with the logits themselves, so there the
measure is their spread, which also decides whether an error can change a token. The presets' trained models come to 0.2
at most in int8 and 0.7 in int4, twelve layers of random weights, which dampen nothing, to 0.3 and 1.9; logits that have
nothing to do with the golden ones are off by four and more. Sixteen bits are rounded to by each operator,
in bfloat16 eight times as coarsely, for which it is given eight times as much. How much a model loses is not for these
cases to say, whose tokens are random: that is measured on held-out data (`benchmarks run quality`).
"""


KV_TOLERANCES: Mapping[KVPrecision, Tolerance] = {
    KVPrecision.FP32: Tolerance(),
    KVPrecision.INT8: Tolerance(relative=0.3),
    KVPrecision.FP16: Tolerance(),
    KVPrecision.BF16: Tolerance(),
}
"""What rounding keys and values adds: a trained model comes to 0.03, twelve layers of random weights to 0.15.

In sixteen bits they are what the graph computes in anyway, so nothing is added.
"""


def tolerance_of(precision: Precision, kv_precision: KVPrecision) -> Tolerance:
    """What graphs of this precision over K/V of that one are held to: both roundings may go the same way."""
    own, kv = TOLERANCES[precision], KV_TOLERANCES[kv_precision]
    return Tolerance(own.absolute + kv.absolute, own.relative + kv.relative)


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

    `logits` is `[sum of len(step), V] float32`: PyTorch's, cache-less, in the order of the steps and their feeds.
    """

    name: str
    sequences: tuple[Int64, ...]
    sources: tuple[Int64, ...]
    steps: tuple[Step, ...]
    logits: Float32


@dataclass(frozen=True, slots=True)
class CaseResult:
    """How one case compared. Errors are over all its logits; `agreement` is the share of equal arg-maxima."""

    name: str
    max_abs_error: float
    max_relative_error: float
    agreement: float
    tolerance: float
    passed: bool


def compare(case: GoldenCase, logits: Float32, tolerance: Tolerance) -> CaseResult:
    """Judges replayed `logits` `[N, V]` against the case's: every absolute error within the tolerance.

    So a case that passes has another arg-max only where the golden one leads by at most twice the tolerance, which is a
    tie as far as the arithmetic can tell. The relative error divides by the spread (standard deviation) of the golden
    logits, which is what decides whether an absolute error can change a token. A NaN or a wrong shape fails.
    """
    allowed = tolerance.of(case.logits)
    if logits.shape != case.logits.shape or not np.isfinite(logits).all():
        return CaseResult(case.name, float("inf"), float("inf"), 0.0, allowed, passed=False)
    error = float(np.abs(logits.astype(np.float64) - case.logits).max())
    spread = float(case.logits.std()) or 1.0
    agreement = float((logits.argmax(-1) == case.logits.argmax(-1)).mean())
    return CaseResult(case.name, error, error / spread, agreement, allowed, passed=error <= allowed)


def check_steps(case: GoldenCase) -> None:
    """Asserts that a case's schedule is one a runner may meet: in order, and batched only one token at a time.

    Raises:
        ValueError: naming the step, or what else does not fit together.
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
    num_feeds = sum(len(step) for step in case.steps)
    if not num_feeds or case.logits.ndim != 2 or len(case.logits) != num_feeds:
        raise ValueError(f"{case.name}: {num_feeds} feeds, logits of shape {list(case.logits.shape)}")
    if len(case.sources) not in (0, len(case.sequences)):
        raise ValueError(f"{case.name}: {len(case.sources)} sources for {len(case.sequences)} sequences")


def _misfits(header: _Header, config: ModelConfig) -> list[str]:
    """Why a model of this configuration cannot be asked a case, by its sizes alone; empty when it can."""
    problems = []
    kinds = [("sequence", header.sequences, config.context)]
    if config.is_encoder_decoder:
        kinds.append(("source", header.sources, config.source_context))
        if any(feed.count != 1 for step in header.steps for feed in step):
            problems.append("feeds several tokens at once to an encoder-decoder")
    if bool(header.sources) != config.is_encoder_decoder:
        problems.append(f"has {len(header.sources)} sources, the model is {config.architecture}")
    problems += [
        f"{kind} {row} has {length} tokens, must have 1 to {longest}"
        for kind, lengths, longest in kinds
        for row, length in enumerate(lengths)
        if not 1 <= length <= longest
    ]
    if header.logits[1] != config.vocab_size:
        problems.append(f"has logits of {header.logits[1]} tokens, the model knows {config.vocab_size}")
    return [f"{header.name}: {problem}" for problem in problems]


def _foreign_ids(case: GoldenCase, config: ModelConfig) -> list[str]:
    """The rows of a case that fits with ids which the model does not know."""
    kinds = (("sequence", case.sequences, config.vocab_size), ("source", case.sources, config.source_vocab_size))
    return [
        f"{case.name}: {kind} {row} has ids outside [0, {vocab_size})"
        for kind, rows, vocab_size in kinds
        for row, ids in enumerate(rows)
        if not 0 <= ids.min() <= ids.max() < vocab_size
    ]


def save(path: Path, cases: Iterable[GoldenCase]) -> None:
    """Writes golden.npz: flat arrays and one JSON index, nothing pickled."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    index = []
    for number, case in enumerate(cases):
        check_steps(case)
        for kind, rows in (("sequence", case.sequences), ("source", case.sources)):
            for row, ids in enumerate(rows):
                arrays[f"{number}/{kind}/{row}"] = ids
        arrays[f"{number}/logits"] = case.logits
        steps = [[[feed.row, feed.start, feed.count] for feed in step] for step in case.steps]
        index.append(
            {"name": case.name, "sequences": len(case.sequences), "sources": len(case.sources), "steps": steps}
        )
    arrays["index"] = np.frombuffer(json.dumps(index).encode(), dtype=np.uint8)
    with path.open("wb") as stream:
        np.savez_compressed(stream, allow_pickle=False, **arrays)


def load(path: Path, config: ModelConfig | None = None) -> tuple[GoldenCase, ...]:
    """Reads golden.npz.

    Args:
        path: the file.
        config: of the model that is to answer; whoever replays what somebody else wrote gives it.

    Raises:
        ValueError: when it is not a well-formed set of cases, or holds some that such a model cannot be asked.
    """
    cases: list[GoldenCase] = []
    problems: list[str] = []
    try:
        with ArrayFile(path, MAX_ARRAYS_BYTES) as arrays:
            entries = arrays.read_index()
            if (num_steps := sum(len(entry["steps"]) for entry in entries)) > MAX_STEPS:
                raise ValueError(f"has {num_steps} steps, must have at most {MAX_STEPS}")
            for number, entry in enumerate(entries):
                header = _Header.read(arrays, number, entry)
                misfits = _misfits(header, config) if config else []
                problems += misfits
                # What has other sizes than the model's is not even unpacked.
                cases += [] if misfits else [_unpack(arrays, number, header)]
    except Exception as error:  # archive, decompressors, NumPy and JSON each object in a way of their own
        raise ValueError(f"{path.name} is not a set of golden cases: {error}") from error
    for case in cases:
        check_steps(case)
        problems += _foreign_ids(case, config) if config else []
    if problems:
        raise ValueError(f"{path.name}: " + "; ".join(problems))
    return tuple(cases)


@dataclass(frozen=True, slots=True)
class _Header:
    """What is known of a case before it is unpacked: lengths of its rows, its schedule, the shape of its logits."""

    name: str
    sequences: tuple[int, ...]
    sources: tuple[int, ...]
    steps: tuple[Step, ...]
    logits: tuple[int, ...]

    @classmethod
    def read(cls, arrays: ArrayFile, number: int, entry: Mapping[str, Any]) -> _Header:
        def lengths(kind: str, count: int) -> tuple[int, ...]:
            return tuple(arrays.shape(f"{number}/{kind}/{row}", np.integer, 1)[0] for row in range(count))

        return cls(
            str(entry["name"]),
            lengths("sequence", entry["sequences"]),
            lengths("source", entry["sources"]),
            tuple(tuple(Feed(*map(int, feed)) for feed in step) for step in entry["steps"]),
            arrays.shape(f"{number}/logits", np.floating, 2),
        )


def _unpack(arrays: ArrayFile, number: int, header: _Header) -> GoldenCase:
    def rows(kind: str, count: int) -> tuple[Int64, ...]:
        names = (f"{number}/{kind}/{row}" for row in range(count))
        return tuple(arrays.read(name, np.integer, 1).astype(np.int64) for name in names)

    return GoldenCase(
        header.name,
        rows("sequence", len(header.sequences)),
        rows("source", len(header.sources)),
        header.steps,
        arrays.read(f"{number}/logits", np.floating, 2).astype(np.float32),
    )


def staggered(lengths: Sequence[int]) -> tuple[Step, ...]:
    """A ragged schedule of single-token feeds: row i joins at step i and each row leaves when it has fed its length."""
    steps = []
    for tick in range(max(row + length for row, length in enumerate(lengths))):
        feeds = tuple(Feed(row, tick - row, 1) for row, length in enumerate(lengths) if 0 <= tick - row < length)
        if feeds:
            steps.append(feeds)
    return tuple(steps)
