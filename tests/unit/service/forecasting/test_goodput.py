"""Answers in time, on a machine whose law is known: real engine, predictor and admission on a clock of their own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from service.engine.types import FinishReason, GenerationRequest, StoppingParams
from service.errors import DeadlineUnreachable
from service.forecasting.admission import DeadlineAdmission, PredictedFinish
from tests.fakes import request
from tests.unit.model.spec.test_cost import decoder_only
from tests.unit.service.forecasting.machine import CONTEXT, LIMITS, Machine

TIMEOUT = 2.0
SECONDS = 16.0
# Who comes before that finds no queue yet, and is not counted.
LEAD = 4.0
# As much as the server allows for the way to the client.
MARGIN = 0.03

Ask = Callable[[str], GenerationRequest]


def asker() -> Ask:
    """Requests of varied lengths: prompts around 40 tokens, answers around 40."""
    source = random.Random(1)

    def ask(name: str) -> GenerationRequest:
        prompt = [source.randrange(3, 30) for _ in range(max(2, min(150, round(source.lognormvariate(3.7, 0.6)))))]
        length = max(2, min(100, round(source.lognormvariate(3.7, 0.5))))
        return request(name, prompt, stopping=StoppingParams(max_tokens=length, ignore_eos=True))

    return ask


@dataclass(slots=True)
class Result:
    """What became of the requests of one run: how many a second were in time, and how each ended."""

    goodput: float
    ends: Counter[str]


class Shop(Machine):
    """A machine with a door: requests come at given times, and some are sent away."""

    def __init__(self, *, admits_by_deadline: bool) -> None:
        super().__init__(decoder_only(vocab_size=32, context=CONTEXT), patience=10.0 if admits_by_deadline else None)
        self.warm()
        self.admission = DeadlineAdmission(self.predictor) if admits_by_deadline else None
        self.predictions: dict[str, PredictedFinish] = {}
        self.ends_counted: Counter[str] = Counter()
        self.start = 0.0

    def offer(self, asked: GenerationRequest, arrival: float) -> None:
        asked = replace(asked, arrival_time=arrival, deadline=arrival + TIMEOUT)
        if self.admission is not None:
            answer_by, is_idle = arrival + TIMEOUT - MARGIN, not self.engine.has_work
            try:
                asked, prediction = self.admission.judge(asked, self.now, answer_by, is_idle=is_idle)
            except DeadlineUnreachable:
                self.note(arrival, "refused")
                return
            if prediction is not None:
                self.predictions[asked.request_id] = prediction
        self.quotes[asked.request_id] = asked, self.predictor.submitted(asked)
        self.told[asked.request_id] = {}
        self.engine.add_request(asked)

    def work(self) -> None:
        """A step, and what it tells of those who ended with it."""
        before = set(self.ends)
        self.step()
        for name in set(self.ends) - before:
            event = self.ends[name]
            assert event.finish_reason is not None
            assert event.timings is not None
            self.note(self.quotes[name][0].arrival_time, event.finish_reason)
            for count in self.told[name].values():
                self.predictor.output_ended(self.quotes[name][0], self.now, count, event.finish_reason)
            if (prediction := self.predictions.get(name)) is not None and self.admission is not None:
                self.admission.ended(prediction, event.timings, [event.finish_reason])

    def serve(self, arrivals: Iterator[float], ask: Ask) -> Result:
        """Works until all that come have left."""
        self.start = start = self.now
        number, arrival = 0, next(arrivals, None)
        while arrival is not None or self.engine.has_work:
            if not self.engine.has_work and arrival is not None:
                self.now = max(self.now, start + arrival)
            while arrival is not None and start + arrival <= self.now:
                self.offer(ask(f"r{number}"), start + arrival)
                number, arrival = number + 1, next(arrivals, None)
            if self.engine.has_work:
                self.work()
        whole = self.ends_counted[FinishReason.LENGTH]
        return Result(whole / (SECONDS - LEAD), self.ends_counted)

    def note(self, arrival: float, end: str) -> None:
        """Counts how a request ended."""
        if arrival >= self.start + LEAD:
            self.ends_counted[end] += 1


def poisson(rate: float) -> Iterator[float]:
    source, at = random.Random(2), 0.0
    while (at := at + source.expovariate(rate)) < SECONDS:
        yield at


def capacity(ask: Ask) -> float:
    """Requests a second, twice as many there at any time as there are rows."""
    shop, number = Shop(admits_by_deadline=False), 0
    start = shop.now
    while shop.now < start + SECONDS:
        while len(shop.quotes) - len(shop.ends) < 2 * LIMITS.max_batch_size:
            number += 1
            shop.submit(ask(f"c{number}"))
        shop.step()
    return sum(name.startswith("c") for name in shop.ends) / (shop.now - start)


def test_at_one_and_a_half_times_capacity_half_as_many_again_are_in_time() -> None:
    rate = 1.5 * capacity(asker())
    off = Shop(admits_by_deadline=False).serve(poisson(rate), asker())
    on = Shop(admits_by_deadline=True).serve(poisson(rate), asker())
    assert on.goodput >= 1.5 * off.goodput
    late = on.ends[FinishReason.DEADLINE]
    assert late <= 0.1 * (late + on.ends[FinishReason.LENGTH]), "who is let in is in time"


def test_below_capacity_hardly_anybody_is_refused() -> None:
    shop = Shop(admits_by_deadline=True)
    result = shop.serve(poisson(0.5 * capacity(asker())), asker())
    assert result.ends["refused"] <= 0.01 * result.ends.total()
    assert result.ends[FinishReason.DEADLINE] <= 0.01 * result.ends.total()
