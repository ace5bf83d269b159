"""Where each tensor of ours comes from: named parts of theirs, with the shapes that they must have.

A layout is checked against the weights' headers as a whole, before a number is read. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from model.hf.folder import DTYPES, Stored
from model.spec.config import ModelConfig

Shape = tuple[int, ...]

MAX_LAYERS = 1024
"""Every layer's tensors are named before it is known whether they are there."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of their tensors, and what is to be done with it.

    `transposed` ones are stored input first; the first `skipped_rows` are of no use.
    """

    name: str
    shape: Shape
    transposed: bool = False
    skipped_rows: int = 0


@dataclass(slots=True)
class Layout:
    """All of a model's tensors.

    `tensors` are ours, each made of parts one behind another. `copies` are theirs that may be there besides and must
    then hold what another one holds; `sinusoids` may be there too, and must then hold the sinusoids that are computed
    here. `ignored` are patterns of whole names of theirs that are of no use: masks, frequencies.
    """

    tensors: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    copies: dict[str, Part] = field(default_factory=dict)
    sinusoids: dict[str, Shape] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def add(self, name: str, *parts: Part) -> None:
        """Makes one of ours of parts, which lie one behind another in the order given."""
        self.tensors[name] = parts

    def add_linear(self, name: str, theirs: Mapping[str, int], width: int, *, bias: bool) -> None:
        """A product with a matrix, and its bias.

        Args:
            name: our module.
            theirs: their modules, output first, with the width of each one's output.
            width: of the input.
            bias: whether there is one.
        """
        self.add(f"{name}.weight", *(Part(f"{module}.weight", (rows, width)) for module, rows in theirs.items()))
        if bias:
            self.add(f"{name}.bias", *(Part(f"{module}.bias", (rows,)) for module, rows in theirs.items()))

    def add_norm(self, name: str, theirs: str, width: int, *, bias: bool) -> None:
        """A norm's weight, and its bias if it has one."""
        for part in ("weight", "bias") if bias else ("weight",):
            self.add(f"{name}.{part}", Part(f"{theirs}.{part}", (width,)))

    @property
    def parts(self) -> Iterable[Part]:
        """Every part of every tensor."""
        return (part for parts in self.tensors.values() for part in parts)

    def check(self, stored: Mapping[str, Stored], unread: Collection[str] = ()) -> list[str]:
        """What the weights lack, what they have too much, and what has the wrong shape.

        Args:
            stored: what is there.
            unread: what may be there as well, in files of which it is known already that they cannot be read.
        """
        parts = {part.name: part for part in self.parts}
        problems = [
            f"the weights lack {name} {list(part.shape)}"
            for name, part in parts.items()
            if name not in stored and name not in unread
        ]
        known = parts | {name: Part(name, part.shape) for name, part in self.copies.items()}
        known |= {name: Part(name, shape) for name, shape in self.sinusoids.items()}
        problems += [
            f"{tensor.file} has unexpected {name} {list(tensor.shape)}"
            for name, tensor in sorted(stored.items())
            if name not in known and not self.ignores(name)
        ]
        problems += [
            f"{stored[name].file}: {name} is {list(stored[name].shape)}, must be {list(part.shape)}"
            for name, part in known.items()
            if name in stored and stored[name].shape != part.shape
        ]
        return problems

    def check_dtypes(self, stored: Mapping[str, Stored]) -> list[str]:
        """What is stored in a way that is not read; what is of no use may be, masks of bytes for one."""
        return [
            f"{tensor.file}: {name} is {tensor.dtype}, must be {', '.join(DTYPES)}"
            for name, tensor in sorted(stored.items())
            if tensor.dtype not in DTYPES and not self.ignores(name)
        ]

    def ignores(self, name: str) -> bool:
        """Whether one of theirs is of no use."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


@dataclass(frozen=True, slots=True)
class Described:
    """What a folder's configuration amounts to: our configuration, the layout of its weights, and what to tell people.

    `config` has no tokens yet that only generation settings know.
    """

    config: ModelConfig
    layout: Layout
    notes: tuple[str, ...] = ()
