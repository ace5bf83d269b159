"""An encoder-decoder under concurrent users: ours over gRPC beside CTranslate2's `Translator`, same random weights.

    python -m benchmarks.translation [--requests 96] [--in-flight 32] [--precisions fp32,int8,int8-kv8] [--rounds 3]
                                     [--quick] [--docs]

Eight layers each, d 512. Every request wants an output of its own length, 8 to 200 tokens, forced on both; its source
is about as long, as in translation. There are always `--in-flight` requests unanswered until none are left. The metric
is generated tokens a second, from the first request to the last answer. `int8-kv8` is ours with keys and values
in eight bits besides, for which CTranslate2 has no option: its int8 stands beside it.

Ours batches continuously. CTranslate2 cannot: a call runs until its last sentence has ended, and only ended ones leave.
So all ways to put a server around it are tried first, each once on half the requests (`BATCHINGS`: calls side by side,
their size, first come first served or sorted by length, sentences that end early or are padded), and the best three go
into the rounds. `translate_iterable` is the same calls behind a queue that reads ahead; what it could gain by seeing
more than is in flight, `offline` shows, which sees all at once and is no server: it is printed and does not count.

In every round each system runs alone, in a process of its own, in an order drawn anew. The promise is: the median of
our best over the median of its best ≥ 2. The last line on stdout is one JSON object; the report goes to `build/bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import scenario
from benchmarks.peers.child import Child, SystemFailed, running
from benchmarks.peers.ctranslate2_translator import Batching
from benchmarks.peers.onward import KV_BITS
from benchmarks.peers.systems import SYSTEMS, InstallError, python_of
from benchmarks.scenario import draw
from model.spec.config import ModelConfig

NAME = "translation"
DOCS = Path("docs")
LIMIT = 2.0
"""How many times CTranslate2's rate ours must be."""
OURS, PEER = "onward", "ctranslate2"
MODULES: Mapping[str, str] = {OURS: "benchmarks.peers.onward", PEER: "benchmarks.peers.ctranslate2_translator"}
"""What speaks `benchmarks.peers.protocol`, by system."""
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
    # Tied, a model with random weights repeats its last token: agreement would say nothing.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured; lengths in tokens."""

    model: Mapping[str, Any]
    requests: int = 96
    in_flight: int = 32
    output_least: int = 8
    output_most: int = 200
    precisions: tuple[str, ...] = ("fp32", "int8", "int8-kv8")
    batchings: tuple[str, ...] = (*BATCHINGS, OFFLINE)
    rounds: int = 3
    threads: int = 1
    seed: int = 0
    install_timeout: float = 3600.0
    call_timeout: float = 900.0


@dataclass(frozen=True, slots=True, order=True)
class Contender:
    """What runs alone: a system, in a precision, batched in one way (ours has one)."""

    system: str
    precision: str
    batching: str = ""


