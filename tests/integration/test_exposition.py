"""Scrapes over HTTP: what is answered, how much of it, and that no client can make it more."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, enable_created_metrics
from prometheus_client.parser import text_string_to_metric_families

from onward.v1 import generation_pb2 as pb
from service.app import App
from service.config import MetricsCompat
from service.telemetry import exposition
from service.telemetry.exposition import Connection, exposing, least_deserving, metrics_app
from service.telemetry.metrics import OUTCOMES
from service.transport.status import STATUS_CODES
from tests.faults.process import until
from tests.servers import CONFIG, MODEL, engine_for, generate_request, read, running, served_model, status_of

# As Prometheus 2.42 sends it: it would rather have OpenMetrics.
ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("sheep", "Sheep.", registry=registry).inc(3)
    return registry


@pytest.fixture
def connection(registry: CollectorRegistry) -> Iterator[http.client.HTTPConnection]:
    with exposing(metrics_app(registry), "127.0.0.1", 0) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        yield connection
        connection.close()


def get(connection: http.client.HTTPConnection, path: str = "/metrics", **headers: str) -> http.client.HTTPResponse:
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    return connection.getresponse()


def test_scrape_is_plain_text_whatever_the_scraper_would_rather_have(connection: http.client.HTTPConnection) -> None:
    answer = get(connection, Accept=ACCEPT)
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "sheep_total 3.0\n" in answer.read().decode()


def test_client_that_asks_byte_by_byte_is_cut_off(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exposition, "_MAX_SECONDS", 0.3)
    with exposing(metrics_app(registry), "127.0.0.1", 0) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as slow:
            slow.settimeout(0.05)
            # A minute's worth: never is it silent for long.
            for _ in range(1200):
                try:
                    slow.sendall(b"a")
                    assert slow.recv(1) == b"", "it was answered"
                    break
                except TimeoutError:
                    continue
                except ConnectionError:
                    break
            else:
                pytest.fail("it is still there")
        with socket.create_connection(("127.0.0.1", port), timeout=30) as later:
            later.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert later.recv(12) == b"HTTP/1.0 200"
    assert capsys.readouterr().err == ""


def test_client_that_reads_nothing_keeps_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "_MAX_SECONDS", 0.5)
    ended = threading.Event()

    def endless(_: object, start_response: Callable[..., object]) -> Iterator[bytes]:
        start_response("200 OK", [])
        try:
            while True:
                yield bytes(1 << 16)
        finally:
            ended.set()

    with (
        exposing(endless, "127.0.0.1", 0) as port,  # type: ignore[arg-type]
        socket.create_connection(("127.0.0.1", port)) as silent,
    ):
        silent.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert ended.wait(60)


def asked(port: int, host: str = "127.0.0.2") -> bytes:
    """How the answer to a scrape from an address begins."""
    with socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(host, 0)) as scraper:
        scraper.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        return scraper.recv(12)


@contextmanager
def closed(connection: socket.socket) -> Iterator[None]:
    """A connection that the server closes before the block ends, or soon after."""
    with connection:
        yield
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b"", "the server has hung up"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_connections_that_ask_nothing_keep_no_scraper_out(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr(exposition, "_MAX_SECONDS", 600.0)
    with exposing(metrics_app(registry), "127.0.0.1", 0) as port:
        before = threading.active_count()
        silent: list[socket.socket] = []
        for number in range(3 * exposition._MAX_CONNECTIONS):
            silent.append(socket.create_connection(("127.0.0.1", port), timeout=60))
            silent[-1].sendall(b"GET /met")
            if number >= exposition._MAX_CONNECTIONS:
                with closed(silent[number - exposition._MAX_CONNECTIONS]):
                    pass
        # A thread ends soon after its connection.
        until(
            lambda: threading.active_count() <= before + exposition._MAX_CONNECTIONS, "closed connections keep threads"
        )
        with closed(silent[-exposition._MAX_CONNECTIONS]):
            assert asked(port, host) == b"HTTP/1.0 200"
        # The others have kept their places.
        for each in silent[1 - exposition._MAX_CONNECTIONS :]:
            with each:
                each.sendall(b"rics HTTP/1.0\r\n\r\n")
                assert each.recv(12) == b"HTTP/1.0 200"


NOW = 100.0
JUST_NOW = NOW - 0.5 * exposition._ANSWER_SECONDS


@pytest.mark.parametrize(
    ("connections", "evicted"),
    [
        ([], None),
        # Without a request, the oldest.
        ([("a", 2.0, None), ("a", 1.0, None), ("a", 0.0, 1.0)], 1),
        # Of the address that has most.
        ([("a", 2.0, 50.0), ("a", 3.0, None), ("b", 0.0, None)], 1),
        # With a request that waits long for its answer.
        ([("a", 2.0, 60.0), ("a", 1.0, 50.0)], 1),
        # A young request only for an address that has fewer connections.
        ([("b", 2.0, JUST_NOW), ("b", 1.0, JUST_NOW), ("a", 0.0, None)], 1),
        ([("a", 2.0, JUST_NOW), ("a", 1.0, JUST_NOW), ("b", 0.0, None)], None),
        ([("a", 2.0, JUST_NOW), ("a", 1.0, 50.0)], 1),
    ],
)
def test_connection_that_deserves_its_place_least_is_evicted_for_one_of_a(
    connections: list[tuple[str, float, float | None]], evicted: int | None
) -> None:
    taken = {number: Connection(*each) for number, each in enumerate(connections)}
    assert least_deserving(taken, "a", NOW) == evicted


def test_connection_is_refused_where_none_may_be_evicted(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "least_deserving", lambda *_: None)
    with exposing(metrics_app(registry), "127.0.0.1", 0) as port, ExitStack() as stack:
        for _ in range(exposition._MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        with closed(socket.create_connection(("127.0.0.1", port), timeout=60)):
            pass


def test_one_scrape_is_rendered_at_a_time(registry: CollectorRegistry) -> None:
    inside, most = 0, 0

    class Slow:
        def collect(self) -> list[object]:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            inside -= 1
            return []

    registry.register(Slow())  # type: ignore[arg-type]
    with exposing(metrics_app(registry), "127.0.0.1", 0) as port, ThreadPoolExecutor(4) as scrapers:
        answers = list(scrapers.map(asked, [port] * 8))
    assert (answers, most) == ([b"HTTP/1.0 200"] * 8, 1)


def test_request_larger_than_the_limit_is_not_read_in_full(registry: CollectorRegistry) -> None:
    with (
        exposing(metrics_app(registry), "127.0.0.1", 0) as port,
        socket.create_connection(("127.0.0.1", port), timeout=60) as large,
        suppress(ConnectionError),
    ):
        large.sendall(b"GET /metrics HTTP/1.0\r\n" + b"".join(b"x-%d: %01000d\r\n" % (i, i) for i in range(90)))
        large.sendall(b"\r\n")
        assert large.recv(1) == b"", "the server has hung up"


def test_start_asks_no_name_server(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object) -> str:
        raise AssertionError("a name was looked up")

    for name in ("getfqdn", "gethostbyaddr", "gethostbyname"):
        monkeypatch.setattr(socket, name, look_up)
    with exposing(metrics_app(registry), "127.0.0.1", 0) as port:
        assert port


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [("gzip", True), ("deflate, gzip;q=0.5", True), ("gzip;q=0", False), ("xgzip, deflate", False)],
)
def test_answer_is_compressed_if_the_client_accepts_gzip(
    connection: http.client.HTTPConnection, accepted: str, is_packed: bool
) -> None:
    answer = get(connection, Accept_Encoding=accepted)
    body = answer.read()
    assert answer.headers.get("Content-Encoding") == ("gzip" if is_packed else None)
    assert b"sheep_total 3.0\n" in (gzip.decompress(body) if is_packed else body)


def test_other_paths_are_not_found(connection: http.client.HTTPConnection) -> None:
    answer = get(connection, "/")
    assert answer.status == 404
    answer.read()
    answer = get(connection, "/metrics?name=x")
    assert answer.status == 200
    answer.read()
    connection.request("POST", "/metrics")
    assert connection.getresponse().status == 405


def test_failed_scrape_is_logged_and_the_next_one_is_answered(
    registry: CollectorRegistry, connection: http.client.HTTPConnection, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        is_broken = True

        def collect(self) -> list[object]:
            if self.is_broken:
                raise ValueError("no sheep today")
            return []

    broken = Broken()
    registry.register(broken)  # type: ignore[arg-type]
    answer = get(connection)
    assert (answer.status, b"sheep" in answer.read()) == (500, False)
    broken.is_broken = False
    assert b"sheep_total" in get(connection).read()
    assert "no sheep today" in caplog.text


def test_objectives_that_an_operator_gives_reach_their_histograms() -> None:
    config = replace(
        CONFIG, slo_time_to_first_token=(0.11,), slo_inter_token_latency=(0.22,), slo_e2e_latency=(0.44, 0.33)
    )
    model, registry = served_model(), CollectorRegistry()
    App(config, [model], {model.name: engine_for(model)}, registry)
    bounds = {(name.removeprefix("onward_"), dict(labels).get("le")) for name, labels in series(registry)}
    for histogram, given in (
        ("time_to_first_token", ("0.11",)),
        ("inter_token_latency", ("0.22",)),
        ("time_per_output_token", ("0.22",)),
        ("e2e_request_latency", ("0.33", "0.44")),
    ):
        assert {(f"{histogram}_seconds_bucket", bound) for bound in given} <= bounds


def series(registry: CollectorRegistry) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    return [(s.name, tuple(sorted(s.labels.items()))) for metric in registry.collect() for s in metric.samples]


METHODS = {"Generate", "GenerateStream", "Score", "Tokenize", "Detokenize", "GetModel"}
GARBAGE: dict[str, Callable[[int], pb.GenerateRequest]] = {
    "models": lambda i: generate_request(model=f"model-{i}"),
    "ids": lambda i: generate_request(request_id=f"id-{i}", max_tokens=1),
    "bad ids": lambda i: generate_request(request_id=f"\0{i}"),
    "values": lambda i: generate_request(sampling=pb.SamplingParams(temperature=-1.0 - i)),
}


async def test_clients_cannot_make_series() -> None:
    async with running() as server:

        async def send(number: int) -> None:
            for make in GARBAGE.values():
                await asyncio.gather(server.generation.Generate(make(number)), return_exceptions=True)
            for method in (f"/onward.v1.GenerationService/No{number}", f"/unknown.v{number}/Generate"):
                await status_of(server.channel.unary_unary(method)(b""), grpc.StatusCode.UNIMPLEMENTED)
            garbled = server.channel.unary_unary("/onward.v1.GenerationService/Score")(b"\xff%d" % number)
            await status_of(garbled, grpc.StatusCode.INVALID_ARGUMENT)
            await read(server.stream(max_tokens=1))

        await send(0)
        before = series(server.registry)
        for number in range(1, 10):
            await send(number)
        assert series(server.registry) == before
    allowed = {
        "model_name": {MODEL},
        "finish_reason": set(OUTCOMES),
        "grpc_method": METHODS,
        "grpc_code": {"OK", *(code.name for code in STATUS_CODES.values())},
    }
    for name, values in allowed.items():
        assert {value for _, pairs in before for key, value in pairs if key == name} <= values, name


@pytest.fixture
def _as_served() -> Iterator[None]:
    """What `serve` turns off for the whole process."""
    disable_created_metrics()
    yield
    enable_created_metrics()


@pytest.mark.parametrize(
    ("compat", "max_series", "max_bytes"), [(MetricsCompat.NONE, 540, 42_000), (MetricsCompat.VLLM, 980, 83_000)]
)
@pytest.mark.usefixtures("_as_served")
def test_a_model_costs_so_many_series_and_bytes(compat: MetricsCompat, max_series: int, max_bytes: int) -> None:
    # How long a scrape takes is for `benchmarks run clocks` to say: this is what that time grows with.
    def scrape(count: int) -> str:
        models = [served_model(f"model-{number}") for number in range(count)]
        registry = CollectorRegistry()
        App(
            replace(CONFIG, metrics_compat=compat),
            models,
            {model.name: engine_for(model) for model in models},
            registry,
        )
        with exposing(metrics_app(registry), "127.0.0.1", 0) as port:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            text = get(connection).read().decode()
            connection.close()
        return text

    one, two = scrape(1), scrape(2)
    assert ("vllm:" in one) is (compat is MetricsCompat.VLLM)
    num_series = [sum(len(family.samples) for family in text_string_to_metric_families(text)) for text in (one, two)]
    assert num_series[1] - num_series[0] <= max_series
    assert len(two) - len(one) <= max_bytes
