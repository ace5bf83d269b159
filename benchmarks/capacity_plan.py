"""A plan on paper, from what a server and its company were measured to cost: how many it takes, what breaks first.

    python -m benchmarks.capacity_plan [--requests-per-day 1000000] [--peak 3] [--replicas 1000] [--docs | --check]

Every figure is reckoned from one of three: what a benchmark has left in `docs` as data, what `deploy` says, or a limit
that a component's own makers state. Assumptions about traffic and machines are options. Where data is missing, the plan
says which command measures it and does not go on.

Printed as Markdown; `--docs` writes `docs/capacity-plan.md`, `--check` exits with 1 if that is not what would be
written. Measures nothing itself.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from onward.v1 import generation_pb2 as pb

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DOCUMENT = "capacity-plan.md"
UTILISATION = 0.6
"""Share of what they can do that replicas, and Envoy's threads, are to be busy with at the peak."""
_SECONDS_PER_DAY = 86400
_MEGABYTE, _GIGABYTE, _GIBIBYTE = 1e6, 1e9, 2**30
_MOST_REPLICAS = 10_000_000
# gRPC's before a message, HTTP/2's before a frame.
_FRAME_BYTES = 5 + 9


class MissingFigures(Exception):
    """Figures that nobody has measured yet; says which, and what measures them."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One that was measured: what it is, the file in `docs` that has it, and where in there."""

    meaning: str
    file: str
    path: tuple[str, ...]
    show: Callable[[float], str]


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.3g}"


def _micro(value: float) -> str:
    return f"{1e6 * value:,.1f} µs"


def _seconds(value: float) -> str:
    return f"{value:,.3g} s" if value < 600 else f"{value / 60:,.0f} min"


def _share(value: float) -> str:
    return f"{value:.2%}" if value < 0.01 else f"{value:.0%}"


def _bytes(value: float) -> str:
    for unit, size in (("GB", _GIGABYTE), ("MB", _MEGABYTE)):
        if value >= size:
            return f"{value / size:,.3g} {unit}"
    return f"{value / 1e3:,.3g} kB"


def _cores(value: float) -> str:
    return f"{value:,.3g} cores"


