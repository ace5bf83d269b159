"""Markup out of a text: tags as in HTML and XML, and the entities between them. Standard library only."""

from __future__ import annotations

import html
import re
from typing import NamedTuple

# A name must follow the bracket, so that "a < b" stays; older LibreOffice catalogs put a backslash before both.
_TAG = re.compile(r"\\?</?[A-Za-z][\w:.-]*(?:\s[^<>]*)?/?\\?>|<!--.*?-->", re.DOTALL)


class Stripped(NamedTuple):
    """A text without its tags, runs of blanks made one, and how many tags there were."""

    text: str
    num_tags: int


def strip(text: str) -> Stripped:
    """Takes tags out, then reads entities: what `&lt;b&gt;` spells out is text and stays."""
    bare, num_tags = _TAG.subn("", text)
    return Stripped(" ".join(html.unescape(bare).split()), num_tags)
