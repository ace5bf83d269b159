"""A run's folder: what is written into it in which order, so that whatever ends the run leaves something whole.

    config.json … run.json   the last whole checkpoint (`model.checkpoint`)
    resume.safetensors       what going on from there needs (`model.training.resume`); gone when the run is over
    best/                    the checkpoint with the best validation score, where there are scores under way
    curves.png               drawn at the end

Only the first process has one; weights and optimiser state come to it whole. Knows nothing of when something is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from model import checkpoint
from model.spec.config import ModelConfig
from model.spec.files import StagedFiles, remove_leftovers, write_atomically
from model.training import curves, resume
from model.training.curves import Point
from model.training.loop import TrainingError
from model.training.resume import RunState

BEST = "best"


class RunFolder:
    """The files of one run.

    Args:
        path: made by `clear`, if missing.
        config: the model's.
        tokenizers: texts by file name.
    """

    def __init__(self, path: Path, config: ModelConfig, tokenizers: Mapping[str, str]) -> None:
        self.path = path
        self._config = config
        self._tokenizers = tokenizers

    @property
    def state(self) -> Path:
        """The file that a run resumes from."""
        return self.path / resume.STATE

    @property
    def best(self) -> Path:
        """The folder of the best weights."""
        return self.path / BEST

    def clear(self, *, keeps_run: bool) -> None:
        """Makes room: what another run has left is neither resumed from nor called this one's.

        Its last checkpoint stays until there is another.
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
            TrainingError: when a weight is no finite number.
        """
        self._write(self.best, weights, manifest)

    def write_last(
        self,
        weights: Mapping[str, Tensor],
        optimizer_state: Mapping[str, Tensor],
        state: RunState,
        manifest: Mapping[str, Any],
    ) -> None:
        """Replaces the last checkpoint and, first, the state to resume from: that one is whole by itself.

        Raises:
            TrainingError: when a weight is no finite number.
        """
        self._write(self.path, weights, manifest, lambda files: resume.stage(files, weights, optimizer_state, state))

    def finish(self, points: Sequence[Point], title: str, manifest: Mapping[str, Any]) -> None:
        """Draws the curves, lets run.json say what the run came to, and drops what only a resumed run would need."""
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
        # The loss that shows it is only computed after the next step: never let it replace what can still be used.
        if broken := [name for name, tensor in weights.items() if not tensor.isfinite().all()]:
            raise TrainingError(f"{broken[0]} has values that are no finite numbers after step {manifest['step']}")
        with StagedFiles(folder) as files:
            stage_more(files)
            checkpoint.stage(files, weights, self._config, self._tokenizers, manifest)
            files.commit()
        checkpoint.tidy(folder, self._tokenizers)
