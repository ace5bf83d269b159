"""Parts of documents that programs write: what lies between two marks is replaced, the rest is people's."""

from __future__ import annotations


def replace(text: str, begin: str, end: str, made: str) -> str:
    """A document with `made` between the two marks, in lines of its own.

    Raises:
        ValueError: when it has no such marks.
    """
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the document lacks {begin} or {end}")
    return f"{before}{begin}\n{made}\n{end}{after}"
