"""The frame of every measurement: settings become options; results become a JSON line, data, a document, a picture.

A scenario is a module of `benchmarks.scenarios` that defines `SCENARIO`. It says what is asked (`measure`), what must
hold (`passed` in its results) and how results read (`render`, `draw`); everything else is here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import pkgutil
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from benchmarks import scenarios
from benchmarks.frame import models, tables
from benchmarks.frame.errors import ArgumentError
from benchmarks.frame.journal import Journal
from benchmarks.frame.models import Subject
from loadtest import provenance
from loadtest.document import DATA
from loadtest.machine import describe, watch_others

BUILD = Path("build/bench")
DOCS = Path("docs/results")


def option(
    default: Any = MISSING,
    text: str = "",
    *,
    flag: str = "",
    least: float | None = None,
    above: float | None = None,
    choices: Collection[str] = (),
    quick: Any = None,
    spaced: bool = False,
) -> Any:
    """A field of a scenario's settings.

    Args:
        default: its value unless given; without one it is a positional argument.
        text: help; a field without help is not on the command line.
        flag: the option's names, separated by spaces; default: the field's.
        least: smallest number.
        above: numbers must exceed this.
        choices: allowed values.
        quick: value under `--quick`, unless the option is given.
        spaced: whether several values may be arguments of their own, beside commas.
    """
    metadata = {"text": text, "flag": flag, "least": least, "above": above, "choices": choices}
    metadata |= {"quick": quick, "spaced": spaced}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def cores(spare: int = 0) -> int:
    """Default number of threads; `spare` cores are left to the client."""
    return max(1, (os.cpu_count() or 1) - spare)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What every scenario has."""

    precision: str = option("int8", "fp32, bf16, int8, int4")
    threads: int = option(cores(), "of the server", least=1)
    seed: int = option(0, "of everything random")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings(Settings):
    """What scenarios have that make one model with random weights."""

    model: str = option("llama-110m", "a preset or recipe file")


@dataclass(frozen=True, slots=True)
class Run:
    """How a scenario is run: where it keeps files, whether it is only a trial, whether it resumes, its files' name."""

    build: Path = BUILD
    is_quick: bool = False
    resume: bool = False
    name: str = ""

    def subject(self, settings: ModelSettings, max_batch: int, *flags: str) -> Subject:
        """The settings' model, exported with these flags of the exporter.

        Raises:
            RuntimeError: if it cannot be made.
        """
        return models.make_subject(
            settings.model, settings.precision, self.build, *flags, max_batch=max_batch, threads=settings.threads
        )

    def journal(self, name: str, head: Mapping[str, Any]) -> Journal:
        """The journal of a run with these facts, of this commit; a new one unless the run resumes.

        Raises:
            ArgumentError: if there is no journal to resume, or it has other facts.
        """
        facts = {**head, "commit": provenance.here()["commit"]}
        return Journal.open(self.build / f"{self.name or name}.jsonl", facts, resume=self.resume)


