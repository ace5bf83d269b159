"""`python -m service.trial SETTINGS`: loads and proves one model, in a process that may fail.

What `service.library` starts before it loads a large artefact beside running streams, which it stays behind: it is nice
to them, and does not spin. SETTINGS is JSON; the last line of stdout is JSON too: what is wrong with the artefact, if
anything, and how long its sessions took to make.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from service.config import Kernels, ServeConfig
from service.engine.types import Device, PrefillProvider
from service.errors import StartupError
from service.library import prove
from service.loading import build_engines, load_model

_NICENESS = 5


def main(argv: Sequence[str]) -> int:
    """Tries it out; 0 whether the model is fit or not."""
    os.nice(_NICENESS)
    (text,) = argv
    name, config = read_settings(json.loads(text))
    problems: list[str] = []
    seconds = 0.0
    try:
        model = load_model(config.models / name, config.prefill_provider, config.device)
        began = time.monotonic()
        engine = build_engines(config.models, [model], config)[name]
        seconds = time.monotonic() - began
        parity = prove(model, engine)
        problems += [f"golden case {case.name} failed" for case in parity.cases if not case.passed]
    except StartupError as error:
        problems += error.problems
    sys.stdout.write(json.dumps({"problems": problems, "session_seconds": seconds}) + "\n")
    return 0


def read_settings(settings: Mapping[str, Any]) -> tuple[str, ServeConfig]:
    """The model's name and the configuration to load it by, of what `service.library.trial_settings` says."""
    others = {name: value for name, value in settings.items() if name not in ("name", "folder")}
    others["prefill_provider"] = PrefillProvider(settings["prefill_provider"])
    others["device"] = Device(settings["device"])
    others["kernels"] = Kernels(settings["kernels"])
    return settings["name"], ServeConfig(models=Path(settings["folder"]), spin=False, **others)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
