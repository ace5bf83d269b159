"""Whether served greedy tokens are the reference's: asks a server, then PyTorch judges every position.

Requests of ragged prompt and output lengths join and leave while others run. Each served output is fed once,
teacher-forced, through the cache-less reference: at every position the served token must be the reference's arg-max or
nearly tied with it, and its log-probability the reference's. Both families, any checkpoint whose artifact is served.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.frame import models
from benchmarks.frame.models import QUIET, Subject
from benchmarks.frame.scenario import Run, Scenario, Settings, option
from benchmarks.frame.streams import connected, gathered, greedy
from model import checkpoint as checkpoints
from model.nn import reference
from model.spec.config import ModelConfig
from onward.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class ServedOutput:
    """A greedy answer: prompt or source ids, generated ids, their log-probabilities."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Faithfulness:
    """`agreement` is the share of `positions` where the served token is the reference's arg-max.

    `max_logprob_error` is in nats, over all positions. `worst_disagreement_margin` is the largest difference between
    the reference's best logit and a served token's: 0 where all agree, rounding where the rest are ties.
    """

    model: str
    requests: int
    positions: int
    agreement: float
    max_logprob_error: float
    worst_disagreement_margin: float


def random_requests(config: ModelConfig, positions: int, seed: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yields (prompt ids, output length) of ragged lengths until the outputs add up to `positions`."""
    rng = np.random.default_rng(seed)
    special = {config.pad_id, config.bos_id, config.eos_id}
    vocabulary = config.source_vocab_size or config.vocab_size
    ordinary = np.array([i for i in range(vocabulary) if i not in special])
    while positions > 0:
        if config.is_encoder_decoder:
            prompt_length = int(rng.integers(1, config.source_context + 1))
            room = config.context - 1
        else:
            prompt_length = int(rng.integers(1, config.context // 2 + 1))
            room = config.context - prompt_length
        length = min(positions, int(rng.integers(1, min(room, 200) + 1)))
        yield tuple(int(i) for i in rng.choice(ordinary, prompt_length)), length
        positions -= length


async def collect(
    target: str, model: str, requests: Sequence[tuple[tuple[int, ...], int]], concurrency: int
) -> list[ServedOutput]:
    """Sends the requests greedily, `concurrency` at a time, so that they join and leave a running batch."""
    async with connected(target) as stub:

        async def one(prompt: tuple[int, ...], length: int) -> ServedOutput:
            wanted = pb.ResponseOptions(logprobs=0)
            response = await stub.Generate(greedy(pb.GenerateRequest, prompt, length, model=model, response=wanted))
            (output,) = response.outputs
            if len(output.token_ids) != length:
                raise RuntimeError(f"asked for {length} tokens, got {len(output.token_ids)}")
            return ServedOutput(prompt, tuple(output.token_ids), tuple(entry.logprob for entry in output.logprobs))

        return await gathered((one(prompt, length) for prompt, length in requests), concurrency)


def judge(folder: Path, model: str, outputs: Sequence[ServedOutput]) -> Faithfulness:
    """One teacher-forced reference forward over each served output."""
    loaded = checkpoints.load(folder)
    agreeing = positions = 0
    worst_error = worst_margin = 0.0
    for output in outputs:
        served = torch.tensor(output.tokens)
        if loaded.config.is_encoder_decoder:
            fed, source = (loaded.config.bos_id, *output.tokens[:-1]), output.prompt
            first = 0
        else:
            fed, source = (*output.prompt, *output.tokens[:-1]), None
            first = len(output.prompt) - 1
        logits = torch.as_tensor(reference.logits(loaded.model, fed, source))[first:]
        expected = logits.double().log_softmax(-1).gather(-1, served[:, None])[:, 0]
        errors = (expected - torch.tensor(output.logprobs, dtype=torch.float64)).abs()
        margins = logits.amax(-1) - logits.gather(-1, served[:, None])[:, 0]
        agreeing += int((logits.argmax(-1) == served).sum())
        positions += len(served)
        worst_error = max(worst_error, float(errors.max()))
        worst_margin = max(worst_margin, float(margins.max()))
    return Faithfulness(model, len(outputs), positions, agreeing / positions, worst_error, worst_margin)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaithfulnessSettings(Settings):
    """Which server is asked how much: one of its own, in `precision`, or one that runs."""

    precision: str = option("fp32", "of the server of its own")

    checkpoint: Path = option(text="of the served model")  # noqa: RUF009 (a field)
    model: str = option("", "by name")
    target: str = option("", "HOST:PORT of a server that runs")
    positions: int = option(10_000, "tokens to judge", least=1, quick=200)
    concurrency: int = option(24, "requests at a time", least=1)


def measure(settings: FaithfulnessSettings, run: Run) -> dict[str, Any]:
    """Asks and judges."""
    config = checkpoints.load(settings.checkpoint).config
    requests = list(random_requests(config, settings.positions, settings.seed))

    def ask(target: str) -> dict[str, Any]:
        outputs = asyncio.run(collect(target, settings.model, requests, settings.concurrency))
        return dataclasses.asdict(judge(settings.checkpoint, settings.model, outputs))

    if settings.target:
        return ask(settings.target)
    work = run.build / "scenarios" / "faithfulness" / settings.checkpoint.name
    artifact = models.export(settings.checkpoint, work, settings.precision)
    with Subject(artifact, settings.threads, settings.concurrency).served(*QUIET) as server:
        return ask(server.target)


SCENARIO = Scenario(__name__, FaithfulnessSettings, measure)
