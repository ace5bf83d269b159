"""Progress of a run on stderr: a bar on a terminal, plain lines elsewhere, nothing where another process reports."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar


@dataclass(frozen=True, slots=True)
class Progress:
    """After `step` of `steps`: recent mean loss in nats per token, recent speed, estimated time left."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float
    seconds_left: float

    def __str__(self) -> str:
        return f"loss {self.loss:.3f}  {self.tokens_per_second:,.0f} tokens/s  {self.seconds_left:.0f} s left"


class Reporter:
    """A context manager around a run that shows its progress; this base class shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, progress: Progress) -> None:
        """Shows how far the run is."""

    def say(self, line: str) -> None:
        """Prints a line that stays on the screen."""


class BarReporter(Reporter):
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
        """Redraws the bar."""
        self._bar.update(self._task, completed=progress.step, total=progress.steps, description=str(progress))

    def say(self, line: str) -> None:
        """Prints above the bar."""
        self._bar.console.print(line, markup=False, highlight=False)


class LineReporter(Reporter):
    """About `num_lines` lines per run, for logs and pipes."""

    def __init__(self, stream: TextIO, num_lines: int = 20) -> None:
        self._stream = stream
        self._num_lines = num_lines
        self._num_printed = 0

    def update(self, progress: Progress) -> None:
        """Prints a line each time another `1 / num_lines` of the run is done."""
        due = progress.step * self._num_lines // progress.steps
        if due > self._num_printed:
            self._num_printed = due
            self.say(f"step {progress.step}/{progress.steps}  {progress}")

    def say(self, line: str) -> None:
        """Prints and flushes."""
        print(line, file=self._stream, flush=True)


def make_reporter(stream: TextIO, *, speaks: bool = True) -> Reporter:
    """A bar on a terminal, else lines; silent where another process speaks."""
    if not speaks:
        return Reporter()
    console = Console(file=stream)
    return BarReporter(console) if console.is_terminal else LineReporter(stream)