_GOODPUT, _COST, _FLEET = "goodput", "scaling-out-cost", "fleet"
COMMANDS = {
    _GOODPUT: "python -m benchmarks.goodput --docs",
    _COST: "python -m benchmarks.scaling_out --docs",
    _FLEET: "python -m benchmarks.fleet --docs",
}
"""What measures each file of figures."""
FIGURES: Mapping[str, Figure] = {
    "capacity": Figure("answers a second of one replica", _GOODPUT, ("capacity",), _count),
    "slots": Figure("sequences that it runs at once", _GOODPUT, ("settings", "batch"), _count),
    "threads": Figure("threads of it", _GOODPUT, ("settings", "threads"), _count),
    "prompt": Figure("tokens of a prompt, median", _GOODPUT, ("settings", "prompt"), _count),
    "answer": Figure("tokens of an answer, median", _GOODPUT, ("settings", "answer"), _count),
    "spread": Figure("spread of their logarithms", _GOODPUT, ("settings", "spread"), _count),
    "message_cpu": Figure(
        "Envoy's processor time for a message", _COST, ("ways", "envoy", "cpu_seconds_per_message"), _micro
    ),
    "call_cpu": Figure("Envoy's processor time for a call", _FLEET, ("envoy", "cpu_seconds_per_call"), _micro),
    "check_cpu": Figure("Envoy's for a health check", _FLEET, ("envoy", "cpu_seconds_per_check"), _micro),
    "server_check_cpu": Figure("a server's for a health check", _FLEET, ("server", "cpu_seconds_per_check"), _micro),
    "envoy_base": Figure("memory of an Envoy", _FLEET, ("envoy", "base_bytes"), _bytes),
    "envoy_per_server": Figure("its memory for each server", _FLEET, ("envoy", "bytes_per_server"), _bytes),
    "envoy_sockets": Figure(
        "its sockets for each server, without calls", _FLEET, ("envoy", "descriptors_per_server"), _count
    ),
    "samples": Figure("samples of a server's metrics", _FLEET, ("server", "samples"), _count),
    "prometheus_base": Figure("memory of a Prometheus", _FLEET, ("prometheus", "base_bytes"), _bytes),
    "series_bytes": Figure("its memory for a series", _FLEET, ("prometheus", "bytes_per_series"), _bytes),
    "sample_cpu": Figure(
        "its processor time for a sample, rules included", _FLEET, ("prometheus", "cpu_seconds_per_sample"), _micro
    ),
    "rules_per_server": Figure(
        "time of all rules for each server", _FLEET, ("prometheus", "rule_seconds_per_server"), _micro
    ),
    "start": Figure("from a server's start until it serves", _FLEET, ("server", "start_seconds"), _seconds),
    "server_bytes": Figure("memory of a server", _FLEET, ("server", "pss_bytes"), _bytes),
    "server_files": Figure("its files and sockets", _FLEET, ("server", "descriptors"), _count),
    "artefact_bytes": Figure("its artefact", _FLEET, ("server", "artefact_bytes"), _bytes),
}
"""All that the plan reckons with, by the names that it has there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What nobody can measure beforehand.

    Args:
        requests_per_day: of the first of the two sizes.
        peak: how many times the mean there are in the busiest time.
        replicas: of the second of the two sizes.
        gigabits: of an Envoy's network, and of what artifacts are read from; a second.
        prometheus_gibibytes: memory of the machine that Prometheus has.
        prometheus_cores: of that machine.
        node_cores: of a cluster's machine.
        update_seconds: how long a rolling update may take.
        check_share: of a core that a server may spend on telling that it is well.
    """

    requests_per_day: float = 1e6
    peak: float = 3.0
    replicas: int = 1000
    gigabits: float = 10.0
    prometheus_gibibytes: float = 16.0
    prometheus_cores: float = 4.0
    node_cores: int = 16
    update_seconds: float = 3600.0
    check_share: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What the files in `deploy` say."""

    check_seconds: float
    clusters: int
    ring: int
    balance: float
    streams: int
    envoys: int
    workers: int
    envoy_bytes: float
    pod_cores: float
    probe_seconds: float
    max_replicas: int
    surge_percent: int
    scrape_seconds: float
    rule_seconds: float


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that grows with the number of replicas, and how much of it there may be.

    Args:
        what: it is.
        value: of it, by the number of replicas; grows with that.
        most: of it.
        show: either of them.
        source: who says that there may not be more.
        then: what is to be done where there must be.
    """

    what: str
    value: Callable[[int], float]
    most: float
    show: Callable[[float], str]
    source: str
    then: str

    def reached_at(self) -> int | None:
        """The smallest number of replicas that is too many; None if that is beyond ten million."""
        if self.value(_MOST_REPLICAS) <= self.most:
            return None
        low, high = 0, _MOST_REPLICAS
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.value(middle) > self.most else (middle, high)
        return high


def erlang_c(servers: int, load: float) -> float:
    """Share of arrivals that must wait, of M/M/c (Erlang's second formula; Cooper, Introduction to Queueing Theory).

    Args:
        servers: c, at least 1.
        load: arrival rate over the rate of one server; below c.

    Raises:
        ValueError: when the queue would grow for ever.
    """
    if not 0 <= load < servers:
        raise ValueError(f"load must be at least 0 and below {servers}, got {load}")
    # By way of the share that is lost where nobody may wait: no factorials, which no float can hold.
    lost = 1.0
    for number in range(1, servers + 1):
        lost = load * lost / (number + load * lost)
    return lost / (1 - load / servers * (1 - lost))


