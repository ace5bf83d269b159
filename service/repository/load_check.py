"""`python -m service.repository.load_check SETTINGS`: loads and proves one model, in a process that may fail.

What `service.repository.library` starts before it loads a large artifact beside running streams, which it stays behind:
it is nice to them, and does not spin. Its address space is limited to what such an artifact needs, and where the
machine runs out of memory all the same, the kernel ends this process first. SETTINGS is JSON; the last line of stdout
is JSON too: what is wrong with the artifact, if anything, and how long its sessions took to make.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from service.config import Kernels, ServeConfig
from service.engine.kv.budget import weight_bytes
from service.engine.types import Device
from service.errors import StartupError
from service.repository.library import prove
from service.repository.loading import build_engines, load_model, manifest_of, needs_of

_NICENESS = 5
# Libraries with what they reserve, and for each thread its stack and its arena: a server of small models has 1 GiB.
_LIBRARY_BYTES = 4 << 30
_THREAD_BYTES = 128 << 20
# Weights in the file, as they are read of it, and in float32 once or twice: those of four bits have been seen to take
# nine times their size.
_WEIGHT_FACTOR = 24


def main(argv: Sequence[str]) -> int:
    """Tries it out; 0 whether the model is fit or not."""
    os.nice(_NICENESS)
    (text,) = argv
    name, config = read_settings(json.loads(text))
    problems: list[str] = []
    seconds = 0.0
    _bound(config.models / name, config)
    try:
        model = load_model(config.models / name, config.device)
        began = time.monotonic()
        # As a server does it, which then has memory for it: here a lack of that ends nothing else.
        engine = build_engines(config.models, [model], config, is_serving=True)[name]
        seconds = time.monotonic() - began
        parity = prove(model, engine)
        problems += [f"golden case {case.name} failed" for case in parity.cases if not case.passed]
    except StartupError as error:
        problems += error.problems
    except MemoryError as error:
        problems.append(f"it needs more memory than its manifest implies: {error}")
    sys.stdout.write(json.dumps({"problems": problems, "session_seconds": seconds}) + "\n")
    return 0


def _bound(folder: Path, config: ServeConfig) -> None:
    """Limits this process to a few times what fit artifacts have been seen to take of address space."""
    try:
        manifest = manifest_of(folder, config.device)
    except StartupError:
        return  # which loading it says again, before anything of it is read
    needs = needs_of(manifest, config)
    kv_bytes = needs.whole if config.kv_memory is None else config.kv_memory
    num_threads = (os.cpu_count() or 1) + (config.threads or 0)
    num_bytes = _LIBRARY_BYTES + num_threads * _THREAD_BYTES + _WEIGHT_FACTOR * weight_bytes(manifest)
    num_bytes += 2 * (kv_bytes + needs.besides)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        num_bytes = min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def read_settings(settings: Mapping[str, Any]) -> tuple[str, ServeConfig]:
    """The model's name and the configuration to load it by, from `service.repository.library.trial_settings`."""
    others = {name: value for name, value in settings.items() if name not in ("name", "folder")}
    others["device"] = Device(settings["device"])
    others["kernels"] = Kernels(settings["kernels"])
    return settings["name"], ServeConfig(models=Path(settings["folder"]), spin=False, **others)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
