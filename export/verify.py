"""The proof: replays golden cases on an artifact's graphs and reports the errors. Needs the artifact alone."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import onnxruntime as ort
from rich import box
from rich.markup import escape
from rich.table import Table

from export.loss import CLEAR_LEAD, Loss, LossMeter, max_relative_rms
from export.replay import PROVIDER, AttentionReplayer, PagedReplayer, Replayer, ReplayError
from model import kernels
from model.spec import artifact, golden, golden_attention, golden_origin, golden_texts
from model.spec.artifact import EXPLAIN, ArtifactError, Device, KVLayout, KVPrecision, Manifest, Precision
from model.spec.golden import CaseResult, Float32, GoldenCase, Tolerance, tolerance_of
from model.spec.golden_attention import ATTENTION_TOLERANCES, AttentionCase, AttentionResult
from model.spec.tokenizer import Tokenizer

if TYPE_CHECKING:
    from export.oracle import OracleReport
    from export.stored_weights import StoredWeights
    from export.text_loss import TextLoss


class Verdict(StrEnum):
    """The result of a case, or of all of them."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not_run"


@dataclass(frozen=True, slots=True)
class ParityReport:
    """How an artifact's graphs compare with PyTorch in float32: parity.json.

    The tolerance is that of the precision (`model.spec.golden.tolerance_of`); each case has its value for it.
    `attention` compares an explain graph's weights, if there is one. The other cases reach `proven_context` of the
    decoder's `context` positions and `proven_source_context` of the encoder's `source_context`, 0 without an encoder.
    `loss` is what quantization costs, if anything is quantized; `weights` what an export found in its own files, and
    `oracle` how PyTorch with these weights compares; `text` is what a text's bits per byte cost, if one was given.
    `answers` are the graphs' logits, case by case.
    """

    provider: str
    precision: Precision
    kv_precision: KVPrecision
    cases: tuple[CaseResult, ...]
    versions: Mapping[str, str]
    context: int
    proven_context: int
    source_context: int
    proven_source_context: int
    attention: tuple[AttentionResult, ...] = ()
    loss: Loss | None = None
    weights: StoredWeights | None = None
    oracle: OracleReport | None = None
    text: TextLoss | None = None
    answers: tuple[Float32, ...] = field(default=(), repr=False)

    @property
    def verdict(self) -> Verdict:
        """Passed when every case did, and there was at least one."""
        if not self.cases:
            return Verdict.NOT_RUN
        return Verdict.FAILED if self.failed else Verdict.PASSED

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the cases that did not pass, and "loss" and "text" if these did not."""
        results: tuple[CaseResult | AttentionResult, ...] = (*self.cases, *self.attention)
        names = tuple(result.name for result in results if not result.passed)
        losses = {"loss": self.loss, "text": self.text}
        return (*names, *(name for name, loss in losses.items() if loss is not None and not loss.passed))

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance of every case."""
        return tolerance_of(self.precision, self.kv_precision)

    @property
    def max_abs_error(self) -> float:
        """The largest over all cases."""
        return max((case.max_abs_error for case in self.cases), default=0.0)

    @property
    def min_agreement(self) -> float:
        """The smallest share of equal greedy choices in a case."""
        return min((case.agreement for case in self.cases), default=0.0)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about what the cases leave unproven."""
        if self.verdict is Verdict.NOT_RUN:
            return (f"warning: nothing is proven, since {self.provider} does not run these graphs",)
        reaches = (
            ("context", self.context, self.proven_context),
            ("source context", self.source_context, self.proven_source_context),
        )
        return tuple(
            f"warning: {name} of {limit} tokens is proven to {proven} only"
            for name, limit, proven in reaches
            if proven < limit
        )

    def to_json(self) -> str:
        """The text of parity.json."""
        report = {
            "provider": self.provider,
            "precision": self.precision,
            "kv_precision": self.kv_precision,
            "tolerance": asdict(self.tolerance),
            "verdict": self.verdict,
            "max_abs_error": finite(self.max_abs_error),
            "min_agreement": self.min_agreement,
            "context": self.context,
            "proven_context": self.proven_context,
            "source_context": self.source_context,
            "proven_source_context": self.proven_source_context,
            "cases": _cases(self.cases),
            "versions": dict(self.versions),
        }
        if self.attention:
            report["attention"] = _cases(self.attention)
        for name in ("loss", "weights", "oracle", "text"):
            if (facts := getattr(self, name)) is not None:
                report[name] = {key: finite(value) for key, value in asdict(facts).items()}
        return json.dumps(report, indent=2, allow_nan=False) + "\n"


def _cases(results: Sequence[CaseResult | AttentionResult]) -> list[dict[str, Any]]:
    cases = []
    for result in results:
        values = {name: finite(value) for name, value in asdict(result).items()}
        values["verdict"] = Verdict.PASSED if values.pop("passed") else Verdict.FAILED
        cases.append(values)
    return cases


def replay(
    folder: Path,
    manifest: Manifest,
    cases: tuple[GoldenCase, ...],
    on_case: Callable[[str], None],
    attention: tuple[AttentionCase, ...] = (),
) -> ParityReport:
    """Replays cases on the graphs in `folder`, whose checksums are not checked; graphs for another device are not run.

    `attention` are PyTorch's attention weights, for an artifact with an explain graph. `on_case` is called with the
    name of each case before it runs, and with the error of a case that cannot run and fails.

    Raises:
        ArtifactError: when ONNX Runtime rejects a graph.
    """
    kv_precision = manifest.kv_cache.precision
    tolerance = tolerance_of(manifest.precision, kv_precision)
    limit = max_relative_rms(manifest.precision, kv_precision)
    meter = LossMeter(limit or 0.0)
    results: list[CaseResult] = []
    answers: list[Float32] = []
    if manifest.device is Device.CPU:
        replayer = _open(folder, manifest)
        for case in cases:
            logits = _run(replayer.run, case, on_case)
            answers.append(np.empty((0, 0), np.float32) if logits is None else logits)
            # The case says whether its bits are known: a manifest could say otherwise, and widen the limit.
            results.append(golden.compare(case, answers[-1], tolerance, kernels.arithmetic(ort.__version__)))
            meter.add(case.logits, answers[-1])
    else:
        cases = attention = ()
    return ParityReport(
        provider=PROVIDER,
        precision=manifest.precision,
        kv_precision=kv_precision,
        cases=tuple(results),
        versions=runtime_versions(),
        context=manifest.config.context,
        proven_context=max((len(row) for case in cases for row in case.sequences), default=0),
        source_context=manifest.config.source_context,
        proven_source_context=max((len(row) for case in cases for row in case.sources), default=0),
        attention=_replay_attention(folder, manifest, attention, on_case),
        loss=None if limit is None else meter.read(),
        answers=tuple(answers),
    )


def arithmetic_of(manifest: Manifest) -> str:
    """What decides the bits of a manifest's graphs here (`model.kernels.arithmetic`); empty if the batch does, too."""
    return kernels.arithmetic(ort.__version__) if manifest.is_reproducible else ""


