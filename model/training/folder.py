"""A run's folder. The order of its writes leaves a complete checkpoint whenever the run is killed.

    config.json … run.json   the last checkpoint (`model.checkpoint`)
    resume.safetensors       the state to resume from (`model.training.resume`); deleted at the end of the run
    best/                    the checkpoint with the best validation score, if the run is evaluated
    curves.png               drawn at the end

Only the first process writes; weights and optimizer state reach it unsharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from model import checkpoint
from model.spec.files import StagedFiles, remove_leftovers, write_atomically
from model.spec.recurrent import NetworkConfig
from model.training import curves, resume
from model.training.curves import Point
from model.training.loop import TrainingError
from model.training.resume import RunState

BEST = "best"


class FolderTaken(ValueError):
    """A folder holds another run, which a new one would replace."""


def check_free(folder: Path) -> None:
    """Checks that a new run replaces nothing.

    Raises:
        FolderTaken: naming what is there.
    """
    if taken := [name for name in (checkpoint.CONFIG, resume.STATE, BEST) if (folder / name).exists()]:
        raise FolderTaken(
            f"{folder} holds a training run ({', '.join(taken)}): --resume continues it, --overwrite replaces it"
        )


class RunFolder:
    """The files of one run; `clear` makes the folder. `tokenizers` are texts by file name."""

    def __init__(self, path: Path, config: NetworkConfig, tokenizers: Mapping[str, str]) -> None:
        self.path = path
        self._config = config
        self._tokenizers = tokenizers

    @property
    def state(self) -> Path:
        """The file of the resume state."""
        return self.path / resume.STATE

    @property
    def best(self) -> Path:
        """The folder of the best weights."""
        return self.path / BEST

    def clear(self, *, keeps_run: bool) -> None:
        """Deletes leftovers and, unless `keeps_run`, the resume state and best checkpoint of another run.

        The other run's last checkpoint stays until a new one replaces it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, self.best):
            remove_leftovers(folder)
        if not keeps_run:
            self.state.unlink(missing_ok=True)
            checkpoint.remove(self.best)

    def write_best(self, weights: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
        """Replaces the best checkpoint.

        Raises:
            TrainingError: when a weight is not finite.
        """
        self._write(self.best, weights, manifest)

    def write_last(
        self,
        weights: Mapping[str, Tensor],
        optimizer_state: Mapping[str, Tensor],
        state: RunState,
        manifest: Mapping[str, Any],
    ) -> None:
        """Replaces the resume state and then the last checkpoint.

        Raises:
            TrainingError: when a weight is not finite.
        """
        self._write(self.path, weights, manifest, lambda files: resume.stage(files, weights, optimizer_state, state))

    def finish(self, points: Sequence[Point], title: str, manifest: Mapping[str, Any]) -> None:
        """Draws the curves, writes the final run.json and deletes the resume state."""
        write_atomically(self.path / curves.PICTURE, curves.draw(points, title))
        checkpoint.amend(self.path, manifest)
        self.state.unlink(missing_ok=True)

    def _write(
        self,
        folder: Path,
        weights: Mapping[str, Tensor],
        manifest: Mapping[str, Any],
        stage_more: Callable[[StagedFiles], None] = lambda _: None,
    ) -> None:
        # The loss would show it only after the next step: check before a usable checkpoint is replaced.
        if broken := [name for name, tensor in weights.items() if not tensor.isfinite().all()]:
            raise TrainingError(f"{broken[0]} has values that are no finite numbers after step {manifest['step']}")
        with StagedFiles(folder) as files:
            stage_more(files)
            checkpoint.stage(files, weights, self._config, self._tokenizers, manifest)
            files.commit()
        checkpoint.tidy(folder, self._tokenizers)
