"""The losses that `loss` measured, as `bench` compares them. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.systems import SYSTEMS

TOLERANCE = 0.001
"""Two losses count as equal up to this share of bits per byte."""

Losses = Mapping[tuple[str, str], float]
"""Bits per byte by name of the system's files and by precision."""


def read_losses(path: Path) -> Losses:
    """Of a run's data; empty without them."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except OSError:
        return {}
    return {(row["system"], row["precision"]): row["bits_per_byte"] for row in rows if "bits_per_byte" in row}


def loss_of(row: Mapping[str, Any], known: Losses | None) -> float | None:
    """The loss of a row's system at its precision, if it is known."""
    spec = SYSTEMS.get(row["system"])
    return None if spec is None or known is None else known.get((spec.files, row["precision"]))


def is_at_most(loss: float | None, other: float | None) -> bool:
    """Whether a loss is at most another, within the tolerance; False if one is unknown."""
    return loss is not None and other is not None and loss <= other * (1.0 + TOLERANCE)
