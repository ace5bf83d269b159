"""Puts the built kernels, if there are any, into the server's wheel, which is then one for x86-64 Linux.

Without them (`make kernels` builds them) the wheel is pure: sources to build from, for every machine.
"""

import re
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_OLDEST_MINOR = 17
"""That of manylinux2014, the oldest glibc that has a tag of this form."""


class Kernels(BuildHookInterface[Any]):
    """The hook of the target `wheel`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Includes the library of the present sources and sets the wheel's tag."""
        sys.path.insert(0, self.root)
        from model.kernels import FOLDER, library_in

        library = library_in(FOLDER)
        if version == "editable" or library is None or sys.platform != "linux":
            return
        build_data["force_include"][str(library)] = library.relative_to(self.root).as_posix()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{_glibc_minor(library)}_x86_64"


def _glibc_minor(library: Path) -> int:
    """The newest glibc 2.x of which the library uses a symbol."""
    named = re.findall(rb"GLIBC_2\.(\d+)[\0.]", library.read_bytes())
    return max(_OLDEST_MINOR, *map(int, named))
