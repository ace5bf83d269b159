"""Removes markup from texts: tags as in HTML and XML; entities become characters. Standard library only."""

from __future__ import annotations

import html
import re
from typing import NamedTuple

# A name must follow the bracket, so that "a < b" stays. Older LibreOffice catalogs escape both brackets with a
# backslash.
_TAG = re.compile(r"\\?</?[A-Za-z][\w:.-]*(?:\s[^<>]*)?/?\\?>|<!--.*?-->", re.DOTALL)


class Stripped(NamedTuple):
    """A text without tags, with single spaces, and the number of tags that were removed."""

    text: str
    num_tags: int


def strip(text: str) -> Stripped:
    """Removes tags, then decodes entities: the text `&lt;b&gt;` stands for stays."""
    bare, num_tags = _TAG.subn("", text)
    return Stripped(" ".join(html.unescape(bare).split()), num_tags)
