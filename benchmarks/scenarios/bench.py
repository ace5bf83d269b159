"""Ours beside what a user would run instead: same weights, same machine, interleaved rounds.

In every round each system runs alone, in a process of its own, in an order drawn anew; the machine's limits are
measured at the round's start. Two metrics, in tokens a second:

    decode    B sequences of 128 prompt tokens together: B · (new - lead) / (t(new) - t(lead)), new = 128, where after
              lead = min(B + 1, new / 2) tokens every prompt has been read: all sequences decode, in steady state
    prefill   one prompt: its tokens / t(1 new)

with t the median of `--repeats` calls on unseen prompts, after a warm-up. A row's value is the median of its rounds.
What cannot be installed, converted, loaded or run is a row with its error and no value. Agreement is the share of
greedy tokens that PyTorch, fed the same tokens in float32, would choose too; random weights have close logits, so it
is worse than a trained model's.

A ratio at a precision is ours over the best peer. At `any` each side has the precision that serves it best, at equal
loss: a peer counts only where its loss (`benchmarks run loss`, on a trained model) is at most ours, and ours only where
it is at most that peer's, both within 0.1 % of bits per byte. What has no measured loss does not count.

With `--device cuda` the peers are compiled transformers and a plain torch CUDA graph, all in the present environment.
Every measurement is a line in `build/bench/bench.jsonl`, where `--resume` continues. The last line of stdout is
`{"rows": […], "ratios": {…}}`.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.frame import models
from benchmarks.frame.errors import ArgumentError
from benchmarks.frame.journal import Entry, Journal
from benchmarks.frame.models import digest, draw, make_checkpoint
from benchmarks.frame.roofline import best_limits, roofline
from benchmarks.frame.rounds import say, shuffled
from benchmarks.frame.scenario import DOCS, Run, Scenario, Settings, option
from benchmarks.frame.statistics import bootstrap, ratio_of_medians
from benchmarks.peers import hf_folder
from benchmarks.peers.child import Child, SystemFailed
from benchmarks.peers.systems import CUDA_SYSTEMS, OURS, SYSTEMS, InstallError, SystemSpec, python_of
from benchmarks.scenarios import _bench_report
from benchmarks.scenarios._bench_losses import Losses, is_at_most, loss_of, read_losses
from benchmarks.scenarios.translation import one_line
from model.spec.config import ModelConfig
from model.training.presets import resolve

METRICS = ("decode", "prefill")
UNIT = "tokens/s"
_WARM_TOKENS = 2
_FAILURES = (InstallError, SystemFailed, OSError)

Row = Mapping[str, Any]
Agreement = Callable[[str, Sequence[Sequence[int]], Sequence[Sequence[int]]], float]
"""From a model's name, prompts and a system's answers to the share of tokens that the reference chooses too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings(Settings):
    """What is measured. A journal is only resumed under the same settings."""

    precision: str = option("")
    models: tuple[str, ...] = option(("llama-110m", "gpt2-124m"), "presets or recipe files")
    systems: tuple[str, ...] = option((), f"none: all; {', '.join(SYSTEMS)}", choices={*SYSTEMS, *CUDA_SYSTEMS})
    precisions: tuple[str, ...] = option(("fp32", "bf16", "int8"), "fp32, fp16, bf16, int8, int4, int8-kv8, int4-kv8")
    metrics: tuple[str, ...] = option(METRICS, "decode, prefill", choices=METRICS)
    batches: tuple[int, ...] = option((1, 8, 32), "of decode", least=1, quick=(1, 8))
    prompts: tuple[int, ...] = option((128, 512, 1024), "of prefill, in tokens", least=1, quick=(128,))
    decode_prompt: int = option(128)
    decode_new: int = option(128, "tokens that decode generates", flag="new", least=2, quick=32)
    rounds: int = option(5, "of all systems", least=1, quick=1)
    repeats: int = option(3, "timed calls per figure and round", least=1, quick=1)
    losses: Path = option(DOCS / "data" / "peers-loss.json", "data of `loss`; not for --device cuda")  # noqa: RUF009 (a field)
    device: str = option("cpu", "cpu or cuda", choices=("cpu", "cuda"))
    in_place: bool = option(False, "the systems of --device cuda, which need no installation")  # noqa: FBT003
    quality_prompts: int = option(4)
    quality_new: int = option(16)
    install_timeout: float = option(3600.0, "seconds to install a system", above=0.0)
    prepare_timeout: float = option(1800.0)
    load_timeout: float = option(900.0)
    call_timeout: float = option(300.0, "seconds of a call", above=0.0)


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """One thing measured: `prompt` tokens for each of `batch` sequences."""

    metric: str
    batch: int
    prompt: int


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """What runs alone: a system, with a model, in a precision (our name)."""

    system: str
    model: str
    precision: str

    def __str__(self) -> str:
        """For people."""
        return f"{self.system} {self.model} {self.precision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The same weights in two formats."""

    config: ModelConfig
    checkpoint: Path
    hugging_face: Path


