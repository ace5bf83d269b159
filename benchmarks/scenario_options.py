"""A scenario's command line: what all scenarios take, numbers with their limits, and how options become settings.

Defaults stand in the settings alone. An option is named after the field that it sets, or says so (`dest`), and one that
is not given sets nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from benchmarks.scenario import BUILD

DOCS = Path("docs")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioSettings:
    """What every scenario's settings have: the export's precision, the server's threads, the seed of what is drawn."""

    precision: str = "int8"
    threads: int = 1
    seed: int = 0


_Settings = TypeVar("_Settings", bound=ScenarioSettings)
_Number = TypeVar("_Number", int, float)


def new_parser(name: str, document: str | None, *, quick: str, model: str = "a preset") -> argparse.ArgumentParser:
    """A parser of what all scenarios take; the scenario adds what is its own.

    Args:
        name: of its module.
        document: its docstring, of which the first line is shown.
        quick: what `--quick` makes of it, in a few words.
        model: what `--model` may be; without a word the scenario has a `--model` of its own.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=(document or "").partition("\n")[0],
        argument_default=argparse.SUPPRESS,
    )
    if model:
        parser.add_argument("--model", help=model)
    parser.add_argument("--precision", help="fp32, int8, int4")
    parser.add_argument("--threads", type=at_least(1), help="of the server")
    parser.add_argument("--seed", type=int, help="of what is drawn")
    parser.add_argument("--quick", action="store_true", default=False, help=f"{quick}: to see that it works")
    parser.add_argument(
        "--docs", action="store_true", default=False, help=f"write the report into {DOCS}/ and not into {BUILD}"
    )
    return parser


def read_settings(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    defaults: _Settings,
    shorten: Callable[[_Settings], _Settings],
) -> tuple[_Settings, Path]:
    """The settings, and the folder for the report.

    Args:
        parser: from `new_parser`; each option that it has besides is a field of the settings.
        arguments: of the command line.
        defaults: what holds where nothing is given.
        shorten: what `--quick` does to what was given.

    Raises:
        SystemExit: with status 2, when they do not fit.
    """
    given = vars(parser.parse_args(arguments))
    is_quick, is_for_docs = given.pop("quick"), given.pop("docs")
    settings = replace(defaults, **given)
    return shorten(settings) if is_quick else settings, DOCS if is_for_docs else BUILD


def at_least(least: _Number) -> Callable[[str], _Number]:
    """For an option's `type`: a finite number of the limit's own type, and no less than it."""
    return _reader(type(least), lambda number: number >= least, f"of at least {least:g}")


def above(limit: float) -> Callable[[str], float]:
    """For an option's `type`: a finite number that is greater than the limit."""
    return _reader(float, lambda number: number > limit, f"above {limit:g}")


def _reader(kind: type[_Number], fits: Callable[[_Number], bool], limit: str) -> Callable[[str], _Number]:
    def number(text: str) -> _Number:
        with suppress(ValueError):
            value = kind(text)
            # Neither infinity nor what is no number passes.
            if value < math.inf and fits(value):
                return value
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a {'whole ' * (kind is int)}number {limit}")

    return number