def read_figures(folder: Path = DOCS) -> dict[str, float]:
    """All of `FIGURES`.

    Raises:
        MissingFigures: naming all that are not there, and what measures them.
    """
    found: dict[str, float] = {}
    missing: dict[str, list[str]] = {}
    for name, figure in FIGURES.items():
        value: Any = _read(folder / f"{figure.file}.json")
        for key in figure.path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int | float) and math.isfinite(value):
            found[name] = float(value)
        else:
            missing.setdefault(figure.file, []).append(".".join(figure.path))
    if missing:
        told = (f"{file}.json lacks {', '.join(keys)}: {COMMANDS[file]}" for file, keys in missing.items())
        raise MissingFigures("; ".join(told))
    return found


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_deployment() -> Deployment:
    """What is deployed, from the files that are."""
    deploy = ROOT / "deploy"
    envoy = yaml.safe_load((deploy / "envoy" / "envoy.yaml").read_text(encoding="utf-8"))
    clusters = envoy["static_resources"]["clusters"]
    (listener,) = envoy["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    ring = clusters[1]["load_balancing_policy"]["policies"][0]["typed_extension_config"]["typed_config"]
    pods = _resources(deploy / "kubernetes" / "onward.yaml")
    proxies = _resources(deploy / "kubernetes" / "envoy.yaml")
    (proxy,) = proxies["Deployment"]["spec"]["template"]["spec"]["containers"]
    (server,) = pods["Deployment"]["spec"]["template"]["spec"]["containers"]
    prometheus = yaml.safe_load((deploy / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))["global"]
    surge = pods["Deployment"]["spec"]["strategy"]["rollingUpdate"]["maxSurge"]
    return Deployment(
        check_seconds=_duration(clusters[0]["health_checks"][0]["interval"]),
        clusters=len(clusters),
        ring=ring["minimum_ring_size"],
        balance=ring["consistent_hashing_lb_config"]["hash_balance_factor"] / 100,
        streams=manager["http2_protocol_options"]["max_concurrent_streams"],
        envoys=proxies["Deployment"]["spec"]["replicas"],
        workers=int(proxy["args"][proxy["args"].index("--concurrency") + 1]),
        envoy_bytes=_quantity(proxy["resources"]["limits"]["memory"]),
        pod_cores=_quantity(server["resources"]["requests"]["cpu"]),
        probe_seconds=server["readinessProbe"]["periodSeconds"],
        max_replicas=pods["HorizontalPodAutoscaler"]["spec"]["maxReplicas"],
        surge_percent=int(surge.removesuffix("%")),
        scrape_seconds=_duration(prometheus["scrape_interval"]),
        rule_seconds=_duration(prometheus["evaluation_interval"]),
    )


def _resources(path: Path) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text(encoding="utf-8"))}


def _duration(text: str) -> float:
    (number,) = re.fullmatch(r"(\d+)s", text).groups()  # type: ignore[union-attr]
    return float(number)


def _quantity(text: str) -> float:
    """Of Kubernetes: a number, or one of Gi or Mi."""
    units = {"Gi": 2**30, "Mi": 2**20}
    return float(text[:-2]) * units[text[-2:]] if text[-2:] in units else float(text)