def points(settings: BenchSettings, config: ModelConfig) -> list[Point]:
    """What is measured of a model within its context; the longest prompt leaves room for one token."""
    found = set()
    if "prefill" in settings.metrics:
        found |= {Point("prefill", 1, min(length, config.context - 1)) for length in settings.prompts}
    if "decode" in settings.metrics and settings.decode_prompt + settings.decode_new <= config.context:
        found |= {Point("decode", batch, settings.decode_prompt) for batch in settings.batches}
    return sorted(found)


def units(settings: BenchSettings) -> list[Unit]:
    """Everything that runs in a round."""
    return [
        Unit(system, model, precision)
        for model in settings.models
        for precision in settings.precisions
        for system in settings.systems
    ]


@dataclass
class Bench:
    """One run of the benchmark; `weights` by model's name, `build` for environments, weights and logs."""

    settings: BenchSettings
    build: Path
    systems: Mapping[str, SystemSpec]
    weights: Mapping[str, Weights]
    is_quick: bool = False
    unusable: dict[Unit, str] = field(default_factory=dict)
    pythons: dict[str, Path | InstallError] = field(default_factory=dict)

    def prepare(self) -> None:
        """Installs and converts before anything is timed; failures become rows."""
        for unit in units(self.settings):
            if unit.precision not in self.systems[unit.system].precisions:
                self.unusable[unit] = f"{unit.precision} is not offered"
                continue
            try:
                with self._child(unit, "prepare") as child:
                    child.ask({"do": "prepare"}, self.settings.prepare_timeout)
            except _FAILURES as error:
                self.unusable[unit] = one_line(error)
                say(f"{unit}: {self.unusable[unit]}")

    def run(self, journal: Journal) -> None:
        """All rounds, except what the journal has."""
        done = {(entry["round"], *entry["unit"]) for entry in journal.entries}
        for number in range(self.settings.rounds):
            if (number, "limits") not in done:
                journal.record({"round": number, "unit": ["limits"], "limits": self._limits()})
            for unit in shuffled(sorted(units(self.settings)), self.settings.seed, number):
                key = [unit.system, unit.model, unit.precision]
                if (number, *key) not in done:
                    say(f"round {number + 1}/{self.settings.rounds}: {unit}")
                    journal.record({"round": number, "unit": key, **self._measure(unit, number)})

    def _measure(self, unit: Unit, number: int) -> dict[str, Any]:
        """One system in one round: its measurements, or its error."""
        if unit in self.unusable:
            return {"error": self.unusable[unit]}
        measured: list[dict[str, Any]] = []
        entry: dict[str, Any] = {"points": measured}
        try:
            with self._child(unit, f"round-{number + 1}") as child:
                entry["version"] = child.ask({"do": "load"}, self.settings.load_timeout)["version"]
                prompts = quality_prompts(self.settings, self.weights[unit.model].config)
                entry["tokens"] = self._generate(child, prompts, self.settings.quality_new)["tokens"]
                measured += self._points(child, unit, number)
        except _FAILURES as error:
            entry["error"] = one_line(error)
        return entry

    def _points(self, child: Child, unit: Unit, number: int) -> Iterator[dict[str, Any]]:
        """Every point's value or error; a system that no longer answers fails the remaining points."""
        config, gone = self.weights[unit.model].config, ""
        for point in points(self.settings, config):
            measured: dict[str, Any] = {"point": [point.metric, point.batch, point.prompt]}
            if gone:
                yield measured | {"error": gone}
                continue
            prompts = Prompts(config.vocab_size, f"{self.settings.seed}/{number}/{unit.model}/{point}")
            try:
                yield measured | self._value(child, point, prompts)
            except SystemFailed as error:
                gone = "" if child.is_usable else one_line(error)
                yield measured | {"error": one_line(error)}

    def _value(self, child: Child, point: Point, prompts: Prompts) -> dict[str, Any]:
        new = self.settings.decode_new if point.metric == "decode" else 1
        # Compiled and captured steps are those of a full call.
        warm = new if self.settings.device == "cuda" else min(new, _WARM_TOKENS)
        self._generate(child, prompts.draw(point.batch, point.prompt), warm)
        lead = min(point.batch + 1, new // 2) if point.metric == "decode" else 1
        first, noise = self._time(child, prompts, point, lead)
        if point.metric == "prefill":
            return {"value": point.prompt / first, "noise": noise}
        every, noise_every = self._time(child, prompts, point, new)
        if every <= first:
            raise SystemFailed(f"{new} tokens took no longer than {lead}: too small to measure")
        return {"value": point.batch * (new - lead) / (every - first), "noise": max(noise, noise_every)}

    def _time(self, child: Child, prompts: Prompts, point: Point, new: int) -> tuple[float, float]:
        """Median seconds and largest noise of the repeats."""
        answers = [
            self._generate(child, prompts.draw(point.batch, point.prompt), new) for _ in range(self.settings.repeats)
        ]
        noise = max(answer["noise"] or 0.0 for answer in answers)
        return statistics.median(answer["seconds"] for answer in answers), noise

    def _generate(self, child: Child, prompts: Sequence[Sequence[int]], new: int) -> dict[str, Any]:
        return child.ask({"do": "generate", "prompts": prompts, "new": new}, self.settings.call_timeout)

    def _limits(self) -> dict[str, Any] | None:
        """The device's limits now; None, with the reason on stderr, if they cannot be measured."""
        command = [sys.executable, "-m", "benchmarks.frame.limits", "--device", self.settings.device]
        command += ["--threads", str(self.settings.threads), *(["--quick"] if self.is_quick else [])]
        try:
            timeout = self.settings.call_timeout
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout, check=True)
            limits: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            say(f"the machine's limits: {error}")
            return None
        return limits

    def _child(self, unit: Unit, name: str) -> AbstractContextManager[Child]:
        """A process of the unit's system, in its own environment.

        Raises:
            InstallError: if there is none; pip runs once.
        """
        spec, weights = self.systems[unit.system], self.weights[unit.model]
        if spec.name not in self.pythons:
            try:
                self.pythons[spec.name] = python_of(spec, self.build / "venvs", self.settings.install_timeout)
            except InstallError as error:
                self.pythons[spec.name] = error
        python = self.pythons[spec.name]
        if isinstance(python, InstallError):
            raise python
        return spec.started(
            python,
            weights.checkpoint if spec.is_ours else weights.hugging_face,
            self.build / "work" / self.settings.device / unit.model / spec.files,
            self.build / "logs" / f"{unit.model}-{unit.precision}-{unit.system}-{name}.log",
            precision=unit.precision,
            threads=self.settings.threads,
            max_batch=max(*self.settings.batches, self.settings.quality_prompts),
            context=weights.config.context,
            device=self.settings.device,
        )


