"""The scenarios' arithmetic on given times, their conduct with tiny models and pretended peers; no time asserted."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    amid_streams,
    clocks,
    company,
    explaining,
    goodput,
    host,
    interference,
    loading,
    look_up,
    prediction,
    prefix,
    scenario,
    translation,
)
from benchmarks.goodput import IN_TIME, LATE, REFUSED, Answered
from benchmarks.interference import Repeat
from benchmarks.peers.ctranslate2_translator import Batching, CTranslate2Translator
from benchmarks.peers.onward import MODEL, Onward
from benchmarks.peers.protocol import Options
from benchmarks.peers.systems import InstallError
from benchmarks.prediction import Seen
from benchmarks.scenario import Answer, percentile
from benchmarks.scenario_options import DOCS
from benchmarks.translation import OFFLINE, OURS, PEER, Contender, Translation
from model import kernels
from onward.v1 import generation_pb2 as pb
from tests.artifacts import tiny_artifact, tiny_config


def tiny_options(tmp_path: Path, family: str, max_batch: int = 4, **overrides: Any) -> Options:
    """As `scenario.make_artifact` gives them, of an artifact that is there already."""
    place = tmp_path / "fp32" / MODEL
    place.parent.mkdir()
    place.symlink_to(tiny_artifact(family, **overrides), target_is_directory=True)
    return Options(tmp_path, tmp_path, "fp32", threads=1, max_batch=max_batch, context=0)


def test_a_percentile_is_a_value_that_was_seen() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([3.0], 0.01) == 3.0


@pytest.mark.parametrize(
    ("module", "given", "expected"),
    [
        (clocks, ["--requests", "7", "--slots", "2", "--in-flight", "3"], {"requests": 7, "slots": 2, "in_flight": 3}),
        (
            company,
            ["--streams", "2", "--prompt", "9", "--in-flight", "3", "--seconds", "4", "--repeats", "5"],
            {"streams": 2, "prompt": 9, "in_flight": 3, "seconds": 4.0, "repeats": 5},
        ),
        (explaining, ["--streams", "2", "--length", "9", "--calls", "3"], {"streams": 2, "length": 9, "calls": 3}),
        (
            goodput,
            ["--batch", "2", "--prompt", "9", "--answer", "3", "--load", "2", "--timeout", "4", "--seconds", "5"],
            {"batch": 2, "prompt": 9, "answer": 3, "load": 2.0, "timeout": 4.0, "seconds": 5.0},
        ),
        (
            interference,
            ["--streams", "2", "--prompt", "9", "--repeats", "3", "--chunk", "16"],
            {"streams": 2, "long_prompt": 9, "repeats": 3, "chunk": 16},
        ),
        (loading, ["--streams", "2", "--repeats", "3"], {"streams": 2, "repeats": 3}),
        (
            prefix,
            ["--prefix", "9", "--requests", "7", "--in-flight", "3", "--repeats", "5"],
            {"prefix": 9, "requests": 7, "in_flight": 3, "repeats": 5},
        ),
    ],
)
def test_a_scenarios_options_set_its_settings_and_what_is_quick_is_less(
    module: Any, given: list[str], expected: dict[str, float]
) -> None:
    common = ["--model", "law", "--precision", "fp32", "--threads", "3", "--seed", "4"]
    settings, folder = module._parse([*given, *common])
    assert settings == module.Settings(model="law", precision="fp32", threads=3, seed=4, **expected)
    assert folder == scenario.BUILD
    quick, folder = module._parse(["--quick", "--docs"])
    whole, _ = module._parse([])
    assert folder == DOCS
    shortened = {name for name in asdict(whole) if getattr(quick, name) != getattr(whole, name)}
    assert shortened
    assert all(getattr(quick, name) < getattr(whole, name) for name in shortened)


# What a long prompt does to others.


def test_waits_are_before_or_during_by_whether_they_overlap_the_reading_of_the_prompt() -> None:
    stream = Answer(0.0, [1.0, 2.0, 3.0, 5.0, 9.0, 10.0, 11.0])
    repeat = interference.divide([stream], Answer(4.0, [9.5]), lead=1)
    # From 3 to 5 the prompt came; from 9 to 10 its first token did; what came later belongs to neither.
    assert repeat.before == (1.0,)
    assert repeat.during == (2.0, 4.0, 1.0)
    assert repeat.first_token_seconds == 5.5
    assert repeat.timeline == ((-1.0, 1.0), (1.0, 2.0), (5.0, 4.0), (6.0, 1.0), (7.0, 1.0))
    with pytest.raises(RuntimeError, match="ended before the long prompt came"):
        interference.divide([Answer(0.0, [1.0, 2.0])], Answer(4.0, [9.5]), lead=0)


@pytest.mark.parametrize(("slowest", "passed"), [(1.3, True), (1.5, False)])
def test_the_promise_is_the_costliest_chunk_over_the_waits_of_all_repeats(slowest: float, passed: bool) -> None:
    repeats = [Repeat((0.1,) * 10, (0.5, wait), 3.0, ()) for wait in (1.0, slowest)]
    found = interference.judge(repeats, [[0.5, 1.0], [0.7, 1.6]])
    assert found["chunk_seconds"] == {"mean": pytest.approx(0.95), "costliest": 1.3, "each": [0.6, 1.3]}
    assert found["p99_rise_seconds"] == pytest.approx(slowest - 0.1)
    assert found["passed"] is passed


def test_a_long_prompt_is_measured_amid_streams_of_a_real_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So long that no stream ends before the long prompt has come, however quick its steps.
    options = tiny_options(tmp_path, "decoder-only", context=8192)
    monkeypatch.setattr(scenario, "make_artifact", lambda *_, **__: options)
    settings = interference.Settings(
        precision="fp32", streams=2, stream_prompt=4, long_prompt=80, lead=2, window=4, repeats=1, chunk=16
    )
    results = interference.measure(settings, tmp_path)
    assert len(results["chunk_seconds"]["each"]) == 5
    assert results["before"]["count"] >= 2
    assert results["during"]["count"] >= 1
    assert "tokens in chunks of 16" in interference.render(results)
    assert "<svg" in interference.draw_picture(results)
    json.dumps(results, allow_nan=False)


# Two models on the same cores.


def company_round(streams: float, prompts: float, waits: tuple[float, ...] = (0.1, 0.2)) -> company.Round:
    """So many seconds in graphs: a hundred steps of the streams, ten of the prompts."""
    runs = {company.STREAMS: company.Runs(streams, 100), company.PROMPTS: company.Runs(prompts, 10 if prompts else 0)}
    return company.Round(10.0, runs, waits)


@pytest.mark.parametrize(("worst", "passed"), [(5.4, True), (5.6, False)])
def test_the_promise_is_every_rounds_share_by_weight(worst: float, passed: bool) -> None:
    rounds = {
        "alone": [company_round(9.0, 0.0)],
        "even": [company_round(5.0, 5.0), company_round(worst, 10 - worst), company_round(4.9, 5.1)],
        "favoured": [company_round(7.5, 2.5, (0.3,) * 30)],
    }
    found = company.judge(rounds)
    assert found["passed"] is passed
    alone, even, favoured = (found["ways"][way] for way in rounds)
    assert (alone["share"], alone["share_by_weight"], alone["step_seconds"]) == (
        1.0,
        1.0,
        {company.STREAMS: 0.09, company.PROMPTS: 0.0},
    )
    assert even["share_by_round"] == pytest.approx([0.5, worst / 10, 0.49])
    assert even["share"] == 0.5
    # Of a step of 50 ms and one of 500 ms.
    assert even["share_step_by_step"] == pytest.approx(1 / 11)
    assert favoured["share_by_weight"] == 0.75
    assert favoured["tokens_per_second"] == 3.0


def test_two_models_are_measured_on_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = tiny_options(tmp_path, "decoder-only")
    monkeypatch.setattr(scenario, "make_artifact", lambda *_, **__: options)
    settings = company.Settings(
        precision="fp32",
        streams=2,
        stream_prompt=4,
        prompt=48,
        in_flight=2,
        lead=0.2,
        seconds=1.0,
        repeats=1,
        ways=("favoured",),
    )
    results = company.measure(settings, tmp_path)
    (way,) = results["ways"].values()
    assert 0 < way["share"] < 1
    assert way["tokens_per_second"] > 0
    assert all(seconds > 0 for seconds in way["step_seconds"].values())
    assert "| favoured |" in company.render(results)
    json.dumps(results, allow_nan=False)


# Answers in time.


def test_a_schedule_is_poisson_at_the_rate_and_of_varied_lengths_around_the_medians() -> None:
    settings = goodput.Settings(lead=100.0, seconds=900.0)
    asked = goodput.schedule(settings, 4.0, random.Random(1), 1000, 4096)
    gaps = sorted(after.at - before.at for before, after in itertools.pairwise(asked))
    assert len(asked) == pytest.approx(4000, rel=0.05)
    # The median of exponential pauses is ln 2 of their mean, and a seventh of them is longer than twice that.
    assert gaps[len(gaps) // 2] == pytest.approx(math.log(2) / 4, rel=0.1)
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2), abs=0.02)
    for lengths, median in (([len(each.prompt) for each in asked], 64), ([each.answer for each in asked], 32)):
        assert sorted(lengths)[len(lengths) // 2] == pytest.approx(median, rel=0.05)
        assert sum(length > median * math.exp(0.5) for length in lengths) / len(lengths) == pytest.approx(
            0.16, abs=0.03
        )
    assert goodput.schedule(settings, 4.0, random.Random(1), 1000, 4096) == asked
    assert max(len(each.prompt) for each in goodput.schedule(settings, math.inf, random.Random(1), 1000, 96)) == 24


def outcomes(**counts: int) -> list[Answered]:
    """Of a round of 10 s after a lead of 5, in which everyone was in time."""
    ends = {"in_time": IN_TIME, "refused": REFUSED, "late": LATE}
    told = [Answered(6.0, ends[name], 0.5, 0.001) for name, count in counts.items() for _ in range(count)]
    return [Answered(4.9, IN_TIME, 0.5, 0.001)] * 7 + told


@pytest.mark.parametrize(("in_time", "passed"), [(60, True), (59, False)])
def test_goodput_is_counted_after_the_lead_over_all_rounds_and_the_promise_is_their_ratio(
    in_time: int, passed: bool
) -> None:
    settings = goodput.Settings(lead=5.0, seconds=10.0)
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
    assert found["offered"] == 7.0
    assert found["ratio"] == pytest.approx(deadline["goodput"] / 3.0)
    assert found["ratio_by_round"] == [1.5, pytest.approx(in_time / 40)]
    assert found["passed"] is passed


def test_nothing_in_time_is_no_goodput_and_not_a_promise_kept() -> None:
    settings = goodput.Settings(lead=5.0, seconds=10.0)
    late = [outcomes(late=5)]
    found = goodput.judge(settings, [5.0], {"off": late, "deadline": late})
    assert (found["ratio"], found["ratio_by_round"], found["passed"]) == (None, [None], False)
    assert goodput.judge(settings, [5.0], {"off": late, "deadline": [outcomes(in_time=1)]})["passed"]


def test_answers_in_time_are_measured_on_real_servers_beyond_their_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = tiny_options(tmp_path, "decoder-only")
    monkeypatch.setattr(scenario, "make_artifact", lambda *_, **__: options)
    settings = goodput.Settings(
        precision="fp32", batch=2, answer=20, timeout=0.5, capacity_seconds=1.0, lead=0.5, seconds=1.0, rounds=1
    )
    results = goodput.measure(settings, tmp_path)
    assert results["capacity"] > 0
    for way in results["ways"].values():
        assert way["per_second"][goodput.FAILED] == 0
        assert sum(way["per_second"].values()) == pytest.approx(results["offered"])
    assert results["ways"]["off"]["per_second"][REFUSED] == 0
    assert "| `--admission=deadline` |" in goodput.render(results)
    assert "<svg" in goodput.draw_picture(results)
    json.dumps(results, allow_nan=False)


# A shared prefix.


@pytest.mark.parametrize("is_shared", [True, False])
def test_prompts_share_the_prefix_and_not_a_token_more(is_shared: bool) -> None:
    settings = prefix.Settings(prefix=8, suffix_least=2, suffix_most=5, requests=10)
    made = prefix.prompts(settings, 1000, random.Random(1), is_shared=is_shared)
    assert len({tuple(prompt[:8]) for prompt in made}) == (1 if is_shared else 10)
    assert len({prompt[8] for prompt in made}) == 10
    assert {len(prompt) - 8 for prompt in made} <= {2, 3, 4, 5}


def test_the_promise_is_kept_by_every_request_by_its_median_over_the_repeats() -> None:
    def series(*seconds: float) -> list[tuple[float, int]]:
        return [(each, 0 if index == 0 else 512) for index, each in enumerate(seconds)]

    repeats = [series(1.0, 0.1, 0.2), series(1.0, 0.9, 0.25), series(1.1, 0.2, 0.1)]
    found = prefix.judge({"sequential": repeats})
    assert found["ways"]["sequential"]["seconds"] == [1.0, 0.2, 0.2]
    assert found["ways"]["sequential"]["ratio"] == {"median": 0.2, "max": 0.2}
    assert found["ways"]["sequential"]["cached_tokens"] == {"first": 0, "others_least": 512, "others_most": 512}
    assert found["passed"]
    assert not prefix.judge({"sequential": [series(1.0, 0.1, 0.3)]})["passed"]


def test_a_prefix_is_measured_in_every_way_on_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = tiny_options(tmp_path, "decoder-only")
    monkeypatch.setattr(scenario, "make_artifact", lambda *_, **__: options)
    settings = prefix.Settings(
        precision="fp32", prefix=32, suffix_least=2, suffix_most=4, requests=4, in_flight=2, repeats=1
    )
    results = prefix.measure(settings, tmp_path)
    assert set(results["ways"]) == set(prefix.WAYS)
    for way in results["ways"].values():
        assert len(way["seconds"]) == 4
        assert min(way["seconds"]) > 0
    # A repeat's prefix is new: nothing of it is at hand when its first request comes.
    assert results["ways"]["sequential"]["cached_tokens"]["first"] == 0
    assert "| sequential |" in prefix.render(results)
    json.dumps(results, allow_nan=False)


# Guesses by look-up.


def answer(token_ids: list[int], seconds: float) -> look_up.Told:
    return look_up.Told(token_ids, seconds)


def test_what_guesses_save_is_a_prompts_median_beside_its_median_without_and_nothing_where_a_token_differs() -> None:
    first, second = [1, 2, 3], [4, 5, 6]
    without = [[answer(first, 1.0), answer(second, 2.0)], [answer(first, 1.0), answer(second, 2.0)]]
    guessed = [[answer(first, 0.4), answer(second, 2.0)], [answer(first, 0.5), answer(second, 2.5)]]
    counts = {"continue": {"drafts": 3.0, "draft_tokens": 8.0, "accepted_tokens": 6.0}}
    (found,) = look_up.judge({"continue": {"without": without, "with": guessed}}, counts)["tasks"].values()
    assert found["tokens_per_second"]["without"] == pytest.approx((2.0 + 1.0) / 2), "of two tokens after the first"
    assert found["ratios"] == pytest.approx([(2.5 + 2.0) / 2, (1.0 + 0.8) / 2])
    assert found["accepted_share"] == 0.75
    guessed[1][1] = answer([4, 5, 7], 2.5)
    with pytest.raises(RuntimeError, match="continue: answers to prompt 1 differ"):
        look_up.judge({"continue": {"without": without, "with": guessed}}, counts)


class Telling:
    """A stub whose answers are messages of so many tokens, the first of them and the last of none."""

    def __init__(self, *counts: int) -> None:
        self._counts = counts
        self.asked: list[pb.GenerateStreamRequest] = []

    async def GenerateStream(  # noqa: N802
        self, request: pb.GenerateStreamRequest
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        self.asked.append(request)
        yield pb.GenerateStreamResponse(accepted=pb.GenerateStreamResponse.Accepted())
        for count in self._counts:
            yield pb.GenerateStreamResponse(delta=pb.GenerateStreamResponse.Delta(token_ids=range(count)))
        yield pb.GenerateStreamResponse(finished=pb.GenerateStreamResponse.Finished())
        timings = pb.Timings(prefill=7.0, decode=2.0, total=9.0)
        yield pb.GenerateStreamResponse(summary=pb.GenerateStreamResponse.Summary(timings=timings))


async def test_a_rate_is_of_the_tokens_after_the_first_by_the_servers_clock() -> None:
    stub: Any = Telling(2, 1, 0, 3)
    told = await look_up.ask(stub, look_up.Question([1, 5], seed=9), 6)
    assert told == look_up.Told([0, 1, 0, 0, 1, 2], 2.0)
    assert told.tokens_per_second == 2.5
    assert (stub.asked[0].sampling.temperature, stub.asked[0].sampling.seed) == (1.0, 9)
    short: Any = Telling(2, 1)
    with pytest.raises(RuntimeError, match="asked for 6 tokens, got 3"):
        await look_up.ask(short, look_up.Question([1]), 6)


def test_tasks_ask_what_their_names_say() -> None:
    settings = look_up.Settings(prompt=16, prompts=1)
    texts = [[5], list(range(10, 40)), list(range(50, 90))]
    begun = [1, *range(10, 25)]
    assert look_up.questions(settings, texts, "continue") == [look_up.Question(begun)]
    (drawn,) = look_up.questions(settings, texts, "sample")
    assert drawn.token_ids == begun
    assert drawn.seed is not None
    assert look_up.questions(settings, texts, "sample") == [drawn], "both servers are asked the same"
    two = look_up.questions(replace(settings, prompts=2), texts, "sample")
    assert two[0] == drawn
    assert two[1].seed != drawn.seed
    assert look_up.questions(settings, texts, "copy") == [look_up.Question([1, *range(10, 20), *range(10, 15)])]
    with pytest.raises(RuntimeError, match="2 held-out modules have 15 tokens, 3 are wanted"):
        look_up.questions(replace(settings, prompts=3), texts, "copy")


@pytest.mark.skipif(not kernels.operators(), reason="the kernels are not built for this processor")
def test_guesses_are_measured_on_real_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = tiny_options(tmp_path, "decoder-only")
    monkeypatch.setattr(look_up, "make_artifact", lambda *_: options)
    monkeypatch.setattr(look_up, "held_out_text", lambda _: ["to be or not to be, " * 4, "that is the question " * 4])
    settings = look_up.Settings(precision="fp32", look_up=4, prompts=2, prompt=40, new=30, repeats=1)
    results = look_up.measure(settings, tmp_path)
    assert results["tokens_equal"]
    assert set(results["tasks"]) == {"continue", "sample", "copy"}
    for name, task in results["tasks"].items():
        # Draws from random weights repeat nothing.
        assert task["guesses"]["draft_tokens"] >= task["guesses"]["accepted_tokens"] >= (name != "sample")
        assert task["tokens_per_second"]["with"] > 0
    assert "| copy (the kindest case) |" in look_up.render(results)
    json.dumps(results, allow_nan=False)


# Predictions.


def seen(predicted: float, measured: float, estimated: float = 1.0, cached: int = 0) -> Seen:
    return Seen(10, cached, 5, predicted, estimated, estimated + 1.0, measured, measured + 1.0)


def test_a_prediction_is_judged_by_what_it_is_off_in_parts_of_what_was_measured() -> None:
    found = prediction.judge([seen(1.2, 1.0, cached=5), seen(0.75, 1.0), seen(2.0, 2.0, 3.0)])
    assert found["count"] == 3
    assert found["cached_share"] == pytest.approx(5 / 30)
    assert found["cost"]["share_within"] == pytest.approx(2 / 3)
    assert found["cost"]["max"] == pytest.approx(0.25)
    assert found["cost"]["bias"] == pytest.approx((0.2 - 0.25 + 0.0) / 3)
    assert found["estimate"]["share_within"] == pytest.approx(2 / 3)
    assert found["finish"]["max"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("share", "unsteady", "holds"),
    [(0.95, 0, True), (0.95, 4, True), (0.85, 0, False), (0.85, 1, False), (0.85, 2, None)],
)
def test_a_promise_is_judged_where_the_same_work_takes_the_same_time(
    share: float, unsteady: int, holds: bool | None
) -> None:
    alone = {way: {"share_within": share} for way in ("cost", "estimate")}
    found = prediction.verdict(alone, [1.0] * (10 - unsteady) + [1.5] * unsteady)
    assert found["holds"] is holds
    assert found["yardstick"] == {"count": 10, "median_seconds": 1.0, "share_within": 1 - unsteady / 10}
    missed_by_one_way = prediction.verdict({**alone, "estimate": {"share_within": 0.5}}, [1.0] * 10)
    assert missed_by_one_way["holds"] is False


@pytest.mark.parametrize("family", ["decoder-only", "encoder-decoder"])
def test_requests_of_a_workload_fit_the_model_and_some_begin_alike(family: str) -> None:
    config = replace(tiny_config(family), **({"source_context": 64} if family == "encoder-decoder" else {}))
    settings = prediction.Settings(chunk=16, shared=0.5)
    made = [workload.next() for workload in [prediction.Workload(config, settings, "a")] for _ in range(200)]
    again = prediction.Workload(config, settings, "a")
    assert made == [again.next() for _ in range(200)]
    most = config.source_context if config.is_encoder_decoder else config.context
    for asked in made:
        assert 1 <= len(asked.token_ids) <= most
        assert asked.new >= 1
        assert len(asked.token_ids) + asked.new <= config.context or config.is_encoder_decoder
    beginnings = [asked.token_ids[:16] for asked in made if len(asked.token_ids) >= 16]
    assert len(set(beginnings)) < len(beginnings) - 50
    assert len({len(asked.token_ids) for asked in made}) > 10


@pytest.mark.parametrize("family", ["decoder-only", "encoder-decoder"])
def test_predictions_of_a_real_server_are_measured_alone_and_under_load(tmp_path: Path, family: str) -> None:
    artifact = tiny_artifact(family)
    settings = prediction.Settings(
        models=(str(artifact),), requests=6, warm_seconds=0.2, load_seconds=0.3, in_flight=6, batch=2, chunk=16
    )
    results = prediction.measure(settings, tmp_path)
    found = results["models"][artifact.name]
    assert found["alone"]["count"] == len(found["requests"]) == 6
    assert found["yardstick"]["count"] == 2
    assert found["load"]["count"] >= 6
    for when in ("alone", "load"):
        for way in ("cost", "estimate", "finish"):
            assert 0 <= found[when][way]["share_within"] <= 1
            assert found[when][way]["max"] >= found[when][way]["p50"] >= 0
    assert all(each["predicted"] > 0 and each["measured"] > 0 for each in found["requests"])
    assert f"| {artifact.name} | load |" in prediction.render(results)
    assert "<svg" in prediction.draw_picture(results)
    json.dumps(results, allow_nan=False)


def test_models_to_predict_are_presets_or_artifacts_and_quick_means_few(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, folder = prediction._parse(["--quick", "--model", "one", "--model", "two", "--docs"])
    assert settings.models == ("one", "two")
    assert settings.requests <= 30
    assert settings.warm_seconds <= 3
    assert folder == DOCS
    monkeypatch.setattr(prediction, "MODELS", tiny_artifact("decoder-only").parent)
    settings, folder = prediction._parse([])
    assert settings.models == ("llama-110m", str(tiny_artifact("decoder-only")))
    assert (settings.requests, settings.warm_seconds, folder) == (300, 60.0, scenario.BUILD)


# Translation.


@dataclass(frozen=True)
class Step:
    step: int
    batch_id: int


@dataclass(frozen=True)
class Result:
    hypotheses: list[list[str]]


class FakeTranslator:
    """CTranslate2's `Translator` as far as it is used: sentences of a call run together until the last has ended."""

    def __init__(self) -> None:
        self.calls: list[list[list[str]]] = []

    def translate_batch(self, sources: list[list[str]], **options: Any) -> list[Result]:
        self.calls.append(sources)
        outputs: list[list[str]] = [[] for _ in sources]
        alive = list(range(len(sources)))
        for step in range(options["max_decoding_length"]):
            for row in list(alive):
                outputs[row].append(sources[row][0])
                if options["callback"] and options["callback"](Step(step, row)):
                    alive.remove(row)
        return [Result([output]) for output in outputs]


