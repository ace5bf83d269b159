"""How long a model's steps take on this machine, learned from the steps themselves.

    seconds of a step's runs  =  a · runs + b · tokens + c · pairs          of prompts, or of sources
                               +  a(rows) + b · pairs                       of the rows that decode, where there are any
                               +  a                                         to wake up, in the first run after a pause
    seconds of the host       =  a + b · rows                               between two runs

That is t = a + b·n + c·n² for a prompt of n tokens, written for chunks: n tokens in a chunk of their own have n(n+1)/2
pairs, later chunks meet those before them as well. A decoding row's pairs are the tokens that it has, so that a step of
a given number of rows is a + b·n. What a step costs whatever its contexts are, a(rows), grows from 1 row to 2, to 4, to
8 and so on by an amount of its own each time, never negative, and evenly between: what was learned at 4 and 8 rows says
what 6 take, and a step of more rows costs no less.

Steps of several kinds of work at once teach all terms together: it is one law. It is linear, so that many short steps
are learned from as one observation, of all their work and all their seconds. How many is decided before the first of
them: looking whenever some time is over would see the long ones more often than there are. Pairs are those of
one layer, for each head. Coefficients are seconds. A step in which guesses came true
(`service.engine.speculation.prompt_lookup`) is learned from as the several that it stands for, so that a row alone is
predicted at the rate of its recent steps.

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

# Of graphs that ran, and of the host between them: a machine changes by minutes, but for its speed.
_MEMORY_SECONDS = 60.0
_HOST_MEMORY_SECONDS = 2.0
# The speed of a machine that is shared wanders by a tenth in half a minute.
_DRIFT = 0.1**2 / 30.0
_HOST_DRIFT = 0.1**2
# Learning takes tens of microseconds of the event loop: steps of a small model come too fast to teach one by one.
_LEARN_SECONDS = 0.002
_MOST_AT_ONCE = 64
# A step takes seconds at most, and then the first one teaches that.
_FIRST_STEP_SECONDS = 1.0
# A matrix product of many rows shares one reading of the weights: a row more costs less than a row alone.
_SHARE_OF_A_ROW = 0.1
# An attended pair needs more time for its operations than a weight does: softmax, and no reuse.
_PAIR_FACTOR = 8.0
# What a pause may add to a run whatever the model: threads sleep, and caches hold something else. Nearly all first runs
# are of prompts, so that little else tells what is the one's and what the other's.
_WAKE_SECONDS = 3e-4
# How fast the averages of who shares a step follow.
_COMPANY_RATE = 0.02
_NUM_PROMPT_TERMS = 3
# Behind those of the rows that decode: their pairs, and the first run after a pause.
_PAIR, _WAKE = -2, -1


@dataclass(frozen=True, slots=True)
class Company:
    """Who shares a request's steps: rows that decode, the pairs of each, and how prompts stretch those steps.

    `stretch` is the time of a step of theirs over what its decoding takes: above 1 where prompts or sources of others
    are computed in the same steps.
    """

    num_rows: float = 0.0
    pairs_per_row: float = 0.0
    stretch: float = 1.0


ALONE = Company()


@dataclass(frozen=True, slots=True)
class Rates:
    """What is known of a model's step times at a moment; it does not change."""

    knots: tuple[int, ...]
    runs: Fitted
    host: Fitted

    def step_seconds(self, num_rows: float, num_pairs: float) -> float:
        """Of a step, host and graph, in which so many rows decode that have so many pairs together."""
        decoding = self.runs.value(_features(self.knots, (0, 0, 0), 1, num_rows, num_pairs))
        return decoding + self.host.value(np.array((1.0, num_rows)))

    def seconds(self, work: PhaseWork, company: Company = ALONE, *, wakes: bool = False) -> float:
        """Of one phase of a request, host and graphs, in this company throughout; whether it begins after a pause."""
        prompts, decoding = self._split(work, company)
        prompts[_WAKE] = wakes
        in_runs = self.runs.value(prompts) + company.stretch * self.runs.value(decoding)
        rows = work.num_decode_rows / max(work.num_decode_steps, 1) + company.num_rows
        return in_runs + work.num_steps * self.host.value(np.array((1.0, rows)))

    def deviation(self, *phases: PhaseWork) -> float:
        """The standard deviation of all these phases' seconds, as far as steps, pauses aside, are not known yet."""
        x = _features(self.knots, (0, 0, 0), 0, 0, 0)
        x = sum((part for work in phases for part in self._split(work, ALONE)), start=x)
        return self.runs.deviation(x)

    def _split(self, work: PhaseWork, company: Company) -> tuple[Float64, Float64]:
        """Features of what is computed in runs of the request's own, and of all that decodes meanwhile."""
        num_chunk_steps = work.num_steps - work.num_decode_steps
        own = (
            work.num_prefill_runs + work.num_encoder_runs,
            work.num_prefill_tokens + work.num_encoder_tokens,
            work.num_prefill_pairs + work.num_encoder_pairs,
        )
        company_pairs = company.num_rows * company.pairs_per_row
        prompts = _features(self.knots, own, num_chunk_steps, company.num_rows, num_chunk_steps * company_pairs)
        rows = work.num_decode_rows / max(work.num_decode_steps, 1) + company.num_rows
        num_pairs = work.num_decode_pairs + work.num_decode_steps * company_pairs
        return prompts, _features(self.knots, (0, 0, 0), work.num_decode_steps, rows, num_pairs)


