"""How long a model's steps take on this machine, learned from the steps themselves.

    seconds of a step's runs  =  a · runs + b · tokens + c · pairs          prefill of prompts, or encoding of sources
                               +  a(rows) + b · pairs                       decode, if any row decodes
                               +  a                                         wake-up, in the first run after a pause
    seconds of the host       =  a + b · rows                               between two runs

That is t = a + b·n + c·n² for a prompt of n tokens, written for chunks: n tokens in one chunk have n(n+1)/2 pairs, and
later chunks attend to the earlier ones as well. Pairs count one layer and one head. A decoding row's pairs are its
tokens, so a step of a given number of rows is a + b·n. The fixed cost a(rows) grows from 1 row to 2, 4, 8 and so on by
an increment of its own each, never negative, and linearly between: 6 rows are learned from 4 and 8, and more rows never
cost less. Coefficients are seconds.

Steps that mix kinds of work teach all terms together. The law is linear, so many short steps are learned from as one
observation of all their work and all their seconds. How many is decided before the first of them: to look whenever some
time is over would see long steps more often than they occur. A step with accepted draft tokens
(`service.engine.speculation.prompt_lookup`) counts as the several steps that it saved, so that a row alone is predicted
at the rate of its recent steps.

Source of the law: Vaswani et al., "Attention Is All You Need" (2017), table 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from model.spec import cost
from model.spec.config import ModelConfig
from model.spec.cost import PhaseWork
from service.engine.types import StepStats
from service.forecasting.least_squares import Fitted, Float64, RecursiveFit

# Of graphs and of the host: apart from its speed, a machine changes by minutes.
_MEMORY_SECONDS = 60.0
_HOST_MEMORY_SECONDS = 2.0
# The speed of a shared machine wanders by a tenth in half a minute.
_DRIFT = 0.1**2 / 30.0
_HOST_DRIFT = 0.1**2
# Learning takes tens of microseconds of the event loop, too long for each step of a small model.
_LEARN_SECONDS = 0.002
_MOST_AT_ONCE = 64
# The prior of a step: seconds at most.
_FIRST_STEP_SECONDS = 1.0
# A matrix product of many rows shares one reading of the weights: a row more costs less than a row alone.
_SHARE_OF_A_ROW = 0.1
# An attended pair needs more time for its operations than a weight does: softmax, and no reuse.
_PAIR_FACTOR = 8.0
# What a pause may add to a run of any model: threads sleep, and caches hold other data. Nearly all first runs are of
# prompts, so observations hardly separate the two.
_WAKE_SECONDS = 3e-4
# Of the moving averages of what decodes.
_BATCH_RATE = 0.02
_NUM_PROMPT_TERMS = 3
# The last terms: pairs of the rows that decode, and the first run after a pause.
_PAIR, _WAKE = -2, -1


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """The rows that decode in the same steps as a request, and the pairs of each.

    `stretch` is the time of such a step over that of its decoding: above 1 if prompts or sources are computed in it.
    """

    num_rows: float = 0.0
    pairs_per_row: float = 0.0
    stretch: float = 1.0


ALONE = BatchLoad()


@dataclass(frozen=True, slots=True)
class Rates:
    """What is known of a model's step times at a moment. Immutable."""

    knots: tuple[int, ...]
    runs: Fitted
    host: Fitted

    def step_seconds(self, num_rows: float, num_pairs: float) -> float:
        """Of a step, host and graph, in which so many rows with so many pairs in all decode."""
        decoding = self.runs.value(_features(self.knots, (0, 0, 0), 1, num_rows, num_pairs))
        return decoding + self.host.value(np.array((1.0, num_rows)))

    def seconds(self, work: PhaseWork, batch: BatchLoad = ALONE, *, wakes: bool = False) -> float:
        """Of one phase of a request, host and graphs, beside this batch; `wakes` if it begins after a pause."""
        prompts, decoding = self._split(work, batch)
        prompts[_WAKE] = wakes
        in_runs = self.runs.value(prompts) + batch.stretch * self.runs.value(decoding)
        rows = work.num_decode_rows / max(work.num_decode_steps, 1) + batch.num_rows
        return in_runs + work.num_steps * self.host.value(np.array((1.0, rows)))

    def deviation(self, *phases: PhaseWork) -> float:
        """The standard deviation of these phases' seconds that is due to what is not known yet, pauses aside."""
        x = _features(self.knots, (0, 0, 0), 0, 0, 0)
        x = sum((part for work in phases for part in self._split(work, ALONE)), start=x)
        return self.runs.deviation(x)

    def _split(self, work: PhaseWork, batch: BatchLoad) -> tuple[Float64, Float64]:
        """Features of the request's own prefill runs, and of all that decodes meanwhile."""
        num_chunk_steps = work.num_steps - work.num_decode_steps
        own = (
            work.num_prefill_runs + work.num_encoder_runs,
            work.num_prefill_tokens + work.num_encoder_tokens,
            work.num_prefill_pairs + work.num_encoder_pairs,
        )
        batch_pairs = batch.num_rows * batch.pairs_per_row
        prompts = _features(self.knots, own, num_chunk_steps, batch.num_rows, num_chunk_steps * batch_pairs)
        rows = work.num_decode_rows / max(work.num_decode_steps, 1) + batch.num_rows
        num_pairs = work.num_decode_pairs + work.num_decode_steps * batch_pairs
        return prompts, _features(self.knots, (0, 0, 0), work.num_decode_steps, rows, num_pairs)


