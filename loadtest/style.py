"""The look of pictures: colors, lettering, axes; equal figures give equal bytes.

Colors are Okabe and Ito's, which color-blind readers can distinguish; markers and line styles repeat the distinction.
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
# Inches, of one drawing and of two side by side.
_SINGLE, _DOUBLE = (6.4, 4.0), (8.4, 3.6)
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.0,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
}


def to_svg(draw: Callable[[], Figure], salt: str) -> bytes:
    """Draws a figure as SVG; the salt makes its ids differ from those of other pictures."""
    stream = io.BytesIO()
    with mpl.rc_context({**_SETTINGS, "svg.hashsalt": salt}):
        draw().savefig(stream, format="svg", facecolor="white", metadata={"Date": None})
    return stream.getvalue()


def new_figure(columns: int = 1) -> tuple[Figure, list[Axes]]:
    """One drawing, or two side by side."""
    figure = Figure(figsize=_SINGLE if columns == 1 else _DOUBLE, layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def logarithmic_axis(axes: Axes, label: str) -> None:
    """A logarithmic y axis with plain numbers."""
    axes.set_yscale("log")
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
