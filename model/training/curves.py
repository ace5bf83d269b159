"""Learning curves: one JSON object per line during training, a picture at the end.

A line has `step` and either training figures (`loss` in nats per token, `learning_rate_factor`, `gradient_norm`,
`num_target_tokens`, `num_skipped`, `seconds`, `tokens_per_second`) or validation figures (`scores`).
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model.spec.files import write_atomically

CURVES = "curves.jsonl"
PICTURE = "curves.png"

Point = Mapping[str, Any]


class CurveLog:
    """The points of one run, in memory and in a file that is written as the run proceeds.

    Args:
        path: the file; it is replaced.
        points: of an earlier part of the run.
    """

    def __init__(self, path: Path, points: Sequence[Point] = ()) -> None:
        self._path = path
        self._points = list(points)
        write_atomically(path, "".join(_line(point) for point in self._points).encode())

    @property
    def points(self) -> Sequence[Point]:
        """All points so far, in order."""
        return tuple(self._points)

    def append(self, point: Point) -> None:
        """Adds a point and writes it."""
        self._points.append(point)
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(_line(point))

    def flush(self) -> None:
        """Flushes the file to the disk, before a resume state that refers to it is saved."""
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(path: Path, last_step: int) -> list[Point]:
    """Points up to and including a step, which is the last one of the state that a run resumes from."""
    if not path.is_file():
        return []
    points = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            points.append(json.loads(line))
        except ValueError:
            break
    return [point for point in points if point["step"] <= last_step]


def draw(points: Sequence[Point], title: str) -> bytes:
    """A PNG: training loss over steps, with validation scores below it where there are any."""
    # Slow to import, and needed once, at the end.
    from matplotlib.figure import Figure

    seen = [point for point in points if "loss" in point]
    scored = [point for point in points if "scores" in point]
    names = sorted({name for point in scored for name, score in point["scores"].items() if not isinstance(score, str)})
    figure = Figure(figsize=(8.0, 3.0 + 2.0 * len(names)), layout="constrained")
    axes = figure.subplots(1 + len(names), 1, sharex=True, squeeze=False)[:, 0]
    axes[0].plot([point["step"] for point in seen], [point["loss"] for point in seen], linewidth=1.0)
    axes[0].set_title(title)
    axes[0].set_ylabel("training loss, nats per token")
    for axis, name in zip(axes[1:], names, strict=True):
        having = [point for point in scored if name in point["scores"]]
        axis.plot([point["step"] for point in having], [point["scores"][name] for point in having], marker="o")
        axis.set_ylabel(name.replace("_", " "))
    for axis in axes:
        axis.grid(visible=True, alpha=0.3)
    axes[-1].set_xlabel("step")
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    return stream.getvalue()


def _line(point: Point) -> str:
    return json.dumps(point, sort_keys=True) + "\n"