def translator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CTranslate2Translator, FakeTranslator]:
    fake = FakeTranslator()
    monkeypatch.setattr(CTranslate2Translator, "_use_workers", lambda *_: None)
    made = CTranslate2Translator(Options(tmp_path, tmp_path, "float32", 2, 8, 64))
    made._translator = fake
    return made, fake


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("is_padded", [False, True])
def test_every_request_gets_an_answer_of_its_own_length_however_calls_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int, is_sorted: bool, is_padded: bool
) -> None:
    made, fake = translator(tmp_path, monkeypatch)
    lengths = [1 + 7 * index % 10 for index in range(23)]
    sources = [[index] * (1 + index % 3) for index in range(23)]
    batching = {"num_workers": num_workers, "max_batch": 4, "is_sorted": is_sorted, "is_padded": is_padded}
    answers = made.translate(sources, lengths, batching, in_flight=6)
    assert answers == [[index] * length for index, length in enumerate(lengths)]
    assert max(map(len, fake.calls)) <= 4
    assert sum(map(len, fake.calls)) == 23


def test_a_call_sees_no_more_requests_than_are_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, fake = translator(tmp_path, monkeypatch)
    sources = [[index] for index in range(10)]
    made.translate(sources, [2] * 10, {"num_workers": 1, "max_batch": 100}, in_flight=3)
    # When a call's sentences have ended, as many new ones have come.
    assert [len(call) for call in fake.calls] == [3, 3, 3, 1]
    with_sorting = Batching(1, 2, is_sorted=True)
    fake.calls.clear()
    made.translate([[1], [2, 2], [3, 3, 3], [4] * 9], [1] * 4, vars(with_sorting), in_flight=3)
    assert fake.calls[0] == [["w3"] * 3, ["w2"] * 2], "the longest of those that have come"


