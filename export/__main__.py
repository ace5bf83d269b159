"""The exporter's command line.

    python -m export CHECKPOINT --out DIR [--precision fp32|bf16|int8|int4] [--kv-cache fp32|int8]
                     [--kv-layout slots|paged] [--explain-graph] [--text FILE]
    python -m export CHECKPOINT --out DIR --device cuda --precision fp16|bf16
    python -m export verify ARTIFACT

Progress goes to stderr; stdout has the parity table and, as its last line, one JSON object. Exit status: 0 proven, or
written for a device that is to prove it; 1 parity failed or the artifact is damaged; 2 the request cannot be served,
such as a proof on a missing device.
"""

from __future__ import annotations

import argparse
import codecs
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from export.verify import ParityReport, Verdict, describe, draw, finite, verify
from model.spec.artifact import ArtifactError, Device, KVFormat, KVLayout, KVPrecision, Precision

EXIT_PROVEN = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2


def main(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit status."""
    if arguments and arguments[0] == "verify":
        return _verify(_verify_parser().parse_args(arguments[1:]))
    return _export(_export_parser().parse_args(arguments))


def _prog() -> str:
    """The command's name, as it was called."""
    return "onward export" if Path(sys.argv[0]).name == "onward" else "python -m export"


def _export_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_prog(),
        description="Turns a checkpoint folder into an artifact folder: ONNX graphs, golden cases, proof.",
        epilog=f"`{_prog()} verify ARTIFACT` proves an artifact again.",
    )
    parser.add_argument("checkpoint", type=Path, help="checkpoint folder of `python -m model`")
    parser.add_argument("--out", type=Path, required=True, help="artifact folder; an artifact there is replaced")
    parser.add_argument("--device", type=Device, choices=list(Device), default=Device.CPU)
    parser.add_argument(
        "--precision",
        type=Precision,
        choices=list(Precision),
        default=Precision.FP32,
        help="precision of weights; int8 and int4 quantize activations, too (default: fp32)",
    )
    parser.add_argument(
        "--kv-cache",
        type=KVPrecision,
        choices=[KVPrecision.FP32, KVPrecision.INT8],
        default=KVPrecision.FP32,
        help="precision of cached keys and values; int8 takes a quarter of the memory and decodes faster, but a "
        "decoder-only model takes 1.6 times as long for prompts of 512 tokens (default: fp32)",
    )
    parser.add_argument(
        "--kv-layout",
        type=KVLayout,
        choices=list(KVLayout),
        default=KVLayout.SLOTS,
        help="layout of cached keys and values: a buffer per row, or blocks of a shared pool; cuda is always paged, "
        "on a CPU paged is slow, fp32 only, and for testing (default: slots)",
    )
    parser.add_argument(
        "--prefill-graph",
        action="store_true",
        help=argparse.SUPPRESS,  # of former releases; refused by name
    )
    parser.add_argument(
        "--explain-graph",
        action="store_true",
        help="also write a graph of attention weights, which `Explain` and `python -m service explain` need; it shares "
        "the decoder's weights; not with int8 K/V",
    )
    parser.add_argument(
        "--text",
        type=Path,
        help="UTF-8 text that the model was not trained on: measure what quantization costs in bits per byte of its "
        "first 32 KiB, and fail above 0.2 %% in bf16, 1 %% in int8, 5 %% in int4 (decoder-only models)",
    )
    return parser


def _verify_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{_prog()} verify",
        description="Checks an artifact's files and replays its golden cases on ONNX Runtime.",
    )
    parser.add_argument("artifact", type=Path, help="folder that `python -m export` wrote")
    return parser


def _export(options: argparse.Namespace) -> int:
    if options.prefill_graph:
        problem = "--prefill-graph is not supported: the server has no prefill provider that reads such a graph"
        return _finish({"artefact": str(options.out), "problems": [problem]}, EXIT_REFUSED)
    # Importing torch takes seconds; `verify` and `--help` do not need it.
    from export.emit import EmitError
    from export.exporter import Refused, export
    from export.golden_cases import GoldenCaseError
    from export.job import ParityError
    from export.oracle import OracleError
    from export.stored_weights import StoredWeightsError
    from model import checkpoint

    began = time.monotonic()
    result: dict[str, Any] = {"artefact": str(options.out)}
    try:
        text = _read_text(options.text) if options.text else ""
    except (OSError, ValueError) as error:
        return _finish(result | {"problems": [f"--text: {error}"]}, EXIT_REFUSED)
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
                text=text,
            )
        num_bytes = sum(path.stat().st_size for path in options.out.iterdir())
    except (
        OSError,
        UnicodeDecodeError,
    ) as error:  # a folder that cannot be made, a disk that is full, another encoding
        return _finish(result | {"problems": [str(error)]}, EXIT_REFUSED)
    except (Refused, checkpoint.CheckpointError) as error:
        return _finish(result | {"problems": error.problems}, EXIT_REFUSED)
    except ParityError as error:
        return _finish(result | _summary(error.report), EXIT_FAILED)
    except (StoredWeightsError, OracleError) as error:
        return _finish(result | {"problems": error.problems}, EXIT_FAILED)
    except (EmitError, GoldenCaseError, ArtifactError) as error:
        return _finish(result | {"problems": [str(error)]}, EXIT_FAILED)
    cost = {"num_bytes": num_bytes, "seconds": round(time.monotonic() - began, 1)}
    return _finish(result | _summary(report) | cost, EXIT_PROVEN)


def _read_text(path: Path) -> str:
    """The first bytes of a text, whole characters.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is empty or not UTF-8.
    """
    from export.text_loss import MAX_TEXT_BYTES

    with path.open("rb") as file:
        text = codecs.getincrementaldecoder("utf-8")().decode(file.read(MAX_TEXT_BYTES))
    if not text:
        raise ValueError(f"{path} is empty")
    return text


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
    """Prints the parity table and the warnings; returns the report's part of the last line."""
    Console().print(draw(report))
    for line in describe(report):
        print(line)
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
        "bits_per_byte": None if report.text is None else report.text.exported,
        "relative_rms": None if report.loss is None else finite(report.loss.relative_rms),
    }


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows the current stage on stderr: a spinner on a terminal, a line for each stage elsewhere."""
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