def _open(folder: Path, manifest: Manifest) -> Replayer | PagedReplayer:
    is_paged = manifest.kv_cache.layout is KVLayout.PAGED
    return PagedReplayer(folder, manifest) if is_paged else Replayer.open(folder, manifest)


C = TypeVar("C", GoldenCase, AttentionCase)
R = TypeVar("R")


def _run(run: Callable[[C], R], case: C, on_case: Callable[[str], None]) -> R | None:
    """The answer to a case; None if it cannot run."""
    on_case(case.name)
    try:
        return run(case)
    except ReplayError as error:
        on_case(f"{case.name}: {error}")
        return None


def _replay_attention(
    folder: Path, manifest: Manifest, cases: tuple[AttentionCase, ...], on_case: Callable[[str], None]
) -> tuple[AttentionResult, ...]:
    if EXPLAIN not in manifest.graphs:
        return ()
    replayer, tolerance = AttentionReplayer(folder, manifest), ATTENTION_TOLERANCES[manifest.precision]
    return tuple(golden_attention.compare(case, _run(replayer.run, case, on_case) or {}, tolerance) for case in cases)


def verify(folder: Path, on_case: Callable[[str], None]) -> ParityReport:
    """Checks an artifact's files against its manifest, then replays the golden cases it carries.

    Raises:
        ArtifactError: listing every problem with the files or the graphs.
    """
    manifest = load_checked(folder, tuple(Device))
    try:
        cases = golden.load(folder / artifact.GOLDEN, manifest.config)
        explained = EXPLAIN in manifest.graphs
        attention = golden_attention.load(folder / artifact.GOLDEN_ATTENTION, manifest.config) if explained else ()
    except ValueError as error:
        raise ArtifactError(folder, [str(error)]) from error
    return replay(folder, manifest, cases, on_case, attention)


