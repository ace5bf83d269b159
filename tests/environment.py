"""Variables of processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(**changes: str) -> dict[str, str]:
    """This process' variables, changed, with the repository's root ahead of what PYTHONPATH has."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **changes}
