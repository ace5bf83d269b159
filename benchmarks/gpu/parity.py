"""Whether the device answers as PyTorch does in float32 on the same device: both families, each precision.

Golden cases (`export.golden_cases`), replayed by the engine as a server would: prompts whole and in chunks, ragged
decoding, rows that join and leave. Then greedy choices: random prompts of many lengths are continued together, and each
chosen token is held to float32's choice after the same tokens (`benchmarks.gpu.oracle`). Weights are random, which is
hard on agreement: what was trained prefers its choice by more, which models that were brought along can show.

What is promised is promised of ten bits of fraction, fp16's: logits within 2e-2 of their spread, 99 % of greedy choices
float32's own. bfloat16 has seven, and is held to eight times as much of the spread (`model.spec.golden`) and, for its
choices, to PyTorch: beside each answer stands what PyTorch itself chooses in the same precision after the same tokens,
and of ours no more may be other than float32's than of its own, to half a percent.
"""

from __future__ import annotations

import gc
import math
from functools import reduce
from operator import add

import numpy as np

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ceilings import DTYPES
from benchmarks.gpu.engines import draw_prompt, greedy, make_engine, serve
from benchmarks.gpu.oracle import Choices, Oracle
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.results import Scribe
from export.golden_cases import make_cases
from model.spec.artifact import Precision
from model.spec.config import ModelConfig
from model.spec.golden import CaseResult, Tolerance, tolerance_of
from service.engine.engine import Engine
from service.engine.scheduler import EngineLimits

NAME = "parity"
AGREEMENT = 0.99
"""Of greedy choices in sixteen bits of which ten are the fraction's, or more."""
MARGIN = 0.005
"""By how much less bfloat16's may agree with float32's than PyTorch's own in bfloat16, where that is less than 99 %."""
_PROMPTS = (4, 64)


def run(bench: Bench, scribe: Scribe) -> None:
    """The model in every precision."""
    plan, name, config = bench.plan, bench.stage.model, bench.proven
    oracle_model = bench.workshop.on_device(name, config)
    scribe.say(f"golden cases of {name} by PyTorch in float32")
    cases, oracle = make_cases(oracle_model), Oracle(oracle_model)
    for precision in plan.precisions:
        graphs = bench.workshop.graphs(name, config, precision)
        tolerance = tolerance_of(precision, graphs.manifest.kv_cache.precision)
        engine = make_engine(graphs, limits(plan))
        results = engine.verify_golden(cases, tolerance)
        scribe.add("golden", {"model": name, "precision": precision, **describe(results, tolerance)})
        answers = answer(engine, config, plan)
        del engine
        gc.collect()
        choices = reduce(add, (oracle.judge(prompt, chosen, tolerance) for prompt, chosen in answers))
        rounded = bench.workshop.on_device(name, config, DTYPES[precision])
        by_torch = reduce(add, (oracle.judge_model(rounded, prompt, chosen, tolerance) for prompt, chosen in answers))
        del rounded
        told = {**describe_choices(choices), "by_torch": describe_choices(by_torch)}
        scribe.add("greedy", {"model": name, "precision": precision, **told})
        claim(scribe, f"{name} {precision}", precision, results, choices, by_torch, tolerance)


def limits(plan: Plan) -> EngineLimits:
    """Of engines whose answers are checked: chunks of one block, so that prompts have several."""
    return EngineLimits(max_batch_size=plan.rows, prefill_chunk=plan.block_size, max_prefill_tokens=2 * plan.block_size)


def answer(engine: Engine, config: ModelConfig, plan: Plan) -> list[tuple[list[int], list[int]]]:
    """Prompts, or sources, and what the engine chooses after them: as many tokens as the plan says, or some more."""
    draw = np.random.default_rng(17)
    vocab_size = config.source_vocab_size if config.is_encoder_decoder else config.vocab_size
    longest = min(_PROMPTS[1], config.source_context if config.is_encoder_decoder else config.context // 4)
    room = config.context - (1 if config.is_encoder_decoder else longest)
    new = min(plan.agreement_new, room)
    prompts = {
        f"g{number}": draw_prompt(vocab_size, int(draw.integers(_PROMPTS[0], longest + 1)), number)
        for number in range(math.ceil(plan.agreement_tokens / new))
    }
    answers = serve(engine, ((0, greedy(name, prompt, new)) for name, prompt in prompts.items()))
    return [(prompt, answers.tokens[name]) for name, prompt in prompts.items()]


def describe(results: tuple[CaseResult, ...], tolerance: Tolerance) -> dict[str, object]:
    """Golden cases as figures; an error without bound is None."""
    worst = max(results, key=lambda result: result.max_relative_error)
    return {
        "num_cases": len(results),
        "failed": [result.name for result in results if not result.passed],
        "max_relative_error": _finite(worst.max_relative_error),
        "worst_case": worst.name,
        "min_agreement": min(result.agreement for result in results),
        "tolerance": {"absolute": tolerance.absolute, "relative": tolerance.relative},
    }


def describe_choices(choices: Choices) -> dict[str, object]:
    """Greedy choices as figures."""
    return {
        "num_tokens": choices.num,
        "agreement": choices.agreement,
        "num_wrong": choices.num_wrong,
        "widest_gap": _finite(choices.widest_gap),
    }


def claim(
    scribe: Scribe,
    what: str,
    precision: Precision,
    results: tuple[CaseResult, ...],
    choices: Choices,
    by_torch: Choices,
    tolerance: Tolerance,
) -> None:
    """What is promised of a model in a precision; `by_torch` are PyTorch's own choices in it."""
    failed = [result.name for result in results if not result.passed]
    worst = max(result.max_relative_error for result in results)
    bound = f"{tolerance.relative:g} of the logits' spread" if tolerance.relative else f"{tolerance.absolute:g}"
    found = f"at most {worst:.2g} of the spread off in {len(results)} cases"
    if failed:
        found += f"; not so: {', '.join(failed)}"
    scribe.claim(f"{what}: golden cases within {bound}", found, holds=not failed)
    found = f"{choices.num_wrong} of {choices.num} are not, the widest gap is {choices.widest_gap:.2g} of the spread"
    scribe.claim(f"{what}: greedy choices that are not float32's are ties", found, holds=choices.num_wrong == 0)
    least, bound = AGREEMENT, f"at least {AGREEMENT:.0%}"
    if precision is Precision.BF16:
        least = min(AGREEMENT, by_torch.agreement - MARGIN)
        bound = f"at least {AGREEMENT:.0%}, or as many as of PyTorch's own in {precision} less {MARGIN:.1%},"
    found = f"{choices.agreement:.2%} of {choices.num}, PyTorch's {by_torch.agreement:.2%}"
    scribe.claim(f"{what}: {bound} of them are", found, holds=choices.agreement >= least)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
