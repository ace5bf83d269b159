"""The exporter's command line.

    python -m export CHECKPOINT --out DIR [--precision fp32|int8|int4] [--kv-cache fp32|int8] [--kv-layout slots|paged]
                     [--explain-graph]
    python -m export CHECKPOINT --out DIR --device cuda --precision fp16|bf16
    python -m export verify ARTIFACT

Progress goes to stderr; stdout holds the parity table and, as its last line, one JSON object. Exit status: 0 proven,
or written for a device that is to prove it; 1 parity failed or the artifact is damaged; 2 what was asked for cannot be
done, such as a proof on a device that is not at hand.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from export.verify import ParityReport, Verdict, draw, finite, verify
from model.spec.artifact import ArtifactError, Device, KVFormat, KVLayout, KVPrecision, Precision

EXIT_PROVEN = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2


def main(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit status."""
    if arguments and arguments[0] == "verify":
        return _verify(_verify_parser().parse_args(arguments[1:]))
    return _export(_export_parser().parse_args(arguments))


def _export_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m export",
        description="Turns a checkpoint folder into an artifact folder: ONNX graphs, golden cases, proof.",
        epilog="`python -m export verify ARTIFACT` proves an artifact again.",
    )
    parser.add_argument("checkpoint", type=Path, help="folder that `python -m model train` or `init` wrote")
    parser.add_argument("--out", type=Path, required=True, help="artifact folder; an artifact there is replaced")
    parser.add_argument("--device", type=Device, choices=list(Device), default=Device.CPU)
    parser.add_argument(
        "--precision",
        type=Precision,
        choices=list(Precision),
        default=Precision.FP32,
        help="what products with weights are computed in (default: fp32)",
    )
    parser.add_argument(
        "--kv-cache",
        type=KVPrecision,
        choices=[KVPrecision.FP32, KVPrecision.INT8],
        default=KVPrecision.FP32,
        help="what keys and values are stored in, those of sources too; int8 takes a quarter of the memory and decodes "
        "faster, but prompts of 512 tokens take a decoder-only model 1.6 times as long (default: fp32)",
    )
    parser.add_argument(
        "--kv-layout",
        type=KVLayout,
        choices=list(KVLayout),
        default=KVLayout.SLOTS,
        help="how keys and values lie: a buffer for each row, or blocks of a pool that rows share; cuda is always "
        "paged, and on a CPU that is for testing, in fp32 and slower (default: slots)",
    )
    parser.add_argument(
        "--prefill-graph",
        action="store_true",
        help=argparse.SUPPRESS,  # of former releases; refused by name
    )
    parser.add_argument(
        "--explain-graph",
        action="store_true",
        help="write a graph of attention weights besides, which `Explain` and `python -m service explain` need; it has "
        "no weights of its own; not with int8 K/V",
    )
    return parser


def _verify_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m export verify",
        description="Checks an artifact's files and replays its golden cases on ONNX Runtime.",
    )
    parser.add_argument("artifact", type=Path, help="folder that `python -m export` wrote")
    return parser


def _export(options: argparse.Namespace) -> int:
    if options.prefill_graph:
        problem = "--prefill-graph is not supported: the server has no prefill provider that reads such a graph"
        return _finish({"artefact": str(options.out), "problems": [problem]}, EXIT_REFUSED)
    # Torch takes seconds to load: `verify` and `--help` do without it.
    from export.emit import EmitError
    from export.exporter import ParityError, Refused, export
    from export.golden_cases import GoldenCaseError
    from model import checkpoint

    began = time.monotonic()
    result: dict[str, Any] = {"artefact": str(options.out)}
    try:
        with _progress() as on_stage:
            on_stage("checkpoint")
            source = checkpoint.load(options.checkpoint)
            report = export(
                source,
                options.out,
                options.device,
                options.precision,
                on_stage,
                KVFormat(options.kv_cache, layout=options.kv_layout),
                explain_graph=options.explain_graph,
            )
        num_bytes = sum(path.stat().st_size for path in options.out.iterdir())
    except OSError as error:  # a folder that cannot be made, a disk that is full
        return _finish(result | {"problems": [str(error)]}, EXIT_REFUSED)
    except (Refused, checkpoint.CheckpointError) as error:
        return _finish(result | {"problems": error.problems}, EXIT_REFUSED)
    except ParityError as error:
        return _finish(result | _summary(error.report), EXIT_FAILED)
    except (EmitError, GoldenCaseError, ArtifactError) as error:
        return _finish(result | {"problems": [str(error)]}, EXIT_FAILED)
    cost = {"num_bytes": num_bytes, "seconds": round(time.monotonic() - began, 1)}
    return _finish(result | _summary(report) | cost, EXIT_PROVEN)


def _verify(options: argparse.Namespace) -> int:
    result: dict[str, Any] = {"artefact": str(options.artifact)}
    try:
        with _progress() as on_stage:
            on_stage("checksums")
            report = verify(options.artifact, lambda name: on_stage(f"replaying {name}"))
    except OSError as error:
        return _finish(result | {"problems": [str(error)]}, EXIT_REFUSED)
    except ArtifactError as error:
        return _finish(result | {"problems": error.problems}, EXIT_FAILED)
    codes = {Verdict.PASSED: EXIT_PROVEN, Verdict.NOT_RUN: EXIT_REFUSED, Verdict.FAILED: EXIT_FAILED}
    return _finish(result | _summary(report), codes[report.verdict])


def _summary(report: ParityReport) -> dict[str, Any]:
    """Draws the table, which belongs before the last line, and returns what that line says of it."""
    Console().print(draw(report))
    for warning in report.warnings:
        print(warning, file=sys.stderr)
    return {
        "precision": report.precision,
        "kv_precision": report.kv_precision,
        "verdict": report.verdict,
        "min_agreement": report.min_agreement,
        "max_abs_error": finite(report.max_abs_error),
        "num_cases": len(report.cases) + len(report.attention),
        "proven_context": report.proven_context,
        "proven_source_context": report.proven_source_context,
        "provider": report.provider,
    }


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is being done, on stderr: a line that changes on a terminal, a line for each stage elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: print(stage, file=sys.stderr)
        return
    with console.status("") as status:
        yield lambda stage: status.update(Text(stage))


def _finish(result: Mapping[str, Any], code: int) -> int:
    for problem in result.get("problems", ()):
        print(problem, file=sys.stderr)
    print(json.dumps(result, allow_nan=False))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
