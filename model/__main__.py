"""`python -m model`: trains, evaluates, initializes and imports checkpoints, and starts the lessons.

The last line on stdout is one JSON object; messages go to stderr. Exit status: 2 for a usage error, 1 for a failed run,
128 + its number for a signal, each with one line. Under `torchrun` every process runs this, and the first one reports.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from model.spec.artifact import CHAT
from model.training.presets import PRESETS, Recipe, RecipeError, resolve

if TYPE_CHECKING:
    from model.training.parallel import Parallel
    from model.training.trainer import TrainResult


_LESSON = "lesson"


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == [_LESSON]:
        # By name, as the lessons use the server's sampling and the client besides, and so stand above this package.
        return int(importlib.import_module("lessons.command").main(given[1:]))
    parser = _make_parser()
    options = parser.parse_args(given)
    if options.command == "import":
        return _import(options)
    if options.command == "train" and options.out is None and not (options.dry_run or options.overfit_one_batch):
        return _fail("train: the following arguments are required: --out", 2)
    try:
        recipe = resolve(options.config, options.overrides)
    except RecipeError as error:
        return _fail(str(error), 2)
    return {"train": _train, "evaluate": _evaluate, "init": _init}[options.command](recipe, options)


def _train(recipe: Recipe, options: argparse.Namespace) -> int:
    if recipe.train is None:
        return _fail(f"{recipe.name} has no data to train on", 2)
    _limit_spinning()
    # Imported late, as torch takes seconds: invalid arguments fail at once.
    from model.training.parallel import SetupError, start

    try:
        with start(recipe.train) as parallel:
            return _train_in(parallel, recipe, options)
    except SetupError as error:
        return _fail(str(error), 2)


def _train_in(parallel: Parallel, recipe: Recipe, options: argparse.Namespace) -> int:
    """Trains or checks, as one of the processes."""
    from model.training import checks
    from model.training.folder import FolderTaken, check_free
    from model.training.loop import TrainingError
    from model.training.parallel import ParallelError
    from model.training.progress import Reporter
    from model.training.resume import ResumeError
    from model.training.task import TaskError
    from model.training.trainer import Terminated, train

    def fail(message: str, status: int) -> int:
        return _fail(message, status) if parallel.is_first else status

    reporter = Reporter(sys.stderr if parallel.is_first else None)
    try:
        if options.dry_run:
            said = asdict(checks.dry_run(recipe, reporter, parallel))
        elif options.overfit_one_batch:
            overfit = checks.overfit_one_batch(recipe, reporter, parallel)
            if not overfit.learned:
                return fail(
                    f"one batch was not learned: loss {overfit.first_loss:.3f} at first, "
                    f"{overfit.last_loss:.3f} after {overfit.steps} steps",
                    1,
                )
            said = asdict(overfit)
        else:
            if not (options.resume or options.overwrite):
                parallel.together(lambda: check_free(options.out))
            result = train(
                recipe,
                options.out,
                reporter,
                resume_run=options.resume,
                parallel=parallel,
            )
            said = _describe(result)
    except (TaskError, ResumeError, ParallelError, FolderTaken, OSError) as error:
        return fail(str(error), 2)
    except TrainingError as error:
        if parallel.is_first or _is_known_to_all(error, (TrainingError, ParallelError)):
            return fail(str(error), 1)
        return _fail(f"process {parallel.rank}: {error}", 1)
    except Terminated as error:
        return fail(str(error), 128 + error.number)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    if parallel.is_first:
        _print_result(said)
    return 0


def _is_known_to_all(error: Exception, kinds: tuple[type[Exception], ...]) -> bool:
    """Whether the first process has the same failure: not if this one alone ran out of memory, for example."""
    return error.__cause__ is None or isinstance(error.__cause__, kinds)


def _describe(result: TrainResult) -> dict[str, Any]:
    best = result.best
    return {
        "checkpoint": str(result.folder),
        "steps": result.steps,
        "train_seconds": round(result.seconds, 3),
        "step_seconds": round(result.step_seconds, 3),
        "num_parameters": result.num_parameters,
        "num_target_tokens": result.num_target_tokens,
        "train_loss": result.loss,
        "validation": dict(result.validation),
        "best": None if best is None else {"step": best.step, "validation": dict(best.scores)},
        **result.scores,
        **result.baselines,
    }


def _evaluate(recipe: Recipe, options: argparse.Namespace) -> int:
    if recipe.train is None:
        return _fail(f"{recipe.name} has no data to score on", 2)
    _limit_spinning()
    from model import checkpoint
    from model.checkpoint import CheckpointError
    from model.training.parallel import SetupError, resolve_device
    from model.training.task import TaskError
    from model.training.tasks import make_task

    try:
        loaded = checkpoint.load_any(options.checkpoint)
        if loaded.config.architecture != recipe.model.architecture:
            have, wanted = loaded.config.architecture, recipe.model.architecture
            return _fail(f"{options.checkpoint} is {have}, {recipe.name} is for {wanted}", 2)
        device = resolve_device(recipe.train.device)
        task = make_task(replace(recipe, model=loaded.config))
        for name, path in loaded.tokenizers.items():
            made = task.tokenizers.get(name)
            if made is None or made.to_json() != path.read_text(encoding="utf-8"):
                return _fail(f"{path} is not the tokenizer that {recipe.name} makes of its data", 2)
        scores = task.test(loaded.model.to(device))
    except (CheckpointError, TaskError, SetupError, OSError) as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    _print_result({"checkpoint": str(options.checkpoint), **scores})
    return 0


def _init(recipe: Recipe, options: argparse.Namespace) -> int:
    from model import checkpoint
    from model.nn.networks import build
    from model.nn.transformer import num_parameters
    from model.spec.artifact import TOKENIZER
    from model.tokenizer_training import one_word_per_id
    from model.training.task import TaskError
    from model.training.tasks import fit_vocabulary, make_task

    try:
        if recipe.data is None or recipe.data.lacks_files:
            # There is no data for a tokenizer: a placeholder has a word per id.
            config, facts = recipe.model, {}
            tokenizers = {TOKENIZER: one_word_per_id(config.vocab_size, config.family)}
        else:
            task = make_task(recipe)
            config, facts, tokenizers = fit_vocabulary(recipe.model, task), dict(task.facts), dict(task.tokenizers)
        model = build(config, options.seed)
        manifest = {
            "recipe": recipe.name,
            "seed": options.seed,
            "steps": 0,
            "data": facts,
            "versions": {"python": platform.python_version()},
        }
        texts = {name: tokenizer.to_json() for name, tokenizer in tokenizers.items()}
        checkpoint.save(options.out, model, config, texts, manifest)
    except (TaskError, ValueError, OSError) as error:
        return _fail(str(error), 2)
    _print_result({"checkpoint": str(options.out), "num_parameters": num_parameters(model)})
    return 0


def _import(options: argparse.Namespace) -> int:
    from model.hf.folder import ImportRefused
    from model.hf.hub import cache_folder, find_snapshot
    from model.hf.importer import plan, write

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    folder: Path = options.folder
    if not folder.exists():
        cache = cache_folder(os.environ)  # noqa: TID251 — another library's variables
        found = find_snapshot(str(folder), cache)
        if found is None:
            return _fail(f"{folder} is no folder, and no model of this name is in {cache}", 2)
        folder = found
    try:
        say(f"checking {folder}")
        planned = plan(folder, context=options.context, chat=not options.no_chat)
        num_parameters = write(planned, options.out, say)
    except ImportRefused as error:
        for problem in error.problems:
            say(f"{folder}: {problem}")
        return _fail(f"{folder} cannot be imported, for {len(error.problems)} reasons", 2)
    except (ValueError, OSError) as error:
        return _fail(str(error), 2)
    for note in planned.notes:
        say(f"note: {note}")
    _print_result(
        {
            "checkpoint": str(options.out),
            "model_type": planned.folder.config["model_type"],
            "num_parameters": num_parameters,
            "context": planned.config.context,
            "has_chat_template": CHAT in planned.extras,
            "notes": list(planned.notes),
        }
    )
    return 0


def _limit_spinning() -> None:
    # OpenMP reads these when torch loads it. By default its threads spin long after every operation, hundreds of times
    # a step; if another process has one of their cores, each spin costs a scheduler's slice, and a run takes twenty
    # times as long. A short spin keeps an idle machine's speed and bounds the loss on a busy one.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # noqa: TID251 — a library's switch
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # noqa: TID251


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=_prog(), description="Makes checkpoints and scores them.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    train = commands.add_parser("train", help="train a model; under torchrun, in several processes")
    previous = train.add_mutually_exclusive_group()
    previous.add_argument("--resume", action="store_true", help="go on from the last state that --out holds")
    previous.add_argument("--overwrite", action="store_true", help="replace the training run that --out holds")
    checks = train.add_mutually_exclusive_group()
    checks.add_argument("--dry-run", action="store_true", help="measure two steps and write nothing")
    checks.add_argument(
        "--overfit-one-batch", action="store_true", help="check that the first batch can be learned; write nothing"
    )
    evaluate = commands.add_parser("evaluate", help="score a checkpoint on a recipe's test data")
    evaluate.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint folder")
    init = commands.add_parser("init", help="make a checkpoint with random weights")
    init.add_argument("--seed", type=_seed, default=0, help="fixes the weights (default 0)")
    importing = commands.add_parser("import", help="make a checkpoint of a Hugging Face folder")
    importing.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder, or name on the hub of a model in its local cache"
    )
    importing.add_argument("--out", type=Path, required=True, metavar="DIR", help="checkpoint folder")
    importing.add_argument("--context", type=int, metavar="TOKENS", help="limit the context, which sizes K/V")
    importing.add_argument("--no-chat", action="store_true", help="leave the chat template out")
    commands.add_parser(_LESSON, help="walk through the lecture: ten lessons with numbers and pictures")
    for command in (train, evaluate, init):
        command.add_argument("config", metavar="CONFIG", help=f"{', '.join(PRESETS)}, or a .json or .toml file")
        command.add_argument(
            "--set",
            dest="overrides",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="override a field of the model, the data or the training; may be given several times",
        )
    train.add_argument("--out", type=Path, metavar="DIR", help="checkpoint folder; not for the two checks")
    init.add_argument("--out", type=Path, required=True, metavar="DIR", help="checkpoint folder")
    return parser


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 2**63)")
    return value


def _print_result(values: dict[str, Any]) -> None:
    # JSON has no NaN and no infinity.
    finite = {
        key: None if isinstance(item, float) and not math.isfinite(item) else item for key, item in values.items()
    }
    print(json.dumps(finite), flush=True)


def _prog() -> str:
    """The command's name, as it was called."""
    return "onward" if Path(sys.argv[0]).name == "onward" else "python -m model"


def _fail(message: str, status: int) -> int:
    print(f"{_prog()}: {message}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
