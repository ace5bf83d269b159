"""Ours beside what a user would run instead: same weights, same machine, same minutes.

    python -m benchmarks.bench [--models llama-110m,gpt2-124m] [--systems …] [--precisions fp32,bf16,int8]
                               [--metrics decode,prefill] [--batches 1,8,32] [--prompts 128,512,1024] [--new 128]
                               [--rounds 3] [--repeats 3] [--quick] [--resume] [--docs]

In every round each system runs alone, in a process of its own, in an order drawn anew; the machine's limits are
measured at the round's start. Two metrics, in tokens a second:

    decode    B sequences of 128 prompt tokens together: B · 127 / (t(128 new) - t(1 new)), or of `--new` tokens
    prefill   one prompt: its tokens / t(1 new)

with t the median of `--repeats` calls on prompts not seen before, after a short one that does not count. A row's value
is the median of its rounds. What cannot be installed, converted, loaded or run is a row with its error and no value.
Agreement is the share of a system's greedy tokens that PyTorch, fed the same tokens in float32, would have chosen too;
the weights are random, whose best logits lie close together, so that it is worse than a trained model's would be.

Every measurement is a line in `build/bench/journal.jsonl`, where `--resume` goes on. The last line on stdout is
`{"rows": […], "ratios": {…}}`; `benchmarks.bench_report` draws the same as a table and a picture.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import bench_report
from benchmarks.peers import hf_folder
from benchmarks.peers.child import Child, SystemFailed, running
from benchmarks.peers.systems import OURS, SYSTEMS, InstallError, SystemSpec, python_of
from benchmarks.scenario import command_line, digest, machine, make_checkpoint
from model.spec.config import ModelConfig
from model.training.presets import resolve

BUILD = Path("build/bench")
DOCS = Path("docs")
METRICS = ("decode", "prefill")
UNIT = "tokens/s"
_SPECIAL_IDS = 4
"""Ids below are control tokens: prompts have none."""
_WARMING_TOKENS = 2
"""Of the decoding call that does not count: every code path has run once then, and little time went."""

Entry = Mapping[str, Any]
"""A line of the journal: one system's measurements in one round."""
Agreement = Callable[[str, Sequence[Sequence[int]], Sequence[Sequence[int]]], float]
"""From a model's name, prompts and a system's answers to the share of tokens that the reference agrees with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured; a journal is only resumed under the same."""

    models: tuple[str, ...] = ("llama-110m", "gpt2-124m")
    systems: tuple[str, ...] = tuple(SYSTEMS)
    precisions: tuple[str, ...] = ("fp32", "bf16", "int8")
    metrics: tuple[str, ...] = METRICS
    batches: tuple[int, ...] = (1, 8, 32)
    prompts: tuple[int, ...] = (128, 512, 1024)
    decode_prompt: int = 128
    decode_new: int = 128
    rounds: int = 3
    repeats: int = 3
    threads: int = 1
    seed: int = 0
    quality_prompts: int = 4
    quality_new: int = 16
    is_quick: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds after which something counts as failed."""

    install: float = 3600.0
    prepare: float = 1800.0
    load: float = 900.0
    call: float = 300.0


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """One thing measured: `prompt` tokens for each of `batch` sequences."""

    metric: str
    batch: int
    prompt: int


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """What runs alone: a system, with a model, in a precision (our name of it)."""

    system: str
    model: str
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The same numbers twice, and what they are."""

    config: ModelConfig
    checkpoint: Path
    hugging_face: Path


def points(settings: Settings, config: ModelConfig) -> list[Point]:
    """What is measured of a model, as far as its context reaches; the longest prompt leaves room for one token."""
    found = set()
    if "prefill" in settings.metrics:
        found |= {Point("prefill", 1, min(length, config.context - 1)) for length in settings.prompts}
    if "decode" in settings.metrics and settings.decode_prompt + settings.decode_new <= config.context:
        found |= {Point("decode", batch, settings.decode_prompt) for batch in settings.batches}
    return sorted(found)