class Prompts:
    """Random prompts, never the same twice; the same for every system that is given the same seed."""

    def __init__(self, vocab_size: int, seed: str) -> None:
        self._vocab_size = vocab_size
        self._random = random.Random(seed)  # noqa: S311 (not for secrets)

    def draw(self, count: int, length: int) -> list[list[int]]:
        """So many prompts of one length."""
        return [draw(self._random, self._vocab_size, length) for _ in range(count)]


def quality_prompts(settings: BenchSettings, config: ModelConfig) -> list[list[int]]:
    """Sent to every system in every round, for the agreement."""
    length = min(32, config.context - settings.quality_new)
    return Prompts(config.vocab_size, f"quality/{settings.seed}").draw(settings.quality_prompts, length)


def rows_of(
    journal: Sequence[Entry], settings: BenchSettings, weights: Mapping[str, Weights], agreement: Agreement
) -> list[dict[str, Any]]:
    """A row for every system, model, precision and point, failures included."""
    limits = best_limits([entry["limits"] for entry in journal if entry.get("limits")])
    rows = []
    for unit in units(settings):
        entries = [entry for entry in journal if entry["unit"] == [unit.system, unit.model, unit.precision]]
        config = weights[unit.model].config
        answers = next((entry["tokens"] for entry in entries if "tokens" in entry), None)
        agreed = agreement(unit.model, quality_prompts(settings, config), answers) if answers else None
        for point in points(settings, config):
            found = [_at(entry, point) for entry in entries]
            values = [each for each in found if "value" in each]
            errors = [each["error"] for each in found if "error" in each]
            samples = [each["value"] for each in values]
            place = (point.metric, point.batch, point.prompt)
            row = {
                "system": unit.system,
                "version": next((entry["version"] for entry in entries if "version" in entry), None),
                "model": unit.model,
                "precision": unit.precision,
                **asdict(point),
                "value": statistics.median(samples) if samples else None,
                "unit": UNIT,
                "samples": samples,
                "interval": bootstrap(statistics.median, samples) if samples else None,
                "noise": [each["noise"] for each in values],
                "agreement": agreed,
                "roofline": roofline(config, limits, unit.precision, place, settings.decode_new),
            }
            if errors or not values:
                row["error"] = "; ".join(dict.fromkeys(errors)) or "not measured"
            rows.append(row)
    return rows


