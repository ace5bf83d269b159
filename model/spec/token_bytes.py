"""The bytes of a token by itself: what a decoder makes of its spelling, before characters are put together.

A token may end in the middle of a character, and decoding it alone gives U+FFFD. Its bytes, joined with its neighbors',
are the text's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_symbols() -> dict[str, int]:
    """The characters that byte-level tokenizers spell bytes with (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_SYMBOLS = _byte_symbols()


class Spelling:
    """From a token's spelling to its bytes. `decoder` is that of a `tokenizer.json`; `steps` are its parts in order."""

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        self.steps: Sequence[dict[str, Any]] = _flattened(decoder)
        kinds = {step["type"] for step in self.steps}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds

    def to_bytes(self, spelling: str) -> bytes:
        """The bytes of a token that is no control token."""
        if self._is_byte_level and all(symbol in _SYMBOLS for symbol in spelling):
            return bytes(map(_SYMBOLS.__getitem__, spelling))
        if self._has_byte_tokens and (byte := _BYTE.fullmatch(spelling)):
            return bytes([int(byte.group(1), 16)])
        for step in self.steps:
            spelling = _decoded(step, spelling)
        return spelling.encode(errors="replace")


def _flattened(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    inner = decoder.get("decoders")
    return [decoder] if inner is None else [step for each in inner for step in _flattened(each)]


def _decoded(step: dict[str, Any], spelling: str) -> str:
    """What a decoder's step makes of one token; steps on whole texts (`Strip`, `Fuse`) are left out."""
    match step["type"]:
        case "Replace" if "String" in step["pattern"]:
            return spelling.replace(step["pattern"]["String"], step["content"])
        case "Metaspace":
            return spelling.replace(step["replacement"], " ")
        case "WordPiece":
            return spelling.removeprefix(step["prefix"])
        case "BPEDecoder":
            return spelling.replace(step["suffix"], " ") if step["suffix"] else spelling
        case _:
            return spelling
