"""`python -m model`: trains checkpoints, or makes some with random weights.

The last line on stdout is one JSON object; everything for people goes to stderr. What the caller got wrong is one line
and exit status 2, a run that failed under way is one line and exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from model.presets import PRESETS, RecipeError, resolve


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without repeating the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    options = _make_parser().parse_args(arguments)
    try:
        recipe = resolve(options.config, options.overrides)
    except RecipeError as error:
        return _fail(str(error), 2)
    return _train(recipe, options) if options.command == "train" else _init(recipe, options)


def _train(recipe: Any, options: argparse.Namespace) -> int:
    # OpenMP reads these when torch loads it. By default its threads spin long at the end of every operation, hundreds
    # of times a step; where another process holds one of their cores, each costs a scheduler's slice and a run twenty
    # times its time. A short spin keeps an idle machine's speed and bounds the loss on a busy one.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # noqa: TID251 — a library's own switch, not our configuration
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # noqa: TID251
    # Torch and its friends take seconds to import: not before the arguments are known to be good.
    from model.training.progress import make_reporter
    from model.training.resume import ResumeError
    from model.training.tasks import TaskError
    from model.training.trainer import TrainingError, train

    try:
        result = train(recipe, options.out, make_reporter(sys.stderr), resume_run=options.resume)
    except (TaskError, ResumeError, OSError) as error:
        return _fail(str(error), 2)
    except TrainingError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    _say(
        {
            "checkpoint": str(result.folder),
            "steps": result.steps,
            "train_seconds": round(result.seconds, 3),
            "step_seconds": round(result.step_seconds, 3),
            "num_parameters": result.num_parameters,
            "num_target_tokens": result.num_target_tokens,
            "loss": result.loss,
            **result.scores,
            **result.baselines,
        }
    )
    return 0


def _init(recipe: Any, options: argparse.Namespace) -> int:
    from model import checkpoint
    from model.artifact import TOKENIZER
    from model.tokenizer_training import one_word_per_id
    from model.training.tasks import TaskError, fit_vocabulary, make_task
    from model.transformer import build, num_parameters

    try:
        if recipe.data is None:
            tokenizer, facts = one_word_per_id(recipe.model.vocab_size, recipe.model.architecture), {}
        else:
            task = make_task(recipe)
            tokenizer, facts = task.tokenizer, dict(task.facts)
        model = build(fit_vocabulary(recipe.model, tokenizer), options.seed)
        manifest = {
            "recipe": recipe.name,
            "seed": options.seed,
            "steps": 0,
            "data": facts,
            "versions": {"python": platform.python_version()},
        }
        checkpoint.save(options.out, model, model.config, {TOKENIZER: tokenizer.to_json()}, manifest)
    except (TaskError, ValueError, OSError) as error:
        return _fail(str(error), 2)
    _say({"checkpoint": str(options.out), "num_parameters": num_parameters(model)})
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m model", description="Makes checkpoints.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    train = commands.add_parser("train", help="train a model on data that need no download")
    train.add_argument("--resume", action="store_true", help="go on from the last state that --out holds")
    init = commands.add_parser("init", help="the same checkpoint with random weights")
    init.add_argument("--seed", type=_seed, default=0, help="fixes the weights (default 0)")
    for command in (train, init):
        command.add_argument("config", metavar="CONFIG", help=f"{', '.join(PRESETS)}, or a .json or .toml file")
        command.add_argument("--out", type=Path, required=True, metavar="DIR", help="checkpoint folder")
        command.add_argument(
            "--set",
            dest="overrides",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="override a field of the model or the training; may be given several times",
        )
    return parser


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 2**63)")
    return value


def _say(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


def _fail(message: str, status: int) -> int:
    print(f"python -m model: {message}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
