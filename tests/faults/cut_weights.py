"""`python -m tests.faults.cut_weights serve …`: the server, with weights that are truncated as it loads them.

That is between their checksum and their proof, just before a graph is loaded or once all are, as a file says that is
named `CUT` and lies beside the model's folder: `BEFORE` or `AFTER`.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime

from service.__main__ import main
from service.engine.engine import Engine
from service.repository import startup
from service.repository.models import Parity, ServedModel

CUT, BEFORE, AFTER = "cut", "before", "after"
_make, _prove = onnxruntime.InferenceSession, startup.prove


def _cut_and_make(path: str, *given: Any, **options: Any) -> Any:
    own, folder = Path(f"{path}.data"), Path(path).parent
    if _is_wanted(folder.parent, BEFORE):
        for weights in [own] if own.exists() else folder.glob("*.onnx.data"):
            os.truncate(weights, 0)
    return _make(path, *given, **options)


def _cut_and_prove(models: Path, model: ServedModel, engine: Engine) -> Parity:
    if _is_wanted(models, AFTER):
        for weights in (models / model.name).glob("*.onnx.data"):
            os.truncate(weights, 0)
    return _prove(model, engine)


def _is_wanted(models: Path, moment: str) -> bool:
    return (models / CUT).exists() and (models / CUT).read_text(encoding="ascii") == moment


if __name__ == "__main__":
    onnxruntime.InferenceSession = _cut_and_make
    startup.prove = partial(_cut_and_prove, Path(sys.argv[sys.argv.index("--models") + 1]))  # type: ignore[assignment]
    sys.exit(main(sys.argv[1:], is_own_process=True))