def units(settings: Settings) -> list[Unit]:
    """Everything that runs in a round, in no particular order."""
    return [
        Unit(system, model, precision)
        for model in settings.models
        for precision in settings.precisions
        for system in settings.systems
    ]


class Bench:
    """One run of the benchmark.

    Args:
        settings: what to measure.
        timeouts: how long to wait.
        build: where everything is kept: environments, weights, logs, the journal.
        systems: by name.
        weights: by model's name.
    """

    def __init__(
        self,
        settings: Settings,
        timeouts: Timeouts,
        build: Path,
        systems: Mapping[str, SystemSpec],
        weights: Mapping[str, Weights],
    ) -> None:
        self._settings = settings
        self._timeouts = timeouts
        self._build = build
        self._systems = systems
        self._weights = weights
        self._unusable: dict[Unit, str] = {}
        self._pythons: dict[str, Path | InstallError] = {}

    def prepare(self) -> None:
        """Installs and converts, one after the other, before anything is timed; failures are kept for the table."""
        for unit in units(self._settings):
            spec = self._systems[unit.system]
            if unit.precision not in spec.precisions:
                self._unusable[unit] = f"{unit.precision} is not offered"
                continue
            try:
                with self._child(unit, "prepare") as child:
                    child.ask({"do": "prepare"}, self._timeouts.prepare)
            except (InstallError, SystemFailed, OSError) as error:
                self._unusable[unit] = self._clean(error)
                print(f"{_name(unit)}: {self._unusable[unit]}", file=sys.stderr, flush=True)

    def run(self, journal: list[Entry], record: Callable[[Entry], None]) -> None:
        """Runs all rounds, without what the journal holds already; every entry is recorded at once."""
        done = {(entry["round"], *entry["unit"]) for entry in journal}
        for number in range(self._settings.rounds):
            if (number, "limits") not in done:
                self._add(journal, record, {"round": number, "unit": ["limits"], "limits": self._limits()})
            for unit in shuffled(units(self._settings), self._settings.seed, number):
                if (number, *_key(unit)) in done:
                    continue
                print(f"round {number + 1}/{self._settings.rounds}: {_name(unit)}", file=sys.stderr, flush=True)
                self._add(journal, record, {"round": number, "unit": _key(unit), **self._measure(unit, number)})

    def _add(self, journal: list[Entry], record: Callable[[Entry], None], entry: Entry) -> None:
        journal.append(entry)
        record(entry)

    def _measure(self, unit: Unit, number: int) -> dict[str, Any]:
        """One system in one round: its measurements, or why there are none."""
        if unit in self._unusable:
            return {"error": self._unusable[unit]}
        measured: list[dict[str, Any]] = []
        entry: dict[str, Any] = {"points": measured}
        try:
            with self._child(unit, f"round-{number + 1}") as child:
                entry["version"] = child.ask({"do": "load"}, self._timeouts.load)["version"]
                entry |= self._quality(child, unit)
                measured += self._points(child, unit, number)
        except (InstallError, SystemFailed, OSError) as error:
            entry["error"] = self._clean(error)
        return entry

    def _points(self, child: Child, unit: Unit, number: int) -> Iterator[dict[str, Any]]:
        """Every point's value, or its error; a system that no longer answers fails all the points that are left."""
        config, gone = self._weights[unit.model].config, ""
        for point in points(self._settings, config):
            measured: dict[str, Any] = {"point": [point.metric, point.batch, point.prompt]}
            if gone:
                yield measured | {"error": gone}
                continue
            prompts = Prompts(config.vocab_size, f"{self._settings.seed}/{number}/{unit.model}/{point}")
            try:
                yield measured | self._value(child, point, prompts)
            except SystemFailed as error:
                said = self._clean(error)
                if not child.is_usable:
                    gone = said
                yield measured | {"error": said}

    def _value(self, child: Child, point: Point, prompts: Prompts) -> dict[str, Any]:
        if point.metric == "prefill":
            self._ask(child, prompts, point, 1)
            seconds, noise = self._time(child, prompts, point, 1)
            return {"value": point.prompt / seconds, "noise": noise}
        self._ask(child, prompts, point, _WARMING_TOKENS)
        one, noise_one = self._time(child, prompts, point, 1)
        all_new, noise_all = self._time(child, prompts, point, self._settings.decode_new)
        if all_new <= one:
            raise SystemFailed(f"{self._settings.decode_new} tokens took no longer than one: too small to measure")
        value = point.batch * (self._settings.decode_new - 1) / (all_new - one)
        return {"value": value, "noise": max(noise_one, noise_all)}

    def _time(self, child: Child, prompts: Prompts, point: Point, new: int) -> tuple[float, float]:
        """Median seconds and largest noise of some calls."""
        answers = [self._ask(child, prompts, point, new) for _ in range(self._settings.repeats)]
        noise = max(answer["noise"] or 0.0 for answer in answers)
        return statistics.median(answer["seconds"] for answer in answers), noise

    def _ask(self, child: Child, prompts: Prompts, point: Point, new: int) -> dict[str, Any]:
        question = {"do": "generate", "prompts": prompts.draw(point.batch, point.prompt), "new": new}
        return child.ask(question, self._timeouts.call)

    def _quality(self, child: Child, unit: Unit) -> dict[str, Any]:
        """Greedy answers for `agreement` to judge; the prompts are the same for every system."""
        config = self._weights[unit.model].config
        prompts = quality_prompts(self._settings, config)
        question = {"do": "generate", "prompts": prompts, "new": self._settings.quality_new}
        return {"tokens": child.ask(question, self._timeouts.call)["tokens"]}

    def _limits(self) -> dict[str, Any] | None:
        """What the machine can do now; None where it could not be measured, which then stands nowhere in the table."""
        command = [sys.executable, "-m", "benchmarks.bench_limits", "--threads", str(self._settings.threads)]
        command += ["--quick"] if self._settings.is_quick else []
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=self._timeouts.call, check=True)
            limits: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            print(f"the machine's limits: {error}", file=sys.stderr)
            return None
        return limits

    def _child(self, unit: Unit, name: str) -> Any:
        """A process of the unit's system, in its own environment.

        Raises:
            InstallError: when there is none; pip is asked once.
        """
        spec, weights = self._systems[unit.system], self._weights[unit.model]
        if spec.name not in self._pythons:
            try:
                self._pythons[spec.name] = python_of(spec, self._build / "venvs", self._timeouts.install)
            except InstallError as error:
                self._pythons[spec.name] = error
        python = self._pythons[spec.name]
        if isinstance(python, InstallError):
            raise python
        threads = str(self._settings.threads)
        folder = weights.checkpoint if spec.is_ours else weights.hugging_face
        work = self._build / "work" / unit.model / (spec.work or spec.name)
        command = [str(python), "-m", spec.module, "--folder", str(folder), "--work", str(work)]
        command += ["--precision", spec.precisions[unit.precision], "--threads", threads]
        command += ["--max-batch", str(max(*self._settings.batches, self._settings.quality_prompts))]
        command += ["--context", str(weights.config.context)]
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **spec.environment}
        log = self._build / "logs" / f"{unit.model}-{unit.precision}-{unit.system}-{name}.log"
        return running(command, environment, log)

    def _clean(self, error: Exception) -> str:
        """An error's words on one line, without where this checkout happens to lie."""
        return " ".join(str(error).replace(str(Path.cwd()), ".").split())


