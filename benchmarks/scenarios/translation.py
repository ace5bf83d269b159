"""An encoder-decoder under concurrent requests: ours over gRPC beside CTranslate2's `Translator`, same random weights.

Eight layers each, d 512. Every request has an output length of its own, 8 to 200 tokens, forced on both; its source is
about as long. `--in-flight` requests are always unanswered until none are left. The metric is generated tokens a
second, from the first request to the last answer. `int8-kv8` is ours with keys and values in eight bits too, for which
CTranslate2 has no option: it is compared with CTranslate2's int8.

Ours batches continuously. CTranslate2 cannot: a call runs until its last sentence ends. So all ways to put a server
around it are tried once on half the requests (`BATCHINGS`), and the best three go into the rounds. `offline` hands it
all requests at once; that is no server: reported, not compared.

In every round each system runs alone, in a process of its own, in an order drawn anew. Promise: the median of our best
over the median of its best ≥ 2.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.frame import models
from benchmarks.frame.models import KV_BITS, digest, draw
from benchmarks.frame.rounds import interleaved, say
from benchmarks.frame.scenario import Results, Run, Scenario, Settings, option
from benchmarks.frame.statistics import bootstrap, ratio_of_medians
from benchmarks.frame.tables import conditions, table, times, verdict
from benchmarks.peers.child import Child, SystemFailed
from benchmarks.peers.ctranslate2_translator import Batching
from benchmarks.peers.systems import SYSTEMS, InstallError, SystemSpec, python_of
from model.spec.config import ModelConfig

LIMIT = 2.0
OURS, PEER = "onward", "ctranslate2"
TRANSLATORS: Mapping[str, SystemSpec] = {
    OURS: SYSTEMS[OURS],
    PEER: replace(SYSTEMS[PEER], module="benchmarks.peers.ctranslate2_translator"),
}
MODEL: Mapping[str, Any] = {
    "architecture": "encoder-decoder",
    "vocab_size": 32000,
    "context": 512,
    "d_model": 512,
    "num_encoder_layers": 8,
    "num_layers": 8,
    "num_heads": 8,
    "d_ff": 2048,
    "positions": "sinusoidal",
    "norm": "layernorm",
    "norm_placement": "post",
    "activation": "relu",
    "attention_bias": True,
    "mlp_bias": True,
    "scale_embeddings": True,
    # With tied embeddings random weights repeat the last token: agreement would say nothing.
    "tie_embeddings": False,
    "share_embeddings": False,
}
BATCHINGS: Mapping[str, Batching] = {
    f"{workers} x {batch}{', sorted' if is_sorted else ''}{', padded' if is_padded else ''}": Batching(
        workers, batch, is_sorted=is_sorted, is_padded=is_padded
    )
    for workers, batch, is_sorted, is_padded in (
        (1, 32, False, False),
        (1, 16, False, False),
        (1, 16, True, False),
        (1, 8, True, False),
        (2, 32, False, False),
        (2, 16, False, False),
        (2, 16, True, False),
        (2, 8, False, False),
        (2, 8, True, False),
        (2, 4, False, False),
        (1, 32, False, True),
        (2, 8, True, True),
    )
}
OFFLINE = "offline"
_ALL_AT_ONCE = Batching(2, 16, is_sorted=True)
_AGREEMENT_SOURCES, _AGREEMENT_TOKENS = 8, 24
_FAILURES = (InstallError, SystemFailed, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationSettings(Settings):
    """What is measured; lengths in tokens."""

    precision: str = option("")
    precisions: tuple[str, ...] = option(("fp32", "int8", "int8-kv8"), "of ours", choices=SYSTEMS[OURS].precisions)
    requests: int = option(96, "of a round", least=1, quick=8)
    in_flight: int = option(32, "unanswered requests", least=1)
    output_least: int = option(8)
    output_most: int = option(200, quick=24)
    batchings: tuple[str, ...] = option((*BATCHINGS, OFFLINE), quick=("1 x 32", "2 x 8, sorted"))
    rounds: int = option(5, "of all systems", least=1, quick=1)
    model: Mapping[str, Any] = option(None)
    install_timeout: float = option(3600.0)
    call_timeout: float = option(900.0)


@dataclass(frozen=True, slots=True, order=True)
class Contender:
    """What runs alone: a system in a precision, with a batching unless it is ours."""

    system: str
    precision: str
    batching: str = ""

    def __str__(self) -> str:
        """For people."""
        return " ".join(part for part in (self.system, self.precision, self.batching) if part)


class Translation:
    """One run.

    Args:
        settings: what to measure.
        build: for environments, weights, logs.
        python: the interpreter with CTranslate2, or why there is none.
        systems: by name.
    """

    def __init__(
        self,
        settings: TranslationSettings,
        build: Path,
        python: Path | InstallError,
        systems: Mapping[str, SystemSpec] = TRANSLATORS,
    ) -> None:
        self._settings = settings
        self._build = build
        self._python = python
        self._systems = systems
        self._config = ModelConfig.from_dict(settings.model or MODEL)
        folder = build / "scenarios" / "translation"
        self._checkpoint = folder / f"checkpoint-{digest(self._config)}"
        self._work = folder / f"work-{digest(self._config)}"

    def measure(self) -> dict[str, Any]:
        """Weights, agreement, batchings, rounds.

        Raises:
            RuntimeError: if the weights cannot be made.
        """
        self._make_checkpoint()
        shutil.rmtree(self._work, ignore_errors=True)  # the exporter may have changed
        agreement, errors = self._agreement()
        tried = self._try_batchings(errors)
        chosen = [Contender(OURS, precision) for precision in self._settings.precisions] + best_batchings(tried)
        rates: dict[Contender, list[tuple[float, float]]] = {contender: [] for contender in chosen}
        for number, contender in interleaved(self._settings.rounds, sorted(chosen), self._settings.seed):
            try:
                rates[contender].append(self._run(contender, number, self._settings.requests))
            except _FAILURES as error:
                errors.setdefault(contender, one_line(error))
        rows = [row(contender, rates[contender], agreement, errors) for contender in chosen]
        rows += [row(contender, [], agreement, errors) for contender in errors if contender not in chosen]
        tries = [{**asdict(contender), "value": rate} for contender, rate in tried.items()]
        return {"model": dict(self._config.to_dict()), "rows": rows, "batchings": tries, **ratios(rows, tried)}

    def _make_checkpoint(self) -> None:
        recipe = self._checkpoint.parent / "recipe.json"
        recipe.parent.mkdir(parents=True, exist_ok=True)
        recipe.write_text(json.dumps({"model": self._config.to_dict()}), encoding="utf-8")
        models.make_checkpoint(str(recipe), self._checkpoint)

    def _agreement(self) -> tuple[dict[Contender, float], dict[Contender, str]]:
        """Prepares every system once: the share of its greedy tokens that are the reference's, or why it cannot run."""
        agreed, errors = {}, {}
        source = random.Random(f"agreement/{self._settings.seed}")  # noqa: S311 (not for secrets)
        length, new = min(24, self._config.source_context), min(_AGREEMENT_TOKENS, self._config.context - 1)
        sources = [draw(source, self._config.source_vocab_size, length) for _ in range(_AGREEMENT_SOURCES)]
        for contender in [Contender(system, each) for system in (OURS, PEER) for each in self._offered(system)]:
            try:
                with self._child(contender, "prepare") as child:
                    for question in ("prepare", "load"):
                        child.ask({"do": question}, self._settings.call_timeout)
                    asked = {"do": "generate", "prompts": sources, "new": new}
                    answers = child.ask(asked, self._settings.call_timeout)["tokens"]
            except _FAILURES as error:
                errors[contender] = one_line(error)
                say(f"{contender}: {errors[contender]}")
                continue
            agreed[contender] = models.reference_agreement(self._checkpoint, sources, answers)
        return agreed, errors

    def _try_batchings(self, errors: dict[Contender, str]) -> dict[Contender, float]:
        """CTranslate2's rate by batching, each measured once."""
        tried = {}
        for precision in self._offered(PEER):
            for name in self._settings.batchings if Contender(PEER, precision) not in errors else ():
                contender = Contender(PEER, precision, name)
                try:
                    tried[contender], _ = self._run(contender, -1, max(1, self._settings.requests // 2))
                except _FAILURES as error:
                    errors[contender] = one_line(error)
        return tried

    def _run(self, contender: Contender, number: int, count: int) -> tuple[float, float]:
        """Generated tokens a second, and the share of the machine that others took."""
        say(f"  {contender}")
        sources, lengths = requests(self._settings, self._config, f"{self._settings.seed}/{number}", count)
        is_offline = contender.batching == OFFLINE
        in_flight = count if is_offline else self._settings.in_flight
        batching = asdict(_ALL_AT_ONCE if is_offline else BATCHINGS[contender.batching]) if contender.batching else {}
        with self._child(contender, f"round-{number + 1}") as child:
            child.ask({"do": "load"}, self._settings.call_timeout)
            question = {"do": "translate", "batching": batching, "in_flight": in_flight}
            warm = {"sources": sources[:4], "lengths": [8] * len(sources[:4])}
            child.ask(question | warm, self._settings.call_timeout)
            answer = child.ask(question | {"sources": sources, "lengths": lengths}, self._settings.call_timeout)
        return sum(lengths) / answer["seconds"], answer["noise"] or 0.0

    def _offered(self, system: str) -> list[str]:
        return [name for name in self._settings.precisions if name in self._systems[system].precisions]

    def _child(self, contender: Contender, name: str) -> AbstractContextManager[Child]:
        python = Path(sys.executable) if contender.system == OURS else self._python
        if isinstance(python, InstallError):
            raise python
        words = [str(contender).replace(" ", "-").replace(",", ""), name]
        return self._systems[contender.system].started(
            python,
            self._checkpoint,
            self._work / contender.system,
            self._build / "logs" / f"translation-{'-'.join(words)}.log",
            precision=contender.precision,
            threads=self._settings.threads,
            max_batch=self._settings.in_flight,
            context=self._config.context,
        )


def measure(settings: TranslationSettings, run: Run) -> dict[str, Any]:
    """Installs CTranslate2 unless it is there."""
    try:
        python: Path | InstallError = python_of(SYSTEMS[PEER], run.build / "venvs", settings.install_timeout)
    except InstallError as error:
        python = error
    return Translation(settings, run.build, python).measure()


def requests(
    settings: TranslationSettings, config: ModelConfig, seed: str, count: int
) -> tuple[list[list[int]], list[int]]:
    """Sources, about as long as their outputs, and the outputs' lengths."""
    source = random.Random(seed)  # noqa: S311 (not for secrets)
    lengths = [source.randint(settings.output_least, settings.output_most) for _ in range(count)]
    sources = [
        draw(source, config.source_vocab_size, min(config.source_context, round(length * source.uniform(0.8, 1.25))))
        for length in lengths
    ]
    return sources, lengths


def best_batchings(tried: Mapping[Contender, float], count: int = 3) -> list[Contender]:
    """The fastest of each precision, without `offline`."""
    chosen = []
    for precision in dict.fromkeys(contender.precision for contender in tried):
        own = [each for each in tried if each.precision == precision and each.batching != OFFLINE]
        chosen += sorted(own, key=lambda contender: -tried[contender])[:count]
    return chosen


def row(
    contender: Contender,
    rates: Sequence[tuple[float, float]],
    agreement: Mapping[Contender, float],
    errors: Mapping[Contender, str],
) -> dict[str, Any]:
    """A row; `rates` are rounds' tokens a second and noise. One that failed has no value and its error."""
    made = {
        **asdict(contender),
        "value": statistics.median(rate for rate, _ in rates) if rates else None,
        "unit": "tokens/s",
        "samples": [rate for rate, _ in rates],
        "noise": [noise for _, noise in rates],
        "agreement": agreement.get(replace(contender, batching="")),
    }
    return made | ({"error": errors[contender]} if contender in errors else {})


def ratios(rows: Sequence[Mapping[str, Any]], tried: Mapping[Contender, float]) -> dict[str, Any]:
    """Ours over CTranslate2's best, in each precision and with either side's best (`any`).

    Ours with fewer bits for keys and values is compared with CTranslate2's best in the same precision of products.
    """
    found: dict[str, float | None] = {}
    intervals: dict[str, tuple[float, float] | None] = {}
    for precision in (*dict.fromkeys(each["precision"] for each in rows), "any"):
        ours = _best(rows, OURS, precision)
        peer = _best(rows, PEER, precision.partition(KV_BITS)[0])
        found[precision] = ours["value"] / peer["value"] if ours and peer else None
        if ours and peer and len(ours["samples"]) == len(peer["samples"]):
            intervals[precision] = bootstrap(ratio_of_medians, ours["samples"], peer["samples"])
    offline = {contender.precision: rate for contender, rate in tried.items() if contender.batching == OFFLINE}
    overall = found["any"]
    passed = overall is not None and overall >= LIMIT
    return {"ratios": found, "intervals": intervals, "offline": offline, "limit": LIMIT, "passed": passed}


def _best(rows: Sequence[Mapping[str, Any]], system: str, precision: str) -> Mapping[str, Any] | None:
    """The row with the highest value."""
    own = (each for each in rows if each["system"] == system and precision in (each["precision"], "any"))
    return max((each for each in own if each["value"]), key=lambda each: float(each["value"]), default=None)


def one_line(error: Exception) -> str:
    """An error's message on one line, without this checkout's path."""
    return " ".join(str(error).replace(str(Path.cwd()), ".").split())


def render(results: Results) -> str:
    """The document."""
    settings, model, rows = results["settings"], results["model"], []
    for each in results["rows"]:
        value = "failed" if each["value"] is None else f"{each['value']:.0f}"
        agreed = "-" if each["agreement"] is None else f"{each['agreement']:.1%}"
        batching = each["batching"] or ("continuous" if each["system"] == OURS else "")
        rows.append([each["system"], each["precision"], batching, value, agreed])
    parts = [f"{name} {times(ratio, results['intervals'].get(name))}" for name, ratio in results["ratios"].items()]
    tries = [[each["batching"], each["precision"], f"{each['value']:.0f}"] for each in results["batchings"]]
    failures = [
        f"- {Contender(each['system'], each['precision'], each['batching'])}: `{each['error']}`"
        for each in results["rows"]
        if "error" in each
    ]
    lines = [
        "# Translation under concurrent users",
        "",
        f"{model['num_encoder_layers']}+{model['num_layers']} layers, d {model['d_model']}, random weights; "
        f"{settings['requests']} requests, {settings['in_flight']} in flight, outputs of {settings['output_least']} to "
        f"{settings['output_most']} tokens; medians of {settings['rounds']} rounds, {conditions(results)}.",
        "",
        *table("system|precision|batching|tokens/s|agreement with fp32", rows, text_columns=3),
        "",
        f"Ours over CTranslate2's best: {', '.join(parts)}; the promise of {results['limit']:g} "
        f"{verdict(results['passed'])}.",
        "",
        "CTranslate2's batchings, each tried once on half the requests (calls side by side x sentences):",
        "",
        *table("batching|precision|tokens/s", tries, text_columns=2),
        *(["", "Failures:", "", *failures] if failures else []),
    ]
    return "\n".join(lines)


SCENARIO = Scenario(__name__, TranslationSettings, measure, render)