_Settings = TypeVar("_Settings")
Results = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scenario(Generic[_Settings]):
    """One measurement.

    Args:
        module: `__name__` of its module.
        settings: dataclass of `option` fields.
        measure: returns JSON-ready results; `RuntimeError` if it cannot be measured, `ArgumentError` if not as given.
        render: the Markdown document, without the command that measured it.
        draw: the picture, as SVG.
        caption: the picture's alternative text.
        picture_only: results that only the picture needs.
        printed: results on the last line of stdout; default: all.
        must_hold: whether the exit status is 1 where `passed` is false.
        is_resumable: whether `--resume` is offered.
    """

    module: str
    settings: type[_Settings]
    measure: Callable[[_Settings, Run], dict[str, Any]]
    render: Callable[[Results], str] | None = None
    draw: Callable[[Results], str] | None = None
    caption: str = ""
    picture_only: Collection[str] = ()
    printed: Collection[str] = ()
    must_hold: bool = False
    is_resumable: bool = False

    @property
    def name(self) -> str:
        """As on the command line."""
        return self.module.rpartition(".")[2]

    @property
    def claim(self) -> str:
        """First line of the module's docstring."""
        return (sys.modules[self.module].__doc__ or "").partition("\n")[0]

    def run(self, arguments: Sequence[str]) -> int:
        """Measures, writes, prints; returns the exit status."""
        settings, run, folder = self.parse(arguments)
        if folder == DOCS and not run.is_quick and provenance.is_changed():
            print(f"{self.name}: --docs writes figures of committed code, and this has changes", file=sys.stderr)
            return 2
        began, others, code = time.monotonic(), watch_others(), provenance.here()
        try:
            found = self.measure(settings, run)
        except RuntimeError as error:
            print(f"{self.name}: {error}", file=sys.stderr)
            return 2 if isinstance(error, ArgumentError) else 1
        facts = {
            "scenario": self.name,
            "command": shlex.join(["python", "-m", "benchmarks", "run", self.name, *arguments]),
            **code,
            "version": models.version(),
            "is_quick": run.is_quick,
            "machine": describe(),
            "others_share": others(),
            "seconds": round(time.monotonic() - began, 1),
            "settings": json.loads(json.dumps(asdict(settings), default=str)),  # type: ignore[call-overload]
        }
        results = {**facts, **found}
        self.write(results, folder, run.name)
        shown = {name: value for name, value in results.items() if not self.printed or name in self.printed}
        print(json.dumps({k: v for k, v in shown.items() if k not in self.picture_only}, allow_nan=False))
        return int(self.must_hold and not results["passed"])

    def write(self, results: Results, folder: Path, name: str = "") -> None:
        """Writes the document, and data and picture under `data`; `name` is their files', by default the scenario's."""
        name, data_folder = name or self.name, folder / DATA
        data_folder.mkdir(parents=True, exist_ok=True)
        kept = {key: value for key, value in results.items() if key not in self.picture_only}
        data = json.dumps(kept, indent=1, allow_nan=False) + "\n"
        (data_folder / f"{name}.json").write_text(data, encoding="utf-8")
        if self.draw is not None:
            (data_folder / f"{name}.svg").write_text(self.draw(results), encoding="utf-8")
        if self.render is not None:
            trial = "**A quick run, to see that it works: its figures say nothing.**\n\n" * results["is_quick"]
            picture = f"![{self.caption}]({DATA}/{name}.svg)\n\n" if self.draw is not None else ""
            document = f"{self.render(results).rstrip()}\n\n{picture}{trial}{tables.measured(results)}\n"
            (folder / f"{name}.md").write_text(document, encoding="utf-8")

    def parse(self, arguments: Sequence[str]) -> tuple[_Settings, Run, Path]:
        """Settings, how to run, and the folder for documents.

        Raises:
            SystemExit: with status 2 if an argument is wrong.
        """
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks run {self.name}",
            description=self.claim,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        known = {each.name: each for each in fields(self.settings) if each.metadata.get("text")}  # type: ignore[arg-type]
        hints = get_type_hints(self.settings)
        for each in known.values():
            _add(parser, each, hints[each.name])
        parser.add_argument("--quick", action="store_true", default=False, help="small: to see that it works")
        if self.is_resumable:
            parser.add_argument("--resume", action="store_true", default=False, help="continue the last run's journal")
        parser.add_argument(
            "--build", type=Path, default=BUILD, help=f"folder for weights and results (default: {BUILD})"
        )
        text = f"write the files into {DOCS}, not into --build"
        parser.add_argument("--docs", action="store_true", default=False, help=text)
        parser.add_argument("--name", default="", help=f"of the files (default: {self.name})")
        given = vars(parser.parse_args(arguments))
        is_quick, resume, docs, build = (given.pop(name, False) for name in ("quick", "resume", "docs", "build"))
        name = given.pop("name")
        values = {name: tuple(_flat(value)) if isinstance(value, list) else value for name, value in given.items()}
        if is_quick:
            small = {each.name: each.metadata.get("quick") for each in fields(self.settings)}  # type: ignore[arg-type]
            values = {name: value for name, value in small.items() if value is not None} | values
        return self.settings(**values), Run(build, is_quick, resume, name), DOCS if docs else build


def load(name: str) -> Scenario[Any]:
    """A scenario by name.

    Raises:
        KeyError: if there is none.
    """
    if name not in names():
        raise KeyError(name)
    scenario: Scenario[Any] = importlib.import_module(f"{scenarios.__name__}.{name}").SCENARIO
    return scenario


def names() -> list[str]:
    """All scenarios. Modules with an underscore in front are parts of others."""
    return sorted(each.name for each in pkgutil.iter_modules(scenarios.__path__) if not each.name.startswith("_"))


def _add(parser: argparse.ArgumentParser, each: Field[Any], hint: Any) -> None:
    about = each.metadata
    is_many = get_args(hint)[1:] == (...,)
    kind = get_args(hint)[0] if is_many else hint
    if kind is bool:
        parser.add_argument(*_flags(each), dest=each.name, action="store_true", help=about["text"])
        return
    read = _reader(kind, about["least"], about["above"], about["choices"])
    if each.default is MISSING:
        parser.add_argument(each.name, type=read, nargs="+" if is_many else None, help=about["text"])
        return
    parser.add_argument(
        *_flags(each),
        dest=each.name,
        action="extend" if is_many else "store",
        nargs="*" if about["spaced"] else None,
        metavar=kind.__name__.upper() + ",…" * is_many,
        type=(lambda text: [read(part) for part in text.split(",") if part]) if is_many else read,
        help=f"{about['text']} (default: {','.join(map(str, each.default)) if is_many else each.default})",
    )


def _flat(values: list[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, list) else [value]


def _flags(each: Field[Any]) -> list[str]:
    return [f"--{name}" for name in (each.metadata["flag"] or each.name.replace("_", "-")).split()]


def _reader(kind: Any, least: float | None, above: float | None, choices: Collection[str]) -> Callable[[str], Any]:
    """Reads one value; a finite number within its limits where it is a number."""
    limits = {"at least": least, "above": above}
    words = [f"{word} {limit:g}" for word, limit in limits.items() if limit is not None]

    def read(text: str) -> Any:
        if kind not in (int, float):
            if choices and text not in choices:
                raise argparse.ArgumentTypeError(f"is {text!r}, must be one of {', '.join(choices)}")
            return kind(text)
        with suppress(ValueError):
            value = kind(text)
            if math.isfinite(value) and (least is None or value >= least) and (above is None or value > above):
                return value
        limit = " and ".join(words)
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a {'whole ' * (kind is int)}number {limit}".rstrip())

    return read