class Translation:
    """One run of the benchmark.

    Args:
        settings: what to measure.
        build: where everything is kept: environments, weights, logs.
        python: the interpreter that has CTranslate2, or why there is none.
        modules: what to start.
    """

    def __init__(
        self, settings: Settings, build: Path, python: Path | InstallError, modules: Mapping[str, str] = MODULES
    ) -> None:
        self._settings = settings
        self._build = build
        self._python = python
        self._modules = modules
        self._config = ModelConfig.from_dict(settings.model)
        self._folder = build / "scenarios" / NAME

    def measure(self) -> dict[str, Any]:
        """Everything: weights, batchings, rounds, agreement.

        Raises:
            RuntimeError: when the weights cannot be made.
        """
        self._make_checkpoint()
        shutil.rmtree(self._work, ignore_errors=True)  # artifacts of an exporter that may have changed since
        agreement, errors = self._agreement()
        tried = self._try_batchings(errors)
        chosen = [Contender(OURS, precision) for precision in self._settings.precisions] + best_batchings(tried)
        rates: dict[Contender, list[float]] = {contender: [] for contender in chosen}
        noise: dict[Contender, list[float]] = {contender: [] for contender in chosen}
        for number in range(self._settings.rounds):
            order = sorted(chosen)
            random.Random(f"{self._settings.seed}/{number}").shuffle(order)  # noqa: S311 (not for secrets)
            for contender in order:
                try:
                    rate, others = self._run(contender, number, self._settings.requests)
                except (InstallError, SystemFailed, OSError) as error:
                    errors.setdefault(contender, _line(error))
                    continue
                rates[contender].append(rate)
                noise[contender].append(others)
        rows = [row(contender, rates[contender], noise[contender], agreement, errors) for contender in chosen]
        silent = [contender for contender in errors if contender not in chosen]
        rows += [row(contender, [], [], agreement, errors) for contender in silent]
        facts = {"scenario": NAME, "settings": asdict(self._settings), "machine": scenario.machine()}
        tries = [{**asdict(contender), "value": rate} for contender, rate in tried.items()]
        return {**facts, "rows": rows, "batchings": tries, **ratios(rows, tried)}

    def _make_checkpoint(self) -> None:
        recipe = self._folder / "recipe.json"
        recipe.parent.mkdir(parents=True, exist_ok=True)
        recipe.write_text(json.dumps({"model": self._settings.model}), encoding="utf-8")
        scenario.make_checkpoint(str(recipe), self._checkpoint)

    @property
    def _checkpoint(self) -> Path:
        return self._folder / f"checkpoint-{scenario.digest(self._config)}"

    @property
    def _work(self) -> Path:
        return self._folder / f"work-{scenario.digest(self._config)}"

    def _agreement(self) -> tuple[dict[Contender, float], dict[Contender, str]]:
        """Prepares every system once, and how far its greedy tokens are the reference's; or why it cannot run."""
        agreed, errors = {}, {}
        source = random.Random(f"agreement/{self._settings.seed}")  # noqa: S311 (not for secrets)
        length = min(24, self._config.source_context)
        new = min(_AGREEMENT_TOKENS, self._config.context - 1)
        sources = [draw(source, self._config.source_vocab_size, length) for _ in range(_AGREEMENT_SOURCES)]
        for system in (OURS, PEER):
            for precision in offered(system, self._settings.precisions):
                contender = Contender(system, precision)
                try:
                    with self._child(contender, "prepare") as child:
                        child.ask({"do": "prepare"}, self._settings.call_timeout)
                        child.ask({"do": "load"}, self._settings.call_timeout)
                        question = {"do": "generate", "prompts": sources, "new": new}
                        answers = child.ask(question, self._settings.call_timeout)["tokens"]
                except (InstallError, SystemFailed, OSError) as error:
                    errors[contender] = _line(error)
                    print(f"{_name(contender)}: {errors[contender]}", file=sys.stderr, flush=True)
                    continue
                agreed[contender] = reference_agreement(self._checkpoint, sources, answers)
        return agreed, errors

    def _try_batchings(self, errors: dict[Contender, str]) -> dict[Contender, float]:
        """CTranslate2's rate by batching, each measured once."""
        tried = {}
        for precision in offered(PEER, self._settings.precisions):
            if Contender(PEER, precision) in errors:
                continue
            for name in self._settings.batchings:
                contender = Contender(PEER, precision, name)
                try:
                    tried[contender], _ = self._run(contender, -1, max(1, self._settings.requests // 2))
                except (SystemFailed, OSError) as error:
                    errors[contender] = _line(error)
        return tried

    def _run(self, contender: Contender, number: int, count: int) -> tuple[float, float]:
        """Generated tokens a second, and the share of the machine that others took."""
        print(f"round {number + 1}: {_name(contender)}", file=sys.stderr, flush=True)
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

    def _child(self, contender: Contender, name: str) -> AbstractContextManager[Child]:
        is_ours = contender.system == OURS
        python = Path(sys.executable) if is_ours else self._python
        if isinstance(python, InstallError):
            raise python
        precision = contender.precision if is_ours else SYSTEMS[PEER].precisions[contender.precision]
        threads = str(self._settings.threads)
        command = [str(python), "-m", self._modules[contender.system], "--folder", str(self._checkpoint)]
        command += ["--work", str(self._work / contender.system), "--precision", precision, "--threads", threads]
        command += ["--max-batch", str(self._settings.in_flight), "--context", str(self._config.context)]
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **SYSTEMS[contender.system].environment}
        batching = contender.batching.replace(" ", "").replace(",", "-")
        log = f"{NAME}-{contender.system}-{contender.precision}{batching and '-'}{batching}-{name}.log"
        return running(command, environment, self._build / "logs" / log)


def offered(system: str, precisions: Sequence[str]) -> list[str]:
    """Those of our names of precisions that a system has."""
    return [precision for precision in precisions if precision in SYSTEMS[system].precisions]


def requests(settings: Settings, config: ModelConfig, seed: str, count: int) -> tuple[list[list[int]], list[int]]:
    """Sources, about as long as their outputs, and the outputs' lengths."""
    source = random.Random(seed)  # noqa: S311 (not for secrets)
    lengths = [source.randint(settings.output_least, settings.output_most) for _ in range(count)]
    sources = [
        draw(source, config.source_vocab_size, min(config.source_context, round(length * source.uniform(0.8, 1.25))))
        for length in lengths
    ]
    return sources, lengths


def best_batchings(tried: Mapping[Contender, float], count: int = 3) -> list[Contender]:
    """The fastest of each precision, without what sees more requests than there are in flight."""
    chosen = []
    for precision in dict.fromkeys(contender.precision for contender in tried):
        own = [each for each in tried if each.precision == precision and each.batching != OFFLINE]
        chosen += sorted(own, key=lambda contender: -tried[contender])[:count]
    return chosen


def row(
    contender: Contender,
    rates: Sequence[float],
    noise: Sequence[float],
    agreement: Mapping[Contender, float],
    errors: Mapping[Contender, str],
) -> dict[str, Any]:
    """A line of the table; one that failed has no value and says why."""
    made = {
        **asdict(contender),
        "value": statistics.median(rates) if rates else None,
        "unit": "tokens/s",
        "samples": list(rates),
        "noise": list(noise),
        "agreement": agreement.get(replace(contender, batching="")),
    }
    return made | ({"error": errors[contender]} if contender in errors else {})


def ratios(rows: Sequence[Mapping[str, Any]], tried: Mapping[Contender, float]) -> dict[str, Any]:
    """Ours over CTranslate2's best, in each precision and with either side's best (`any`).

    Fewer bits for keys and values are a matter of ours alone: its best in the same precision of products is beside it.
    """
    found: dict[str, float | None] = {}
    for precision in (*dict.fromkeys(each["precision"] for each in rows), "any"):
        ours = _best(rows, OURS, precision)
        peer = _best(rows, PEER, precision.partition(KV_BITS)[0])
        found[precision] = ours / peer if ours and peer else None
    offline = {contender.precision: rate for contender, rate in tried.items() if contender.batching == OFFLINE}
    overall = found["any"]
    return {"ratios": found, "offline": offline, "limit": LIMIT, "passed": overall is not None and overall >= LIMIT}


def _best(rows: Sequence[Mapping[str, Any]], system: str, precision: str) -> float | None:
    rates = (each["value"] for each in rows if each["system"] == system and precision in (each["precision"], "any"))
    return max((rate for rate in rates if rate), default=None)


def reference_agreement(checkpoint: Path, sources: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> float:
    """Share of tokens that PyTorch, fed the same ones in float32, would have chosen too."""
    from model import checkpoint as checkpoints
    from model.nn import reference

    loaded = checkpoints.load(checkpoint)
    agreeing = 0
    for source, answer in zip(sources, answers, strict=True):
        logits = reference.logits(loaded.model, [loaded.config.bos_id, *answer[:-1]], source)
        agreeing += sum(int(best) == token for best, token in zip(logits.argmax(-1), answer, strict=True))
    return agreeing / sum(map(len, answers))


def render(results: Mapping[str, Any]) -> str:
    """The document, in Markdown."""
    settings, model = results["settings"], results["settings"]["model"]
    lines = [
        "# Translation under concurrent users",
        "",
        f"{model['num_encoder_layers']}+{model['num_layers']} layers, d {model['d_model']}, random weights; "
        f"{settings['requests']} requests, {settings['in_flight']} in flight, outputs of {settings['output_least']} to "
        f"{settings['output_most']} tokens; medians of {settings['rounds']} rounds, {settings['threads']} threads, on "
        f"{results['machine']['processor']}.",
        "",
        "| system | precision | batching | tokens/s | agreement with fp32 |",
        "|---|---|---|---:|---:|",
    ]
    for each in results["rows"]:
        value = "failed" if each["value"] is None else f"{each['value']:.0f}"
        agreed = "-" if each["agreement"] is None else f"{each['agreement']:.1%}"
        batching = each["batching"] or ("continuous" if each["system"] == OURS else "")
        lines.append(f"| {each['system']} | {each['precision']} | {batching} | {value} | {agreed} |")
    lines += ["", "Ours over CTranslate2's best: "]
    parts = [
        f"{precision} {'-' if ratio is None else f'{ratio:.2f}'}" for precision, ratio in results["ratios"].items()
    ]
    verdict = "holds" if results["passed"] else "does **not** hold"
    lines[-1] += f"{', '.join(parts)}; the promise of {results['limit']:g} {verdict}."
    lines += ["", "CTranslate2's batchings, each tried once on half the requests (calls side by side x sentences):", ""]
    lines += ["| batching | precision | tokens/s |", "|---|---|---:|"]
    lines += [f"| {each['batching']} | {each['precision']} | {each['value']:.0f} |" for each in results["batchings"]]
    failures = [each for each in results["rows"] if "error" in each]
    if failures:
        lines += ["", "Failures:", ""]
        lines += [f"- {each['system']} {each['precision']} {each['batching']}: `{each['error']}`" for each in failures]
    return "\n".join(lines) + "\n"


def _name(contender: Contender) -> str:
    return " ".join(part for part in (contender.system, contender.precision, contender.batching) if part)


def _line(error: Exception) -> str:
    """An error's words on one line, without where this checkout happens to lie."""
    return " ".join(str(error).replace(str(Path.cwd()), ".").split())


def main() -> int:
    """Measures, and says it all on the last line of stdout."""
    settings, folder = _parse(sys.argv[1:])
    try:
        python: Path | InstallError = python_of(SYSTEMS[PEER], scenario.BUILD / "venvs", settings.install_timeout)
    except InstallError as error:
        python = error
    return scenario.tell(NAME, Translation(settings, scenario.BUILD, python).measure, render, folder)


def _parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    defaults = Settings(model=MODEL, threads=os.cpu_count() or 1)
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=defaults.requests)
    parser.add_argument("--in-flight", type=int, default=defaults.in_flight)
    parser.add_argument("--precisions", type=lambda text: tuple(text.split(",")), default=defaults.precisions)
    parser.add_argument("--rounds", type=int, default=defaults.rounds)
    parser.add_argument("--threads", type=int, default=defaults.threads)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--quick", action="store_true", help="one round of few, short requests: to see that it works")
    parser.add_argument("--docs", action="store_true", help="write the report into docs/ and not into build/bench")
    options = parser.parse_args(arguments)
    for name in ("requests", "in_flight", "rounds", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if others := [name for name in options.precisions if name not in SYSTEMS[OURS].precisions]:
        parser.error(f"--precisions: unknown: {', '.join(others)}")
    given = {name: getattr(options, name) for name in ("requests", "in_flight", "precisions", "rounds")}
    settings = replace(defaults, **given, threads=options.threads, seed=options.seed)
    if options.quick:
        settings = replace(
            settings,
            requests=min(8, settings.requests),
            rounds=1,
            output_most=24,
            batchings=("1 x 32", "2 x 8, sorted"),
        )
    return settings, DOCS if options.docs else scenario.BUILD


if __name__ == "__main__":
    sys.exit(main())
