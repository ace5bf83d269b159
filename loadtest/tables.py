"""Tables of a report: rows of text, in Markdown and in HTML. Knows nothing of what they say."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Table: TypeAlias = Sequence[Sequence[str]]
"""A row of headings, then rows; the first column is text, the others are figures."""


def to_markdown(table: Table) -> str:
    """Figures to the right."""
    heading, *rows = table
    rules = ["---", *["---:"] * (len(heading) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (heading, rules, *rows))


def to_html(table: Table) -> str:
    """One `table` element, everything in it escaped."""

    def row(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    heading, *rows = table
    return (
        f"<table><thead>{row(heading, 'th')}</thead><tbody>{''.join(row(each, 'td') for each in rows)}</tbody></table>"
    )