def test_a_call_that_fails_fails_all_and_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, fake = translator(tmp_path, monkeypatch)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no luck")

    monkeypatch.setattr(fake, "translate_batch", fail)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="no luck"):
        made.translate([[1]] * 9, [1] * 9, {"num_workers": 3, "max_batch": 2}, in_flight=4)
    assert set(threading.enumerate()) <= before


def test_ours_answers_as_many_callers_as_there_are_at_a_time(tmp_path: Path) -> None:
    system = Onward(tiny_options(tmp_path, "encoder-decoder"))
    system.prepare()
    try:
        system.load()
        lengths = [5, 1, 9, 3, 7]
        sources = [[3 + index] * (2 + index) for index in range(5)]
        together = system.translate(sources, lengths, {}, in_flight=3)
        alone = [
            system.translate([source], [length], {}, 1)[0] for source, length in zip(sources, lengths, strict=True)
        ]
    finally:
        system.close()
    assert [len(answer) for answer in together] == lengths
    assert together == alone


SETTINGS = translation.Settings(
    model={**translation.MODEL, "vocab_size": 64, "context": 32, "d_model": 8, "num_heads": 1, "d_ff": 8},
    requests=6,
    in_flight=2,
    output_most=12,
    precisions=("fp32",),
    batchings=("1 x 32", "2 x 8", "1 x 8, sorted", "2 x 4", OFFLINE),
    rounds=2,
)
FAKES = {OURS: "tests.fake_peer", PEER: "tests.fake_peer"}


