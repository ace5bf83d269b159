"""One export in progress: its checkpoint, the folder that it fills, its golden cases, and the proof of each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import onnx
import torch

from export.backend import Graph
from export.emit import emit
from export.graphs import OPSET
from export.verify import ParityReport, Verdict, replay, runtime_versions
from model.checkpoint import Checkpoint
from model.spec.artifact import Device, GraphSpec, KVFormat, Manifest, Precision
from model.spec.golden import GoldenCase
from model.spec.golden_attention import AttentionCase


class ParityError(Exception):
    """The exported graphs differ from PyTorch beyond tolerance; `report` says in which cases."""

    def __init__(self, report: ParityReport) -> None:
        self.report = report
        failed, num_cases = report.failed, len(report.cases) + len(report.attention)
        arithmetic = f"{report.precision} over {report.kv_precision} K/V"
        super().__init__(f"parity in {arithmetic} failed in {len(failed)} of {num_cases} cases: {', '.join(failed)}")


@dataclass(frozen=True, slots=True)
class Job:
    """What both pipelines work on. `on_stage` is called with the name of each stage before it begins."""

    checkpoint: Checkpoint
    folder: Path
    cases: tuple[GoldenCase, ...]
    attention: tuple[AttentionCase, ...]
    on_stage: Callable[[str], None]

    def emit(self, stage: str, name: str, graph: Graph) -> GraphSpec:
        """Writes one graph to the folder; returns its signature."""
        self.on_stage(stage)
        return emit(graph, self.folder / f"{name}.onnx")

    def draft(
        self, device: Device, graphs: Mapping[str, GraphSpec], kv: KVFormat, precision: Precision = Precision.FP32
    ) -> Manifest:
        """The manifest of the graphs, without checksums."""
        config, generation = self.checkpoint.config, self.checkpoint.generation
        return Manifest(
            config=config,
            device=device,
            precision=precision,
            opset=OPSET,
            eos_ids=generation.eos_ids,
            pad_id=config.pad_id,
            decoder_start_id=config.bos_id,
            graphs=graphs,
            files={},
            kv_cache=kv,
            generation=generation.rules,
            training=self.checkpoint.training,
            versions={
                **runtime_versions(),
                "onward": _own_version(),
                "torch": torch.__version__,
                "onnx": onnx.__version__,
            },
        )

    def prove(self, draft: Manifest) -> ParityReport:
        """Replays the golden cases on the graphs in the folder; graphs for CUDA are left unproven.

        Raises:
            ParityError: when a case fails.
        """
        report = replay(
            self.folder,
            draft,
            self.cases,
            lambda name: self.on_stage(f"replaying {name} in {draft.precision}"),
            self.attention,
        )
        if report.verdict is not (Verdict.PASSED if draft.device is Device.CPU else Verdict.NOT_RUN):
            raise ParityError(report)
        return report


def _own_version() -> str:
    try:
        return metadata.version("onward")
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "uninstalled"
