"""The bytes that each token of a vocabulary adds to decoded text, read off a `tokenizer.json`'s decoder.

Unlike `Tokenizer.decode`, which needs whole characters, this spells tokens that hold a part of one. Decoders are known
step by step, as the tokenizers library defines them; one whose text is not its tokens' bytes in a row is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model.spec.tokenizer import Tokenizer, TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes by token id; empty for control tokens and ids that the file skips.

    Attributes:
        first: of a token that begins a text: some decoders drop a space there.
        later: of a token anywhere else.
    """

    first: tuple[bytes, ...]
    later: tuple[bytes, ...]


def spell_tokens(tokenizer: Tokenizer) -> TokenBytes:
    """The bytes of all tokens. Takes about a microsecond per token and step of the decoder.

    Raises:
        TokenizerError: when its decoder does more than put tokens' bytes in a row.
    """
    described = json.loads(tokenizer.to_json())
    spell, drops = _read(_steps(described["decoder"]))
    controls = tokenizer.control_spellings
    later, first = [], []
    for token_id in range(tokenizer.vocab_size):
        spelling = tokenizer.token(token_id)
        has_text = spelling is not None and spelling not in controls
        later.append(spell(spelling) if spelling is not None and has_text else b"")
        first.append(drops(spelling, later[-1]) if spelling is not None and has_text else b"")
    return TokenBytes(tuple(first), tuple(later))


_Spell = Callable[[str], bytes]
_Drop = Callable[[str, bytes], bytes]


def _read(steps: list[dict[str, Any]]) -> tuple[_Spell, _Drop]:
    """What a decoder makes of a token, and what of its spelling and bytes where it begins a text."""
    replaced: list[tuple[str, str]] = []
    has_byte_tokens = is_byte_level = is_fused = False
    drop: _Drop = lambda _, spelled: spelled  # noqa: E731
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if not is_fused:
                replaced.append((pattern, content))
            case {"type": "ByteFallback"} if not is_fused:
                has_byte_tokens = True
            case {"type": "ByteLevel"} if len(steps) == 1:
                is_byte_level = True
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if is_fused:
                drop = lambda _, spelled: spelled.removeprefix(b" ")  # noqa: E731
            case {"type": "Metaspace", "replacement": str(mark)} if len(steps) == 1:
                replaced.append((mark, " "))
                if step.get("prepend_scheme", "always") != "never":
                    drop = lambda spelling, _, mark=mark: spelling.replace(mark, "").encode()  # type: ignore[misc]  # noqa: E731
            case _:
                raise TokenizerError(f"the bytes of single tokens are unknown, as its decoder has a step {step}")
    if not steps:
        raise TokenizerError("the bytes of single tokens are unknown, as it has no decoder")
    alphabet = _byte_alphabet()

    def spell(spelling: str) -> bytes:
        if is_byte_level:
            # A token with a character outside the alphabet stands for itself.
            known = [alphabet.get(character) for character in spelling]
            return spelling.encode() if None in known else bytes(byte for byte in known if byte is not None)
        for pattern, content in replaced:
            spelling = spelling.replace(pattern, content)
        byte = _BYTE_TOKEN.fullmatch(spelling) if has_byte_tokens else None
        return spelling.encode() if byte is None else bytes([int(byte[1], 16)])

    return spell, drop


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The flattened steps of a decoder."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for each in decoder["decoders"] for step in _steps(each)]
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character that byte-level tokenizers write for it (Radford et al., 2019, `bytes_to_unicode`)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
