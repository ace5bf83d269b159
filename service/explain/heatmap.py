"""Heat maps as small SVGs with labels on both axes, in light and dark mode.

Labels are untrusted and escaped. No scripts, fonts or external resources. Knows nothing of attention.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

STYLE = """\
svg text { fill: #1f2328; font-family: Helvetica, Arial, sans-serif }
svg .token { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace }
svg .faint { fill: #59636e }
svg .line { fill: none; stroke: #d1d9e0 }
svg .ink { fill: #0550ae; shape-rendering: crispEdges }
svg .paper { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  svg text { fill: #f0f6fc }
  svg .faint { fill: #9198a1 }
  svg .line { stroke: #3d444d }
  svg .ink { fill: #79c0ff }
  svg .paper { fill: #0d1117 }
}
"""
"""CSS: once on a page, or in each picture that is a file of its own."""

# Steps of opacity: too fine to be distinguished. Each is one path.
_NUM_LEVELS = 32
_MAX_LABEL = 16
# A monospaced character's width, relative to the font size.
_ADVANCE = 0.61
_GAP = 6.0
_MIN_GRID_CELL = 10.0
_LEGEND_WIDTH = 230.0
_AXIS_HEIGHT = 24.0
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# White space as character vocabularies, GPT-2's byte vocabulary and SentencePiece spell it. Other letters of GPT-2's
# alphabet are letters of some language.
_SHAPES = str.maketrans({" ": "␣", "Ġ": "␣", "▁": "␣", "\n": "↵", "Ċ": "↵", "\r": "␍", "\t": "⇥"})


@dataclass(frozen=True, slots=True)
class Heatmap:
    """A matrix and its labels.

    Attributes:
        rows: labels.
        columns: labels.
        weights: `[rows, columns]`, from 0 to 1.
        strongest: the weight with full opacity.
        lines: of text above, the first one a title.
        row_axis: name of the row labels.
        column_axis: name of the column labels.
        scale: what the legend says of the strongest weight, after its number.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    weights: npt.NDArray[Any]
    strongest: float
    lines: Sequence[str] = field(default=())
    row_axis: str = ""
    column_axis: str = ""
    scale: str = "of its row"


def draw(heatmap: Heatmap, cell: float, *, alone: bool = False) -> str:
    """One `<svg>` element.

    Args:
        heatmap: what to draw.
        cell: side of a cell, in pixels.
        alone: whether it is a file of its own.
    """
    frame = _Frame.of(heatmap, cell)
    name = heatmap.lines[0] if heatmap.lines else "heat map"
    return _element(name, list(_parts(heatmap, frame)), frame.width, frame.height, alone=alone)


def draw_beside(heatmaps: Sequence[Heatmap], cell: float) -> str:
    """One SVG file of several heat maps, from left to right."""
    frames = [_Frame.of(heatmap, cell) for heatmap in heatmaps]
    parts: list[str] = []
    left = 0.0
    for heatmap, frame in zip(heatmaps, frames, strict=True):
        parts += [f'<g transform="translate({left:g} 0)">', *_parts(heatmap, frame), "</g>"]
        left += frame.width + 2 * _GAP
    name = "; ".join(heatmap.lines[0] for heatmap in heatmaps if heatmap.lines)
    return _element(name, parts, left, max(frame.height for frame in frames), alone=True)


def _parts(heatmap: Heatmap, frame: _Frame) -> Iterator[str]:
    yield from (*_title(heatmap), *_labels(heatmap, frame), *_cells(heatmap, frame), *_legend(heatmap, frame))


def _element(name: str, parts: list[str], width: float, height: float, *, alone: bool) -> str:
    attributes = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    if alone:
        # Its own background: the page around it is unknown.
        paper = f'<rect width="{width:g}" height="{height:g}" class="paper"/>'
        parts = [f"<style>{_escape(STYLE)}</style>", paper, *parts]
        attributes += ' xmlns="http://www.w3.org/2000/svg"'
    return f'<svg role="img" aria-label="{_escape(name)}" {attributes}>\n' + "\n".join(parts) + "\n</svg>\n"


def visible(token: str) -> str:
    """A token as a label: visible white space, at most `_MAX_LABEL` characters, a dot if empty."""
    shaped = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in token.translate(_SHAPES))
    return (shaped if len(shaped) <= _MAX_LABEL else shaped[: _MAX_LABEL - 1] + "…") or "·"


@dataclass(frozen=True, slots=True)
class _Frame:
    """Layout in pixels: the matrix's top left corner, a cell's side, the font size, the whole picture."""

    left: float
    top: float
    cell: float
    letter: float
    width: float
    height: float

    @classmethod
    def of(cls, heatmap: Heatmap, cell: float) -> _Frame:
        letter = max(8.0, min(16.0, 0.68 * cell))
        head = 30.0 * bool(heatmap.lines) + 19.0 * max(0, len(heatmap.lines) - 1)
        axis = _label_height(heatmap.columns[: _num_below_axis(heatmap, cell)], letter) + _AXIS_HEIGHT
        above = max(_label_height(heatmap.columns, letter), axis if heatmap.column_axis else 0.0)
        row_width = _ADVANCE * letter * max((len(visible(each)) for each in heatmap.rows), default=1)
        left = _GAP + row_width + _GAP + (26.0 if heatmap.row_axis else 0.0)
        top = head + _GAP + above + _GAP
        has_legend = bool(heatmap.lines)
        matrix_width = max(cell * len(heatmap.columns), _LEGEND_WIDTH * has_legend)
        lines = (2 * _GAP + (8.4 if index == 0 else 6.6) * len(line) for index, line in enumerate(heatmap.lines))
        return cls(
            left=left,
            top=top,
            cell=cell,
            letter=letter,
            width=math.ceil(max(left + matrix_width + 2 * _GAP, *lines, 0)),
            height=math.ceil(top + cell * len(heatmap.rows) + 2 * _GAP + 34.0 * has_legend),
        )


def _label_height(columns: Sequence[str], letter: float) -> float:
    """Height of the tallest column label. Labels of one character are upright, others rotated."""
    longest = max((len(visible(each)) for each in columns), default=1)
    return letter if longest == 1 else _ADVANCE * letter * longest


def _num_below_axis(heatmap: Heatmap, cell: float) -> int:
    """Number of columns below the axis name."""
    return math.ceil(7.0 * (len(heatmap.column_axis) + 3) / cell)


def _title(heatmap: Heatmap) -> Iterator[str]:
    for index, line in enumerate(heatmap.lines):
        if index == 0:
            yield f'<text x="{_GAP:g}" y="20" font-size="16" font-weight="bold">{_escape(line)}</text>'
        else:
            yield f'<text class="faint" x="{_GAP:g}" y="{21 + 19 * index}" font-size="13">{_escape(line)}</text>'


def _labels(heatmap: Heatmap, frame: _Frame) -> Iterator[str]:
    cell, letter = frame.cell, frame.letter
    # Cells smaller than letters: only every n-th label.
    every = max(1, math.ceil(0.9 * letter / cell))
    base = frame.top - _GAP
    middle = 0.36 * letter
    for index, label in list(enumerate(heatmap.columns))[::every]:
        x = frame.left + cell * (index + 0.5)
        text = visible(label)
        if len(text) == 1:
            place = f'x="{x:g}" y="{base:g}" text-anchor="middle"'
        else:
            place = f'transform="translate({x + middle:g} {base:g}) rotate(-90)"'
        yield f'<text class="token" {place} font-size="{letter:g}">{_escape(text)}</text>'
    for index, label in list(enumerate(heatmap.rows))[::every]:
        y = frame.top + cell * (index + 0.5) + middle
        place = f'x="{frame.left - _GAP:g}" y="{y:g}" text-anchor="end"'
        yield f'<text class="token" {place} font-size="{letter:g}">{_escape(visible(label))}</text>'
    if heatmap.column_axis:
        below = heatmap.columns[: _num_below_axis(heatmap, cell)]
        x, y = frame.left, base - _label_height(below, letter) - 0.4 * _AXIS_HEIGHT
        yield f'<text class="faint" x="{x:g}" y="{y:g}" font-size="13">{_escape(heatmap.column_axis)} →</text>'
    if heatmap.row_axis:
        place = f'transform="translate(18 {frame.top:g}) rotate(-90)" text-anchor="end"'
        yield f'<text class="faint" {place} font-size="13">← {_escape(heatmap.row_axis)}</text>'


def _cells(heatmap: Heatmap, frame: _Frame) -> Iterator[str]:
    """One path per level of opacity, in units of cells; equal neighbors are one rectangle."""
    num_rows, num_columns = heatmap.weights.shape
    shades = np.minimum(np.asarray(heatmap.weights, np.float64) / (heatmap.strongest or 1.0), 1.0)
    levels = np.rint(shades * _NUM_LEVELS).astype(int)
    runs: dict[int, list[str]] = {}
    for y, row in enumerate(levels.tolist()):
        x = 0
        for level, cells in groupby(row):
            length = len(list(cells))
            runs.setdefault(level, []).append(f"M{x} {y}h{length}v1h-{length}z")
            x += length
    runs.pop(0, None)
    yield f'<g transform="translate({frame.left:g} {frame.top:g}) scale({frame.cell:g})">'
    for level, path in sorted(runs.items()):
        yield f'<path class="ink" fill-opacity="{level / _NUM_LEVELS:.3g}" d="{"".join(path)}"/>'
    yield "</g>"
    lines = f"M0 0h{num_columns}v{num_rows}h-{num_columns}z"
    if frame.cell >= _MIN_GRID_CELL:
        lines += "".join(f"M{x} 0v{num_rows}" for x in range(1, num_columns))
        lines += "".join(f"M0 {y}h{num_columns}" for y in range(1, num_rows))
    place = f'transform="translate({frame.left:g} {frame.top:g}) scale({frame.cell:g})"'
    yield f'<path class="line" {place} stroke-width="{0.6 / frame.cell:.3g}" d="{lines}"/>'


def _legend(heatmap: Heatmap, frame: _Frame) -> Iterator[str]:
    if not heatmap.lines:
        return
    x, y, step = frame.left, frame.height - 30.0, 12.0
    for level in range(9):
        yield (
            f'<rect class="ink" x="{x + 16 + step * level:g}" y="{y:g}" width="{step:g}" height="12" '
            f'fill-opacity="{level / 8:.3g}"/>'
        )
    yield f'<rect class="line" x="{x + 16:g}" y="{y:g}" width="{9 * step:g}" height="12" stroke-width="0.6"/>'
    yield f'<text class="faint" x="{x:g}" y="{y + 11:g}" font-size="13">0</text>'
    end = f"{heatmap.strongest:.2f} {heatmap.scale}"
    yield f'<text class="faint" x="{x + 22 + 9 * step:g}" y="{y + 11:g}" font-size="13">{end}</text>'


def _escape(text: str) -> str:
    """Escapes text for XML and replaces the characters that XML forbids."""
    return html.escape(_NO_XML.sub("\N{REPLACEMENT CHARACTER}", text), quote=True)