@dataclass(slots=True)
class _Steps:
    """Some steps in a row, added up, until there are as many as `wanted`. `rows` says how many decode so many rows."""

    wanted: int = 1
    count: int = 0
    seconds: float = 0.0
    num_runs: int = 0
    num_tokens: int = 0
    num_pairs: int = 0
    num_decode_pairs: int = 0
    num_wakes: int = 0
    rows: dict[int, int] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        return self.count >= self.wanted

    def following(self) -> _Steps:
        """Room for the next: for as many as would have made milliseconds of these, whatever those take."""
        wanted = math.ceil(_LEARN_SECONDS * self.count / self.seconds) if self.seconds > 0 else self.wanted
        return _Steps(min(wanted, _MOST_AT_ONCE))

    def add(self, stats: StepStats, *, wakes: bool) -> None:
        """Adds a step; one whose guesses came true counts as the steps that it saved, too: of these there is less time.

        So a step of one row is learned to take what a token takes.
        """
        num_steps = 1 + stats.num_accepted_tokens
        self.count += 1
        self.seconds += stats.run_seconds
        self.num_runs += stats.num_prefill_runs + stats.num_encoder_runs
        self.num_tokens += stats.num_prefill_tokens + stats.num_encoder_tokens
        self.num_pairs += stats.num_prefill_pairs + stats.num_encoder_pairs
        self.num_decode_pairs += stats.num_decode_pairs
        self.num_wakes += wakes
        self.rows[stats.num_decode_rows] = self.rows.get(stats.num_decode_rows, 0) + num_steps

    def prompts(self, knots: tuple[int, ...]) -> Float64:
        """Features of what is not the rows'."""
        own = (self.num_runs, self.num_tokens, self.num_pairs)
        return _features(knots, own, 0, 0, 0, num_wakes=self.num_wakes)

    def decoding(self, knots: tuple[int, ...]) -> Float64:
        """Features of the rows that decode."""
        x = _features(knots, (0, 0, 0), 0, 0, 0)
        for num_rows, num_steps in self.rows.items():
            x += _features(knots, (0, 0, 0), num_steps, num_rows, 0)
        x[_PAIR] = self.num_decode_pairs
        return x


