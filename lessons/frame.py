"""A lesson's page: what it says, the numbers it computed, the functions it called, its picture.

A number on a page is a value that was computed in this run, under a name, so that tests can change an input and look at
every number. Text has places for numbers and none of its own.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from lessons.notes import NOTES, Notes, source
from service.explain.heatmap import Heatmap, draw_beside

P = ParamSpec("P")
R = TypeVar("R")
_CELL, _LEAST_CELL, _WIDTH = 30.0, 9.0, 260.0


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Prose; `is_hint` says what to look at in the picture."""

    text: str
    is_hint: bool = False


@dataclass(frozen=True, slots=True)
class Figures:
    """Numbers under their name, one line per row; `origin` is where the notes have them."""

    name: str
    lines: tuple[str, ...]
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Code:
    """A function of the lesson, to be shown as it stands."""

    function: Callable[..., Any]


Item = Paragraph | Figures | Code


@dataclass(slots=True)
class Page:
    """What one run of a lesson produces.

    Attributes:
        notes: the inputs; tests change them.
        seed: of all that is drawn at random.
        items: what to print, in order.
        numbers: every computed number as printed, by name.
        values: the same with all digits.
        used: the names of the notes' numbers that are on the page.
        called: the functions and modules that were called, in order.
        maps: heat maps for the terminal.
        picture: the SVG file.
    """

    notes: Notes = NOTES
    seed: int = 0
    items: list[Item] = field(default_factory=list)
    numbers: dict[str, str] = field(default_factory=dict)
    values: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    used: dict[str, None] = field(default_factory=dict)
    called: dict[str, None] = field(default_factory=dict)
    maps: list[Heatmap] = field(default_factory=list)
    picture: str = ""

    def say(self, text: str, **values: Any) -> None:
        """A paragraph; `{name:.2f}` is replaced by the value of this name, which counts as a computed number."""
        self.items.append(Paragraph(self._fill(text, values)))

    def look(self, text: str, **values: Any) -> None:
        """As `say`: what to look at."""
        self.items.append(Paragraph(self._fill(text, values), is_hint=True))

    def given(self, name: str) -> Any:
        """An input of the notes, printed with its source."""
        value = getattr(self.notes, name)
        self.used[name] = None
        text = name.replace("_", " ")
        self.items.append(Figures(text, tuple(_lines(value, None, None)), source(name)))
        return value

    def show(self, name: str, value: Any, digits: int = 2, rows: Sequence[str] | None = None) -> None:
        """Computed numbers: a scalar, a row or a matrix, with a label for each row."""
        lines = tuple(_lines(value, digits, rows))
        self._record(name, "\n".join(lines), value)
        self.items.append(Figures(name, lines))

    def compare(self, name: str, found: Any, digits: int = 2, rows: Sequence[str] | None = None) -> None:
        """A result that the notes print, below the same computed here."""
        printed = getattr(self.notes, name)
        self.used[name] = None
        text = name.replace("_", " ")
        self.show(text, found, digits, rows)
        self.items.append(Figures(f"{text}, as printed", tuple(_lines(printed, digits, rows)), source(name)))

    def table(self, name: str, header: Sequence[str], rows: Sequence[Sequence[Any]], digits: int = 2) -> None:
        """Computed numbers in columns; the first column may be words."""
        cells = [list(header), *([_cell(value, digits) for value in row] for row in rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        lines = tuple("  ".join(each.rjust(width) for each, width in zip(row, widths, strict=True)) for row in cells)
        for row in rows:
            label = row[0] if isinstance(row[0], str) else _cell(row[0], digits)
            for column, value in list(zip(header, row, strict=True))[1:]:
                self._record(f"{name}, {label}, {column}", _cell(value, digits), value)
        self.items.append(Figures(name, lines))

    def call(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a function or module of the product and notes its name."""
        self.called[_name(function)] = None
        return function(*args, **kwargs)

    def code(self, function: Callable[..., Any]) -> None:
        """Shows a function of the lesson."""
        self.items.append(Code(function))

    def heat(self, title: str, rows: Sequence[str], columns: Sequence[str], weights: Any, *hints: str) -> None:
        """A heat map, beside those of earlier calls."""
        values = array(weights)
        scale = "of its row" if np.allclose(values.sum(-1), 1.0, atol=1e-4) else "at most"
        strongest = float(np.nanmax(values))
        self.maps.append(Heatmap(rows, columns, values, strongest, (title, *hints), scale=scale))
        most = max(size for heatmap in self.maps for size in heatmap.weights.shape)
        self.picture = draw_beside(self.maps, max(_LEAST_CELL, min(_CELL, _WIDTH / most)))

    def _fill(self, text: str, values: dict[str, Any]) -> str:
        for _, name, spec, _ in string.Formatter().parse(text):
            if name:
                self._record(name, format(_scalar(values[name]), spec or ""), values[name])
        return text.format(**{name: _scalar(value) for name, value in values.items()})

    def _record(self, name: str, text: str, value: Any) -> None:
        if self.numbers.setdefault(name, text) != text:
            raise ValueError(f"two numbers have the name {name!r}")
        self.values[name] = array(value)


@dataclass(frozen=True, slots=True)
class Lesson:
    """One lesson: its name on the command line, its title, and the function that fills a page.

    `is_exact`: nothing is trained or timed, so that every machine prints the same.
    """

    name: str
    title: str
    fill: Callable[[Page], None]
    is_exact: bool = False

    def run(self, notes: Notes = NOTES, seed: int = 0) -> Page:
        """Runs the lesson."""
        page = Page(notes, seed)
        self.fill(page)
        return page


def array(value: Any) -> npt.NDArray[Any]:
    """A tensor, an array or nested lists as a NumPy array."""
    return np.asarray(value.detach().cpu().numpy() if isinstance(value, Tensor) else value)


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor | np.generic) else value


def _name(function: Callable[..., Any]) -> str:
    if isinstance(function, nn.Module):
        function = type(function)
    function = getattr(function, "func", function)
    return f"{function.__module__}.{function.__qualname__}"


def _cell(value: Any, digits: int | None) -> str:
    value = _scalar(value)
    if isinstance(value, float):
        if np.isinf(value):
            return "-∞" if value < 0 else "∞"
        return f"{value:.10g}" if digits is None else f"{value + 0.0:.{digits}f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _lines(value: Any, digits: int | None, rows: Sequence[str] | None) -> list[str]:
    values = array(value)
    matrix = [[_cell(each, digits) for each in row] for row in np.atleast_2d(values)]
    width = max(len(each) for row in matrix for each in row)
    labels = list(rows) if rows is not None else [""] * len(matrix)
    margin = max(map(len, labels))
    return [
        f"{label:<{margin}}  {'  '.join(each.rjust(width) for each in row)}".rstrip()
        for label, row in zip(labels, matrix, strict=True)
    ]
