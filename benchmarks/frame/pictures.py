"""Pictures as SVG: text stays text, and the same figures give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib as mpl
from matplotlib.figure import Figure

_RASTER_DOTS_PER_INCH = 150
"""Of rasterized parts."""


@contextmanager
def drawing(name: str, width: float, height: float, *, font_size: float = 8.0) -> Iterator[tuple[Figure, io.StringIO]]:
    """A figure in inches to draw on, and the stream that has it as SVG once the block ends.

    The name makes the ids within unique among pictures; `font_size` in points.
    """
    stream = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": font_size}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, stream
        figure.savefig(stream, format="svg", dpi=_RASTER_DOTS_PER_INCH, facecolor="white", metadata={"Date": None})
