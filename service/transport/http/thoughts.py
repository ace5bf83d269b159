"""Thoughts of a model that thinks: what is ahead of `</think>` in an output is `reasoning_content`, the rest `content`.

    <think>
    The user asks for a name.
    </think>

    Ada

The opening tag is the model's own or already stands in the prompt. Over gRPC the text is whole, tags included.
"""

from __future__ import annotations

from model.spec.chat import THOUGHTS

FIELD = "reasoning_content"
_TAG, _END_TAG = THOUGHTS


class ThoughtParser:
    """Splits an output, as it comes. `is_within` is whether it begins inside of thoughts.

    `num_tokens` are the tokens of its thoughts, tags included, among those that `count` had, while it `is_counting`.
    """

    def __init__(self, *, is_within: bool) -> None:
        self._read = self._read_break if is_within else self._read_begin
        self._is_past = False
        self._rest = self._thoughts = self._content = ""
        self._is_last = False
        self._spelled = _TAG.encode() if is_within else b""
        self.is_counting = True
        self._num_seen = self.num_tokens = 0

    def count(self, spelled: bytes) -> None:
        """Counts a token, given its bytes: it may come ahead of its text."""
        if not self.is_counting:
            return
        self._num_seen += 1
        self._spelled = (self._spelled + spelled).lstrip()
        tag, end = _TAG.encode(), _END_TAG.encode()
        self.is_counting = tag.startswith(self._spelled[: len(tag)])
        if self._spelled.startswith(tag):
            self.num_tokens = self._num_seen
            self.is_counting = end not in self._spelled
            # The end's beginning, at most, is kept beside the tag.
            self._spelled = tag + self._spelled[len(tag) :][-len(end) :]

    def take(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """New thoughts, and new text behind them. Line breaks beside the tags are left out."""
        self._rest += text
        self._is_last = is_last
        self._thoughts = self._content = ""
        while self._read():
            pass
        return self._thoughts, self._content

    def _read_begin(self) -> bool:
        begin = self._rest.lstrip()
        if begin.startswith(_TAG):
            self._rest = begin.removeprefix(_TAG)
            self._read = self._read_break
            return True
        if _TAG.startswith(begin) and not self._is_last:
            return False
        self._read = self._read_content
        return True

    def _read_thoughts(self) -> bool:
        text, tag, rest = self._rest.partition(_END_TAG)
        if not tag and not self._is_last:
            # What may be the beginning of the tag, and line breaks that may be ahead of it.
            kept = next(size for size in range(len(_END_TAG) - 1, -1, -1) if text.endswith(_END_TAG[:size]))
            rest = text[len(text[: len(text) - kept].rstrip("\n")) :]
        text = text.removesuffix(rest) if not tag else text.rstrip("\n")
        self._thoughts += text
        self._rest = rest
        if tag:
            self._is_past, self._read = True, self._read_break
        return bool(tag)

    def _read_break(self) -> bool:
        """Line breaks behind a tag."""
        self._rest = self._rest.lstrip("\n")
        if self._rest:
            self._read = self._read_content if self._is_past else self._read_thoughts
        return bool(self._rest)

    def _read_content(self) -> bool:
        self._content, self._rest = self._content + self._rest, ""
        return False


def with_thoughts(thoughts: str, content: str) -> str:
    """An earlier answer as templates look for it."""
    return f"{_TAG}\n{thoughts}\n{_END_TAG}\n\n{content}"
