"""The bytes that each token of a vocabulary adds to decoded text, for decoders that only put tokens' bytes in a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from model.spec.tokenizer import Tokenizer, TokenizerError


@dataclass(frozen=True, slots=True)
class VocabularyBytes:
    """Bytes by token id; empty for control tokens and ids that the file skips.

    Attributes:
        first: of a token that begins a text: some decoders drop a space there.
        later: of a token anywhere else.
    """

    first: tuple[bytes, ...]
    later: tuple[bytes, ...]


def spell_tokens(tokenizer: Tokenizer) -> VocabularyBytes:
    """The bytes of all tokens. Takes about a microsecond per token and step of the decoder.

    Raises:
        TokenizerError: when its decoder does more than put tokens' bytes in a row.
    """
    drop, controls = _check(tokenizer.decoder_steps), tokenizer.control_spellings
    spellings = [tokenizer.token(token_id) for token_id in range(tokenizer.vocab_size)]
    texts = ["" if spelling is None or spelling in controls else spelling for spelling in spellings]
    later = [tokenizer.token_bytes(token_id) if text else b"" for token_id, text in enumerate(texts)]
    return VocabularyBytes(tuple(map(drop, texts, later)), tuple(later))


_Drop = Callable[[str, bytes], bytes]


def _check(steps: Sequence[dict[str, Any]]) -> _Drop:
    """What becomes of a token's spelling and bytes where it begins a text; refuses steps on more than one token."""
    is_fused = False
    drop: _Drop = lambda _, spelled: spelled  # noqa: E731
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str()}} | {"type": "ByteFallback"} if not is_fused:
                pass
            case {"type": "ByteLevel"} if len(steps) == 1:
                pass
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if is_fused:
                drop = lambda _, spelled: spelled.removeprefix(b" ")  # noqa: E731
            case {"type": "Metaspace", "replacement": str(mark)} if len(steps) == 1:
                if step.get("prepend_scheme", "always") != "never":
                    drop = lambda spelling, _, mark=mark: spelling.replace(mark, "").encode()  # type: ignore[misc]  # noqa: E731
            case _:
                raise TokenizerError(f"the bytes of single tokens are unknown, as its decoder has a step {step}")
    if not steps:
        raise TokenizerError("the bytes of single tokens are unknown, as it has no decoder")
    return drop
