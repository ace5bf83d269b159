"""Weights in PyTorch's own files, `pytorch_model.bin`: older repositories have no others.

Such a file is a pickle, which could run programs. PyTorch's weights-only unpickler builds tensors and refuses all else.
Archives, as PyTorch writes since 1.6, are mapped: a tensor is read when it is used. Older files are read whole.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from model.hf.folder import Stored
from model.hf.values import shorten

if TYPE_CHECKING:
    from torch import Tensor

_MAX_PICKLE_BYTES = 64 << 20
"""Of an archive's names and shapes; tensors are beside them."""
_MAX_WHOLE_BYTES = 8 << 30
_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_REASON = "WeightsUnpickler error: "


class PickledWeights:
    """The tensors of one file.

    Raises:
        ValueError: when it holds anything but tensors by name, is damaged, or is too large.
    """

    def __init__(self, path: Path) -> None:
        import torch

        is_archive = zipfile.is_zipfile(path)
        _check_sizes(path, is_archive=is_archive)
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
        except OSError:
            raise
        except Exception as error:  # whatever a hostile pickle leads to
            reason = str(error).rpartition(_REASON)[2].strip().partition("\n")[0]
            raise ValueError(f"cannot be read as tensors alone: {shorten(reason)}") from error
        if not isinstance(found, dict) or not all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
            for name, tensor in found.items()
        ):
            raise ValueError("holds something else than tensors by name")
        self._tensors: dict[str, Tensor] = found

    def header(self, file: str) -> dict[str, Stored]:
        """Dtypes and shapes, as of a safetensors file of this name."""
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._tensors.items()}
        return {
            name: Stored(file, _SAFETENSORS.get(dtypes[name], dtypes[name]), tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def get_tensor(self, name: str) -> Tensor:
        """One tensor; its numbers are read here or later."""
        return self._tensors[name].detach()


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a file.

    Raises:
        ValueError: as `PickledWeights`.
    """
    return PickledWeights(path).header(path.name)


def _check_sizes(path: Path, *, is_archive: bool) -> None:
    """Refuses what would be larger in memory than on the disk."""
    if not is_archive:
        if (size := path.stat().st_size) > _MAX_WHOLE_BYTES:
            raise ValueError(f"is no archive and has {size} bytes, must have at most {_MAX_WHOLE_BYTES}")
        return
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError) as error:
        raise ValueError(f"is a damaged archive: {error}") from error
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ValueError(f"{shorten(member.filename)} is compressed, which PyTorch does not write")
        if member.filename.endswith(".pkl") and member.file_size > _MAX_PICKLE_BYTES:
            raise ValueError(
                f"{shorten(member.filename)} has {member.file_size} bytes, must have at most {_MAX_PICKLE_BYTES}"
            )
