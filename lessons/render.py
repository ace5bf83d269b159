"""Pages as text for a terminal and as Markdown."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence

import numpy as np

from lessons.frame import Code, Figures, Lesson, Page, Paragraph
from service.explain.heatmap import Heatmap, visible

_SHADES = " ░▒▓█"
_MAX_CELLS = 16
_WIDTH = 100


def terminal(lesson: Lesson, page: Page, number: int, picture: str) -> str:
    """A page for a terminal; heat maps are drawn with block characters."""
    blocks = [f"{number}. {lesson.title}", *(_plain(item) for item in page.items if not isinstance(item, Code))]
    blocks += ["\n".join(_blocks(heatmap)) for heatmap in page.maps if max(heatmap.weights.shape) <= _MAX_CELLS]
    blocks += [_wrap(f"Called: {', '.join(page.called)}."), f"Picture: {picture}"]
    return "\n\n".join(blocks) + "\n"


def markdown(lesson: Lesson, page: Page, number: int, picture: str) -> str:
    """The page as a document; `picture` is the SVG's name beside it."""
    hints = [item.text for item in page.items if isinstance(item, Paragraph) and item.is_hint]
    parts = [
        f"# {number}. {lesson.title}",
        f"Written by `python -m model lesson {lesson.name} --docs docs/learn/lessons`; [all lessons](index.md).",
        *_documents(page),
        f"![{lesson.title}]({picture})",
        *(_wrap(f"**Look**: {hint}") for hint in hints),
        "## What was called",
        "\n".join(f"- {_link(name)}" for name in page.called),
    ]
    return "\n\n".join(parts) + "\n"


def index(lessons: Sequence[tuple[str, Lesson]]) -> str:
    """A document that links to all pages, given their names."""
    lines = [f"{number}. [{lesson.title}]({name}.md)" for number, (name, lesson) in enumerate(lessons, start=1)]
    return (
        "\n\n".join(
            [
                "# Ten lessons",
                _wrap(
                    "Attention and the transformer, computed by the product's own modules with small numbers. `onward "
                    "lesson` or `python -m model lesson` runs all ten in a few minutes, `onward lesson mask` one of "
                    "them; it prints the page and writes its picture to `lessons-out`. It needs the extras `cpu` and "
                    "`train` (`make demo` installs them), and no trained model."
                ),
                _wrap(
                    "The lessons follow a set of lecture notes, “the notes”, which are not part of this repository. "
                    "Where the notes print a number, it stands beside the one computed here, with its section, and "
                    "mistakes of the notes are named. Losses are in nats: a loss of ln 8 is a blind guess among eight. "
                    "Trained numbers differ in their last digits between processors. `page.call(f, …)` in the code is "
                    "f(…), and notes f's name for the list at a page's end."
                ),
                "\n".join(lines),
                "A student's questions, each with its picture: [questions](../questions.md).",
            ]
        )
        + "\n"
    )


def _documents(page: Page) -> Iterator[str]:
    """The items but hints; figures that follow each other share a block."""
    waiting: list[str] = []
    for item in page.items:
        if isinstance(item, Figures):
            waiting.append(_plain(item))
            continue
        if waiting:
            yield _fence("\n\n".join(waiting), "text")
            waiting = []
        if isinstance(item, Code):
            yield _fence(textwrap.dedent(inspect.getsource(item.function)).strip(), "python")
        elif not item.is_hint:
            yield "\n".join(textwrap.wrap(item.text, _WIDTH))
    if waiting:
        yield _fence("\n\n".join(waiting), "text")


def _plain(item: Figures | Paragraph | Code) -> str:
    if isinstance(item, Paragraph):
        return _wrap(f"Look: {item.text}" if item.is_hint else item.text)
    if isinstance(item, Code):
        return inspect.getsource(item.function)
    origin = f" ({item.origin})" if item.origin else ""
    if len(item.lines) == 1 and len(item.name) + len(item.lines[0]) + len(origin) < _WIDTH:
        return f"  {item.name}: {item.lines[0].strip()}{origin}"
    return "\n".join([f"  {item.name}{origin}", *(f"    {line}" for line in item.lines)])


def _blocks(heatmap: Heatmap) -> Iterator[str]:
    """A heat map as lines of text: two block characters a cell, darker for more."""
    yield f"  {heatmap.lines[0]}"
    margin = max(len(visible(each)) for each in heatmap.rows)
    shares = np.clip(np.nan_to_num(heatmap.weights) / (heatmap.strongest or 1.0), 0.0, 1.0)
    for label, row in zip(heatmap.rows, shares, strict=True):
        cells = "".join(2 * _SHADES[round(float(share) * (len(_SHADES) - 1))] for share in row)
        yield f"    {visible(label):>{margin}} │{cells}│"


def _link(name: str) -> str:
    """`package.module.function` with a link to its file."""
    module, _, function = name.rpartition(".")
    while module and module not in sys.modules:
        module, _, scope = module.rpartition(".")
        function = f"{scope}.{function}"
    if module.partition(".")[0] in {"model", "service", "lessons", "loadtest", "export", "onward"}:
        return f"[`{name}`](../../../{module.replace('.', '/')}.py)"
    return f"`{name}`"


def _wrap(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _WIDTH))


def _fence(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```"