class Prompts:
    """Random prompts, never the same twice; the same ones for every system that is given the same seed."""

    def __init__(self, vocab_size: int, seed: str) -> None:
        self._vocab_size = vocab_size
        self._random = random.Random(seed)  # noqa: S311 (not for secrets)

    def draw(self, count: int, length: int) -> list[list[int]]:
        """So many prompts of one length."""
        return [[self._random.randrange(_SPECIAL_IDS, self._vocab_size) for _ in range(length)] for _ in range(count)]


def quality_prompts(settings: Settings, config: ModelConfig) -> list[list[int]]:
    """What every system is asked in every round, to see whether it computes the same model."""
    length = min(32, config.context - settings.quality_new)
    return Prompts(config.vocab_size, f"quality/{settings.seed}").draw(settings.quality_prompts, length)


def shuffled(things: Sequence[Unit], seed: int, number: int) -> list[Unit]:
    """A round's order, which (seed, round) decides."""
    order = sorted(things)
    random.Random(f"{seed}/{number}").shuffle(order)  # noqa: S311 (not for secrets)
    return order


def rows_of(
    journal: Sequence[Entry], settings: Settings, weights: Mapping[str, Weights], agreement: Agreement
) -> list[dict[str, Any]]:
    """A row for every system, model, precision and point that was asked for: nothing that failed is left out."""
    limits = best_limits(journal)
    rows = []
    for unit in units(settings):
        entries = [entry for entry in journal if entry["unit"] == _key(unit)]
        config = weights[unit.model].config
        answers = next((entry["tokens"] for entry in entries if "tokens" in entry), None)
        agreed = agreement(unit.model, quality_prompts(settings, config), answers) if answers else None
        version = next((entry["version"] for entry in entries if "version" in entry), None)
        for point in points(settings, config):
            found = [_at(entry, point) for entry in entries]
            values = [each for each in found if "value" in each]
            errors = [each["error"] for each in found if "error" in each]
            row = {
                "system": unit.system,
                "version": version,
                "model": unit.model,
                "precision": unit.precision,
                **asdict(point),
                "value": statistics.median(each["value"] for each in values) if values else None,
                "unit": UNIT,
                "samples": [each["value"] for each in values],
                "noise": [each["noise"] for each in values],
                "agreement": agreed,
                "roofline": bench_report.roofline(
                    config, limits, unit.precision, (point.metric, point.batch, point.prompt), settings.decode_new
                ),
            }
            if errors or not values:
                row["error"] = "; ".join(dict.fromkeys(errors)) or "not measured"
            rows.append(row)
    return rows


