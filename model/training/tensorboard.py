"""Learning curves as TensorBoard's event files, for whoever compares runs there. Knows nothing of training.

Imported only when asked for: it brings a second library's worth of modules along.
"""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from model.training.curves import Point

FOLDER = "tensorboard"


class EventLog:
    """A run's points as scalars, `training/…` and `validation/…`.

    Args:
        folder: of the event files, made if missing.
        last_step: up to which an earlier part of the run has written; what it wrote after that, TensorBoard forgets.
    """

    def __init__(self, folder: Path, last_step: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=last_step + 1)

    def append(self, point: Point) -> None:
        """Adds a point of `model.training.curves` and writes it at once."""
        step = point["step"]
        values = {f"validation/{name}": value for name, value in point.get("scores", {}).items()}
        values |= {f"training/{name}": value for name, value in point.items() if name not in ("step", "scores")}
        for name, value in values.items():
            if not isinstance(value, str):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Ends the files."""
        self._writer.close()