class Plan:
    """What follows from the figures, by the number of replicas; rates are per second at the peak.

    Args:
        figures: those of `FIGURES`.
        deployment: what is deployed.
        assumed: the rest.
    """

    def __init__(self, figures: Mapping[str, float], deployment: Deployment, assumed: Assumptions) -> None:
        self._figures = figures
        self._deployment = deployment
        self._assumed = assumed
        # Of lognormal lengths, by their medians.
        mean = math.exp(figures["spread"] ** 2 / 2)
        self.prompt_tokens, self.answer_tokens = mean * figures["prompt"], mean * figures["answer"]
        # Besides a message for each token: accepted, finished, summary.
        self._messages = self.answer_tokens + 3

    @property
    def replicas_per_day(self) -> int:
        """That the assumed requests a day take at their peak."""
        rate = self._assumed.peak * self._assumed.requests_per_day / _SECONDS_PER_DAY
        return math.ceil(rate / (UTILISATION * self._figures["capacity"]))

    def rate(self, replicas: int) -> float:
        """Requests."""
        return replicas * UTILISATION * self._figures["capacity"]

    def running(self, replicas: int) -> float:
        """Requests that run at once (Little's law)."""
        return replicas * UTILISATION * self._figures["slots"]

    @property
    def slots(self) -> int:
        """That a replica has."""
        return round(self._figures["slots"])

    def memory(self, replicas: int) -> float:
        """Bytes of all of them."""
        return replicas * self._figures["server_bytes"]

    def wait(self, slots: int) -> tuple[float, float]:
        """Share that must wait, and seconds that they all wait in the mean, where so many slots have one queue."""
        per_slot = self._figures["capacity"] / self._figures["slots"]
        share = erlang_c(slots, UTILISATION * slots)
        return share, share / (slots * per_slot * (1 - UTILISATION))

    def proxy_cores(self, replicas: int) -> float:
        """That calls take of all Envoys together."""
        per_request = self._figures["call_cpu"] + self._messages * self._figures["message_cpu"]
        return self.rate(replicas) * per_request

    def envoys(self, replicas: int) -> int:
        """How many there must be, but at least as many as are deployed."""
        each = UTILISATION * self._deployment.workers
        return max(self._deployment.envoys, math.ceil(self.proxy_cores(replicas) / each))

    def checks(self, replicas: int) -> float:
        """Health checks of one Envoy, which asks each server once for each way to choose it."""
        return replicas * self._deployment.clusters / self._deployment.check_seconds

    def server_checks(self, replicas: int) -> float:
        """Health checks that each server answers."""
        return self.checks(1) * self.envoys(replicas)

    def envoy_sockets(self, replicas: int) -> float:
        """Of one Envoy to servers: those of health checks, and one of each thread for each way."""
        busy = self._deployment.workers * self._deployment.clusters
        return replicas * (self._figures["envoy_sockets"] + busy)

    def server_sockets(self, replicas: int) -> float:
        """Of one server: its own, and those of all Envoys."""
        return self._figures["server_files"] + self.envoys(replicas) * self.envoy_sockets(1)

    def request_bytes(self) -> float:
        """Of one streamed request and its answer, headers aside, in tokens of four letters."""
        text = "word"
        request = pb.GenerateStreamRequest(text=text * round(self.prompt_tokens))
        delta = pb.GenerateStreamResponse(delta=pb.GenerateStreamResponse.Delta(text=text, token_ids=[31_999]))
        return request.ByteSize() + _FRAME_BYTES + self._messages * (delta.ByteSize() + _FRAME_BYTES)

    def envoy_bits(self, replicas: int) -> float:
        """A second, in and out of all Envoys that are deployed, each."""
        return 2 * 8 * self.rate(replicas) * self.request_bytes() / self._deployment.envoys

    def series(self, replicas: int) -> float:
        """That Prometheus keeps."""
        return replicas * self._figures["samples"]

    def samples(self, replicas: int) -> float:
        """That it is told a second."""
        return self.series(replicas) / self._deployment.scrape_seconds

    def prometheus_bytes(self, replicas: int) -> float:
        """Of memory."""
        return self._figures["prometheus_base"] + self.series(replicas) * self._figures["series_bytes"]

    def surge(self, replicas: int) -> int:
        """How many are replaced at a time."""
        return -(-self._deployment.surge_percent * replicas // 100)

    def read_seconds(self, replicas: int) -> float:
        """Until so many have read their artifact from the same place."""
        return replicas * self._figures["artefact_bytes"] * 8 / (self._assumed.gigabits * 1e9)

    def update_seconds(self, replicas: int) -> float:
        """Of a rolling update: one batch after the other starts, reads its artifact and is found to be ready."""
        surge = self.surge(replicas)
        each = self._figures["start"] + self.read_seconds(surge) + self._deployment.probe_seconds
        return math.ceil(replicas / surge) * each

    def unevenness(self, replicas: int) -> float:
        """Standard deviation of the servers' shares of the keys, over their mean.

        A share is the sum of as many gaps between random places on the ring as the server has: a beta distribution.
        """
        return math.sqrt((replicas - 1) / (max(self._deployment.ring, replicas) + 1))

    def dns_bytes(self, replicas: int) -> float:
        """Of the answer that names all servers: its head, the question, and an A record for each (RFC 1035, 4.1)."""
        return 12 + len("onward-grpc.default.svc.cluster.local") + 2 + 4 + 16 * replicas

    def nodes(self, replicas: int) -> int:
        """Machines of the cluster, if pods were all there is."""
        return math.ceil(replicas / max(1, math.floor(self._assumed.node_cores / self._deployment.pod_cores)))

    def limits(self) -> list[Limit]:
        """All that could be too much, in the order in which it becomes that."""
        deployment, assumed, figures = self._deployment, self._assumed, self._figures
        found = [
            Limit(
                "pods that the autoscaler makes", float, deployment.max_replicas, _count,
                "`maxReplicas` in deploy/kubernetes/onward.yaml", "raise it: it keeps bills within bounds",
            ),
            Limit(
                "processor time of all Envoys", self.proxy_cores,
                UTILISATION * deployment.envoys * deployment.workers, _cores,
                f"{deployment.envoys} Envoys of {deployment.workers} threads at {UTILISATION:.0%}, "
                "deploy/kubernetes/envoy.yaml",
                "more Envoys; or none, where clients balance by themselves",
            ),
            Limit(
                "processor time of one Envoy's health checks", lambda n: self.checks(n) * figures["check_cpu"],
                1.0, _cores, "Envoy checks health on its main thread alone",
                "a longer `interval`; or groups of servers, each with Envoys of its own",
            ),
            Limit(
                "a server's core for health checks",
                lambda n: self.server_checks(n) * figures["server_check_cpu"], assumed.check_share, _share,
                f"assumed: {assumed.check_share:.0%} is enough",
                "a longer `interval`: the checks of a server grow with the number of Envoys",
            ),
            Limit(
                "memory of one Envoy", lambda n: figures["envoy_base"] + n * figures["envoy_per_server"],
                deployment.envoy_bytes, _bytes, "`limits.memory` in deploy/kubernetes/envoy.yaml", "raise it",
            ),
            Limit(
                "sockets of one Envoy to servers", self.envoy_sockets, 1024, _count,
                "soft limit of a process where nobody sets another (systemd.exec, LimitNOFILE)",
                "`LimitNOFILE=524288`, or `ulimit -n`; container engines mostly set more",
            ),
            Limit(
                "files and sockets of one server", self.server_sockets, 1024, _count,
                "soft limit of a process where nobody sets another (systemd.exec, LimitNOFILE)",
                "`LimitNOFILE=524288`, or `ulimit -n`; container engines mostly set more",
            ),
            Limit(
                "requests at once on one connection of a client", self.running, deployment.streams, _count,
                "`max_concurrent_streams` in deploy/envoy/envoy.yaml",
                "several connections: those beyond wait in the client",
            ),
            Limit(
                "unevenness of keys", self.unevenness, (deployment.balance - 1) / 2, _share,
                "two deviations reach `hash_balance_factor`, and keys are sent elsewhere (deploy/envoy/envoy.yaml)",
                "a larger `minimum_ring_size`; 8,388,608 is the most that Envoy takes",
            ),
            Limit(
                "network of one Envoy, bits a second", self.envoy_bits, assumed.gigabits * 1e9, _count,
                f"assumed: {assumed.gigabits:g} Gbit/s", "more Envoys",
            ),
            Limit(
                "memory of Prometheus", self.prometheus_bytes, assumed.prometheus_gibibytes * _GIBIBYTE, _bytes,
                f"assumed: {assumed.prometheus_gibibytes:g} GiB",
                "one for each group of servers, and one that collects what they have recorded (federation)",
            ),
            Limit(
                "processor time of Prometheus", lambda n: self.samples(n) * figures["sample_cpu"],
                assumed.prometheus_cores, _cores, f"assumed: {assumed.prometheus_cores:g} cores",
                "one for each group of servers; or a longer `scrape_interval`",
            ),
            Limit(
                "time of all rules, one after the other", lambda n: n * figures["rules_per_server"],
                deployment.rule_seconds, _seconds, "`evaluation_interval` in deploy/prometheus/prometheus.yml",
                "one for each group of servers; or a longer `evaluation_interval`",
            ),
            Limit(
                "DNS answer, bytes", self.dns_bytes, 65_535, _count, "a message over TCP (RFC 1035, 4.2.2)",
                "several Services, a cluster in Envoy's configuration for each; or endpoints by EDS",
            ),
            Limit(
                "machines of a cluster", self.nodes, 5_000, _count,
                "Kubernetes, Considerations for large clusters", "several clusters",
            ),
            Limit(
                "time of a rolling update", self.update_seconds, assumed.update_seconds, _seconds,
                f"assumed: {_seconds(assumed.update_seconds)}",
                "artefacts in the image or on the machines, so that not all read from one place",
            ),
        ]  # fmt: skip
        return sorted(found, key=lambda each: each.reached_at() or math.inf)


def render(figures: Mapping[str, float], deployment: Deployment, assumed: Assumptions, folder: Path = DOCS) -> str:
    """The document, in Markdown.

    Args:
        figures: those of `FIGURES`.
        deployment: what is deployed.
        assumed: the rest.
        folder: which has the costs of each way.
    """
    plan = Plan(figures, deployment, assumed)
    sizes = [plan.replicas_per_day, assumed.replicas]
    daily = UTILISATION * figures["capacity"] * _SECONDS_PER_DAY / assumed.peak
    machine = _read(folder / f"{_GOODPUT}.json")["machine"]
    settings = _read(folder / f"{_GOODPUT}.json")["settings"]
    lines = [
        "# Capacity plan",
        "",
        "Written by `python -m benchmarks.capacity_plan --docs` from what was measured; see there for how.",
        "",
        f"A replica is {settings['model']} {settings['precision']} on {settings['threads']} threads of "
        f"{machine['processor']} with {settings['batch']} sequences at once, asked for streams of "
        f"{plan.answer_tokens:.0f} tokens after prompts of {plan.prompt_tokens:.0f} in the mean. At the peak, which is "
        f"{assumed.peak:g} times the mean, it is to be busy {UTILISATION:.0%} of the time: it carries "
        f"**{_thousands(daily)} requests a day**.",
        "",
        *_sizes_table(plan, assumed, sizes),
        "",
        *_breaks_table(plan, sizes),
        "",
        *_ways_table(_read(folder / f"{_COST}.json")),
        "",
        "## What it is reckoned from",
        "",
        "| figure | measured | in |",
        "|---|---:|---|",
        *(
            f"| {figure.meaning} | {figure.show(figures[name])} | [{figure.file}.json]({figure.file}.json) |"
            for name, figure in FIGURES.items()
        ),
        "",
        "Assumed, each an option of the command: "
        f"{_thousands(assumed.requests_per_day)} requests a day, {assumed.peak:g} times the mean at the peak; "
        f"{assumed.gigabits:g} Gbit/s of network, for an Envoy and for what artefacts are read from; "
        f"{assumed.prometheus_gibibytes:g} GiB and {assumed.prometheus_cores:g} cores for Prometheus; machines of "
        f"{assumed.node_cores} cores; a rolling update within {_seconds(assumed.update_seconds)}.",
        "",
        "Waiting is that of M/M/c (Erlang's second formula), c being slots: arrivals and lengths are as irregular as "
        "can be, and a slot is as quick as when all of a replica's are busy. Alone, each replica has its own queue and "
        "its own share of the arrivals; together, they have one. The fewest in flight of five that are drawn, which is "
        "how Envoy chooses, lies close to the latter (Mitzenmacher 2001, on the better of two).",
        "",
    ]
    return "\n".join(lines)


def _sizes_table(plan: Plan, assumed: Assumptions, sizes: Sequence[int]) -> list[str]:
    rows: Sequence[tuple[str, Callable[[int], str]]] = (
        ("replicas", _count),
        ("requests a second at the peak", lambda n: _count(plan.rate(n))),
        ("requests a day", lambda n: _thousands(plan.rate(n) * _SECONDS_PER_DAY / assumed.peak)),
        ("requests that run at once", lambda n: _count(plan.running(n))),
        ("must wait, and wait in the mean: alone", lambda _: _wait(plan.wait(plan.slots))),
        ("the same: together", lambda n: _wait(plan.wait(n * plan.slots))),
        ("memory of all replicas", lambda n: _bytes(plan.memory(n))),
        ("Envoy's cores for calls", lambda n: _cores(plan.proxy_cores(n))),
        ("Envoys", lambda n: _count(plan.envoys(n))),
        ("health checks a second, all Envoys", lambda n: _count(plan.envoys(n) * plan.checks(n))),
        ("series", lambda n: _count(plan.series(n))),
        ("samples a second", lambda n: _count(plan.samples(n))),
        ("disk of Prometheus a day, at 2 bytes a sample", lambda n: _bytes(2 * plan.samples(n) * _SECONDS_PER_DAY)),
        ("artefacts read from one place, all at once", lambda n: _seconds(plan.read_seconds(n))),
        ("rolling update", lambda n: _seconds(plan.update_seconds(n))),
        ("changes of endpoints a second in it", lambda n: _count(2 * n / plan.update_seconds(n))),
    )
    return [
        "## Two sizes",
        "",
        f"| | {_thousands(assumed.requests_per_day)} requests a day | {assumed.replicas:,} replicas |",
        "|---|---:|---:|",
        *(f"| {what} | {' | '.join(show(size) for size in sizes)} |" for what, show in rows),
        "",
        "Two bytes a sample is the upper end of what Prometheus' documentation reckons with (Storage). Endpoints are "
        "heard of by DNS, at most every five seconds: a headless Service is none of kube-proxy's business.",
    ]


def _breaks_table(plan: Plan, sizes: Sequence[int]) -> list[str]:
    limits = plan.limits()
    first, head = limits[0], " | ".join(f"at {size:,}" for size in sizes)
    rows = []
    for limit in limits:
        shown = " | ".join(_against(limit, limit.value(size)) for size in sizes)
        rows.append(
            f"| {_at(limit)} | {limit.what} | {shown} | {limit.show(limit.most)} | {limit.source} | {limit.then} |"
        )
    return [
        "## What breaks first",
        "",
        f"The first: {first.what}, at {_at(first)} replicas. By the number of replicas that is the first too many; "
        "bold is beyond the limit. All Envoys are as many as are deployed; of health checks and sockets of a server, "
        "as many as the calls take.",
        "",
        f"| replicas | what | {head} | limit | says | then |",
        "|---:|---|---:|---:|---:|---|---|",
        *rows,
    ]


def _at(limit: Limit) -> str:
    at = limit.reached_at()
    return "never" if at is None else f"{at:,}"


def _against(limit: Limit, value: float) -> str:
    told = limit.show(value)
    return f"**{told}**" if value > limit.most else told


def _ways_table(cost: Mapping[str, Any]) -> list[str]:
    """What each way to ask costs beside the direct one, as it was measured in one run."""
    rows = [
        f"| {way} | {_micro(found['added_call_seconds'])} | {_micro(found['added_message_seconds'])} | "
        f"{found['throughput_share']:.0%} | {_optional(found.get('pss_bytes'), _bytes)} | "
        f"{_optional(found.get('start_seconds'), _seconds)} |"
        for way, found in cost["ways"].items()
    ]
    return [
        "## What each way costs",
        "",
        "| way | added to a call | to a message | throughput of direct | memory | start |",
        "|---|---:|---:|---:|---:|---:|",
        *rows,
        "",
        f"From [{_COST}.json]({_COST}.json), which says more.",
    ]


def _optional(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def _wait(told: tuple[float, float]) -> str:
    share, seconds = told
    return f"{share:.1%}, {1e3 * seconds:,.3g} ms"


def _thousands(value: float) -> str:
    """Three digits of it, for people."""
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{float(f'{value:.3g}'):,.0f}"


def main(arguments: Sequence[str]) -> int:
    """Prints the plan, writes it, or compares it."""
    assumed, options = _parse(arguments)
    try:
        told = render(read_figures(), read_deployment(), assumed)
    except MissingFigures as error:
        print(f"capacity plan: {error}", file=sys.stderr)
        return 1
    document = DOCS / DOCUMENT
    if options.check:
        if document.exists() and document.read_text(encoding="utf-8") == told:
            return 0
        print(f"{DOCUMENT} is out of date: python -m benchmarks.capacity_plan --docs", file=sys.stderr)
        return 1
    if options.docs:
        document.write_text(told, encoding="utf-8")
    else:
        print(told)
    return 0


def _parse(arguments: Sequence[str]) -> tuple[Assumptions, argparse.Namespace]:
    defaults = Assumptions()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capacity_plan", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--requests-per-day", type=float, default=defaults.requests_per_day)
    parser.add_argument("--peak", type=float, default=defaults.peak, help="of the busiest time, times the mean")
    parser.add_argument("--replicas", type=int, default=defaults.replicas, help="of the other size")
    parser.add_argument("--gigabits", type=float, default=defaults.gigabits, help="of network a second")
    parser.add_argument("--prometheus-gibibytes", type=float, default=defaults.prometheus_gibibytes)
    parser.add_argument("--prometheus-cores", type=float, default=defaults.prometheus_cores)
    parser.add_argument("--node-cores", type=int, default=defaults.node_cores, help="of a cluster's machine")
    parser.add_argument("--update-seconds", type=float, default=defaults.update_seconds, help="of a rolling update")
    parser.add_argument("--check-share", type=float, default=defaults.check_share, help="of a server's core")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--docs", action="store_true", help=f"write docs/{DOCUMENT}")
    what.add_argument("--check", action="store_true", help=f"compare docs/{DOCUMENT}")
    options = parser.parse_args(arguments)
    given = {each.name: getattr(options, each.name) for each in fields(Assumptions)}
    for name, value in given.items():
        if not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be finite and above 0, got {value}")
    return Assumptions(**given), options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