@dataclass(slots=True)
class _Steps:
    """Consecutive steps, added up until there are `wanted`; `rows` counts them by the rows that they decode."""

    wanted: int = 1
    count: int = 0
    seconds: float = 0.0
    num_runs: int = 0
    num_tokens: int = 0
    num_pairs: int = 0
    num_decode_pairs: int = 0
    num_wakes: int = 0
    rows: dict[int, float] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        return self.count >= self.wanted

    def following(self) -> _Steps:
        """Empty, for as many steps as would take `_LEARN_SECONDS` at the rate of these."""
        wanted = math.ceil(_LEARN_SECONDS * self.count / self.seconds) if self.seconds > 0 else self.wanted
        return _Steps(min(wanted, _MOST_AT_ONCE))

    def add(self, stats: StepStats, *, wakes: bool) -> None:
        """Adds a step; accepted draft tokens count as steps, so that a row's step takes what its token takes."""
        num_steps = _steps_of(stats)
        self.count += 1
        self.seconds += stats.run_seconds
        self.num_runs += stats.num_prefill_runs + stats.num_encoder_runs
        self.num_tokens += stats.num_prefill_tokens + stats.num_encoder_tokens
        self.num_pairs += stats.num_prefill_pairs + stats.num_encoder_pairs
        self.num_decode_pairs += stats.num_decode_pairs
        self.num_wakes += wakes
        self.rows[stats.num_decode_rows] = self.rows.get(stats.num_decode_rows, 0) + num_steps

    def prompts(self, knots: tuple[int, ...]) -> Float64:
        """Features of prefill and wake-ups."""
        own = (self.num_runs, self.num_tokens, self.num_pairs)
        return _features(knots, own, 0, 0, 0, num_wakes=self.num_wakes)

    def decoding(self, knots: tuple[int, ...]) -> Float64:
        """Features of the decoding rows."""
        x = _features(knots, (0, 0, 0), 0, 0, 0)
        for num_rows, num_steps in self.rows.items():
            x += _features(knots, (0, 0, 0), num_steps, num_rows, 0)
        x[_PAIR] = self.num_decode_pairs
        return x


def _steps_of(stats: StepStats) -> float:
    """Steps without draft tokens that would have given as many tokens."""
    return 1 + stats.num_accepted_tokens / max(stats.num_decode_rows, 1)