def best_limits(journal: Sequence[Entry]) -> dict[str, Any] | None:
    """The most that any round saw."""
    seen = [entry["limits"] for entry in journal if entry.get("limits")]
    if not seen:
        return None
    names = {name for limits in seen for name in limits["gemm"]}
    return {
        "read_gb_per_second": max(limits["read_gb_per_second"] for limits in seen),
        "gemm": {name: max(limits["gemm"].get(name, 0.0) for limits in seen) for name in sorted(names)},
    }


def ratios_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Ours over the best peer, by `model/precision/metric/batch/prompt`; precision `any` lets each side choose its own.

    Where no peer has a value there is nothing to compare with, and no entry; where ours has none it is None.
    """
    ratios = {}
    places = {(row["model"], row["metric"], row["batch"], row["prompt"]) for row in rows}
    for model, metric, batch, prompt in sorted(places):
        place = (model, metric, batch, prompt)
        here = [row for row in rows if (row["model"], row["metric"], row["batch"], row["prompt"]) == place]
        for precision in [*dict.fromkeys(row["precision"] for row in here), "any"]:
            alike = [row for row in here if row["value"] and precision in (row["precision"], "any")]
            peers = [row for row in alike if row["system"] not in OURS]
            if not peers:
                continue
            best = max(peers, key=lambda row: float(row["value"]))
            ours = {name: max((row["value"] for row in alike if row["system"] == name), default=None) for name in OURS}
            ratios[f"{model}/{precision}/{metric}/{batch}/{prompt}"] = {
                **{name: None if value is None else round(value / best["value"], 4) for name, value in ours.items()},
                "best_peer": best["system"],
                "best_peer_precision": best["precision"],
                "best_peer_agreement": best["agreement"],
            }
    return ratios


def _at(entry: Entry, point: Point) -> Mapping[str, Any]:
    """What an entry says of a point; the entry's own error stands for points it did not come to."""
    for measured in entry.get("points", ()):
        if measured["point"] == [point.metric, point.batch, point.prompt]:
            found: Mapping[str, Any] = measured
            return found
    return {"error": entry["error"]} if "error" in entry else {}


