"""How long a model's steps take on this machine, learned from the steps themselves.

    seconds of a step's runs  =  a · runs + b · tokens + c · pairs          of prompts, or of sources
                               +  a(rows) + b · pairs                       of the rows that decode, where there are any
    seconds of the host       =  a + b · rows                               between two runs

That is t = a + b·n + c·n² for a prompt of n tokens, told for chunks: n tokens in a chunk of their own have n(n+1)/2
pairs, later chunks meet those before them as well. A decoding row's pairs are the tokens that it has, so that a step of
a given number of rows is a + b·n. What a step costs whatever its contexts are, a(rows), grows from 1 row to 2, to 4, to
8 and so on by an amount of its own each time, never negative, and evenly between: what was learned at 4 and 8 rows says
what 6 take, and a step of more rows costs no less.

Steps of several kinds of work at once teach all terms together: it is one law. Pairs are those of one layer, for each
head. Coefficients are seconds. Source of the law: Vaswani et al., "Attention Is All You Need" (2017), table 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from model import cost
from model.config import ModelConfig
from model.cost import PhaseWork
from service.engine.types import StepStats
from service.least_squares import Fitted, Float64, RecursiveFit

# Of graphs that ran, and of the host between them: a machine changes by minutes, but for its speed.
_MEMORY_SECONDS = 60.0
_HOST_MEMORY_SECONDS = 2.0
# The speed of a machine that is shared wanders by a tenth in half a minute.
_DRIFT = 0.1**2 / 30.0
_HOST_DRIFT = 0.1**2
# Looking at a step takes tens of microseconds of the event loop: those of a small model come too fast for all of them.
_LOOK_SECONDS = 0.002
# A step takes seconds at most, and then the first one teaches that.
_FIRST_STEP_SECONDS = 1.0
# A matrix product of many rows shares one reading of the weights: a row more costs less than a row alone.
_SHARE_OF_A_ROW = 0.1
# An attended pair needs more time for its operations than a weight does: softmax, and no reuse.
_PAIR_FACTOR = 8.0
_NUM_PROMPT_TERMS = 3


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

    def stretch(self, stats: StepStats) -> float:
        """How many times as long as its decoding alone a step takes; 1 where nothing decodes."""
        decoding = _features(self.knots, (0, 0, 0), 1, stats.num_decode_rows, stats.num_decode_pairs)
        seconds = self.runs.value(decoding)
        return self.runs.value(_step_features(self.knots, stats)) / seconds if seconds > 0 else 1.0

    def seconds(self, work: PhaseWork, company: Company = ALONE) -> float:
        """Of one phase of a request, host and graphs, in this company throughout."""
        prompts, decoding = self._split(work, company)
        in_runs = self.runs.value(prompts) + company.stretch * self.runs.value(decoding)
        rows = work.num_decode_rows / max(work.num_decode_steps, 1) + company.num_rows
        return in_runs + work.num_steps * self.host.value(np.array((1.0, rows)))

    def deviation(self, *phases: PhaseWork) -> float:
        """The standard deviation of all these phases' seconds together, as far as steps are not known yet."""
        x = sum((part for work in phases for part in self._split(work, ALONE)), start=np.zeros(len(self.knots) + 4))
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


