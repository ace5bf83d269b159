"""Markdown of reports: tables, figures with units, and the parts of documents that programs write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(headings: str, rows: Iterable[Sequence[object]], *, text_columns: int = 1) -> list[str]:
    """Lines; headings are separated by bars, and the columns after the text are aligned to the right."""
    names = headings.split("|")
    rules = ["---"] * text_columns + ["---:"] * (len(names) - text_columns)
    return [f"| {' | '.join(map(str, cells))} |" for cells in (names, rules, *rows)]


def milliseconds(seconds: float) -> str:
    """With unit."""
    return f"{1e3 * seconds:.1f} ms"


def microseconds(seconds: float, digits: int = 0) -> str:
    """With unit."""
    return f"{1e6 * seconds:,.{digits}f} µs"


def times(value: float | None, interval: Sequence[float] | None) -> str:
    """A ratio and its interval."""
    if value is None:
        return "-"
    return f"{value:.2f}" + ("" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})")


def verdict(holds: object) -> str:
    """What is said of a promise."""
    return "holds" if holds else "does **not** hold"


def measured(results: Mapping[str, Any]) -> str:
    """The command of a run, its code, its day, and how busy others kept the machine."""
    others = results["others_share"]
    busy = "" if others is None else f" Other processes took {others:.1%} of the machine."
    return f"Measured by `{results['command']}` at {results['commit']} on {results['date']}.{busy}"


def conditions(results: Mapping[str, Any]) -> str:
    """Threads and processor."""
    return f"{results['settings']['threads']} threads, on {results['machine']['processor']}"


def subject(results: Mapping[str, Any]) -> str:
    """Model and precision."""
    return f"{results['settings']['model']} {results['settings']['precision']}"


def replace(text: str, begin: str, end: str, made: str) -> str:
    """The document with `made` between the two marks, on lines of its own.

    Raises:
        ValueError: if a mark is missing.
    """
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the document lacks {begin} or {end}")
    return f"{before}{begin}\n{made}\n{end}{after}"