def translate(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    python: Path | InstallError = Path(sys.executable),
    settings: translation.Settings = SETTINGS,
) -> dict[str, Any]:
    monkeypatch.setattr(Translation, "_make_checkpoint", lambda self: None)
    monkeypatch.setattr(translation, "reference_agreement", lambda *_: 0.75)
    results = Translation(settings, tmp_path, python, FAKES).measure()
    json.dumps(results, allow_nan=False)
    return results


def test_all_batchings_are_tried_and_the_best_three_go_into_the_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = translate(tmp_path, monkeypatch)
    assert [each["batching"] for each in results["batchings"]] == list(SETTINGS.batchings)
    systems = [(row["system"], len(row["samples"]), row["agreement"]) for row in results["rows"]]
    assert systems == [(OURS, 2, 0.75)] + 3 * [(PEER, 2, 0.75)]
    assert OFFLINE not in {row["batching"] for row in results["rows"]}
    assert set(results["offline"]) == {"fp32"}
    assert results["ratios"]["fp32"] == results["ratios"]["any"] > 0
    assert "| onward | fp32 | continuous |" in translation.render(results)


def test_a_peer_that_is_not_there_is_a_row_and_breaks_the_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = translate(tmp_path, monkeypatch, InstallError("no such wheel"))
    ours, peer = results["rows"]
    assert ours["value"] > 0
    assert (peer["system"], peer["value"], peer["error"]) == (PEER, None, "no such wheel")
    assert results["ratios"] == {"fp32": None, "any": None}
    assert results["passed"] is False
    assert "- ctranslate2 fp32 : `no such wheel`" in translation.render(results)


