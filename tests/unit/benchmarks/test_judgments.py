"""What scenarios make of given figures: judgments of figures that keep a promise, and of some that break it."""

from __future__ import annotations

import itertools
import json
import math
import random
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.frame.streams import Answer
from benchmarks.scenarios import (
    core_sharing,
    fleet,
    goodput,
    http,
    interference,
    loading,
    prediction,
    prefix,
    scaling_out,
    structured,
    translation,
)
from benchmarks.scenarios.goodput import IN_TIME, LATE, REFUSED, Answered
from benchmarks.scenarios.scaling_out import DIRECT, ENVOY, Round
from benchmarks.scenarios.translation import OFFLINE, OURS, PEER, Contender
from model.spec.config import ModelConfig


def test_waits_are_before_or_during_by_whether_they_overlap_the_prefill_of_the_prompt() -> None:
    stream = Answer(0.0, [1.0, 2.0, 3.0, 5.0, 9.0, 10.0, 11.0])
    repeat = interference.divide([stream], Answer(4.0, [9.5]), lead=1)
    # From 3 to 5 the prompt arrived; from 9 to 10 its first token did; what came later belongs to neither.
    assert repeat.before == (1.0,)
    assert repeat.during == (2.0, 4.0, 1.0)
    assert repeat.first_token_seconds == 5.5
    assert repeat.timeline == ((-1.0, 1.0), (1.0, 2.0), (5.0, 4.0), (6.0, 1.0), (7.0, 1.0))
    with pytest.raises(RuntimeError, match="ended before the long prompt came"):
        interference.divide([Answer(0.0, [1.0, 2.0])], Answer(4.0, [9.5]), lead=0)


@pytest.mark.parametrize(("slowest", "passed"), [(1.3, True), (1.5, False)])
def test_interference_may_cost_the_costliest_chunk_over_the_waits_of_all_repeats(slowest: float, passed: bool) -> None:
    repeats = [interference.Repeat((0.1,) * 10, (0.5, wait), 3.0, ()) for wait in (1.0, slowest)]
    found = interference.judge(repeats, [[0.5, 1.0], [0.7, 1.6]])
    assert found["chunk_seconds"] == {"mean": pytest.approx(0.95), "costliest": 1.3, "each": [0.6, 1.3]}
    assert found["p99_rise_seconds"] == pytest.approx(slowest - 0.1)
    assert found["passed"] is passed


def sharing_round(streams: float, prompts: float, waits: tuple[float, ...] = (0.1, 0.2)) -> core_sharing.Round:
    """So many seconds in graphs: a hundred steps of the streams, ten of the prompts."""
    runs = {
        core_sharing.STREAMS: core_sharing.Runs(streams, 100),
        core_sharing.PROMPTS: core_sharing.Runs(prompts, 10 if prompts else 0),
    }
    return core_sharing.Round(10.0, runs, waits)


@pytest.mark.parametrize(("worst", "passed"), [(5.4, True), (5.6, False)])
def test_cores_are_shared_by_weight_in_every_round(worst: float, passed: bool) -> None:
    rounds = {
        "alone": [sharing_round(9.0, 0.0)],
        "even": [sharing_round(5.0, 5.0), sharing_round(worst, 10 - worst), sharing_round(4.9, 5.1)],
        "favored": [sharing_round(7.5, 2.5, (0.3,) * 30)],
    }
    found = core_sharing.judge(rounds)
    assert found["passed"] is passed
    alone, even, favored = (found["ways"][way] for way in rounds)
    assert (alone["share"], alone["share_by_weight"]) == (1.0, 1.0)
    assert alone["step_seconds"] == {core_sharing.STREAMS: 0.09, core_sharing.PROMPTS: 0.0}
    assert even["share_by_round"] == pytest.approx([0.5, worst / 10, 0.49])
    assert even["share"] == 0.5
    # Of a step of 50 ms and one of 500 ms.
    assert even["share_step_by_step"] == pytest.approx(1 / 11)
    assert (favored["share_by_weight"], favored["tokens_per_second"]) == (0.75, 3.0)


