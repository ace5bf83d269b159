"""`python -m tests.faults.cut_weights serve …`: the server, with weights that are truncated as it loads them.

That is between their checksum and their proof, just before or after ONNX Runtime makes a session, as a file says that
is named `CUT` and lies beside the model's folder: `BEFORE` or `AFTER`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import onnxruntime

from service.__main__ import main

CUT, BEFORE, AFTER = "cut", "before", "after"
_make = onnxruntime.InferenceSession


def _make_and_cut(path: str, *given: Any, **options: Any) -> Any:
    _cut(Path(path), BEFORE)
    session = _make(path, *given, **options)
    _cut(Path(path), AFTER)
    return session


def _cut(graph: Path, moment: str) -> None:
    wanted = graph.parents[1] / CUT
    if wanted.exists() and wanted.read_text(encoding="ascii") == moment:
        own = graph.with_name(f"{graph.name}.data")
        for weights in [own] if own.exists() else graph.parent.glob("*.onnx.data"):
            os.truncate(weights, 0)


if __name__ == "__main__":
    onnxruntime.InferenceSession = _make_and_cut
    sys.exit(main(sys.argv[1:], is_own_process=True))
