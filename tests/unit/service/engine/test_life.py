"""Whole lives of requests, by a state machine: both families, with speculation, over slots and over blocks."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.engine_life import LIMITS, PAGED_BUDGET, Life
from tests.fakes import CONTEXT, FakeRunner, request
from tests.paged import PagedFakeRunner


class EncoderDecoderLife(Life):
    """The same life for the other family."""

    encoder_decoder = True


class SpeculationLife(Life):
    """The same life with speculation, where texts recur."""

    memory = 1
    look_up = 5

    @rule(first=st.integers(4, 9), max_tokens=st.integers(10, 50), count=st.integers(1, 20))
    @precondition(lambda self: not self.scheduler.has_work)
    def add_alone(self, first: int, max_tokens: int, count: int) -> None:
        """A request alone, so that most steps have drafts."""
        name = f"r{len(self.requests)}"
        self.submit(request(name, [first, 5, 6, 7] * 2, max_tokens=max_tokens, arrival_time=self.now))
        self.step(count)


class MergedChunksLife(Life):
    """The same life where a prompt alone is computed in long runs."""

    merges_chunks = True

    @rule(length=st.sampled_from([17, 24, 25, 33, 40, CONTEXT - 1]), count=st.integers(1, 3))
    @precondition(lambda self: not self.scheduler.has_work)
    def add_alone(self, length: int, count: int) -> None:
        """A prompt alone, of several chunks."""
        name = f"r{len(self.requests)}"
        self.submit(request(name, [3 + i % 29 for i in range(length)], max_tokens=3, arrival_time=self.now))
        self.step(count)


class PagedLife(Life):
    """The same life over blocks: whatever is copied, saved and freed, each row holds what it should."""

    budget = PAGED_BUDGET

    def make_runner(self) -> FakeRunner:
        return PagedFakeRunner(self.budget, LIMITS.max_batch_size, before_run=self.on_batch)


class PagedEncoderDecoderLife(PagedLife):
    """And for the other family."""

    encoder_decoder = True


Life.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
EncoderDecoderLife.TestCase.settings = Life.TestCase.settings
SpeculationLife.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
MergedChunksLife.TestCase.settings = SpeculationLife.TestCase.settings
PagedLife.TestCase.settings = settings(max_examples=75, stateful_step_count=30)
PagedEncoderDecoderLife.TestCase.settings = PagedLife.TestCase.settings
TestDecoderOnlyLife = Life.TestCase
TestEncoderDecoderLife = EncoderDecoderLife.TestCase
TestSpeculationLife = SpeculationLife.TestCase
TestMergedChunksLife = MergedChunksLife.TestCase
TestPagedLife = PagedLife.TestCase
TestPagedEncoderDecoderLife = PagedEncoderDecoderLife.TestCase