class StepTimes:
    """Learns the step times of one model, and the load of its batches.

    Args:
        config: the model; its arithmetic gives the prior ratios of the terms.
        max_batch_size: the most rows of a step.

    Attributes:
        rates: what is known now.
        pairs_per_row: recent average of decoding rows.
        stretch: recent average of steps with such rows (see `BatchLoad`).
    """

    def __init__(self, config: ModelConfig, max_batch_size: int) -> None:
        self._knots = _powers_of_two(max_batch_size)
        self._prompts = "encoder" if config.is_encoder_decoder else "prefill"
        step = cost.linear_flops(config, PhaseWork(num_decode_rows=1, num_logits=1))
        pair = _PAIR_FACTOR * cost.pair_flops(config) * config.num_layers / step
        rows = [_SHARE_OF_A_ROW * (high - low) for low, high in itertools.pairwise(self._knots)]
        scales = [1.0, _SHARE_OF_A_ROW, pair, 1.0, *rows, pair, _WAKE_SECONDS / _FIRST_STEP_SECONDS]
        self._runs = RecursiveFit(
            [_FIRST_STEP_SECONDS * scale for scale in scales], _MEMORY_SECONDS, _DRIFT, num_kinds=2
        )
        self._host = RecursiveFit(
            [0.1 * _FIRST_STEP_SECONDS, 0.01 * _FIRST_STEP_SECONDS], _HOST_MEMORY_SECONDS, _HOST_DRIFT
        )
        self._last_rows, self._last_steps = 0, 1.0
        # Not learned from yet: steps without prefill and steps with it, the host's, and the batches.
        self._unlearned = [_Steps(), _Steps()]
        self._unlearned_host = np.zeros(3)
        self._unlearned_batch = _Steps()
        self.pairs_per_row = 0.0
        self.stretch = 1.0
        self.rates = Rates(self._knots, self._runs.fitted, self._host.fitted)

    def learn(self, stats: StepStats, *, is_calibration: bool = False) -> None:
        """Learns from a step, if it computed anything; short ones are gathered until they make milliseconds.

        One of a calibration teaches at once, and no pause was before it.
        """
        if not stats.num_tokens:
            return
        last_rows, self._last_rows = self._last_rows, stats.num_rows
        last_steps, self._last_steps = self._last_steps, _steps_of(stats)
        if stats.host_seconds is not None:
            # Most of it is work on the rows of the step before.
            self._unlearned_host += (last_steps, last_steps * last_rows, stats.host_seconds)
        has_prompts = stats.num_prefill_runs + stats.num_encoder_runs > 0
        steps = self._unlearned[has_prompts]
        steps.add(stats, wakes=stats.host_seconds is None and not is_calibration)
        if not steps.is_full and not is_calibration:
            return
        # Prefill wants all threads at once, so it varies by much more: its errors are a kind of their own.
        self._runs.learn(steps.prompts(self._knots) + steps.decoding(self._knots), steps.seconds, kind=has_prompts)
        self._unlearned[has_prompts] = steps.following()
        if self._unlearned_host[0]:
            self._host.learn(self._unlearned_host[:2].copy(), float(self._unlearned_host[2]))
            self._unlearned_host[:] = 0.0
        self.rates = Rates(self._knots, self._runs.fitted, self._host.fitted)

    def note_batch(self, stats: StepStats) -> None:
        """Averages the load of a step's decoding rows."""
        if not stats.num_decode_rows:
            return
        steps = self._unlearned_batch
        steps.add(stats, wakes=False)
        if not steps.is_full:
            return
        self._unlearned_batch = steps.following()
        rate = 1 - (1 - _BATCH_RATE) ** steps.count
        num_rows = sum(each * num_steps for each, num_steps in steps.rows.items())
        self.pairs_per_row += rate * (steps.num_decode_pairs / num_rows - self.pairs_per_row)
        decoding = self._runs.fitted.value(steps.decoding(self._knots))
        if decoding > 0:
            # Of all these steps together: a request waits for their sum.
            stretch = 1 + self._runs.fitted.value(steps.prompts(self._knots)) / decoding
            self.stretch += rate * (stretch - self.stretch)

    def coefficients(self) -> Mapping[str, float]:
        """Seconds by term: prefill or encoding by run, token and pair; decoding by rows and pair; wake-up; host."""
        runs, host = self._runs.fitted.coefficients.tolist(), self._host.fitted.coefficients.tolist()
        named = {f"{self._prompts}_{term}": runs[index] for index, term in enumerate(("run", "token", "pair"))}
        steps = itertools.accumulate(runs[_NUM_PROMPT_TERMS:_PAIR])
        named |= {f"decode_step_{rows}": seconds for rows, seconds in zip(self._knots, steps, strict=True)}
        return named | {"decode_pair": runs[_PAIR], "wake": runs[_WAKE], "host_step": host[0], "host_row": host[1]}


def _powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, up to the first that is at least `most`."""
    return tuple(1 << power for power in range((most - 1).bit_length() + 1))


def _features(
    knots: tuple[int, ...],
    prompts: tuple[float, float, float],
    num_steps: float,
    num_rows: float,
    num_pairs: float,
    num_wakes: int = 0,
) -> Float64:
    """Features of `num_steps` steps that decode `num_rows` rows each, with `num_pairs` in all, and of prefill.

    Linear between two knots.
    """
    x = np.zeros(_NUM_PROMPT_TERMS + len(knots) + 2)
    x[:_NUM_PROMPT_TERMS] = prompts
    x[_WAKE] = num_wakes
    if num_rows > 0 and num_steps > 0:
        x[_NUM_PROMPT_TERMS] = num_steps
        for index in range(1, len(knots)):
            low, high = knots[index - 1], knots[index]
            if num_rows <= low:
                break
            x[_NUM_PROMPT_TERMS + index] = num_steps * min((num_rows - low) / (high - low), 1.0)
        x[_PAIR] = num_pairs
    return x
