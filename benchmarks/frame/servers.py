"""A server of one's own for as long as a benchmark lasts (`loadtest.serving`), for those who need its address alone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtest.serving import serving as served
from loadtest.serving import wait_served

__all__ = ["served", "serving", "wait_ready"]


@contextmanager
def serving(models: Path, *flags: str) -> Iterator[str]:
    """Serves the artifacts under `models`; yields "host:port" once every model has passed its proof.

    Raises:
        RuntimeError: when the server ends before it is ready, or does not end cleanly.
    """
    with served(models, *flags) as server:
        yield server.target


def wait_ready(process: subprocess.Popen[str]) -> str:
    """The "host:port" that a starting server announces.

    Raises:
        RuntimeError: when it ends before.
    """
    return wait_served(process).target
