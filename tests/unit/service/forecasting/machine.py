"""A machine whose law is known: a real engine over a fake model, whose clock goes by what is computed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from model.spec.config import ModelConfig
from service.engine.batch import ScheduledBatch
from service.engine.scheduler import EngineLimits
from service.engine.types import (
    GenerationRequest,
    SamplingParams,
    StepStats,
    StoppingParams,
    TokenEvent,
)
from service.forecasting.costing import Cost, CostModel
from service.forecasting.prediction import LatencyPredictor, Quote
from tests.fakes import FakeRunner, fake_engine, request
from tests.unit.model.spec.test_cost import decoder_only, encoder_decoder

LIMITS = EngineLimits(max_batch_size=8, prefill_chunk=16, max_prefill_tokens=16)
CONTEXT = 256
FAMILIES = pytest.mark.parametrize("family", [decoder_only, encoder_decoder], ids=["decoder-only", "encoder-decoder"])


@dataclass(frozen=True)
class Law:
    """What a machine takes, in seconds."""

    prompt_run: float = 0.004
    prompt_token: float = 3e-4
    prompt_pair: float = 2e-6
    decode_row: float = 0.006
    more_rows: float = 4e-4
    decode_pair: float = 1e-5
    host: float = 2e-4
    host_row: float = 3e-5
    wake: float = 0.0


class Machine:
    """An engine and the clock that its steps move; a predictor is told of every step."""

    def __init__(
        self,
        config: ModelConfig,
        law: Law = Law(),
        noise: float = 0.0,
        patience: float | None = None,
        limits: EngineLimits = LIMITS,
        *,
        merges_chunks: bool = False,
    ) -> None:
        self.law, self.noise, self.now, self.speed = law, noise, 0.0, 1.0
        self.hiccups, self._is_awake = 0.0, False
        self._source = random.Random(0)
        self.runner = FakeRunner(LIMITS.max_batch_size, before_run=self._run)
        self.engine = fake_engine(
            self.runner,
            encoder_decoder=config.is_encoder_decoder,
            limits=replace(limits, patience_seconds=patience),
            context=CONTEXT,
            clock=lambda: self.now,
        )
        self.engine._scheduler.merge_chunks(is_proven=merges_chunks)
        self.predictor = LatencyPredictor(CostModel(config, self.engine.chunk_rules), LIMITS.max_batch_size, patience)
        self.told: dict[str, dict[int, int]] = {}
        self.quotes: dict[str, tuple[GenerationRequest, Quote]] = {}
        self.costs: dict[str, Cost | None] = {}
        self.ends: dict[str, TokenEvent] = {}

    def submit(self, asked: GenerationRequest) -> None:
        asked = replace(asked, arrival_time=self.now)
        self.quotes[asked.request_id] = asked, self.predictor.submitted(asked)
        self.told[asked.request_id] = {}
        self.engine.add_request(asked)

    def step(self) -> StepStats:
        output = self.engine.step()
        self._is_awake = self.engine.has_work
        self.now += self.law.host + self.law.host_row * output.stats.num_rows
        for event in output.events:
            if event.token_id is not None:
                self.predictor.token_sent(event.request_id)
        self.predictor.step_done(output.stats)
        for event in output.events:
            told = self.told[event.request_id]
            if event.token_id is not None:
                told[event.output_index] = told.get(event.output_index, 0) + 1
            if event.is_terminal:
                asked, quote = self.quotes[event.request_id]
                self.costs[event.request_id] = self.predictor.settle(quote, asked, told, event)
                self.predictor.ended(event.request_id)
                self.ends[event.request_id] = event
        return output.stats

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()

    def run(self, asked: GenerationRequest) -> float:
        """Seconds of service of a request by itself."""
        self.submit(asked)
        self.drain()
        return seconds_of(self.ends[asked.request_id])

    def warm(self, count: int = 40) -> None:
        for number in range(count):
            self.run(draw(self._source, f"warm{number}"))

    def _run(self, batch: ScheduledBatch) -> None:
        law = self.law
        prompts = (
            (batch.num_prefill_runs + batch.num_encoder_runs) * law.prompt_run
            + (batch.num_prefill_tokens + batch.num_encoder_tokens) * law.prompt_token
            + (batch.num_prefill_pairs + batch.num_encoder_pairs) * law.prompt_pair
        )
        rows = batch.num_decode_rows
        decoding = law.decode_row + (rows - 1) * law.more_rows + batch.num_decode_pairs * law.decode_pair if rows else 0
        slowness = max(0.1, 1 + self._source.gauss(0.0, self.noise))
        if self.hiccups and self._source.random() < self.hiccups:
            slowness *= 5
        self.now += self.speed * (prompts + decoding) * slowness + (0.0 if self._is_awake else law.wake)


def seconds_of(end: TokenEvent) -> float:
    assert end.timings is not None
    assert end.timings.scheduled_time is not None
    return end.timings.finished_time - end.timings.scheduled_time


def draw(source: random.Random, name: str, rows: int = 1) -> GenerationRequest:
    """A request of geometric lengths."""
    length = min(1 + int(source.expovariate(1 / 50)), 150)
    new = min(1 + int(source.expovariate(1 / 30)), 90)
    prompt = [source.randrange(3, 30) for _ in range(length)]
    sampling = SamplingParams(temperature=2.0, n=rows, seed=source.randrange(1 << 30))
    return request(name, prompt, sampling=sampling, stopping=StoppingParams(max_tokens=new, ignore_eos=True))


def machine(family: object = decoder_only, **options: Any) -> Machine:
    assert callable(family)
    return Machine(family(vocab_size=32, context=CONTEXT), **options)