def test_a_system_that_answers_too_little_is_a_row_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PEER", "short")
    monkeypatch.setattr(translation, "_AGREEMENT_SOURCES", 3)
    results = translate(tmp_path, monkeypatch)
    assert all("asked for outputs of" in row["error"] for row in results["rows"])


def test_what_only_ours_has_is_asked_of_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SETTINGS, precisions=("int8", "int8-kv8"), batchings=("1 x 32",), rounds=1)
    results = translate(tmp_path, monkeypatch, settings=settings)
    found = [(row["system"], row["precision"], row["value"] is not None) for row in results["rows"]]
    assert found == [(OURS, "int8", True), (OURS, "int8-kv8", True), (PEER, "int8", True)]
    assert [each["precision"] for each in results["batchings"]] == ["int8"]
    assert "| onward | int8-kv8 | continuous |" in translation.render(results)


def test_keys_and_values_in_eight_bits_are_compared_with_the_peers_products_in_as_many() -> None:
    rates = {(OURS, "fp32"): 9.0, (OURS, "int8"): 4.0, (OURS, "int8-kv8"): 12.0}
    rates |= {(PEER, "fp32"): 3.0, (PEER, "int8"): 8.0}
    rows = [{"system": system, "precision": name, "value": rate} for (system, name), rate in rates.items()]
    assert translation.ratios(rows, {})["ratios"] == {"fp32": 3.0, "int8": 0.5, "int8-kv8": 1.5, "any": 1.5}
    rows[-1]["value"] = None
    assert translation.ratios(rows, {})["ratios"] == {"fp32": 3.0, "int8": None, "int8-kv8": None, "any": 4.0}


