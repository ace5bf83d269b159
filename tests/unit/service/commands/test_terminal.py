"""A model's text cannot steer a terminal; pipes get it as it is."""

from __future__ import annotations

import io

from service.commands.terminal import write_text

TEXT = "a\tb\n\x1b]0;title\x07\x1b[2J\x9b31m\x7f\r"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_are_shown_on_a_terminal_alone() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        write_text(TEXT, out)
    assert pipe.getvalue() == TEXT
    shown = terminal.getvalue()
    assert shown.startswith("a\tb\n\u241b]0;title\u2407")
    assert not {char for char in shown if ord(char) < 32 or 0x7F <= ord(char) < 0xA0} - {"\t", "\n"}
