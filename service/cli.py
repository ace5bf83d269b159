"""`onward VERB …`: one command for the server, its clients, the benchmark, and the way from a model to an artifact.

Each verb is a module's `main`, imported when the verb runs: `ask` loads neither torch nor the serving stack.
"""

from __future__ import annotations

import importlib
import io
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass

_FAILED = 1
_BAD_VERB = 2
# The shells' exit status of a command that SIGINT ended.
_INTERRUPTED = 130
_COMPLETION = "completion"
_OURS = ("service", "model", "export", "loadtest", "onward", "lessons")


@dataclass(frozen=True, slots=True)
class _Verb:
    """A verb: its module, the extra that installs what it needs, and whether the module's `main` knows it by name."""

    help: str
    module: str
    extra: str
    is_named: bool = True

    def run(self, name: str, arguments: Sequence[str], **options: bool) -> int:
        named = [name] if self.is_named else []
        return int(importlib.import_module(self.module).main([*named, *arguments], **options) or 0)


_VERBS = {
    "serve": _Verb("serve every model of a folder", "service.__main__", "cpu"),
    "plan": _Verb("the memory that serving a model takes", "service.__main__", "core"),
    "ask": _Verb("ask a served model", "service.__main__", "core"),
    "chat": _Verb("have a conversation with a served model", "service.__main__", "core"),
    "explain": _Verb("draw a served model's attention", "service.__main__", "core"),
    "health": _Verb("exit with 0 if a server answers requests, with 1 if not", "service.__main__", "core"),
    "trace": _Verb("write a server's flight recorder to a file for Perfetto", "service.__main__", "core"),
    "bench": _Verb("benchmark a server that streams tokens over gRPC", "loadtest.bench", "load", is_named=False),
    "import": _Verb("make a checkpoint of a Hugging Face folder", "model.__main__", "train"),
    "train": _Verb("train a model", "model.__main__", "train"),
    "lesson": _Verb("walk through the lecture: ten lessons", "lessons.command", "train", is_named=False),
    "export": _Verb("make an artifact of a checkpoint, and prove it", "export.__main__", "train", is_named=False),
}


def main() -> int:
    """The console script; returns its exit status."""
    return run(sys.argv[1:])


def run(arguments: Sequence[str]) -> int:
    """Runs a verb and returns its exit status: 2 for an unknown one, 1 where a library is not installed."""
    name = arguments[0] if arguments else ""
    if name == _COMPLETION:
        sys.stdout.write(_completion())
        return 0
    if name not in _VERBS:
        is_help = name in {"-h", "--help"}
        (sys.stdout if is_help else sys.stderr).write(_usage())
        return 0 if is_help else _BAD_VERB
    verb = _VERBS[name]
    # Only then may it restart itself, for huge pages.
    own_process = {"is_own_process": True} if verb.module == "service.__main__" else {}
    try:
        return verb.run(name, arguments[1:], **own_process)
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return _INTERRUPTED
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in _OURS or not missing:
            raise
        sys.stderr.write(f"onward {name}: {missing} is not installed: pip install 'onward-server[{verb.extra}]'\n")
        return _FAILED


def _usage() -> str:
    lines = {name: verb.help for name, verb in _VERBS.items()}
    lines[_COMPLETION] = 'print a shell\'s completion: eval "$(onward completion)", in bash or zsh'
    return "usage: onward VERB …\n\n" + "".join(f"  {name:<12}{words}\n" for name, words in lines.items())


def _flags(name: str, verb: _Verb) -> Iterator[str]:
    """The flags in a verb's usage; none where what it needs is not installed."""
    out = io.StringIO()
    with suppress(ModuleNotFoundError, SystemExit), redirect_stdout(out):
        verb.run(name, ["--help"])
    usage = out.getvalue().partition("\n\n")[0]
    yield from dict.fromkeys(re.findall(r"--[a-z][a-z0-9-]*", usage))


def _completion() -> str:
    """A function that completes verbs and flags, and leaves the rest to the shell: files."""
    cases = "".join(f'            {name}) words="{" ".join(_flags(name, verb))}" ;;\n' for name, verb in _VERBS.items())
    return f"""\
if [ -n "$ZSH_VERSION" ]; then autoload -U +X bashcompinit && bashcompinit; fi
_onward() {{
    local words="" current="${{COMP_WORDS[COMP_CWORD]}}"
    if [ "$COMP_CWORD" = 1 ]; then
        words="{" ".join([*_VERBS, _COMPLETION])}"
    elif [ "${{current#-}}" != "$current" ]; then
        case "${{COMP_WORDS[1]}}" in
{cases}        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _onward onward
"""
