"""The command line and its environment twins, parsed into one command's frozen configuration.

The flag wins over its variable. All problems are reported at once. This module alone reads the environment; the values'
meanings are not known here.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.config.client import (
    AskConfig,
    ChatConfig,
    ConnectionConfig,
    ExplainConfig,
    GenerationConfig,
    HealthConfig,
    TraceConfig,
    explain_problems,
)
from service.config.options import flag, is_unicode, options, variable
from service.config.plan import PlanConfig
from service.config.serve import (
    Admission,
    Defaults,
    Kernels,
    LogLevel,
    MetricsCompat,
    RequestLimits,
    ServeConfig,
    Telemetry,
    serve_problems,
)
from service.errors import StartupError

__all__ = [
    "Admission", "AskConfig", "ChatConfig", "ConnectionConfig", "Defaults", "ExplainConfig", "GenerationConfig",
    "HealthConfig", "Kernels", "LogLevel", "MetricsCompat", "PlanConfig", "RequestLimits", "ServeConfig", "Telemetry",
    "TraceConfig", "flag", "options", "variable",
]  # fmt: skip

Config = ServeConfig | PlanConfig | AskConfig | ChatConfig | ExplainConfig | HealthConfig | TraceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    """One command: its configuration class, and the class of its field `limits` if it has one.

    `problems` gets the names of all fields that are given, and yields what is wrong with them together.
    """

    config: type[Any]
    help: str
    limits: type[Any] | None = None
    positionals: tuple[str, ...] = ()
    problems: Callable[[Collection[str]], Iterable[str]] = lambda _: ()


_COMMANDS: Mapping[str, _Command] = {
    "serve": _Command(
        config=ServeConfig, limits=RequestLimits, problems=serve_problems, help="serve every model of a folder"
    ),
    "plan": _Command(config=PlanConfig, positionals=("folder",), help="print the memory that serving a model takes"),
    "ask": _Command(config=AskConfig, positionals=("model", "text"), help="ask a served model"),
    "chat": _Command(config=ChatConfig, positionals=("model",), help="have a conversation with a served model"),
    "explain": _Command(
        config=ExplainConfig,
        positionals=("model", "text"),
        problems=explain_problems,
        help="draw a served model's attention",
    ),
    "health": _Command(config=HealthConfig, help="exit with 0 if a server answers requests, with 1 if not"),
    "trace": _Command(config=TraceConfig, help="write a server's flight recorder to a file for Perfetto"),
}
_POSITIONALS = {
    "folder": "an artifact, a folder of artifacts, or a checkpoint that is not exported yet",
    "model": "the model's name",
    "text": "the prompt or source text",
}


def keep_tokenizers_on_their_threads() -> None:
    """Makes the tokenizers library run on its caller's thread, unless the operator says otherwise.

    Its own thread pool would use every core, at the engine's priority.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def parse_command_line(argv: Sequence[str]) -> Config:
    """Parses the process's command line and environment.

    Raises:
        StartupError: listing every flag and variable whose value is unusable.
        SystemExit: from argparse, on an unknown flag or command and on `--help`.
    """
    return parse(argv, os.environ)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """As `parse_command_line`, for the given environment."""
    arguments = vars(_parser().parse_args(argv))
    command = _COMMANDS[arguments.pop("command")]
    values = {name: arguments[name] for name in command.positionals}
    problems = [f"{name} is {text!r}, must be UTF-8" for name, text in values.items() if not is_unicode(text)]
    values |= _values(command.config, arguments, environ, problems)
    if command.limits is not None:
        values["limits"] = command.limits(**_values(command.limits, arguments, environ, problems))
    given = [name for name in options(command.config) if arguments.get(name) is not None or variable(name) in environ]
    problems += command.problems(given)
    if problems:
        raise StartupError(problems)
    config: Config = command.config(**values)
    return config


def _values(
    config: type[Any], arguments: Mapping[str, str | None], environ: Mapping[str, str], problems: list[str]
) -> dict[str, Any]:
    """The values given for a class's fields; unusable ones are added to `problems`."""
    values = {}
    for name, option in options(config).items():
        text, source = arguments.get(name), flag(name)
        if text is None:
            text, source = environ.get(variable(name)), variable(name)
        if text is None:
            continue
        try:
            values[name] = option.parse(text)
        except ValueError as error:
            problems.append(f"{source} is {text!r}, {error}")
    return values


def _parser() -> argparse.ArgumentParser:
    prog = "onward" if Path(sys.argv[0]).name == "onward" else "python -m service"
    parser = argparse.ArgumentParser(prog=prog, description="Serve transformers over gRPC, or ask one.")
    commands = parser.add_subparsers(dest="command", required=True)
    epilog = "Each flag may be given as the environment variable in brackets instead; the flag wins."
    for name, command in _COMMANDS.items():
        # Abbreviated flags would change their meaning when a longer one is added.
        verb = commands.add_parser(name, help=command.help, epilog=epilog, allow_abbrev=False)
        for positional in command.positionals:
            verb.add_argument(positional, help=_POSITIONALS[positional])
        groups: dict[str, argparse._ArgumentGroup] = {}
        for config in filter(None, (command.config, command.limits)):
            _add_options(verb, groups, config)
    return parser


def _add_options(
    parser: argparse.ArgumentParser, groups: dict[str, argparse._ArgumentGroup], config: type[Any]
) -> None:
    """Adds a flag for each option to its group; values stay text here, so that all are checked together."""
    defaults = {each.name: each.default for each in dataclasses.fields(config)}
    for name, option in options(config).items():
        group = groups.get(option.group)
        if group is None:
            group = groups[option.group] = parser.add_argument_group(option.group)
        default = defaults[name]
        shown = "" if default in (None, (), dataclasses.MISSING) else f" (default: {default})"
        text = f"{option.help}{shown} [{variable(name)}]"
        if option.is_switch:
            group.add_argument(flag(name), dest=name, action="store_const", const="true", help=text)
            group.add_argument(
                flag(f"no_{name}"), dest=name, action="store_const", const="false", help=argparse.SUPPRESS
            )
        else:
            group.add_argument(flag(name), dest=name, metavar=name.upper(), help=text)
