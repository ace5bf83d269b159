"""Finds a model by its hub name in Hugging Face's local cache. Downloads nothing; standard library only.

CACHE/models--Qwen--Qwen3-0.6B/refs/main            the commit that `main` was
CACHE/models--Qwen--Qwen3-0.6B/snapshots/COMMIT/    the model's folder: links into blobs/
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_PREFIX = "models--"
_SNAPSHOTS = "snapshots"
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]+")


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where Hugging Face's libraries keep downloads, by their environment variables."""
    for name, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if environ.get(name):
            return Path(environ[name]).expanduser() / below
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def find_snapshot(name: str, cache: Path) -> Path | None:
    """The folder of a model that is in the cache: the commit of `main`, else the only one there is.

    Args:
        name: as on the hub, such as "Qwen/Qwen3-0.6B".
        cache: `cache_folder`.
    """
    if not _NAME.fullmatch(name):
        return None
    repository = cache / (_PREFIX + name.replace("/", "--"))
    try:
        commit = (repository / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        commit = ""
    snapshots = repository / _SNAPSHOTS
    if _COMMIT.fullmatch(commit) and (snapshots / commit).is_dir():
        return snapshots / commit
    folders = [path for path in snapshots.iterdir() if path.is_dir()] if snapshots.is_dir() else []
    return folders[0] if len(folders) == 1 else None


def repository_of(snapshot: Path) -> Path | None:
    """The cache's folder of the model whose snapshot this is; None for any other folder."""
    folder = snapshot.resolve()
    repository = folder.parent.parent
    return repository if folder.parent.name == _SNAPSHOTS and repository.name.startswith(_PREFIX) else None


def name_of(repository: Path) -> str:
    """The hub name of a folder of the cache."""
    return repository.name.removeprefix(_PREFIX).replace("--", "/")
