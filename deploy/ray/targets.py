"""The addresses of replicas' metrics for Prometheus: a file for each in a folder, for `file_sd_configs`.

Ports are free ones, unknown beforehand. A killed replica leaves its file; the next one that starts on its machine
removes it. Knows nothing of Ray.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PROCESSES = Path("/proc")


@contextmanager
def announced(folder: Path, address: str) -> Iterator[None]:
    """Lists this process's metrics ("host:port") for the length of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    _forget_dead(folder)
    path = folder / f"{platform.node()}-{os.getpid()}.json"
    # Prometheus reads whenever something changes, so a file must appear whole.
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps([{"targets": [address]}]), encoding="utf-8")
    draft.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _forget_dead(folder: Path) -> None:
    for path in folder.glob(f"{platform.node()}-*.json"):
        pid = path.stem.rpartition("-")[2]
        if not (_PROCESSES / pid).exists():
            path.unlink(missing_ok=True)