def _key(unit: Unit) -> list[str]:
    return [unit.system, unit.model, unit.precision]


def _name(unit: Unit) -> str:
    return f"{unit.system} {unit.model} {unit.precision}"


class Journal:
    """Lines of JSON, each on the disk before the next measurement begins; the first holds the settings."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path = path
        self._head = {"settings": json.loads(json.dumps(asdict(settings)))}

    def start(self) -> None:
        """Begins anew."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._head) + "\n", encoding="utf-8")

    def resume(self) -> list[Entry]:
        """What was measured before, failures apart, which are tried again; a torn last line counts as not written.

        Raises:
            ValueError: when there is no journal, or one of other settings.
        """
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ValueError(f"nothing to resume: {error}") from error
        entries = []
        for line in lines:
            try:
                entries.append(json.loads(line))
            except ValueError:
                break
        if entries[:1] != [self._head]:
            raise ValueError(f"{self._path} is of other settings: run without --resume")
        kept: list[Entry] = [entry for entry in entries[1:] if not _has_failed(entry)]
        self.start()
        for entry in kept:
            self.record(entry)
        return kept

    def record(self, entry: Entry) -> None:
        """Appends one entry."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _has_failed(entry: Entry) -> bool:
    return "error" in entry or any("error" in measured for measured in entry.get("points", ()))


def make_weights(source: str, build: Path, *, is_fresh: bool) -> Weights:
    """A checkpoint with random weights from seed 0, and the same as a Hugging Face folder; both kept for the next run.

    Args:
        source: a preset's name or a recipe file.
        build: where they are kept.
        is_fresh: whether to throw away what systems made of the weights before.

    Raises:
        model.training.presets.RecipeError: for a name that is neither a preset nor a recipe file.
        benchmarks.peers.hf_folder.UnknownFamily: for a model that peers do not know.
        RuntimeError: when the weights cannot be made.
    """
    recipe = resolve(source)
    hf_folder.family(recipe.model)
    folder = build / "models" / f"{recipe.name}-{digest(recipe.model)}"
    checkpoint, hugging_face = folder / "checkpoint", folder / recipe.name
    make_checkpoint(source, checkpoint)
    if not (hugging_face / "config.json").exists():
        hf_folder.write(checkpoint, hugging_face)
        is_fresh = True
    if is_fresh:  # conversions of other weights, and artifacts of an exporter that may have changed since
        shutil.rmtree(build / "work" / recipe.name, ignore_errors=True)
    return Weights(config=recipe.model, checkpoint=checkpoint, hugging_face=hugging_face)


def reference_agreement(weights: Mapping[str, Weights]) -> Agreement:
    """Judges by the cache-less PyTorch reference in float32, each answer fed back once."""

    def agreement(model: str, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> float:
        from model import checkpoint
        from model.nn import reference

        loaded = checkpoint.load(weights[model].checkpoint)
        agreeing = positions = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = reference.logits(loaded.model, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
            agreeing += sum(int(best) == token for best, token in zip(logits.argmax(-1), answer, strict=True))
            positions += len(answer)
        return agreeing / positions

    return agreement


def main() -> int:
    """Measures, and says it all on the last line of stdout."""
    options = _parse(sys.argv[1:])
    timeouts = Timeouts(install=options.install_timeout, call=options.call_timeout)
    signal.signal(signal.SIGTERM, _terminate)  # so that what was started is ended
    try:
        sources = {resolve(source).name: source for source in options.models}
        settings = _settings(options, tuple(sources))
        journal = Journal(BUILD / "journal.jsonl", settings)
        entries = journal.resume() if options.resume else []
        weights = {name: make_weights(source, BUILD, is_fresh=not options.resume) for name, source in sources.items()}
    except (ValueError, RuntimeError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if not options.resume:
        journal.start()
    bench = Bench(settings, timeouts, BUILD, SYSTEMS, weights)
    bench.prepare()
    bench.run(entries, journal.record)
    rows = rows_of(entries, settings, weights, reference_agreement(weights))
    said = {"rows": rows, "ratios": ratios_of(rows)}
    taken = {"command": command_line("bench"), "limits": best_limits(entries)}
    facts = {"settings": asdict(settings), "machine": machine()}
    bench_report.write(said | facts | taken, DOCS if options.docs else BUILD)
    for row in rows:
        if row["value"] is None:
            place = f"{row['metric']} {row['batch']} x {row['prompt']}"
            print(f"failed: {row['system']} {row['model']} {row['precision']} {place}: {row['error']}")
    print(json.dumps(said, allow_nan=False))
    return 0


def _terminate(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=_list, default=defaults.models, help="presets or recipe files")
    parser.add_argument("--systems", type=_choices(SYSTEMS), default=defaults.systems, help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--precisions", type=_list, default=defaults.precisions, help="fp32, bf16, int8, int4")
    parser.add_argument("--metrics", type=_choices(METRICS), default=METRICS, help="decode, prefill")
    parser.add_argument("--batches", type=_numbers, default=None, help="of decode; default 1,8,32")
    parser.add_argument("--prompts", type=_numbers, default=None, help="of prefill, in tokens; default 128,512,1024")
    parser.add_argument("--new", type=int, default=None, help="tokens that decode generates; default 128")
    parser.add_argument("--rounds", type=int, default=None, help="default 3")
    parser.add_argument("--repeats", type=int, default=None, help="timed calls per figure and round; default 3")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0, help="of prompts and orders")
    parser.add_argument("--quick", action="store_true", help="one round, few and short calls: to see that it works")
    parser.add_argument("--resume", action="store_true", help="go on with the journal of a run that was broken off")
    parser.add_argument("--docs", action="store_true", help="write the report into docs/ and not into build/bench")
    parser.add_argument("--install-timeout", type=float, default=Timeouts().install, metavar="SECONDS")
    parser.add_argument("--call-timeout", type=float, default=Timeouts().call, metavar="SECONDS")
    options = parser.parse_args(arguments)
    for name, least in (("rounds", 1), ("repeats", 1), ("threads", 1), ("new", 2)):
        if (value := getattr(options, name)) is not None and value < least:
            parser.error(f"--{name} must be at least {least}")
    return options


def _settings(options: argparse.Namespace, models: tuple[str, ...]) -> Settings:
    common: dict[str, Any] = {
        name: getattr(options, name) for name in ("systems", "precisions", "metrics", "threads", "seed")
    }
    common["models"] = models
    if options.quick:
        common |= {"rounds": 1, "repeats": 1, "batches": (1, 8), "prompts": (128,), "decode_new": 32, "is_quick": True}
    given = {"rounds": options.rounds, "repeats": options.repeats, "decode_new": options.new}
    given |= {"batches": options.batches, "prompts": options.prompts}
    return Settings(**common | {name: value for name, value in given.items() if value is not None})


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    if min(numbers) < 1:
        raise ValueError
    return numbers


def _list(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part for part in text.split(",") if part))


def _choices(known: Any) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        if unknown := [name for name in _list(text) if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
        return _list(text)

    return parse


if __name__ == "__main__":
    sys.exit(main())
