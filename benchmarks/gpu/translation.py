"""The recipe for English to German, trained in the time there is, then served: BLEU by PyTorch and by the engine.

Trains with the command that anyone would give, `python -m model train docs/recipes/en-de-gpu.toml`. A run that is not
over in time is ended by the signal that it knows (SIGTERM), and its best weights so far are scored: how many steps it
came to is told. The scores are those of one set of weights on the same held-out pairs, written greedily once by PyTorch
in float32 and once by the engine. Which corpus it was is told by its size; the sample in the repository is too small to
learn a language from.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines import greedy, make_engine, serve
from benchmarks.gpu.oracle import Oracle
from benchmarks.gpu.parity import AGREEMENT, describe_choices
from benchmarks.gpu.places import RECIPE, ROOT
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.results import Scribe
from benchmarks.gpu.workshop import Graphs
from model import checkpoint, evaluate
from model.checkpoint import Checkpoint
from model.data import pairs
from model.data.config import DataConfig
from model.nn.transformer import EncoderDecoder, num_parameters
from model.spec.artifact import TARGET_TOKENIZER, TOKENIZER
from model.spec.golden import tolerance_of
from model.spec.tokenizer import EOS_ID, Tokenizer
from model.training.presets import resolve
from service.engine.scheduler import EngineLimits
from service.engine.types import GenerationRequest

NAME = "translation"
SCORING_SECONDS = 75.0
"""Left for scoring and serving when training is told to end."""
BLEU_TOLERANCE = 0.5
"""By how much the served translations may score less than PyTorch's."""

