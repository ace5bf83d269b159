"""`python -m tests.faults.stuck_disk serve …`: the server, on a disk that stops answering in the middle of a file.

Reading a manifest waits until something is written to a pipe named `STUCK` beside it. As on a disk, no signal
interrupts the wait.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from model.spec import artifact
from model.spec.reading import read_text
from service.__main__ import main

STUCK = "stuck"


def _read_slowly(path: Path, max_bytes: int) -> str:
    if (path.parent / STUCK).exists():
        # A signal may also come just before the read begins, which then is not interrupted either.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        (path.parent / STUCK).read_bytes()
    return read_text(path, max_bytes)


if __name__ == "__main__":
    artifact.checks.read_text = _read_slowly  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[1:], is_own_process=True))