def _at(entry: Entry, point: Point) -> Mapping[str, Any]:
    """An entry's measurement of a point; its own error for points that it did not reach."""
    for measured in entry.get("points", ()):
        if measured["point"] == [point.metric, point.batch, point.prompt]:
            found: Mapping[str, Any] = measured
            return found
    return {"error": entry["error"]} if "error" in entry else {}


def ratios_of(rows: Sequence[Row], known: Losses | None = None) -> dict[str, dict[str, Any]]:
    """Ours over the best peer, by `model/precision/metric/batch/prompt`; `any` is the pair of `_at_equal_loss`.

    There is no entry where no peer has a value; a system of ours without one is None. `interval`, `precision` and
    `loss` are of the first of ours that has a value.

    Args:
        rows: of `rows_of`.
        known: losses by system and precision; without them every precision counts.
    """
    ratios = {}
    places = {(row["model"], row["metric"], row["batch"], row["prompt"]) for row in rows}
    for place in sorted(places):
        here = [
            row for row in rows if row["value"] and (row["model"], row["metric"], row["batch"], row["prompt"]) == place
        ]
        pairs: dict[str, tuple[Sequence[Row], Any]] = {}
        for precision in dict.fromkeys(row["precision"] for row in here):
            alike = [row for row in here if row["precision"] == precision]
            pairs[precision] = [row for row in alike if row["system"] in OURS], _fastest(_peers(alike))
        pairs["any"] = _at_equal_loss(here, known)
        model, metric, batch, prompt = place
        for precision, (own, best) in pairs.items():
            if best is None:
                continue
            ours = {name: _fastest([row for row in own if row["system"] == name]) for name in OURS}
            judged = next((row for row in ours.values() if row is not None), None)
            ratios[f"{model}/{precision}/{metric}/{batch}/{prompt}"] = {
                **{name: None if row is None else round(row["value"] / best["value"], 4) for name, row in ours.items()},
                "interval": _interval(judged, best),
                "precision": None if judged is None else judged["precision"],
                "loss": None if judged is None else loss_of(judged, known),
                "best_peer": best["system"],
                "best_peer_precision": best["precision"],
                "best_peer_loss": loss_of(best, known),
                "best_peer_agreement": best["agreement"],
            }
    return ratios


