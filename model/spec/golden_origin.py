"""Golden origin: the files and the manifest that an artifact's golden cases are of, kept in golden.npz.

Cases find what changes their answers: no number of them finds a table's row that none reads, a position that none
reaches, or a text that the tokenizer alone sees. So golden.npz has the checksums of the other files and the fields of
the manifest. Another manifest whose checksums fit its files is found; a person who also rewrites golden.npz is not.
Standard library and NumPy only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.spec.arrays import ArrayFile
from model.spec.artifact import GOLDEN, MAX_ARRAYS_BYTES, PARITY, Manifest

MEMBER = "origin"
"""Its name in golden.npz."""
_FOR_PEOPLE = ("files", "versions")
_MAX_SHOWN = 60


def of(manifest: Manifest) -> dict[str, Any]:
    """The origin of a manifest's golden cases, JSON-ready."""
    fields: dict[str, Any] = json.loads(manifest.to_json())
    files = {name: entry.sha256 for name, entry in manifest.files.items() if name not in (GOLDEN, PARITY)}
    return {"files": files, "manifest": {name: value for name, value in fields.items() if name not in _FOR_PEOPLE}}


def check(folder: Path, manifest: Manifest) -> list[str]:
    """How an artifact differs from the one whose golden cases it has; none where golden.npz does not say.

    The files' checksums are those of the manifest, which `artifact.load` checks.

    Raises:
        ValueError: when golden.npz is malformed.
    """
    try:
        with ArrayFile(folder / GOLDEN, MAX_ARRAYS_BYTES) as arrays:
            then = arrays.read_json(MEMBER) if MEMBER in arrays else None
        if then is None:
            return []
        files, fields = dict(then["files"]), _flat(then["manifest"])
    except Exception as error:  # archive, decompressors, NumPy and JSON raise various errors
        raise ValueError(f"{GOLDEN} has no origin of golden cases: {error}") from error
    now = of(manifest)
    have = _flat(now["manifest"])
    problems = [
        f"{name} is {_short(have.get(name))}, at export {_short(value)}"
        for name, value in fields.items()
        if have.get(name) != value
    ]
    for name in sorted(files.keys() | now["files"].keys()):
        if name not in now["files"]:
            problems.append(f"{name} is missing, the golden cases were made beside it")
        elif files.get(name) != now["files"][name]:
            problems.append(f"{name} is not the file that the golden cases were made beside")
    return problems


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest's fields, those of its parts as `config.context`: one that a later version adds is not compared."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= {f"{name}.{part}": each for part, each in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"
