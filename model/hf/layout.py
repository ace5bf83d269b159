"""A layout: which tensors of a Hugging Face checkpoint make up each of ours, with their shapes.

It is checked against the weights' headers before any weight is read. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from model.hf.folder import DTYPES, Stored
from model.spec.config import ModelConfig

Shape = tuple[int, ...]

MAX_LAYERS = 1024
"""Bounds the names that are generated before the weights are checked."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of their tensors. `transposed` ones are stored input first; the first `skipped_rows` are unused."""

    name: str
    shape: Shape
    transposed: bool = False
    skipped_rows: int = 0


@dataclass(slots=True)
class Layout:
    """All of a model's tensors.

    `tensors` are ours, each a concatenation of parts. `copies` may also be stored and must then equal another tensor;
    `sinusoids` may be stored and must then equal the computed ones. `ignored` are patterns of full names that are
    unused, such as masks and frequencies.
    """

    tensors: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    copies: dict[str, Part] = field(default_factory=dict)
    sinusoids: dict[str, Shape] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def add(self, name: str, *parts: Part) -> None:
        """Adds one of our tensors as the concatenation of `parts`."""
        self.tensors[name] = parts

    def add_linear(self, name: str, theirs: Mapping[str, int], width: int, *, bias: bool) -> None:
        """Adds a linear layer over `width` inputs; `theirs` are their modules in order with their output widths."""
        self.add(f"{name}.weight", *(Part(f"{module}.weight", (rows, width)) for module, rows in theirs.items()))
        if bias:
            self.add(f"{name}.bias", *(Part(f"{module}.bias", (rows,)) for module, rows in theirs.items()))

    def add_norm(self, name: str, theirs: str, width: int, *, bias: bool) -> None:
        """Adds a norm's weight, and its bias if it has one."""
        for part in ("weight", "bias") if bias else ("weight",):
            self.add(f"{name}.{part}", Part(f"{theirs}.{part}", (width,)))

    def add_head(self, table: Part, *, is_tied: bool) -> None:
        """The output matrix: a copy of the token table, or one of its own."""
        if is_tied:
            self.copies["lm_head.weight"] = table
        else:
            self.add("head.weight", Part("lm_head.weight", table.shape))

    @property
    def parts(self) -> Iterable[Part]:
        """Every part of every tensor."""
        return (part for parts in self.tensors.values() for part in parts)

    def check(self, stored: Mapping[str, Stored], unread: Collection[str] = ()) -> list[str]:
        """Missing tensors, unexpected tensors, and wrong shapes.

        Args:
            stored: the tensors in the weights' headers.
            unread: names in files that could not be read.
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
        """Tensors of unsupported dtypes; ignored ones may have any."""
        return [
            f"{tensor.file}: {name} is {tensor.dtype}, must be {', '.join(DTYPES)}"
            for name, tensor in sorted(stored.items())
            if tensor.dtype not in DTYPES and not self.ignores(name)
        ]

    def ignores(self, name: str) -> bool:
        """Whether one of their tensors is unused."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


@dataclass(frozen=True, slots=True)
class Described:
    """Our configuration for a folder, the layout of its weights, and notes for people.

    `config` lacks the tokens that only generation settings have.
    """

    config: ModelConfig
    layout: Layout
    notes: tuple[str, ...] = ()
