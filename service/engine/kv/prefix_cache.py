"""Which K/V of former requests are kept for later ones, and which go first when room is wanted. Plain ints, no tensors.

What is kept is a tree of pieces: the chunks of a prompt one below the other, or a whole source by itself. A piece is
found by what it says and by all that precedes it, compared token by token: no hash stands for them. Only what a prefill
computed whole is ever kept, so that whoever finds it gets the bits that it would have computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from service.engine.chunks import CachedChunk, TokenIds


class PrefixCache:
    """The pieces that are kept, the least recently used first to go.

    A piece is always more recently used than those below it, so that what goes first has nothing below it.
    """

    def __init__(self) -> None:
        self._pieces: OrderedDict[tuple[int | None, TokenIds], CachedChunk] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def __contains__(self, piece: CachedChunk) -> bool:
        return self._pieces.get(piece.key) is piece

    @property
    def num_bytes(self) -> int:
        """What all pieces take of the budget."""
        return self._num_bytes

    def get(self, parent: CachedChunk | None, token_ids: TokenIds) -> CachedChunk | None:
        """The piece that says this right after `parent`, None if it is not kept; uses nothing."""
        return self._pieces.get((None if parent is None else parent.handle, token_ids))

    def find(self, pieces: Iterable[TokenIds]) -> list[CachedChunk]:
        """The pieces, from the first on, that are kept; uses nothing."""
        found: list[CachedChunk] = []
        for token_ids in pieces:
            if (piece := self.get(found[-1] if found else None, token_ids)) is None:
                break
            found.append(piece)
        return found

    def use(self, piece: CachedChunk) -> None:
        """Notes that a piece was used, and with it all before it."""
        current: CachedChunk | None = piece
        while current is not None:
            self._pieces.move_to_end(current.key)
            current = current.parent

    def add(self, piece: CachedChunk) -> None:
        """Keeps a piece, as just used.

        Raises:
            ValueError: when it is kept already, or what precedes it is not.
        """
        if piece.key in self._pieces or (piece.parent is not None and piece.parent not in self):
            raise ValueError(f"piece {piece.handle} has no place")
        self._pieces[piece.key] = piece
        self._num_bytes += piece.num_bytes
        self.use(piece)

    def take_oldest(self) -> CachedChunk:
        """Takes out the piece that has been unused for longest.

        Raises:
            KeyError: when nothing is kept.
        """
        _, piece = self._pieces.popitem(last=False)
        self._num_bytes -= piece.num_bytes
        return piece

    def check_invariants(self) -> None:
        """Asserts that every piece can be found, is counted once, and is younger than those below it.

        Raises:
            AssertionError: saying what broke.
        """
        ages = {piece: age for age, piece in enumerate(self._pieces.values())}
        for piece, age in ages.items():
            if piece.parent is not None and ages.get(piece.parent, -1) < age:
                raise AssertionError(f"piece {piece.handle} stays while what precedes it goes")
        if self._num_bytes != sum(piece.num_bytes for piece in ages):
            raise AssertionError(f"{self._num_bytes} bytes counted")
        if len({piece.handle for piece in ages}) != len(ages):
            raise AssertionError("two pieces under one handle")
