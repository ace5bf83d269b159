"""`python -m model lesson [NAME …]` and `onward lesson`: runs lessons, prints their pages, writes their pictures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from lessons import (
    block,
    encoder_decoder,
    heads,
    length,
    mask,
    positions,
    query_key_value,
    scores,
    six_steps,
    without_parameters,
)
from lessons.frame import Lesson
from lessons.render import index, markdown, terminal

LESSONS: tuple[Lesson, ...] = (
    six_steps.LESSON,
    without_parameters.LESSON,
    query_key_value.LESSON,
    scores.LESSON,
    heads.LESSON,
    positions.LESSON,
    mask.LESSON,
    block.LESSON,
    encoder_decoder.LESSON,
    length.LESSON,
)
"""In their order; numbers count from 1."""


_TARGET, _TEXT = "127.0.0.1:8001", "May 3, 1987"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the lessons and returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.served is None and (options.target or options.text):
        parser.error("--target and --text go with --served")
    if options.served is not None:
        if options.docs is not None:
            parser.error("--docs does not go with --served")
        if options.name != encoder_decoder.LESSON.name:
            parser.error(f"--served needs the lesson {encoder_decoder.LESSON.name}")
        # Imported late: only this needs gRPC.
        from lessons.served import show

        return show(options.served, options.text or _TEXT, options.target or _TARGET, options.out)
    folder: Path = options.docs or options.out
    folder.mkdir(parents=True, exist_ok=True)
    # More threads gain nothing on matrices of this size, and one gives the same sums everywhere.
    torch.set_num_threads(1)
    for number, lesson in enumerate(LESSONS, start=1):
        if options.name in (None, lesson.name):
            _walk(lesson, number, folder, is_document=options.docs is not None)
    if options.docs is not None:
        named = [(stem(lesson, number), lesson) for number, lesson in enumerate(LESSONS, start=1)]
        (folder / "index.md").write_text(index(named), encoding="utf-8")
    return 0


def stem(lesson: Lesson, number: int) -> str:
    """The name of a lesson's files."""
    return f"{number:02}-{lesson.name}"


def _walk(lesson: Lesson, number: int, folder: Path, *, is_document: bool) -> None:
    page = lesson.run()
    picture = folder / f"{stem(lesson, number)}.svg"
    picture.write_text(page.picture, encoding="utf-8")
    if is_document:
        path = picture.with_suffix(".md")
        path.write_text(markdown(lesson, page, number, picture.name), encoding="utf-8")
        sys.stdout.write(f"{path}\n")
    else:
        sys.stdout.write(terminal(lesson, page, number, str(picture)) + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    prog = "onward lesson" if Path(sys.argv[0]).name == "onward" else "python -m model lesson"
    parser = argparse.ArgumentParser(
        prog=prog, description="Walks through the lecture: ten lessons, or the one named.", allow_abbrev=False
    )
    names = [lesson.name for lesson in LESSONS]
    numbers = {str(number): name for number, name in enumerate(names, start=1)}
    parser.add_argument(
        "name",
        nargs="?",
        choices=names,
        type=lambda given: numbers.get(given, given),
        metavar="NAME",
        help=f"{', '.join(names)}, or its number",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("lessons-out"), metavar="DIR", help="folder of the pictures (lessons-out)"
    )
    parser.add_argument("--docs", type=Path, metavar="DIR", help="write pages and pictures to this folder instead")
    parser.add_argument(
        "--served", metavar="MODEL", help="with encoder-decoder: draw a request to this model of a running server"
    )
    parser.add_argument("--target", metavar="HOST:PORT", help=f"address of that server ({_TARGET})")
    parser.add_argument("--text", help=f"source text of that request ({_TEXT})")
    return parser