def _at_equal_loss(rows: Sequence[Row], known: Losses | None) -> tuple[Sequence[Row], Any]:
    """Ours, and the fastest peer whose loss is at most ours; at our fastest precision that has no more loss than it.

    The peer is None if there is no such pair.
    """
    ours = [row for row in rows if row["system"] in OURS]
    if known is None:
        return ours, _fastest(_peers(rows))
    judged = next((name for name in OURS if any(row["system"] == name for row in ours)), None)
    for row in sorted(ours, key=lambda row: -float(row["value"])):
        if row["system"] == judged:
            best = _fastest([peer for peer in _peers(rows) if is_at_most(loss_of(peer, known), loss_of(row, known))])
            if best is not None and is_at_most(loss_of(row, known), loss_of(best, known)):
                return [each for each in ours if each["precision"] == row["precision"]], best
    return [], None


def _peers(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["system"] not in OURS]


def _fastest(rows: Sequence[Row]) -> Any:
    """The row with the highest value; None of none."""
    return max(rows, key=lambda row: float(row["value"]), default=None)


def _interval(ours: Mapping[str, Any] | None, peer: Mapping[str, Any]) -> tuple[float, float] | None:
    """Of the ratio of medians over the rounds; None where one of them lacks a round."""
    if ours is None or len(ours["samples"]) != len(peer["samples"]):
        return None
    return bootstrap(ratio_of_medians, ours["samples"], peer["samples"])


def make_weights(source: str, build: Path, *, is_fresh: bool, is_in_place: bool) -> Weights:
    """A checkpoint with random weights from seed 0, and for the CPU's peers a Hugging Face folder; kept for later runs.

    Args:
        source: a preset's name or a recipe file.
        build: where they are kept.
        is_fresh: whether to discard systems' conversions.
        is_in_place: whether all systems read our checkpoint.

    Raises:
        ArgumentError: if there is no such model, or peers do not know it.
        RuntimeError: if the weights cannot be made.
    """
    try:
        recipe = resolve(source)
        config = recipe.transformer
        if not is_in_place:
            hf_folder.family(config)
    except ValueError as error:
        raise ArgumentError(str(error)) from error
    folder = build / "models" / f"{recipe.name}-{digest(config)}"
    checkpoint, hugging_face = folder / "checkpoint", folder / recipe.name
    make_checkpoint(source, checkpoint)
    if not is_in_place and not (hugging_face / "config.json").exists():
        hf_folder.write(checkpoint, hugging_face)
        is_fresh = True
    if is_fresh:
        for device in ("cpu", "cuda"):
            shutil.rmtree(build / "work" / device / recipe.name, ignore_errors=True)
    return Weights(config=config, checkpoint=checkpoint, hugging_face=hugging_face)


def measure(settings: BenchSettings, run: Run) -> dict[str, Any]:
    """Prepares all systems, runs the rounds."""
    is_in_place = settings.in_place or settings.device == "cuda"
    systems = CUDA_SYSTEMS if is_in_place else SYSTEMS
    if unknown := [name for name in settings.systems if name not in systems]:
        raise ArgumentError(f"on {settings.device} there is no {', '.join(unknown)}, there are {', '.join(systems)}")
    weights = {
        Path(source).stem: make_weights(source, run.build, is_fresh=not run.resume, is_in_place=is_in_place)
        for source in settings.models
    }
    settings = replace(settings, models=tuple(weights), systems=settings.systems or tuple(systems))
    journal = run.journal("bench", asdict(settings))
    bench = Bench(settings, run.build, systems, weights, run.is_quick)
    bench.prepare()
    bench.run(journal)

    def agreement(model: str, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> float:
        return models.reference_agreement(weights[model].checkpoint, prompts, answers)

    rows = rows_of(journal.entries, settings, weights, agreement)
    for row in rows:
        if row["value"] is None:
            place = f"{row['metric']} {row['batch']} x {row['prompt']}"
            print(f"failed: {row['system']} {row['model']} {row['precision']} {place}: {row['error']}")
    known = None if is_in_place else read_losses(settings.losses)
    if known == {}:
        say(f"{settings.losses} has no losses: there is no ratio at `any` precision")
    limits = best_limits([entry["limits"] for entry in journal.entries if entry.get("limits")])
    return {"rows": rows, "ratios": ratios_of(rows, known), "limits": limits}


SCENARIO = Scenario(
    __name__,
    BenchSettings,
    measure,
    _bench_report.render,
    lambda results: _bench_report.draw(results["rows"]),
    caption="Tokens a second of every system, by metric",
    printed=("rows", "ratios"),
    is_resumable=True,
)