class StepTimes:
    """Learns the step times of one model.

    Args:
        config: the model, whose arithmetic says how the terms might compare before anything was seen.
        max_batch_size: rows that a step may have.
    """

    def __init__(self, config: ModelConfig, max_batch_size: int) -> None:
        self._knots = _powers_of_two(max_batch_size)
        self._prompts = "encoder" if config.is_encoder_decoder else "prefill"
        step = cost.phase_cost(config, PhaseWork(num_decode_rows=1, num_logits=1)).linear_flops
        pair = _PAIR_FACTOR * cost.pair_flops(config) * config.num_layers / step
        rows = [_SHARE_OF_A_ROW * (high - low) for low, high in itertools.pairwise(self._knots)]
        scales = [1.0, _SHARE_OF_A_ROW, pair, 1.0, *rows, pair]
        self._runs = RecursiveFit([_FIRST_STEP_SECONDS * scale for scale in scales], _MEMORY_SECONDS, _DRIFT)
        self._host = RecursiveFit(
            [0.1 * _FIRST_STEP_SECONDS, 0.01 * _FIRST_STEP_SECONDS], _HOST_MEMORY_SECONDS, _HOST_DRIFT
        )
        self._last_rows = 0
        # Of steps since the last that was looked at, without prompts or sources and with them.
        self._unseen_seconds = [_LOOK_SECONDS, _LOOK_SECONDS]
        self.rates = Rates(self._knots, self._runs.fitted, self._host.fitted)

    def learn(self, stats: StepStats, *, is_due: bool = False) -> bool:
        """Takes in one step; whether it did: of steps that come in quick succession some are passed over.

        Args:
            stats: the step; one that computed nothing teaches nothing.
            is_due: whether it must not be passed over.
        """
        if not stats.num_tokens:
            return False
        last_rows, self._last_rows = self._last_rows, stats.num_rows
        has_prompts = stats.num_prefill_runs + stats.num_encoder_runs > 0
        self._unseen_seconds[has_prompts] += stats.run_seconds
        if self._unseen_seconds[has_prompts] < _LOOK_SECONDS and not is_due:
            return False
        self._unseen_seconds[has_prompts] = 0.0
        self._runs.learn(_step_features(self._knots, stats), stats.run_seconds)
        if stats.host_seconds is not None:
            # Most of it is what is done with the rows of the step before.
            self._host.learn(np.array((1.0, last_rows)), stats.host_seconds)
        self.rates = Rates(self._knots, self._runs.fitted, self._host.fitted)
        return True

    def coefficients(self) -> Mapping[str, float]:
        """Seconds by term.

        Of prompts or sources for each run, token and pair; of a decoding step of so many rows without its pairs, and
        for each pair; of the host for each step and row.
        """
        runs, host = self._runs.fitted.coefficients.tolist(), self._host.fitted.coefficients.tolist()
        named = {f"{self._prompts}_{term}": runs[index] for index, term in enumerate(("run", "token", "pair"))}
        steps = itertools.accumulate(runs[_NUM_PROMPT_TERMS:-1])
        named |= {f"decode_step_{rows}": seconds for rows, seconds in zip(self._knots, steps, strict=True)}
        return named | {"decode_pair": runs[-1], "host_step": host[0], "host_row": host[1]}


def _powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, up to the first that is not exceeded."""
    return tuple(1 << power for power in range((most - 1).bit_length() + 1))


def _step_features(knots: tuple[int, ...], stats: StepStats) -> Float64:
    """What the coefficients of `runs` are multiplied with, for one step."""
    prompts = (
        stats.num_prefill_runs + stats.num_encoder_runs,
        stats.num_prefill_tokens + stats.num_encoder_tokens,
        stats.num_prefill_pairs + stats.num_encoder_pairs,
    )
    return _features(knots, prompts, 1, stats.num_decode_rows, stats.num_decode_pairs)


def _features(
    knots: tuple[int, ...], prompts: tuple[float, float, float], num_steps: float, num_rows: float, num_pairs: float
) -> Float64:
    """The same for some steps, each of so many rows that decode, and pairs in all of them.

    Between two knots a part of the step from one to the other is taken.
    """
    x = np.zeros(len(knots) + _NUM_PROMPT_TERMS + 1)
    x[:_NUM_PROMPT_TERMS] = prompts
    if num_rows > 0 and num_steps > 0:
        x[_NUM_PROMPT_TERMS] = num_steps
        for index in range(1, len(knots)):
            low, high = knots[index - 1], knots[index]
            if num_rows <= low:
                break
            x[_NUM_PROMPT_TERMS + index] = num_steps * min((num_rows - low) / (high - low), 1.0)
        x[-1] = num_pairs
    return x
