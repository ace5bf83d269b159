"""A report as a list of blocks, rendered as Markdown with files beside it or as one self-contained HTML page."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

DATA = "data"
"""Folder of pictures and data, beside a document."""
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; font-size: 0.8rem; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: 0.3rem 0.5rem; border-bottom: 1px solid #ddd; text-align: right; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 2rem 0; } figure svg { max-width: 100%; height: auto; }
figcaption { color: #444; font-size: 0.9rem; max-width: 46rem; }
.holds { border-left: 0.4rem solid #009e73; padding-left: 1rem; }
.refused { border-left: 0.4rem solid #d55e00; padding-left: 1rem; }
.open { border-left: 0.4rem solid #999999; padding-left: 1rem; }
"""


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading of the given level."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; `**strong**` and `code` are its only marks. `style` is a CSS class of the page."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Items:
    """A bulleted list; nothing is rendered if it is empty."""

    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """A row of headings, then rows; the first column is text, the others are figures."""

    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Drawing:
    """An SVG with a caption. `name` is its file's stem."""

    name: str
    title: str
    caption: str
    svg: bytes

    def write(self, folder: Path) -> None:
        """Writes the file that the Markdown refers to."""
        (folder / f"{self.name}.svg").write_bytes(self.svg)


Block: TypeAlias = Heading | Text | Items | Table | Drawing


def write_markdown(blocks: Sequence[Block], path: Path) -> Path:
    """Writes the document, and its drawings under `data`; returns the document's path."""
    folder = path.parent / DATA
    folder.mkdir(parents=True, exist_ok=True)
    write_drawings(blocks, folder)
    path.write_text("\n\n".join(text for block in blocks if (text := _markdown(block))) + "\n", encoding="utf-8")
    return path


def write_drawings(blocks: Iterable[Block], folder: Path) -> None:
    """Writes every drawing as a file."""
    for block in blocks:
        if isinstance(block, Drawing):
            block.write(folder)


def to_page(title: str, blocks: Iterable[Block], data: Any) -> str:
    """One HTML page that needs no other file, with `data` as JSON in a script element."""
    raw = json.dumps(data, allow_nan=False).replace("</", "<\\/")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>\n'
        + "\n".join(text for block in blocks if (text := _html(block)))
        + f'\n<script type="application/json" id="results">{raw}</script>\n</body></html>\n'
    )


def _markdown(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {block.text}"
        case Text():
            return block.text
        case Items():
            return "\n".join(f"- {line}" for line in block.lines)
        case Table():
            heading, *rows = block.rows
            rules = ["---", *["---:"] * (len(heading) - 1)]
            return "\n".join("| " + " | ".join(row) + " |" for row in (heading, rules, *rows))
        case Drawing():
            return f"![{block.title}]({DATA}/{block.name}.svg)\n\n{block.caption}"


def _html(block: Block) -> str:
    match block:
        case Heading():
            return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
        case Text():
            style = f' class="{block.style}"' if block.style else ""
            return f"<p{style}>{_inline(block.text)}</p>"
        case Items():
            return f"<ul>{_elements('li', map(_inline, block.lines))}</ul>" if block.lines else ""
        case Table():
            heading, *rows = (map(html.escape, row) for row in block.rows)
            body = _elements("tr", (_elements("td", row) for row in rows))
            return f"<table><thead><tr>{_elements('th', heading)}</tr></thead><tbody>{body}</tbody></table>"
        case Drawing():
            svg, caption = _standalone(block.svg.decode(), block.name), _inline(block.caption)
            return f'<figure id="{block.name}">{svg}<figcaption>{caption}</figcaption></figure>'


def _elements(tag: str, contents: Iterable[str]) -> str:
    return "".join(f"<{tag}>{content}</{tag}>" for content in contents)


def _inline(markdown: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(markdown))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)


def _standalone(svg: str, name: str) -> str:
    """An SVG to embed among others: without its prologue, its ids prefixed with its name."""
    svg = svg[svg.index("<svg") :]
    for before, after in (('id="', f'id="{name}-'), ('href="#', f'href="#{name}-'), ("url(#", f"url(#{name}-")):
        svg = svg.replace(before, after)
    return svg
