"""What a person sees while a model trains: a bar on a terminal, plain lines anywhere else.

Knows how to show a run's progress, and nothing of where it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar


@dataclass(frozen=True, slots=True)
class Progress:
    """After `step` of `steps`: mean loss in nats per token lately, speed lately, and what is left at the run's pace."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float
    seconds_left: float

    def __str__(self) -> str:
        return f"loss {self.loss:.3f}  {self.tokens_per_second:,.0f} tokens/s  {self.seconds_left:.0f} s left"


class Reporter(Protocol):
    """Shows how far a run has come; a context manager around the run."""

    def __enter__(self) -> Self:
        """Starts showing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the terminal as it was."""

    def update(self, progress: Progress) -> None:
        """The run has come so far."""

    def say(self, line: str) -> None:
        """Something that stays on the screen."""


class BarReporter:
    """A bar that redraws itself."""

    def __init__(self, console: Console) -> None:
        self._bar = Bar(BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), console=console)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, progress: Progress) -> None:
        """Redraws."""
        self._bar.update(self._task, completed=progress.step, total=progress.steps, description=str(progress))

    def say(self, line: str) -> None:
        """Prints above the bar."""
        self._bar.console.print(line, markup=False, highlight=False)


class LineReporter:
    """One line now and then, for logs and pipes.

    Args:
        stream: where to.
        num_lines: about how many lines a whole run prints.
    """

    def __init__(self, stream: TextIO, num_lines: int = 20) -> None:
        self._stream = stream
        self._num_lines = num_lines
        self._num_printed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, progress: Progress) -> None:
        """Prints when another share of the run is done."""
        due = progress.step * self._num_lines // progress.steps
        if due > self._num_printed:
            self._num_printed = due
            self.say(f"step {progress.step}/{progress.steps}  {progress}")

    def say(self, line: str) -> None:
        """Prints and flushes."""
        print(line, file=self._stream, flush=True)


class SilentReporter:
    """Shows nothing: of several processes one speaks."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, progress: Progress) -> None:
        """Nothing."""

    def say(self, line: str) -> None:
        """Nothing."""


def make_reporter(stream: TextIO, *, speaks: bool = True) -> Reporter:
    """A bar where there is a terminal to draw it on; nothing where another process speaks."""
    if not speaks:
        return SilentReporter()
    console = Console(file=stream)
    return BarReporter(console) if console.is_terminal else LineReporter(stream)