def test_the_best_of_each_precision_is_chosen_without_what_sees_everything() -> None:
    rates = {("fp32", name): rate for name, rate in zip("abcd", (1.0, 3.0, 2.0, 0.5), strict=True)}
    rates |= {("fp32", OFFLINE): 9.0, ("int8", "a"): 5.0}
    tried = {Contender(PEER, precision, batching): rate for (precision, batching), rate in rates.items()}
    chosen = translation.best_batchings(tried)
    assert [(each.precision, each.batching) for each in chosen] == [
        ("fp32", "b"),
        ("fp32", "c"),
        ("fp32", "a"),
        ("int8", "a"),
    ]


def test_requests_are_the_same_for_the_same_seed_and_sources_are_about_as_long_as_outputs() -> None:
    config = translation.ModelConfig.from_dict(translation.MODEL)
    settings = replace(SETTINGS, model=translation.MODEL, output_most=200)
    sources, lengths = translation.requests(settings, config, "seed", 200)
    assert (sources, lengths) == translation.requests(settings, config, "seed", 200)
    assert 8 <= min(lengths) <= 20
    assert 180 <= max(lengths) <= 200
    assert all(0.75 < len(source) / length < 1.3 for source, length in zip(sources, lengths, strict=True))


def test_host_measures_the_steps_in_which_all_decode(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        str(tiny_artifact("decoder-only")),
        "--batches",
        "1,3",
        "--prompt",
        "8",
        "--new",
        "6",
        "--threads",
        "1",
    ]
    assert host.main(arguments) == 0
    batches = json.loads(capsys.readouterr().out.splitlines()[-1])["batches"]
    assert set(batches) == {"1", "3"}
    for found in batches.values():
        assert found["run_seconds"] > 0
        assert 0 < found["host_share"] < 1


