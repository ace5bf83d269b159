"""Whether prefill time is quadratic, as attention's law says: a fit of the engine's seconds over prompt length.

One prompt at a time, in chunks, from its arrival to its first token; the engine alone, on the given device. The fit and
the objections to it are the load test's (`loadtest.scaling.fit`).
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.frame import models
from benchmarks.frame.engine import checked_step, greedy_request, load_engine
from benchmarks.frame.models import draw
from benchmarks.frame.rounds import say
from benchmarks.frame.scenario import ModelSettings, Run, Scenario, option
from loadtest.scaling.fit import examine
from model.spec.artifact import read_manifest
from model.training.presets import resolve
from service.engine.scheduler import EngineLimits

_QUADRATIC = 2
_CUDA_CHUNK = 4096
_CPU_CHUNK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LawSettings(ModelSettings):
    """What is measured; lengths in tokens."""

    lengths: tuple[int, ...] = option((256, 512, 1024, 2048, 3072), "of prompts", least=1, quick=(16, 32, 48, 64, 96))
    repeats: int = option(5, "of each length, after a warm-up", least=1, quick=1)
    device: str = option("cpu", "cpu or cuda", choices=("cpu", "cuda"))


def measure(settings: LawSettings, run: Run) -> dict[str, Any]:
    """Every length, then the fit."""
    recipe, is_cuda = resolve(settings.model), settings.device == "cuda"
    work = run.build / "law" / f"{recipe.name}-{models.digest(recipe.model)}"
    models.make_checkpoint(settings.model, work / "checkpoint")
    if is_cuda:
        from benchmarks.frame.paged import emit_checkpoint

        folder = emit_checkpoint(work / "checkpoint", work, settings.precision, settings.device)
    else:
        folder = models.export(work / "checkpoint", work, settings.precision)
    chunk = _CUDA_CHUNK if is_cuda else _CPU_CHUNK
    limits = EngineLimits(max_batch_size=1, prefill_chunk=chunk, max_prefill_tokens=chunk)
    engine, vocab_size = load_engine(folder, limits, settings.threads), read_manifest(folder).config.vocab_size
    source = random.Random(settings.seed)  # noqa: S311 (not for secrets)
    samples: list[tuple[float, float]] = []
    for length in settings.lengths:
        for number in range(settings.repeats + 1):
            prompt, began = draw(source, vocab_size, length), time.perf_counter()
            engine.add_request(greedy_request(f"{length}-{number}", prompt, 1))
            while engine.has_work:
                checked_step(engine)
            if number:
                samples.append((length, time.perf_counter() - began))
        say(f"{length} tokens in {samples[-1][1]:.3f} s")
    found = examine(samples, _QUADRATIC)
    return {
        "samples": samples,
        "coefficients": list(found.curve.coefficients),
        "intervals": [[interval.low, interval.high] for interval in found.intervals],
        "crossover": found.crossover if found.crossover < float("inf") else None,
        "bic": list(found.bic),
        "misfit": found.misfit,
        "extrapolation_error": found.extrapolation_error,
        "objections": list(found.objections),
        "passed": found.holds,
    }


SCENARIO = Scenario(__name__, LawSettings, measure)
