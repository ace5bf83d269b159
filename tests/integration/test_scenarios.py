"""Every scenario in short on real servers with tiny models, with pretended peers; no time asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks import __main__ as command
from benchmarks.frame import models, streams
from benchmarks.frame.models import Subject, artifact_folder
from benchmarks.frame.scenario import Run, load, names
from benchmarks.frame.servers import cpu_seconds, proportional_bytes
from benchmarks.infra.clock_server import addresses
from benchmarks.peers.ctranslate2_translator import Batching, CTranslate2Translator
from benchmarks.peers.onward import Onward
from benchmarks.peers.onward_unary import OnwardUnary
from benchmarks.peers.protocol import Options
from benchmarks.peers.systems import InstallError
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
    speculation,
    structured,
    translation,
)
from benchmarks.scenarios.goodput import REFUSED
from benchmarks.scenarios.translation import OFFLINE, OURS, PEER, TRANSLATORS, Translation
from model import kernels
from onward.v1 import generation_pb2 as pb
from tests.artifacts import tiny_artifact

TEXTS = ["to be or not to be, " * 4, "that is the question " * 4]
TINY: dict[str, Any] = {"precision": "fp32", "threads": 1}
Check = Callable[[dict[str, Any]], None]


def place_artifact(folder: Path, family: str, **overrides: Any) -> Path:
    """A tiny artifact where scenarios have theirs."""
    place = artifact_folder(folder, "fp32")
    place.parent.mkdir(parents=True)
    place.symlink_to(tiny_artifact(family, **overrides), target_is_directory=True)
    return place


def written(scenario: Any, settings: Any, found: dict[str, Any], folder: Path) -> str:
    """Writes results as the frame does; the document."""
    given = json.loads(json.dumps(asdict(settings), default=str))
    about = {"settings": given, "machine": {"processor": "p", "cores": 2}, "is_quick": True, "others_share": None}
    about |= {"command": "the command", "commit": "abc", "date": "2026-11-26"}
    scenario.write(about | found, folder / "written")
    if scenario.draw is not None:
        assert "<svg" in (folder / "written" / "data" / f"{scenario.name}.svg").read_text(encoding="utf-8")
    return (folder / "written" / f"{scenario.name}.md").read_text(encoding="utf-8")


def test_every_scenario_is_listed_with_its_claim_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == names()
    assert all(len(line.split()) > 4 for line in lines)
    for name in names():
        with pytest.raises(SystemExit, match="0"):
            load(name).parse(["--help"])
    assert command.main(["run", "sheep"]) == 2
    assert "NAME is one of" in capsys.readouterr().err


def check_core_sharing(results: dict[str, Any]) -> None:
    (way,) = results["ways"].values()
    assert 0 < way["share"] < 1
    assert way["tokens_per_second"] > 0
    assert all(seconds > 0 for seconds in way["step_seconds"].values())


def check_goodput(results: dict[str, Any]) -> None:
    assert results["capacity"] > 0
    for way in results["ways"].values():
        assert way["per_second"][goodput.FAILED] == 0
        assert sum(way["per_second"].values()) == pytest.approx(results["offered"])
    assert results["ways"]["off"]["per_second"][REFUSED] == 0


def check_http(results: dict[str, Any]) -> None:
    for each in ("tokens_per_second", "first_token_seconds"):
        assert min(results[each][way] for way in (http.GRPC, http.HTTP)) > 0


def check_interference(results: dict[str, Any]) -> None:
    assert len(results["chunk_seconds"]["each"]) == 5
    assert results["before"]["count"] >= 2
    assert results["during"]["count"] >= 1


def check_loading(results: dict[str, Any]) -> None:
    assert set(results["changes"]) == {"load", "reload", "unload", "first explain", "explain"}
    assert all(change["count"] >= 1 for change in results["changes"].values())
    assert set(results["stages"]) == set(loading.STAGES)


def check_prefix(results: dict[str, Any]) -> None:
    assert set(results["ways"]) == set(prefix.WAYS)
    for way in results["ways"].values():
        assert len(way["seconds"]) == 4
        assert min(way["seconds"]) > 0
    # A repeat's prefix is new: its first request has no cache hit.
    assert results["ways"]["sequential"]["cached_tokens"]["first"] == 0


def check_fleet(results: dict[str, Any]) -> None:
    server, envoy, prometheus = (results[name] for name in ("server", "envoy", "prometheus"))
    assert server["samples"] > 300
    assert server["start_seconds"] > 0
    # Each is asked in two ways, over two sockets.
    assert envoy["descriptors_per_server"] == pytest.approx(2, abs=0.5)
    assert envoy["by_servers"][1]["checks_per_second"] > envoy["by_servers"][0]["checks_per_second"]
    assert [each["series"] for each in prometheus["by_servers"]] == [2 * server["samples"], 6 * server["samples"]]
    assert all(each["rule_seconds"] > 0 for each in prometheus["by_servers"])


def check_scaling_out(results: dict[str, Any]) -> None:
    for way in (scaling_out.DIRECT, scaling_out.ENVOY):
        found = results["ways"][way]
        assert 0 < found["call_seconds"]["p50"] <= found["call_seconds"]["p99"]
        assert 0 < found["message_seconds"]["p50"] <= found["message_seconds"]["p99"]
        assert found["messages_per_second"] > 0
    assert results["ways"][scaling_out.ENVOY]["pss_bytes"] > 1_000_000
    # Every request but the first of a family hits its prefix.
    assert results["cached"]["single"] == results["cached"]["with_key"] == pytest.approx(12 * 128 / (16 * 132))
    assert results["passed"]


@pytest.mark.parametrize(
    ("module", "settings", "max_batch", "context", "check", "said"),
    [
        (
            core_sharing,
            core_sharing.SharingSettings(
                **TINY, streams=2, stream_prompt=4, prompt=48, in_flight=2, lead=0.2, seconds=1.0, repeats=1,
                ways=("favored",),
            ),
            4, 128, check_core_sharing, "| favored |",
        ),
        (
            goodput,
            goodput.GoodputSettings(
                **TINY, batch=2, answer=20, timeout=0.5, capacity_seconds=1.0, lead=0.5, seconds=1.0, rounds=1
            ),
            4, 128, check_goodput, "| `--admission=deadline` |",
        ),
        (
            http,
            http.HttpSettings(**TINY, streams=3, prompt=4, new=5, singles=2, rounds=1),
            3, 128, check_http, "| HTTP |",
        ),
        (
            # So long that no stream ends before the long prompt arrives, however fast its steps.
            interference,
            interference.InterferenceSettings(
                **TINY, streams=2, stream_prompt=4, long_prompt=80, lead=2, window=4, repeats=1, chunk=16
            ),
            4, 8192, check_interference, "tokens in chunks of 16",
        ),
        (
            loading,
            loading.LoadingSettings(**TINY, streams=2, stream_prompt=4, lead=2, window=32, repeats=1),
            2, 1024, check_loading, "| sessions and K/V |",
        ),
        (
            prefix,
            prefix.PrefixSettings(**TINY, prefix=32, suffix_least=2, suffix_most=4, requests=4, in_flight=2, repeats=1),
            4, 128, check_prefix, "| sequential |",
        ),
        (
            fleet,
            fleet.FleetSettings(**TINY, servers=(2, 6), duration=1.0, scrape_seconds=0.3, calls=32, callers=4),
            4, 128, check_fleet, "| 6 |",
        ),
        (
            scaling_out,
            scaling_out.ScalingOutSettings(
                **TINY, rounds=1, calls=10, paced_streams=2, paced_messages=5, pace_seconds=0.001, full_streams=4,
                full_messages=50, idle_seconds=0.1, families=4, requests=16, prefix=128, suffix=4,
            ),
            4, 512, check_scaling_out, "| envoy |",
        ),
    ],
    ids=lambda value: value.__name__.rpartition(".")[2] if hasattr(value, "SCENARIO") else "",
)  # fmt: skip
@pytest.mark.sampled(2)
def test_a_scenario_is_measured_on_real_servers(
    module: Any,
    settings: Any,
    max_batch: int,
    context: int,
    check: Check,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if module is fleet:
        request.getfixturevalue("prometheus")
    explain = {"explain_graph": True} if module is loading else {}
    subject = Subject(place_artifact(tmp_path, "decoder-only", context=context, **explain), 1, max_batch)
    monkeypatch.setattr(models, "make_subject", lambda *_, **__: subject)
    monkeypatch.setattr(streams, "PAUSE_SECONDS", 0.1)
    results = module.measure(settings, Run(tmp_path))
    check(results)
    assert said in written(module.SCENARIO, settings, results, tmp_path)


def test_structured_output_is_measured_beside_free_text_and_with_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_artifact(tmp_path, "decoder-only", context=1024)
    monkeypatch.setattr(structured, "export", lambda *_: place)
    (tmp_path / "run.json").touch()
    settings = structured.StructuredSettings(
        **TINY, checkpoint=tmp_path, streams=2, prompt=4, new=40, documents=1, rounds=1
    )
    results = structured.measure(settings, Run(tmp_path))
    assert results["document_tokens"] > 80
    assert 0.3 < results["steps_saved"] < 1
    assert min(rate for rates in results["tokens_per_second"].values() for rate in rates.values()) > 0
    assert "| sampled, a text |" in written(structured.SCENARIO, settings, results, tmp_path)
    whole = structured.Written([1, 2], json.dumps(dict.fromkeys(structured._FIELDS)), 1.0)
    cut = structured.Written([1, 3], whole.text, 1.0)
    rates = {"greedy": {structured.FREE: [1.0], "a text": [1.0]}}
    with pytest.raises(RuntimeError, match="differ"):
        structured.judge(rates, {structured.WITHOUT: [[whole]], structured.WITH: [[cut]]}, 1.0)


@pytest.mark.parametrize("family", ["decoder-only", "encoder-decoder"])
@pytest.mark.sampled(1)
def test_predictions_of_a_real_server_are_measured_alone_and_under_load(tmp_path: Path, family: str) -> None:
    artifact = tiny_artifact(family)
    settings = prediction.PredictionSettings(
        models=(str(artifact),), requests=6, warm_seconds=0.2, load_seconds=0.3, in_flight=6, batch=2, chunk=16
    )
    results = prediction.measure(settings, Run(tmp_path))
    assert f"| {artifact.name} | load |" in written(prediction.SCENARIO, settings, results, tmp_path)
    found = results["models"][artifact.name]
    assert found["alone"]["count"] == len(found["requests"]) == 6
    assert found["yardstick"]["count"] == 2
    assert found["load"]["count"] >= 6
    for when in ("alone", "load"):
        for way in ("cost", "estimate", "finish"):
            assert 0 <= found[when][way]["share_within"] <= 1
            assert found[when][way]["max"] >= found[when][way]["p50"] >= 0
    assert all(each["predicted"] > 0 and each["measured"] > 0 for each in found["requests"])


def test_host_measures_the_steps_in_which_all_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.frame.scenario.BUILD", tmp_path)
    artifact = str(tiny_artifact("decoder-only"))
    given = ["--artifact", artifact, "--batches", "1,3", "--prompt", "8", "--new", "6", "--threads", "1"]
    assert command.main(["run", "host", *given]) == 0
    batches = json.loads(capsys.readouterr().out.splitlines()[-1])["batches"]
    assert set(batches) == {"1", "3"}
    for found in batches.values():
        assert found["run_seconds"] > 0
        assert 0 < found["host_share"] < 1
        assert len(found["host_share_by_round"]) == 5
        assert found["host_share_interval"][0] <= found["host_share"] <= found["host_share_interval"][1]


# What they stand on.


def test_one_process_is_many_servers() -> None:
    with fleet.healthy_server(3) as (targets, _):
        assert [target.rpartition(":")[0] for target in targets] == addresses(3)
        for target in targets:
            with grpc.insecure_channel(target) as channel:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_metrics_are_exposed_at_every_address() -> None:
    page = b"sheep 1\n" * 1000
    with fleet.exposing(page, addresses(3)) as targets:
        assert len(targets) == 3
        for target in targets:
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=60) as answer:
                assert answer.read() == page
                assert answer.headers["Content-Type"].startswith("text/plain")


@pytest.mark.parametrize("servers", [(2,), (5, 2), (2, 2)])
def test_numbers_of_servers_must_rise(servers: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="--servers must be"):
        fleet.measure(fleet.FleetSettings(servers=servers), Run(tmp_path))


def test_a_process_is_read_as_the_system_counts_it() -> None:
    before, began = cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() - began < 0.1:
        pass
    assert cpu_seconds(os.getpid()) - before >= 0.05
    # A process of its own, that maps little: of what others map too, a part is counted, and they come and go.
    program = "block = b'x' * 200_000_000; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdin=PIPE, stdout=PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert proportional_bytes(child.pid) == pytest.approx(200_000_000, rel=0.2)
        child.kill()


# Speculative decoding.


def answer(token_ids: list[int], seconds: float) -> speculation.Decoded:
    return speculation.Decoded(token_ids, seconds)


def test_speculation_is_a_prompts_median_over_that_without_and_no_token_differs() -> None:
    first, second = [1, 2, 3], [4, 5, 6]
    without = [[answer(first, 1.0), answer(second, 2.0)], [answer(first, 1.0), answer(second, 2.0)]]
    speculated = [[answer(first, 0.4), answer(second, 2.0)], [answer(first, 0.5), answer(second, 2.5)]]
    counts = {"continue": {"drafts": 3.0, "draft_tokens": 8.0, "accepted_tokens": 6.0}}
    (found,) = speculation.judge({"continue": {"without": without, "with": speculated}}, counts)["tasks"].values()
    assert found["tokens_per_second"]["without"] == pytest.approx((2.0 + 1.0) / 2), "of two tokens after the first"
    assert found["ratios"] == pytest.approx([(2.5 + 2.0) / 2, (1.0 + 0.8) / 2])
    assert found["accepted_share"] == 0.75
    speculated[1][1] = answer([4, 5, 7], 2.5)
    with pytest.raises(RuntimeError, match="continue: answers to prompt 1 differ"):
        speculation.judge({"continue": {"without": without, "with": speculated}}, counts)


class Scripted:
    """A stub whose answers are messages of so many tokens; the first and the last have none."""

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
    stub: Any = Scripted(2, 1, 0, 3)
    decoded = await speculation.ask(stub, speculation.Question([1, 5], seed=9), 6)
    assert decoded == speculation.Decoded([0, 1, 0, 0, 1, 2], 2.0)
    assert decoded.tokens_per_second == 2.5
    assert (stub.asked[0].sampling.temperature, stub.asked[0].sampling.seed) == (1.0, 9)
    short: Any = Scripted(2, 1)
    with pytest.raises(RuntimeError, match="asked for 6 tokens, got 3"):
        await speculation.ask(short, speculation.Question([1]), 6)


def test_tasks_ask_what_their_names_say() -> None:
    settings = speculation.SpeculationSettings(prompt=16, prompts=1)
    texts = [[5], list(range(10, 40)), list(range(50, 90))]
    begun = [1, *range(10, 25)]
    assert speculation.questions(settings, texts, "continue") == [speculation.Question(begun)]
    (drawn,) = speculation.questions(settings, texts, "sample")
    assert drawn.token_ids == begun
    assert drawn.seed is not None
    assert speculation.questions(settings, texts, "sample") == [drawn], "both servers are asked the same"
    two = speculation.questions(replace(settings, prompts=2), texts, "sample")
    assert two[0] == drawn
    assert two[1].seed != drawn.seed
    assert speculation.questions(settings, texts, "copy") == [speculation.Question([1, *range(10, 20), *range(10, 15)])]
    with pytest.raises(RuntimeError, match="2 held-out modules have 15 tokens, 3 are wanted"):
        speculation.questions(replace(settings, prompts=3), texts, "copy")


@pytest.mark.skipif(not kernels.operators(), reason="the kernels are not built for this processor")
def test_speculation_is_measured_on_real_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(place_artifact(tmp_path, "decoder-only"), 1, 2)
    monkeypatch.setattr(speculation, "_make_subject", lambda *_: subject)
    monkeypatch.setattr(speculation, "held_out_text", lambda _: TEXTS)
    settings = speculation.SpeculationSettings(precision="fp32", look_up=4, prompts=2, prompt=40, new=30, repeats=1)
    results = speculation.measure(settings, Run(tmp_path))
    assert results["tokens_equal"]
    assert set(results["tasks"]) == {"continue", "sample", "copy"}
    for name, task in results["tasks"].items():
        # Draws from random weights repeat nothing.
        assert task["guesses"]["draft_tokens"] >= task["guesses"]["accepted_tokens"] >= (name != "sample")
        assert task["tokens_per_second"]["with"] > 0
    assert "| copy (the best case) |" in written(speculation.SCENARIO, settings, results, tmp_path)


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
    place_artifact(tmp_path, "encoder-decoder")
    system = OnwardUnary(Options(tmp_path, tmp_path, "fp32", 1, 4, 0))
    system.prepare()
    try:
        system.load()
        lengths = [5, 1, 9, 3, 7]
        sources = [[3 + index] * (2 + index) for index in range(5)]
        together = system.translate(sources, lengths, {}, in_flight=3)
        alone = [
            system.translate([source], [length], {}, 1)[0] for source, length in zip(sources, lengths, strict=True)
        ]
        prompts = [[3, 4, 5], [6, 7, 8]]
        assert system.generate(prompts, 6) == Onward.generate(system, prompts, 6), "unary and streamed"
    finally:
        system.close()
    assert [len(answer) for answer in together] == lengths
    assert together == alone


SETTINGS = translation.TranslationSettings(
    model={**translation.MODEL, "vocab_size": 64, "context": 32, "d_model": 8, "num_heads": 1, "d_ff": 8},
    requests=6,
    in_flight=2,
    output_most=12,
    precisions=("fp32",),
    batchings=("1 x 32", "2 x 8", "1 x 8, sorted", "2 x 4", OFFLINE),
    rounds=2,
)
FAKES = {name: replace(spec, module="tests.fake_peer") for name, spec in TRANSLATORS.items()}


def translate(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    python: Path | InstallError = Path(sys.executable),
    settings: translation.TranslationSettings = SETTINGS,
) -> dict[str, Any]:
    monkeypatch.setattr(Translation, "_make_checkpoint", lambda self: None)
    monkeypatch.setattr(models, "reference_agreement", lambda *_: 0.75)
    results = Translation(settings, tmp_path, python, FAKES).measure()
    assert "| onward |" in written(translation.SCENARIO, settings, results, tmp_path)
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


def test_a_peer_that_is_not_there_is_a_row_and_breaks_the_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = translate(tmp_path, monkeypatch, InstallError("no such wheel"))
    ours, peer = results["rows"]
    assert ours["value"] > 0
    assert (peer["system"], peer["value"], peer["error"]) == (PEER, None, "no such wheel")
    assert results["ratios"] == {"fp32": None, "any": None}
    assert results["passed"] is False
    assert "- ctranslate2 fp32: `no such wheel`" in (tmp_path / "written" / "translation.md").read_text()


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
    assert "| onward | int8-kv8 | continuous |" in (tmp_path / "written" / "translation.md").read_text()
