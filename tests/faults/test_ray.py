"""The server on a real Ray Serve: what a caller gets is what a server by itself would have told, but for a few cases.

The cases are those of docs/operate/scaling-out.md. Needs `make ray` once, which also runs this; skipped without it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.frame import models
from benchmarks.frame.models import Subject
from benchmarks.frame.scenario import Run
from benchmarks.infra import prometheus
from benchmarks.infra.ray_serve import PYTHON
from benchmarks.scenarios import scaling_out
from deploy.ray.ingress import environment
from onward import Client, IncompleteStream
from onward.errors import CallError
from onward.inference import open_inference_pb2 as oip
from onward.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from onward.v1.model_pb2_grpc import ModelServiceStub
from service.routing import ROUTING_KEY, routing_key
from tests.artifacts import tiny_artifact
from tests.faults.callers import LONG, NUM_CALLERS, SECONDS, SHORT, TRITON_CLIENT, Load, last_json, run
from tests.faults.process import DECODER, MODELS, SLOTS, TRANSLATOR, ServerProcess, greedy, serving, streamed, until
from tests.faults.ray_replicas import (
    BROKEN,
    CONTEXT,
    LOST,
    PATIENCE,
    REFUSED,
    Replicas,
    infer_request,
    replicas,
    services,
    status_of,
    tokens_of,
    told,
)
from tests.identities import key_table

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="Ray is not installed: make ray"),
    # Starting and stopping it takes most of that, on a machine that does other things besides.
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server by itself, with the same models."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / DECODER).symlink_to(tiny_artifact(DECODER, context=CONTEXT), target_is_directory=True)
    with serving(folder) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def direct(alone: ServerProcess) -> Iterator[grpc.Channel]:
    with alone.channel() as channel:
        yield channel


class TestByLoad:
    """Two replicas, chosen by how much they have to do."""

    @pytest.fixture(scope="class")
    @classmethod
    def two(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
        with replicas(tmp_path_factory.mktemp("ray"), flags=("--max-stall-seconds", "2")) as found:
            yield found

    # What is answered.

    def test_answers_and_streams_are_those_of_a_server_and_both_replicas_give_them(
        self, two: Replicas, direct: grpc.Channel
    ) -> None:
        before = two.samples("requests_total")
        for model in MODELS:
            for text in ("3 May", "1977", "ab"):
                request = greedy(model, text=text, max_tokens=30)
                expected = GenerationServiceStub(direct).Generate(request, timeout=SECONDS)
                answer = two.generation.Generate(request, timeout=SECONDS)
                assert answer.outputs == expected.outputs
                events = list(two.generation.GenerateStream(streamed(request), timeout=SECONDS))
                assert [token for event in events for token in event.delta.token_ids] == list(
                    expected.outputs[0].token_ids
                )
                assert (events[0].HasField("accepted"), events[-1].HasField("summary")) == (True, True)
        asked = [after - each for after, each in zip(two.samples("requests_total"), before, strict=True)]
        assert sum(asked) == 12
        assert len(asked) == 2
        assert all(asked)

    @pytest.mark.parametrize(
        ("stub", "method", "request_"),
        [
            (ModelServiceStub, "ListModels", model_pb2.ListModelsRequest()),
            (ModelServiceStub, "GetModel", model_pb2.GetModelRequest(model=TRANSLATOR)),
            (GenerationServiceStub, "Tokenize", pb.TokenizeRequest(model=DECODER, text="3 May")),
            (GenerationServiceStub, "Score", pb.ScoreRequest(model=DECODER, text="3 May", target_text="1977")),
        ],
    )
    def test_other_unary_calls_are_answered_as_by_a_server(
        self, two: Replicas, direct: grpc.Channel, stub: Any, method: str, request_: Any
    ) -> None:
        answers = [getattr(stub(channel), method)(request_, timeout=SECONDS) for channel in (two.channel, direct)]
        assert answers[0] == answers[1]

    def test_health_is_reported(self, two: Replicas) -> None:
        stub = health_pb2_grpc.HealthStub(two.channel)
        for name in ("", "onward.v1.GenerationService", *MODELS):
            told = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=SECONDS)
            assert told.status == health_pb2.HealthCheckResponse.SERVING
        assert status_of(stub.Check, health_pb2.HealthCheckRequest(service="nobody")).code().name == "NOT_FOUND"
        assert run("-m", "service", "health", "--target", two.ray.target) == "SERVING\n"

    def test_the_wire_contract_is_told_as_by_a_server(self, two: Replicas, direct: grpc.Channel) -> None:
        lists = [services(channel) for channel in (two.channel, direct)]
        assert lists[0] == lists[1]
        assert "onward.v1.GenerationService" in lists[0]

    # What is refused.

    @pytest.mark.parametrize("ask", REFUSED.values(), ids=REFUSED.keys())
    def test_refusals_have_the_code_the_words_and_the_details_of_a_server(
        self, two: Replicas, direct: grpc.Channel, ask: Callable[[grpc.Channel], Any]
    ) -> None:
        assert told(ask(two.channel)) == told(ask(direct))

    @pytest.mark.parametrize(
        "path",
        [
            "/onward.v1.ModelService/LoadModel",
            "/onward.v1.ModelService/VerifyParity",
            "/inference.GRPCInferenceService/RepositoryModelUnload",
        ],
    )
    def test_what_is_for_one_server_is_refused(self, two: Replicas, path: str) -> None:
        error = status_of(two.channel.unary_unary(path), b"")
        assert (error.code().name, error.details()) == (
            "PERMISSION_DENIED",
            "this is for one replica and not for all behind this address",
        )

    def test_a_watch_of_health_is_not_offered(self, two: Replicas) -> None:
        call = health_pb2_grpc.HealthStub(two.channel).Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert call.code().name == "UNIMPLEMENTED"

    def test_too_much_metadata_ends_a_connection_and_no_other(self, two: Replicas) -> None:
        with grpc.insecure_channel(two.ray.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            generate = GenerationServiceStub(channel).Generate
            assert generate(SHORT, metadata=[("x-padding", "x" * 4_000)], timeout=SECONDS).outputs
            error = status_of(generate, SHORT, metadata=[("x-padding", "x" * 20_000)])
        assert error.code().name == "UNAVAILABLE"
        assert two.generation.Generate(SHORT, timeout=SECONDS).outputs

    # Deadlines.

    def test_a_deadline_cancels_and_is_known_where_the_request_tells_it(self, two: Replicas) -> None:
        long = greedy(DECODER, max_tokens=1900)
        assert status_of(two.generation.Generate, long, timeout=0.2).code().name == "DEADLINE_EXCEEDED"
        long.timeout_seconds = 0.2
        assert status_of(two.generation.Generate, long).code().name in ("DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
        two.settle()

    # What is given up.

    def test_200_cancelled_streams_leave_nothing_behind_in_any_replica(self, two: Replicas) -> None:
        before = two.samples("requests_total", finish_reason="cancelled")
        for _ in range(20):
            calls = [two.generation.GenerateStream(streamed(greedy(DECODER, max_tokens=1900))) for _ in range(10)]
            for call in calls:
                next(iter(call))
            for call in calls:
                call.cancel()
        two.settle()
        after = two.samples("requests_total", finish_reason="cancelled")
        cancelled = [more - less for more, less in zip(after, before, strict=True)]
        # One may be over before it is told.
        assert 180 <= sum(cancelled) <= 200
        assert all(each >= 40 for each in cancelled)
        answers = [two.generation.Generate.future(SHORT, timeout=SECONDS) for _ in range(4 * SLOTS)]
        assert {answer.code().name for answer in answers} == {"OK"}

    def test_a_client_that_stops_reading_loses_its_place(self, two: Replicas) -> None:
        before = sum(two.samples("grpc_server_handled_total", grpc_code="ABORTED"))
        request = streamed(greedy(DECODER, max_tokens=1900, response=pb.ResponseOptions(logprobs=20)))
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", 65535),
        ]
        with grpc.insecure_channel(two.ray.target, options) as channel:
            call = GenerationServiceStub(channel).GenerateStream(request, timeout=SECONDS)
            next(iter(call))
            until(
                lambda: sum(two.samples("grpc_server_handled_total", grpc_code="ABORTED")) > before,
                "it keeps its place",
                SECONDS,
            )
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code().name == "ABORTED"
        two.settle()

    # Everybody's clients.

    def test_tritonclient_sees_what_it_sees_of_a_server(self, two: Replicas, alone: ServerProcess) -> None:
        targets = (two.ray.target, alone.target)
        through, expected = (last_json(run(str(TRITON_CLIENT), target, DECODER)) for target in targets)
        for found in (through, expected):
            for answers in found["stream"].values():
                # How tokens are put together into messages is a matter of time.
                answers["pieces"] = "".join(answers["pieces"])
                answers["finals"] = answers["finals"][-1:]
        refused = {"unload", "load"}
        assert {name: seen for name, seen in through.items() if name not in refused} == {
            name: seen for name, seen in expected.items() if name not in refused
        }
        assert [through[name][0] for name in sorted(refused)] == ["StatusCode.PERMISSION_DENIED"] * 2

    def test_several_requests_of_the_other_protocol_share_a_stream(self, two: Replicas) -> None:
        held = threading.Event()

        def requests() -> Iterator[oip.ModelInferRequest]:
            for name in ("x", "y"):
                yield infer_request(id=name)
            # What is asked is answered before there is no more to ask.
            held.wait(SECONDS)

        seen: set[str] = set()
        for message in GRPCInferenceServiceStub(two.channel).ModelStreamInfer(requests(), timeout=SECONDS):
            assert not message.error_message
            seen.add(message.infer_response.id)
            if len(seen) == 2:
                held.set()
        assert seen == {"x", "y"}

    def test_our_own_clients_ask(self, two: Replicas, alone: ServerProcess) -> None:
        words = ("-m", "service", "ask", DECODER, "3 May", "--temperature", "0", "--max-tokens", "9")
        expected = run(*words, "--target", alone.target)
        words = (*words, "--target", two.ray.target)
        assert run(*words) == run(*words, "--stream") == expected
        with Client(two.ray.target) as client:
            assert client.generate("3 May", model=DECODER, temperature=0.0, max_tokens=9).text + "\n" == expected
            with pytest.raises(CallError, match=r"stopping\.max_tokens"):
                client.generate("3 May", model=DECODER, max_tokens=0)

    def test_load_bench_finds_every_request_answered(self, two: Replicas) -> None:
        report = last_json(
            run(
                "-m", "loadtest", "bench", "--target", two.ray.target, "--model", DECODER,
                "--num-prompts", "40", "--max-concurrency", "8", "--prompt-tokens", "8", "--max-tokens", "6",
            )
        )  # fmt: skip
        assert (report["offered"], report["finished"], report["missing"]) == (40, 40, 0)

    # Who watches.

    @pytest.mark.usefixtures("prometheus")
    def test_prometheus_finds_both_and_sums_over_them(
        self, two: Replicas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        configure = prometheus._configure

        def by_file(*given: Any) -> dict[str, Any]:
            config = configure(*given)
            for job in config["scrape_configs"]:
                del job["static_configs"]
                job["file_sd_configs"] = [{"files": [str(two.targets / "*.json")], "refresh_interval": "1s"}]
            return config

        monkeypatch.setattr(prometheus, "_configure", by_file)
        with prometheus.scraping("", tmp_path, interval_seconds=0.5) as found:
            until(lambda: len(found.query('up{job="onward"} == 1')) == 2, "it does not find both", SECONDS)
            for _ in range(6):
                two.generation.Generate(SHORT, timeout=SECONDS)
            expected = sum(two.samples("requests_total"))
            until(lambda: found.number("sum(onward_requests_total)") == expected, "it counts otherwise", SECONDS)

    # Replicas that come and go; last, as they are others afterwards.

    def test_replica_sigkill_under_load_fails_only_what_it_had_begun_and_it_returns_by_itself(
        self, two: Replicas
    ) -> None:
        whole, short = tokens_of(two, LONG), tokens_of(two, SHORT)
        victim, other = two.ray.replicas()
        with Load(two.ray.target, has_retries=True) as load:
            until(two.are_busy, "the streams do not run on both", SECONDS)
            load.call()
            os.kill(victim, signal.SIGKILL)
            until(lambda: victim not in two.ray.replicas(), "it is still there", SECONDS)
            killed = time.monotonic()
            load.until_answers(100)
            two.until_two(old=[victim])
            until(lambda: min(two.samples("requests_total")) >= 10, "the replica that returned is not asked", PATIENCE)
        assert other in two.ray.replicas()
        lost = [call for call in load.answers if call.code != "OK"]
        assert all(call.begun < killed for call in lost), "a call failed that was sent to a dead replica"
        assert len(lost) <= NUM_CALLERS
        assert {call.tokens for call in load.answers if call.code == "OK"} == {short}
        broken = [stream for stream in load.streams if stream.code != "OK"]
        assert broken
        assert all(stream.begun < killed for stream in broken)
        assert {call.code for call in lost} <= LOST
        assert {stream.code for stream in broken} <= BROKEN
        for stream in broken:
            # Even all of them are not the whole answer while its summary is missing.
            assert stream.tokens == whole[: len(stream.tokens)]
        assert {stream.tokens for stream in load.streams if stream.code == "OK"} == {whole}
        two.settle()

    def test_our_own_client_says_that_a_stream_is_incomplete(self, two: Replicas) -> None:
        old = two.ray.replicas()
        with Client(two.ray.target) as client:
            with client.stream("3 May", model=DECODER, max_tokens=1900, ignore_eos=True) as stream:
                next(stream)
                for pid in old:
                    os.kill(pid, signal.SIGKILL)
                with pytest.raises((IncompleteStream, CallError)):
                    list(stream)
            # Nobody is left to ask, until Ray has started others.
            two.until_two(old)
            assert client.generate("3 May", model=DECODER, max_tokens=3).text

    def test_rolling_update_under_load_loses_nothing(self, two: Replicas) -> None:
        whole, short = tokens_of(two, LONG), tokens_of(two, SHORT)
        old = two.ray.replicas()
        with Load(two.ray.target) as load:
            until(two.are_busy, "the streams do not run on both", SECONDS)
            load.call()
            two.ray.process.send_signal(signal.SIGHUP)
            until(lambda: any("the replicas are new" in line for line in two.ray.said), "they are not new", PATIENCE)
            two.until_two(old)
            load.until_answers(50)
        assert {(call.code, call.tokens) for call in load.answers} == {("OK", short)}
        assert {(stream.code, stream.tokens) for stream in load.streams} == {("OK", whole)}
        two.settle()

    def test_models_that_cannot_be_served_replace_nobody(self, two: Replicas) -> None:
        short, said = tokens_of(two, SHORT), len(two.ray.said)
        place = two.targets.with_name("models") / DECODER
        good = place.readlink()
        place.unlink()
        place.mkdir()
        two.ray.process.send_signal(signal.SIGHUP)
        until(
            lambda: any("the replicas were not replaced" in line for line in two.ray.said[said:]),
            "they were",
            PATIENCE,
        )
        assert {tokens_of(two, SHORT) for _ in range(8)} == {short}
        place.rmdir()
        place.symlink_to(good, target_is_directory=True)
        old = two.ray.replicas()
        two.ray.process.send_signal(signal.SIGHUP)
        two.until_two(old)
        assert tokens_of(two, SHORT) == short


KEY = (("authorization", "Bearer a-key"),)
MAX_CALLS = 12


class TestByKey:
    """Two replicas, chosen by the routing key; callers have keys of the other kind too, and limits are small."""

    @pytest.fixture(scope="class")
    @classmethod
    def two(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
        folder = tmp_path_factory.mktemp("ray")
        keys = folder / "keys.toml"
        keys.write_text(key_table("alice", "a-key"))
        flags = (
            "--api-keys", str(keys), "--max-message-bytes", "4096", "--max-concurrent-rpcs", str(MAX_CALLS),
            "--no-reflection",
        )  # fmt: skip
        with replicas(folder, "--by-key", flags=flags) as found:
            yield found

    def test_a_call_without_an_api_key_is_refused(self, two: Replicas) -> None:
        for metadata in ((), (("authorization", "Bearer another"),)):
            error = status_of(two.generation.Generate, SHORT, metadata=metadata)
            assert error.code().name == "UNAUTHENTICATED"
        assert two.generation.Generate(SHORT, metadata=KEY, timeout=SECONDS).outputs

    def test_prompts_with_a_routing_key_find_what_was_computed(self, two: Replicas) -> None:
        cached = []
        for number in range(8):
            request = greedy(DECODER, text="k" * 600 + "x" * number, max_tokens=1)
            metadata = [*KEY, (ROUTING_KEY, routing_key(request.text))]
            cached.append(two.generation.Generate(request, timeout=SECONDS, metadata=metadata).usage.cached_tokens)
        assert cached[0] == 0
        assert min(cached[1:]) >= 512

    def test_routing_keys_lead_to_both_replicas_and_calls_without_one_take_turns(self, two: Replicas) -> None:
        before = two.samples("requests_total")
        for number in range(24):
            two.generation.Generate(SHORT, timeout=SECONDS, metadata=[*KEY, (ROUTING_KEY, f"key-{number}")])
        keyed = two.samples("requests_total")
        assert all(more - less >= 2 for more, less in zip(keyed, before, strict=True))
        for _ in range(24):
            two.generation.Generate(SHORT, timeout=SECONDS, metadata=KEY)
        assert all(more - less >= 8 for more, less in zip(two.samples("requests_total"), keyed, strict=True))

    def test_a_message_that_is_too_large_is_refused(self, two: Replicas) -> None:
        error = status_of(two.generation.Generate, greedy(DECODER, text="a" * 8000), metadata=KEY)
        assert error.code().name == "RESOURCE_EXHAUSTED"

    def test_the_wire_contract_is_not_told_where_that_is_off(self, two: Replicas) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            services(two.channel)
        assert caught.value.code().name == "UNIMPLEMENTED"

    def test_more_calls_than_there_may_be_are_refused(self, two: Replicas) -> None:
        calls = [
            two.generation.GenerateStream(
                streamed(greedy(DECODER, max_tokens=1900)), metadata=[*KEY, (ROUTING_KEY, f"{number}")], timeout=SECONDS
            )
            for number in range(4 * MAX_CALLS)
        ]
        refused = []
        for call in calls:
            try:
                next(iter(call))
            except grpc.RpcError as error:
                refused.append((error.code().name, error.details()))
        for call in calls:
            call.cancel()
        # Each has as many, and one that waits.
        assert len(refused) >= 2 * MAX_CALLS - 4
        assert set(refused) == {("RESOURCE_EXHAUSTED", "Request dropped due to backpressure")}
        two.settle()


def test_replicas_come_and_go_with_what_is_wanted(tmp_path: Path) -> None:
    words = ("--replicas", "1", "--max-replicas", "2", "--upscale-seconds", "1", "--downscale-seconds", "1")
    with replicas(tmp_path, *words) as some:
        assert len(some.ray.replicas()) == 1
        is_over = threading.Event()

        def ask_on() -> None:
            while not is_over.is_set():
                some.generation.Generate(LONG, timeout=SECONDS)

        # More than its places.
        asking = [threading.Thread(target=ask_on) for _ in range(2 * SLOTS)]
        for thread in asking:
            thread.start()
        try:
            until(lambda: len(some.addresses()) == 2, "there is but one", PATIENCE)
            until(lambda: all(some.samples("requests_total")), "the other is not asked", PATIENCE)
        finally:
            is_over.set()
            for thread in asking:
                thread.join(SECONDS)
        until(lambda: len(some.addresses()) == 1, "there are still two", PATIENCE)
        some.generation.Generate(SHORT, timeout=SECONDS)


def test_every_variable_is_one_that_ray_reads() -> None:
    (constants,) = PYTHON.parents[1].glob("lib/*/site-packages/ray/serve/_private/constants.py")
    known = constants.read_text(encoding="utf-8")
    names = {name for name in environment(1, by_key=True) if name != "RAY_USAGE_STATS_ENABLED"}
    assert all(f'"{name}"' in known for name in names)


def test_what_it_costs_is_measured_beside_the_direct_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "fp32" / "model"
    place.parent.mkdir()
    place.symlink_to(tiny_artifact(DECODER, context=512), target_is_directory=True)
    monkeypatch.setattr(models, "make_subject", lambda *_, **__: Subject(place, threads=1, max_batch=4))
    settings = scaling_out.ScalingOutSettings(
        precision="fp32", rounds=1, calls=10, paced_streams=2, paced_messages=5, pace_seconds=0.001,
        full_streams=4, full_messages=50, idle_seconds=0.1, families=4, requests=16, prefix=128, suffix=4, ray=True,
    )  # fmt: skip
    results = scaling_out.measure(settings, Run(tmp_path))
    found = results["ways"][scaling_out.RAY]
    assert 0 < found["call_seconds"]["p50"] <= found["call_seconds"]["p99"]
    assert 0 < found["message_seconds"]["p50"] <= found["message_seconds"]["p99"]
    assert found["pss_bytes"] > 50_000_000
    # Every one but the first of a family finds its beginning.
    assert results["cached"]["ray_with_key"] == results["cached"]["single"] == pytest.approx(12 * 128 / (16 * 132))
    assert results["cached"]["ray_without_key"] < results["cached"]["ray_with_key"]
    assert results["passed"]