def load_checked(folder: Path, devices: Collection[Device]) -> Manifest:
    """Checks an artifact's files against its manifest, its texts and both of them against the export's.

    Raises:
        ArtifactError: listing every problem.
    """
    manifest = artifact.load(folder, devices=devices)
    target = artifact.TARGET_TOKENIZER if artifact.TARGET_TOKENIZER in manifest.files else artifact.TOKENIZER
    try:
        prompts, outputs = (Tokenizer.load(folder / name) for name in (artifact.TOKENIZER, target))
        problems = golden_texts.check(folder, manifest, prompts, outputs) or golden_origin.check(folder, manifest)
    except (OSError, ValueError) as error:
        problems = [str(error)]
    if problems:
        raise ArtifactError(folder, problems)
    return manifest


def runtime_versions() -> dict[str, str]:
    """Versions of what computes a replay; `kernels` is the library of our own operators, or "standard"."""
    library = kernels.library() if kernels.operators() else None
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "onnxruntime": ort.__version__,
        "kernels": "standard" if library is None else library.name,
    }


def finite(value: Any) -> Any:
    """None for a float that is not finite, which JSON cannot represent; other values unchanged."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw(report: ParityReport) -> Table:
    """The report as a table, one line for each case.

    `relative` divides the error by the spread of the golden logits; `greedy` is the share of equal arg-maxima. For
    attention, `relative` is the mean distance of rows divided by that from uniform rows.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"parity of {report.precision} over {report.kv_precision} K/V with PyTorch on {report.provider}",
        title_justify="left",
    )
    table.add_column("case")
    for column in ("max error", "relative", "tolerance", "greedy", "verdict"):
        table.add_column(column, justify="right")
    rows = [(each, each.max_relative_error, each.tolerance, f"{each.agreement:.1%}") for each in report.cases]
    shown: list[tuple[CaseResult | AttentionResult, float, float, str]] = [*rows]
    shown += [(each, each.relative_distance, each.tolerance.relative, "") for each in report.attention]
    for result, relative, tolerance, greedy in shown:
        verdict = Verdict.PASSED if result.passed else f"[bold red]{Verdict.FAILED}"
        errors = (f"{error:.1e}" for error in (result.max_abs_error, relative, tolerance))
        table.add_row(escape(result.name), *errors, greedy, verdict)
    return table


def describe(report: ParityReport) -> list[str]:
    """Lines about stored weights, the cost of quantization and the export's own answers, for people."""
    lines = []
    if (weights := report.weights) is not None:
        lines.append(f"{weights.num_tensors} stored tensors are the checkpoint's")
        if weights.worst:
            lines[-1] += f"; {weights.worst} is rounded most, by {weights.max_relative_rms:.2%} of its RMS"
    if (oracle := report.oracle) is not None:
        lines.append(
            f"PyTorch with these weights and this rounding answers alike, to {oracle.max_error:.1e} of the logits' "
            f"spread (at most {oracle.limit:g}), over {oracle.num_tokens} tokens and {oracle.num_products} products"
        )
    if (loss := report.loss) is not None:
        lines.append(
            f"quantization costs {loss.relative_rms:.3f} of the logits' spread (RMS, at most {loss.limit:.2f}) and "
            f"{loss.kl:.2g} nats over {loss.num_positions} positions; greedy tokens agree at {loss.agreement:.1%}, at "
            f"{loss.clear_agreement:.1%} of the {loss.num_clear} that lead by {CLEAR_LEAD} of the spread"
        )
    if (text := report.text) is not None:
        lines.append(
            f"{text.num_bytes} bytes of text take {text.exported:.4f} bits per byte, {text.pytorch:.4f} in PyTorch "
            f"(at most {text.limit:.1%} more)"
        )
    return [*lines, golden.describe_drift(report.cases) or "the export's own answers are unknown"]