_MAX_PAIRS = 1000
_EXTRA_TOKENS = 50
_ROWS = 128
_POLL_SECONDS = 0.5
_TELL_SECONDS = 15.0
_STOP_SECONDS = 60.0
_ENDED_BY_SIGNAL = 128 + signal.SIGTERM
_MAX_SAID = 500


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Pairs that were not learned from: source ids, and the translations to be compared with."""

    sources: list[list[int]]
    references: list[str]


def run(bench: Bench, scribe: Scribe) -> None:
    """Trains, scores, serves."""
    plan = bench.plan
    overrides = (f"paths={json.dumps([str(bench.corpus)])}", f"device={plan.device}", *plan.train_overrides)
    folder = Path(tempfile.mkdtemp(prefix="en-de-", dir=bench.folder)) / "checkpoint"
    scribe.note("corpus", bench.corpus.name)
    settings = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "model", "train", str(RECIPE), "--out", str(folder), *settings]
    trained = train(command, folder.with_suffix(".log"), bench.seconds_left - SCORING_SECONDS, scribe)
    best = folder / "best"
    loaded = checkpoint.load(best if best.is_dir() else folder)
    scribe.note("training", {**trained, **describe(loaded)})
    recipe = resolve(str(RECIPE), overrides)
    if recipe.data is None:
        raise ValueError(f"{RECIPE.name} has no data")
    score(bench, scribe, loaded, hold_out(loaded, recipe.data))


def score(bench: Bench, scribe: Scribe, loaded: Checkpoint, held_out: HeldOut) -> None:
    """Has held-out sources translated by PyTorch and by the engine."""
    target = Tokenizer.load(loaded.target_tokenizer)
    if not isinstance(loaded.model, EncoderDecoder):
        raise TypeError(f"{RECIPE.name} trains no encoder-decoder")
    bounds = [len(source) + _EXTRA_TOKENS for source in held_out.sources]
    scribe.say(f"{len(held_out.sources)} held-out pairs by PyTorch in float32")
    answers = evaluate.greedy(loaded.model.to(bench.device), held_out.sources, bounds)
    by_torch = [target.decode(answer) for answer in answers]
    loaded.model.to("cpu")
    precision = bench.plan.precisions[0]
    graphs = bench.workshop.adopt("en-de", loaded.model, precision)
    began = time.perf_counter()
    written = translate(graphs, held_out.sources, bounds, bench.plan)
    seconds = time.perf_counter() - began
    served = [target.decode(answer) for answer in written]
    scores = evaluate.translation_scores(by_torch, held_out.references)
    served_scores = evaluate.translation_scores(served, held_out.references)
    same = sum(mine == theirs for mine, theirs in zip(served, by_torch, strict=True))
    scribe.note("num_pairs", len(served))
    scribe.note("pytorch", scores)
    scribe.note("served", {**served_scores, "precision": str(precision), "same_as_pytorch": same})
    scribe.note("served_tokens_per_second", sum(map(len, written)) / seconds)
    tolerance = tolerance_of(precision, graphs.manifest.kv_cache.precision)
    oracle = Oracle(loaded.model.to(bench.device))
    if not (chosen := [pair for pair in zip(held_out.sources, written, strict=True) if pair[1]]):
        raise RuntimeError("every translation is empty")
    choices = reduce(add, (oracle.judge(source, answer, tolerance) for source, answer in chosen))
    scribe.note("greedy", describe_choices(choices))
    lost = float(scores["bleu"]) - float(served_scores["bleu"])
    found = f"{served_scores['bleu']:.2f} against {scores['bleu']:.2f}, {same} of {len(served)} translations the same"
    what = f"BLEU as served in {precision} is PyTorch's to {BLEU_TOLERANCE:g} or better"
    scribe.claim(what, found, holds=lost <= BLEU_TOLERANCE)
    found = f"{choices.agreement:.2%} of {choices.num}, {choices.num_wrong} of the others are no ties"
    holds = choices.agreement >= AGREEMENT and choices.num_wrong == 0
    what = f"of the served tokens at least {AGREEMENT:.0%} are float32's choice, the others ties"
    scribe.claim(what, found, holds=holds)


def train(command: Sequence[str], log: Path, seconds: float, scribe: Scribe) -> dict[str, Any]:
    """Trains for so long at most; what became of it.

    Args:
        command: of the trainer, which ends with 128 + the signal's number where SIGTERM ended it.
        log: where what it says goes.
        seconds: after which it is told to end.
        scribe: told now and then how far it is.

    Raises:
        RuntimeError: when training fails, with what it said last.
    """
    began = time.monotonic()
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
    told, is_cut = began, False
    try:
        while process.poll() is None:
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            if now - told >= _TELL_SECONDS:
                told = now
                scribe.say(_last_line(log))
            if now - began >= seconds and not is_cut:
                scribe.say("time is up: ending the run")
                is_cut = True
                process.send_signal(signal.SIGTERM)
            if now - began >= seconds + _STOP_SECONDS:
                break
    finally:
        if process.poll() is None:
            process.kill()
        said, _ = process.communicate()
    took = time.monotonic() - began
    if process.returncode == 0:
        return {"is_cut": False, "seconds": round(took, 1), "result": json.loads(said.strip().splitlines()[-1])}
    if is_cut and process.returncode == _ENDED_BY_SIGNAL:
        return {"is_cut": True, "seconds": round(took, 1)}
    raise RuntimeError(f"training ended with {process.returncode}: {_last_line(log)}")


def describe(loaded: Checkpoint) -> dict[str, Any]:
    """What a checkpoint says of its training."""
    told = loaded.training
    return {
        "num_parameters": num_parameters(loaded.model),
        "step": told["step"],
        "steps": told["steps"],
        "num_pairs": told["data"]["num_examples"],
        "num_target_tokens": told["num_target_tokens"],
        "precision": told["precision"],
        "validation": told["validation"],
    }


def hold_out(loaded: Checkpoint, data: DataConfig) -> HeldOut:
    """The test side's pairs whose lengths the model knows, the first thousand."""
    corpus, config = pairs.load(data), loaded.config
    tokenizers = {name: Tokenizer.load(path) for name, path in loaded.tokenizers.items()}
    reader, writer = tokenizers[TOKENIZER], tokenizers.get(TARGET_TOKENIZER, tokenizers[TOKENIZER])
    sources = reader.encode_batch([pair.source for pair in corpus.test])
    targets = writer.encode_plain_batch([pair.target for pair in corpus.test])
    fitting = [
        (list(source), pair.target)
        for source, target, pair in zip(sources, targets, corpus.test, strict=True)
        if 1 <= len(source) <= config.source_context and len(target) < config.context
    ][:_MAX_PAIRS]
    return HeldOut([source for source, _ in fitting], [reference for _, reference in fitting])


def translate(
    graphs: Graphs, sources: Sequence[Sequence[int]], bounds: Sequence[int], plan: Plan
) -> list[Sequence[int]]:
    """What the engine writes, end tokens aside."""
    rows = min(_ROWS, len(sources))
    engine = make_engine(
        graphs, EngineLimits(max_batch_size=rows, prefill_chunk=plan.block_size, max_prefill_tokens=_ROWS * 16)
    )
    asked = enumerate(zip(sources, bounds, strict=True))
    requests = [_request(str(number), source, bound) for number, (source, bound) in asked]
    answers = serve(engine, ((0, request) for request in requests))
    return [array("i", (token for token in answers.tokens[each.request_id] if token != EOS_ID)) for each in requests]


def _request(name: str, source: Sequence[int], bound: int) -> GenerationRequest:
    """Until the end token, as PyTorch writes."""
    request = greedy(name, source, bound)
    return replace(request, stopping=replace(request.stopping, ignore_eos=False))


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][-_MAX_SAID:] if lines else "nothing said yet"