def test_a_schedule_is_poisson_at_the_rate_and_of_lognormal_lengths_around_the_medians() -> None:
    settings = goodput.GoodputSettings(lead=100.0, seconds=900.0)
    asked = goodput.schedule(settings, 4.0, random.Random(1), 1000, 4096)
    gaps = sorted(after.at - before.at for before, after in itertools.pairwise(asked))
    assert len(asked) == pytest.approx(4000, rel=0.05)
    # The median of exponential pauses is ln 2 of their mean, and a seventh of them is longer than twice that.
    assert gaps[len(gaps) // 2] == pytest.approx(math.log(2) / 4, rel=0.1)
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2), abs=0.02)
    for lengths, median in (([len(each.prompt) for each in asked], 64), ([each.answer for each in asked], 32)):
        assert sorted(lengths)[len(lengths) // 2] == pytest.approx(median, rel=0.05)
        longer = sum(length > median * math.exp(0.5) for length in lengths)
        assert longer / len(lengths) == pytest.approx(0.16, abs=0.03)
    assert goodput.schedule(settings, 4.0, random.Random(1), 1000, 4096) == asked
    assert max(len(each.prompt) for each in goodput.schedule(settings, math.inf, random.Random(1), 1000, 96)) == 24


def outcomes(**counts: int) -> list[Answered]:
    """Of a round of 10 s after a lead of 5, in which all were in time."""
    ends = {"in_time": IN_TIME, "refused": REFUSED, "late": LATE}
    counted = [Answered(6.0, ends[name], 0.5, 0.001) for name, count in counts.items() for _ in range(count)]
    return [Answered(4.9, IN_TIME, 0.5, 0.001)] * 7 + counted


@pytest.mark.parametrize(("in_time", "passed"), [(60, True), (59, False)])
def test_goodput_is_counted_after_the_lead_over_all_rounds(in_time: int, passed: bool) -> None:
    settings = goodput.GoodputSettings(lead=5.0, seconds=10.0)
    rounds = {
        "off": [outcomes(in_time=20, late=50), outcomes(in_time=40, late=30)],
        "deadline": [outcomes(in_time=30, refused=40), outcomes(in_time=in_time, refused=5, late=5)],
    }
    found = goodput.judge(settings, [4.0, 6.0], rounds)
    off, deadline = found["ways"]["off"], found["ways"]["deadline"]
    assert off["goodput_by_round"] == [2.0, 4.0]
    assert (off["goodput"], deadline["goodput"]) == (3.0, pytest.approx((3.0 + in_time / 10) / 2))
    assert off["per_second"] == {IN_TIME: 3.0, REFUSED: 0.0, LATE: 4.0, goodput.FAILED: 0.0}
    assert off["seconds"] == {IN_TIME: {"p50": 0.5, "p99": 0.5}, REFUSED: None}
    assert (found["offered"], found["passed"]) == (7.0, passed)
    assert found["ratio"] == pytest.approx(deadline["goodput"] / 3.0)
    assert found["ratio_by_round"] == [1.5, pytest.approx(in_time / 40)]


def test_no_goodput_at_all_is_no_promise_kept() -> None:
    settings = goodput.GoodputSettings(lead=5.0, seconds=10.0)
    late = [outcomes(late=5)]
    found = goodput.judge(settings, [5.0], {"off": late, "deadline": late})
    assert (found["ratio"], found["ratio_by_round"], found["passed"]) == (None, [None], False)
    assert goodput.judge(settings, [5.0], {"off": late, "deadline": [outcomes(in_time=1)]})["passed"]


@pytest.mark.parametrize("is_shared", [True, False])
def test_prompts_share_the_prefix_and_not_a_token_more(is_shared: bool) -> None:
    settings = prefix.PrefixSettings(prefix=8, suffix_least=2, suffix_most=5, requests=10)
    made = prefix.prompts(settings, 1000, random.Random(1), is_shared=is_shared)
    assert len({tuple(prompt[:8]) for prompt in made}) == (1 if is_shared else 10)
    assert len({prompt[8] for prompt in made}) == 10
    assert {len(prompt) - 8 for prompt in made} <= {2, 3, 4, 5}


def test_a_prefix_saves_for_every_request_by_its_median_over_the_repeats() -> None:
    def series(*seconds: float) -> list[tuple[float, int]]:
        return [(each, 0 if index == 0 else 512) for index, each in enumerate(seconds)]

    repeats = [series(1.0, 0.1, 0.2), series(1.0, 0.9, 0.25), series(1.1, 0.2, 0.1)]
    found = prefix.judge({"sequential": repeats})
    assert found["ways"]["sequential"]["seconds"] == [1.0, 0.2, 0.2]
    assert found["ways"]["sequential"]["ratio"] == {"median": 0.2, "max": 0.2}
    assert found["ways"]["sequential"]["cached_tokens"] == {"first": 0, "others_least": 512, "others_most": 512}
    assert found["passed"]
    assert not prefix.judge({"sequential": [series(1.0, 0.1, 0.3)]})["passed"]


def test_a_prediction_is_judged_by_its_relative_error() -> None:
    def seen(predicted: float, measured: float, estimated: float = 1.0, cached: int = 0) -> prediction.Seen:
        return prediction.Seen(10, cached, 5, predicted, estimated, estimated + 1.0, measured, measured + 1.0)

    found = prediction.judge([seen(1.2, 1.0, cached=5), seen(0.75, 1.0), seen(2.0, 2.0, 3.0)])
    assert (found["count"], found["cached_share"]) == (3, pytest.approx(5 / 30))
    assert found["cost"]["share_within"] == found["estimate"]["share_within"] == pytest.approx(2 / 3)
    assert found["cost"]["max"] == pytest.approx(0.25)
    assert found["cost"]["bias"] == pytest.approx((0.2 - 0.25 + 0.0) / 3)
    assert found["finish"]["max"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("share", "unsteady", "holds"),
    [(0.95, 0, True), (0.95, 4, True), (0.85, 0, False), (0.85, 1, False), (0.85, 2, None)],
)
def test_predictions_are_judged_where_the_same_work_takes_the_same_time(
    share: float, unsteady: int, holds: bool | None
) -> None:
    alone = {way: {"share_within": share} for way in ("cost", "estimate")}
    found = prediction.judge_promise(alone, [1.0] * (10 - unsteady) + [1.5] * unsteady)
    assert found["holds"] is holds
    assert found["yardstick"] == {"count": 10, "median_seconds": 1.0, "share_within": 1 - unsteady / 10}
    missed_by_one = prediction.judge_promise({**alone, "estimate": {"share_within": 0.5}}, [1.0] * 10)
    assert missed_by_one["holds"] is False


@pytest.mark.parametrize("family", ["decoder-only", "encoder-decoder"])
def test_requests_of_a_workload_fit_the_model_and_some_share_a_prefix(family: str) -> None:
    sizes = {"vocab_size": 64, "context": 128, "d_model": 8, "num_layers": 1, "num_heads": 1, "d_ff": 8}
    sizes |= {"source_context": 64, "num_encoder_layers": 1} if family == "encoder-decoder" else {}
    config = ModelConfig.from_dict({"architecture": family, **sizes})
    settings = prediction.PredictionSettings(chunk=16, shared=0.5)
    workload, again = (prediction.Workload(config, settings, "a") for _ in range(2))
    made = [workload.next() for _ in range(200)]
    assert made == [again.next() for _ in range(200)]
    most = config.source_context if config.is_encoder_decoder else config.context
    for asked in made:
        assert 1 <= len(asked.token_ids) <= most
        assert asked.new >= 1
        assert len(asked.token_ids) + asked.new <= config.context or config.is_encoder_decoder
    beginnings = [asked.token_ids[:16] for asked in made if len(asked.token_ids) >= 16]
    assert len(set(beginnings)) < len(beginnings) - 50
    assert len({len(asked.token_ids) for asked in made}) > 10


def test_waits_amid_loading_belong_to_the_changes_that_they_overlap() -> None:
    stream = Answer(0.0, [1.0, 2.0, 3.0, 5.0, 9.0, 10.0, 11.0, 12.0])
    timeline = loading.Timeline((stream,), 1.5, {"load": [(4.0, 4.5)], "reload": [(9.5, 10.5), (11.2, 11.3)]})
    found = loading.judge(timeline, lead=1)
    # What began before the measurement does not count, nor what ends after the first change has begun.
    assert (found["before"]["count"], found["before"]["max"]) == (1, 1.0)
    assert (found["changes"]["load"]["count"], found["changes"]["load"]["max"]) == (1, 2.0)
    assert found["changes"]["reload"]["count"] == 3
    assert found["changes"]["reload"]["seconds"] == pytest.approx(0.55)


class Clock:
    """A clock that the watched work alone sets; it knows which threads have read it since."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looks = threading.Condition()
        self._lookers: set[int] = set()

    def __call__(self) -> float:
        with self._looks:
            self._lookers.add(threading.get_ident())
            self._looks.notify_all()
            return self._seconds

    def pass_unseen(self) -> str:
        """Five seconds without a read, as when the work holds the interpreter's lock."""
        with self._looks:
            self._seconds += 5.0
        return "made"

    def pass_watched(self) -> str:
        """Five seconds, after each of which the event loop and the thread have read it."""
        for _ in range(5):
            with self._looks:
                self._seconds += 1.0
                self._lookers.clear()
                assert self._looks.wait_for(lambda: len(self._lookers) == 2, timeout=60)
        return "made"


def test_a_silence_lasts_as_long_as_the_work_keeps_the_loop_and_threads_from_running() -> None:
    for silence in (5.0, 1.0):
        clock = Clock()
        work = clock.pass_unseen if silence == 5.0 else clock.pass_watched
        expected = {"seconds": 5.0, "loop": silence, "thread": silence}
        assert loading.watch_silences(work, clock) == (expected, "made")


def test_one_more_server_costs_the_slope_from_few_to_many() -> None:
    envoys = [
        {"servers": 2, "checks_per_second": 4.0, "cpu_share": 0.01, "server_cpu_share": 0.002,
         "pss_bytes": 50e6, "descriptors": 40},
        {"servers": 9, "checks_per_second": 18.0, "cpu_share": 0.9, "server_cpu_share": 0.9,
         "pss_bytes": 0.0, "descriptors": 0},
        {"servers": 102, "checks_per_second": 204.0, "cpu_share": 0.03, "server_cpu_share": 0.102,
         "pss_bytes": 60e6, "descriptors": 240},
    ]  # fmt: skip
    prometheuses = [
        {"servers": 2, "series": 1e3, "samples_per_second": 1e2, "cpu_share": 0.02, "pss_bytes": 9e7,
         "rule_seconds": 0.01},
        {"servers": 102, "series": 51e3, "samples_per_second": 51e2, "cpu_share": 0.07, "pss_bytes": 8e7,
         "rule_seconds": 0.21},
    ]  # fmt: skip
    found = fleet.judge({"samples": 500}, envoys, prometheuses, 1e-4)
    assert found["server"] == {"samples": 500, "cpu_seconds_per_check": pytest.approx(0.1 / 200)}
    assert found["envoy"]["bytes_per_server"] == pytest.approx(100e3)
    assert found["envoy"]["descriptors_per_server"] == pytest.approx(2)
    assert found["envoy"]["cpu_seconds_per_check"] == pytest.approx(0.02 / 200)
    assert (found["envoy"]["base_bytes"], found["envoy"]["cpu_seconds_per_call"]) == (50e6, 1e-4)
    assert found["prometheus"]["cpu_seconds_per_sample"] == pytest.approx(0.05 / 5e3)
    assert found["prometheus"]["rule_seconds_per_server"] == pytest.approx(0.002)
    assert found["prometheus"]["bytes_per_series"] == 0, "less memory for more is noise"
    assert fleet.count_samples(b'# HELP a sheep\n# TYPE a counter\na{b="# c"} 1\n\nd 2\n') == 2


def test_a_proxy_is_compared_with_the_direct_way() -> None:
    rounds = {
        DIRECT: [Round([0.001] * 9, [0.0001] * 9, 1000.0, None), Round([0.003] * 10, [0.0003] * 10, 3000.0, None)],
        ENVOY: [Round([0.004] * 9, [0.0005] * 9, 500.0, 0.02), Round([0.005] * 10, [0.0006] * 10, 1500.0, 0.04)],
    }
    ways = scaling_out.judge_transport(rounds, num_messages=1000)["ways"]
    assert ways[DIRECT]["call_seconds"] == {"p50": 0.003, "p90": 0.003, "p99": 0.003}
    assert ways[ENVOY]["added_call_seconds"] == pytest.approx(0.002)
    assert ways[ENVOY]["added_message_seconds"] == pytest.approx(0.0003)
    assert (ways[DIRECT]["messages_per_second"], ways[ENVOY]["throughput_share"]) == (2000.0, 0.5)
    assert ways[ENVOY]["cpu_seconds_per_message"] == pytest.approx(0.03 / 1000)
    assert (ways[DIRECT]["cpu_seconds_per_message"], ways[DIRECT]["added_call_seconds"]) == (None, 0.0)


@pytest.mark.parametrize(("with_key", "passed"), [(0.48, True), (0.479, False)])
@pytest.mark.parametrize("name", ["with_key", "ray_with_key"])
def test_a_routing_key_keeps_the_cache_hits_of_one_server(name: str, with_key: float, passed: bool) -> None:
    shares = {"single": 0.6, "with_key": 0.6, "without_key": 0.3, "ray_without_key": 0.1, name: with_key}
    found = scaling_out.judge_shares(shares)
    assert found["passed"] is passed
    assert found["kept"]["without_key"] == pytest.approx(0.5)


def test_prompts_of_scaling_out_share_a_few_prefixes_evenly() -> None:
    settings = scaling_out.ScalingOutSettings(families=4, requests=30, prefix=6, suffix=3)
    made = scaling_out.prompts(settings, 1000, random.Random(1))
    assert sorted(Counter(tuple(prompt[:6]) for prompt in made).values()) == [7, 7, 8, 8]
    assert len({prompt[6] for prompt in made}) == 30
    assert {len(prompt) for prompt in made} == {9}


def test_int8_keys_and_values_are_compared_with_the_peers_int8() -> None:
    rates = {(OURS, "fp32"): 9.0, (OURS, "int8"): 4.0, (OURS, "int8-kv8"): 12.0}
    rates |= {(PEER, "fp32"): 3.0, (PEER, "int8"): 8.0}
    rows: list[dict[str, Any]] = [
        {"system": system, "precision": name, "value": rate, "samples": [rate]}
        for (system, name), rate in rates.items()
    ]
    assert translation.ratios(rows, {})["ratios"] == {"fp32": 3.0, "int8": 0.5, "int8-kv8": 1.5, "any": 1.5}
    rows[-1]["value"] = None
    assert translation.ratios(rows, {})["ratios"] == {"fp32": 3.0, "int8": None, "int8-kv8": None, "any": 4.0}


def test_the_best_batchings_of_each_precision_are_chosen_without_offline() -> None:
    rates = {("fp32", name): rate for name, rate in zip("abcd", (1.0, 3.0, 2.0, 0.5), strict=True)}
    rates |= {("fp32", OFFLINE): 9.0, ("int8", "a"): 5.0}
    tried = {Contender(PEER, precision, batching): rate for (precision, batching), rate in rates.items()}
    chosen = [(each.precision, each.batching) for each in translation.best_batchings(tried)]
    assert chosen == [("fp32", "b"), ("fp32", "c"), ("fp32", "a"), ("int8", "a")]


def test_translation_requests_are_the_same_for_a_seed_and_sources_about_as_long_as_outputs() -> None:
    config = ModelConfig.from_dict(translation.MODEL)
    settings = replace(translation.TranslationSettings(), output_most=200)
    sources, lengths = translation.requests(settings, config, "seed", 200)
    assert (sources, lengths) == translation.requests(settings, config, "seed", 200)
    assert 8 <= min(lengths) <= 20
    assert 180 <= max(lengths) <= 200
    assert all(0.75 < len(source) / length < 1.3 for source, length in zip(sources, lengths, strict=True))


@pytest.mark.parametrize(
    ("rate", "first", "passed"), [(0.96, 0.002, True), (0.94, 0.002, False), (0.96, 0.0041, False)]
)
def test_http_may_cost_a_twentieth_of_the_rate_and_three_milliseconds(rate: float, first: float, passed: bool) -> None:
    ways = {http.GRPC: http.Round(1.0, 0.001, [[1]]), http.HTTP: http.Round(rate, first, [[1]])}
    assert http.judge({way: [each] * 5 for way, each in ways.items()})["passed"] is passed


@pytest.mark.parametrize(
    ("rates", "accepted", "passed"),
    [
        ([0.96] * 5, 1.0, True),
        ([0.94] * 5, 1.0, False),
        ([0.9, 0.9, 0.96, 0.97, 0.98], 1.0, False),
        ([1.0] * 5, 0.5, False),
    ],
)
def test_a_schema_may_cost_a_twentieth_by_the_whole_interval_and_saves_steps(
    rates: list[float], accepted: float, passed: bool
) -> None:
    document = json.dumps(dict.fromkeys(structured._FIELDS))
    written = {way: [[structured.Written([1, 2], document, 1.0)]] for way in (structured.WITHOUT, structured.WITH)}
    found = structured.judge({"greedy": {structured.FREE: [1.0] * 5, "a text": rates}}, written, accepted)
    assert found["passed"] is passed