def test_waits_amid_explain_are_told_by_the_calls_that_they_overlap() -> None:
    stream = Answer(0.0, [1.0, 2.0, 3.0, 3.5, 8.0, 9.0, 9.5, 12.0, 13.0])
    timeline = explaining.Timeline((stream,), ((4.0, 7.0), (9.2, 9.4), (11.0, 11.5)))
    found = explaining.judge(timeline, lead=1)
    assert (found["before"]["count"], found["before"]["max"]) == (2, 1.0)
    assert (found["first_call"]["count"], found["first_call"]["max"]) == (1, 4.5)
    assert (found["next_calls"]["count"], found["next_calls"]["max"]) == (2, 2.5)
    assert found["call_seconds"] == pytest.approx([3.0, 0.2, 0.5])
    with pytest.raises(RuntimeError, match="a stream ended before the last call"):
        explaining.judge(explaining.Timeline((stream,), ((4.0, 7.0), (13.5, 14.0))), lead=1)
    settings = {"model": "m", "precision": "int8", "streams": 1, "length": 8, "calls": 3, "threads": 1}
    sizes = {"without": {"seconds": 1.0, "num_bytes": 1000}, "with": {"seconds": 3.5, "num_bytes": 2500}}
    text = explaining.render(found | {"settings": settings, "machine": {"processor": "p"}, "export": sizes})
    assert "| first call | 4500.0 ms | 4500.0 ms | 4500.0 ms |" in text
    assert "adds 1,500 bytes to an artefact of 1,000. Exporting took 1.0 s without it, and then 3.5 s with it." in text


def test_explain_is_measured_amid_streams_of_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(checkpoint: Path, out: Path, precision: str, *flags: str) -> dict[str, float]:
        # So long that no stream ends before the calls do, however quick its steps.
        artifact = tiny_artifact("decoder-only", explain_graph="--explain-graph" in flags, context=8192)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.symlink_to(artifact, target_is_directory=True)
        return {"seconds": 1.0, "num_bytes": 1000}

    monkeypatch.setattr(scenario, "make_checkpoint", lambda *_: None)
    monkeypatch.setattr(explaining, "_export", export)
    monkeypatch.setattr(amid_streams, "PAUSE_SECONDS", 0.02)
    settings = explaining.Settings(precision="fp32", streams=2, stream_prompt=4, length=8, calls=2, lead=2, window=4)
    results = explaining.measure(settings, tmp_path)
    assert all(results[when]["count"] >= 1 for when in ("before", "first_call", "next_calls"))
    assert len(results["call_seconds"]) == 2
    assert "| next calls |" in explaining.render(results)
    json.dumps(results, allow_nan=False)
