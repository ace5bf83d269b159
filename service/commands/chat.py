"""`python -m service chat`: a conversation with a served model, line by line; the history is this process's.

On a terminal it prompts; otherwise each line of the input is a message, and only the answers are printed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TextIO

from onward import NO_RETRIES, CallError, Client, IncompleteStream
from service.commands.ask import conversation, generate_options
from service.commands.connection import connection
from service.commands.terminal import write_text
from service.config import ChatConfig

_FAILED = 1
# The shells' exit status of a command that SIGINT ended.
_INTERRUPTED = 130
_CLEAR = "/clear"


def chat(config: ChatConfig, lines: TextIO, out: TextIO, err: TextIO) -> int:
    """Answers every line of `lines`; returns the exit status.

    Ctrl-C ends an answer, and what was said of it stays in the history. A message without an answer is dropped. Errors
    go to `err`, and end the command unless `lines` is a terminal.
    """
    is_terminal = lines.isatty()
    if is_terminal:
        with suppress(ImportError):  # Windows has none
            import readline  # noqa: F401 — gives `input` its line editing
        err.write(f"{config.model}: Ctrl-C stops an answer, {_CLEAR} forgets the conversation, Ctrl-D ends\n")
    turns: list[tuple[str, str]] = []
    with Client(connection(config), retries=NO_RETRIES) as client:
        while True:
            try:
                message = input("> ") if is_terminal else lines.readline()
            except EOFError:
                out.write("\n")
                return 0
            except KeyboardInterrupt:
                err.write("\n")
                if not is_terminal:
                    return _INTERRUPTED
                continue
            except UnicodeDecodeError:
                err.write("the input must be UTF-8\n")
                return _FAILED
            if not message:
                if not is_terminal:
                    return 0
                continue
            message = message.strip()
            if message == _CLEAR:
                turns.clear()
            elif message:
                asked = ("user", message)
                answer, error = _answer(client, config, [*turns, asked], out)
                if answer:
                    turns += [asked, ("assistant", answer)]
                if error is not None:
                    err.write(f"{error}\n")
                    if not is_terminal:
                        return _FAILED


def _answer(
    client: Client, config: ChatConfig, turns: list[tuple[str, str]], out: TextIO
) -> tuple[str, Exception | None]:
    """Prints an answer as it comes; returns its text, and the error that ended it early."""
    said: list[str] = []
    failure: Exception | None = None
    try:
        with client.stream(conversation(config, *turns), **generate_options(config)) as stream:
            for chunk in stream:
                said.append(chunk.text)
                write_text(chunk.text, out)
                out.flush()
    except (CallError, IncompleteStream) as error:
        failure = error
    except KeyboardInterrupt:
        pass
    if said or failure is None:
        out.write("\n")
        out.flush()
    return "".join(said), failure
