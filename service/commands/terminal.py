"""Text of a model on a terminal: control characters are shown, not obeyed."""

from __future__ import annotations

from typing import TextIO

# C0 without tab and line feed, DEL, and C1: a sequence of them moves the cursor, sets titles or answers for the user.
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}
_CONTROLS |= dict.fromkeys(range(0x7F, 0xA0), "\N{REPLACEMENT CHARACTER}")


def write_text(text: str, out: TextIO) -> None:
    """Writes a model's text; as it is where `out` is no terminal."""
    out.write(text.translate(_CONTROLS) if out.isatty() else text)
