"""Chooses the device that a server computes on, from the operator's choice, the artifacts and the machine.

    MODELS/NAME/manifest.json          a model for one device
    MODELS/NAME/cpu/, …/cuda/          the same model for either: one folder for machines with a GPU and without

A server computes on one device: one thread steps all models, and those on a GPU would wait for those on the CPU. Knows
folders and manifests; graphs are tried by `service.engine.sessions.session`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from model.spec.artifact import MANIFEST, MOVE, ArtifactError, read_manifest
from model.spec.artifact import Device as BuiltFor
from service.engine.sessions.cuda_provider import Cuda, find_cuda_problem
from service.engine.sessions.session import GraphSession, SessionOptions
from service.engine.types import Device
from service.errors import StartupError

_LOGGER = logging.getLogger(__name__)


def model_folders(folder: Path) -> list[Path]:
    """The subfolders that are models, by name: not hidden ones, nor the `lost+found` of a volume's file system.

    Raises:
        StartupError: when the folder cannot be read.
    """
    try:
        visible = (path for path in folder.iterdir() if not path.name.startswith(".") and path.name != "lost+found")
        return sorted(path for path in visible if path.is_dir())
    except OSError as error:
        raise StartupError([f"{folder} cannot be read: {error.strerror}"]) from error


def artifact_folder(folder: Path, device: Device) -> Path:
    """The folder of a model's artifact for a device: the subfolder of that name, or the model's folder itself."""
    own = folder / device
    return own if not (folder / MANIFEST).exists() and (own / MANIFEST).exists() else folder


def choose_device(
    wanted: Device, folders: Collection[Path], find_problem: Callable[[Path], str | None] | None = None
) -> Device:
    """`CPU` or `CUDA`; logs if models are exported for CUDA and it does not work.

    Args:
        wanted: `AUTO` is CUDA if all models are exported for it and it works, else the CPU.
        folders: of the models.
        find_problem: returns why CUDA does not work, given an artifact for it; by default `find_problem_with`.

    Raises:
        StartupError: when a model is not exported for the device that is left, or CUDA is wanted and does not work.
    """
    found_in = {folder.name: _artifacts(folder) for folder in folders}
    # Folders without a readable manifest are left to loading, which reports them.
    artifacts = {name: found for name, found in found_in.items() if found}
    lacking = {device: [name for name, found in artifacts.items() if device not in found] for device in BuiltFor}
    find = find_problem or find_problem_with
    if wanted is Device.AUTO:
        return _pick(artifacts, lacking, find)
    if missing := lacking[BuiltFor(wanted)]:
        problem = f"is not exported for it, export it with --device {wanted}"
        raise StartupError([f"device is {wanted}: {name} {problem}" for name in missing])
    if wanted is Device.CUDA and (obstacle := _obstacle(artifacts, find)) is not None:
        raise StartupError([f"device is {wanted}: {obstacle}"])
    return wanted


def find_problem_with(artifact: Path) -> str | None:
    """Why an artifact's graphs do not run on the first CUDA device, for an operator; None if they do.

    Tries the smallest of them, which has no weights.
    """
    if problem := find_cuda_problem():
        return problem
    try:
        GraphSession(artifact, read_manifest(artifact).graphs[MOVE], SessionOptions(), cuda=Cuda(records=False))
    except StartupError as error:
        return "; ".join(error.problems)
    except (ArtifactError, KeyError):
        # Left to loading, which reports it.
        return None
    return None


def _pick(
    artifacts: Mapping[str, Mapping[BuiltFor, Path]],
    lacking: Mapping[BuiltFor, list[str]],
    find_problem: Callable[[Path], str | None],
) -> Device:
    if artifacts and not lacking[BuiltFor.CUDA]:
        problem = _obstacle(artifacts, find_problem)
        if problem is None:
            return Device.CUDA
        if not lacking[BuiltFor.CPU]:
            _LOGGER.warning("computing on the CPU, as CUDA does not work: %s", problem)
            return Device.CPU
        raise StartupError(
            [f"device is auto: {name} is exported for cuda alone, and {problem}" for name in lacking[BuiltFor.CPU]]
        )
    if missing := lacking[BuiltFor.CPU]:
        others = ", ".join(lacking[BuiltFor.CUDA])
        problem = f"exported for cuda alone, and {others} for cpu alone: one server computes on one device"
        raise StartupError([f"device is auto: {name} is {problem}" for name in missing])
    return Device.CPU


def _obstacle(
    artifacts: Mapping[str, Mapping[BuiltFor, Path]], find_problem: Callable[[Path], str | None]
) -> str | None:
    """Why CUDA does not work, tried with the first artifact for it; None if it works or there is no such artifact."""
    for_cuda = (found[BuiltFor.CUDA] for found in artifacts.values() if BuiltFor.CUDA in found)
    first = next(for_cuda, None)
    return None if first is None else find_problem(first)


def _artifacts(folder: Path) -> dict[BuiltFor, Path]:
    """A model's artifacts by device; empty if no manifest can be read."""
    try:
        if (folder / MANIFEST).exists():
            return {read_manifest(folder).device: folder}
    except ArtifactError:
        return {}
    return {device: folder / device for device in BuiltFor if (folder / device / MANIFEST).exists()}