class StepTimes:
    """Learns the step times of one model, and who shares a step.

    Args:
        config: the model, whose arithmetic says how the terms might compare before anything was seen.
        max_batch_size: rows that a step may have.

    Attributes:
        rates: what is known now.
        pairs_per_row: of rows that decoded lately.
        stretch: of steps with such rows (see `Company`).
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
        self._last_rows, self._last_steps = 0, 1
        # Not yet learned from: steps without prompts or sources and those with them, the host's, and who shared them.
        self._unlearned = [_Steps(), _Steps()]
        self._unlearned_host = np.zeros(3)
        self._unlearned_company = _Steps()
        self.pairs_per_row = 0.0
        self.stretch = 1.0
        self.rates = Rates(self._knots, self._runs.fitted, self._host.fitted)

    def learn(self, stats: StepStats, *, is_calibration: bool = False) -> None:
        """Takes in one step; short ones teach nothing until there are milliseconds of them.

        Args:
            stats: the step; one that computed nothing teaches nothing.
            is_calibration: whether it is of a calibration: it need not wait for others, and nothing paused before it.
        """
        if not stats.num_tokens:
            return
        last_rows, self._last_rows = self._last_rows, stats.num_rows
        last_steps, self._last_steps = self._last_steps, 1 + stats.num_accepted_tokens
        if stats.host_seconds is not None:
            # Most of it is what is done with the rows of the step before.
            self._unlearned_host += (last_steps, last_steps * last_rows, stats.host_seconds)
        has_prompts = stats.num_prefill_runs + stats.num_encoder_runs > 0
        steps = self._unlearned[has_prompts]
        steps.add(stats, wakes=stats.host_seconds is None and not is_calibration)
        if not steps.is_full and not is_calibration:
            return
        # Prompts want all threads at once, and take what they take with them: they vary by much more.
        self._runs.learn(steps.prompts(self._knots) + steps.decoding(self._knots), steps.seconds, kind=has_prompts)
        self._unlearned[has_prompts] = steps.following()
        if self._unlearned_host[0]:
            self._host.learn(self._unlearned_host[:2].copy(), float(self._unlearned_host[2]))
            self._unlearned_host[:] = 0.0
        self.rates = Rates(self._knots, self._runs.fitted, self._host.fitted)

    def note_company(self, stats: StepStats) -> None:
        """Takes note of who shares the step of rows that decode."""
        if not stats.num_decode_rows:
            return
        steps = self._unlearned_company
        steps.add(stats, wakes=False)
        if not steps.is_full:
            return
        self._unlearned_company = steps.following()
        rate = 1 - (1 - _COMPANY_RATE) ** steps.count
        num_rows = sum(each * num_steps for each, num_steps in steps.rows.items())
        self.pairs_per_row += rate * (steps.num_decode_pairs / num_rows - self.pairs_per_row)
        decoding = self._runs.fitted.value(steps.decoding(self._knots))
        if decoding > 0:
            # Of all these steps together: it is their sum that somebody sits through.
            stretch = 1 + self._runs.fitted.value(steps.prompts(self._knots)) / decoding
            self.stretch += rate * (stretch - self.stretch)

    def coefficients(self) -> Mapping[str, float]:
        """Seconds by term.

        Of prompts or sources for each run, token and pair; of a decoding step of so many rows without its pairs, and
        for each pair; of waking up; of the host for each step and row.
        """
        runs, host = self._runs.fitted.coefficients.tolist(), self._host.fitted.coefficients.tolist()
        named = {f"{self._prompts}_{term}": runs[index] for index, term in enumerate(("run", "token", "pair"))}
        steps = itertools.accumulate(runs[_NUM_PROMPT_TERMS:_PAIR])
        named |= {f"decode_step_{rows}": seconds for rows, seconds in zip(self._knots, steps, strict=True)}
        return named | {"decode_pair": runs[_PAIR], "wake": runs[_WAKE], "host_step": host[0], "host_row": host[1]}


def _powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, up to the first that is not exceeded."""
    return tuple(1 << power for power in range((most - 1).bit_length() + 1))


def _features(
    knots: tuple[int, ...],
    prompts: tuple[float, float, float],
    num_steps: float,
    num_rows: float,
    num_pairs: float,
    num_wakes: int = 0,
) -> Float64:
    """What the coefficients of `runs` are multiplied with: some steps, each of so many rows that decode, pairs in all.

    Between two knots a part of the step from one to the other is taken.
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
