"""How pictures look, whatever they show: colours, lettering, axes, and the same bytes for the same figures.

Colours are Okabe and Ito's, told apart by all common kinds of colour vision; markers and line styles repeat the
distinction. Text stays text.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

BLUE, SKY, ORANGE, GREEN = "#0072B2", "#56B4E9", "#E69F00", "#009E73"
RED, PINK, GREY, BLACK = "#D55E00", "#CC79A7", "#999999", "#000000"
WIDTH, HEIGHT = 6.4, 4.0
TWICE_AS_WIDE, LOWER = 8.4, 3.6
"""Of a picture with two drawings, in inches."""
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.0,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
}
_DOTS_PER_INCH = 160


def to_bytes(draw: Callable[[], Figure], salt: str, file_format: str = "svg") -> bytes:
    """A picture's bytes, SVG or PNG; the salt tells the ids within an SVG from those of others."""
    stream = io.BytesIO()
    with mpl.rc_context({**_SETTINGS, "svg.hashsalt": salt}):
        figure = draw()
        metadata = {"Date": None} if file_format == "svg" else {"Software": None}
        figure.savefig(stream, format=file_format, dpi=_DOTS_PER_INCH, facecolor="white", metadata=metadata)
    return stream.getvalue()


def new_figure(columns: int = 1) -> tuple[Figure, list[Axes]]:
    """One drawing, or several side by side."""
    size = (WIDTH, HEIGHT) if columns == 1 else (TWICE_AS_WIDE, LOWER)
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def logarithmic_axis(axes: Axes, label: str) -> None:
    """The upright axis in powers of ten, its numbers written out."""
    axes.set_yscale("log")
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
