"""How well a server predicts what requests take: predictions beside measurements, one request at a time and under load.

A model is a preset, exported with random weights, or an artifact's folder. Each has a server of its own. After a
warm-up requests are sent one by one, with geometrically distributed lengths; some share a prefix (or a source) with
others, so that cached tokens matter. `Estimate` is asked before each; the answer's `Cost` has the prediction at
arrival and the seconds of service, without the queue. Promise:

    within 20 % of what was measured for 90 % of the requests, for `Cost` and for `Estimate`

After every `YARDSTICK_EVERY`th request goes one whose work is always the same. The share of these within 20 % of their
median is the best that any prediction could reach on this machine. If that is below 90 %, as for requests so short that
the machine's jitter dominates, the promise is not judged. Then the same under load, with more in flight than fit into a
batch: reported, not promised; there the predicted finish is compared with the duration of the whole call.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.frame import models
from benchmarks.frame.models import QUIET, Subject, draw
from benchmarks.frame.pictures import drawing
from benchmarks.frame.rounds import say
from benchmarks.frame.scenario import Results, Run, Scenario, Settings, cores, option
from benchmarks.frame.statistics import percentile, percentiles
from benchmarks.frame.streams import connected, greedy
from benchmarks.frame.tables import conditions, milliseconds, table, verdict
from model.spec.artifact import MANIFEST
from model.spec.config import ModelConfig
from onward.v1 import generation_pb2 as pb
from service.config import ServeConfig

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

WITHIN = 0.2
SHARE = 0.9
YARDSTICK_EVERY = 4
# A server predicts once it has seen a few steps of each kind.
_MAX_UNPREDICTED = 100
_MIN_WARM_REQUESTS = 32
_MAX_CONTEXT = 1024
"""Lengths are drawn for at most this context, so that a request takes seconds, not minutes."""
_PREFIX_CHUNKS = 2
_PRESET, _TRAINED = "llama-110m", Path("build/models")
_WAYS = {"cost": "`Cost`", "estimate": "`Estimate`", "finish": "`Estimate`, the finish"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionSettings(Settings):
    """What is measured. `shared` is the share of requests with a shared prefix or source.

    The server has `batch` rows, fewer than are `in_flight` under load, so that there is a queue.
    """

    models: tuple[str, ...] = option(
        (), f"presets or artifacts' folders; none: {_PRESET} and what is under {_TRAINED}", flag="models model"
    )
    requests: int = option(300, "one at a time", least=1, quick=30)
    warm_seconds: float = option(60.0, "of warm-up", flag="warm", least=0.0, quick=3.0)
    load_seconds: float = option(30.0, "under load", flag="load", least=0.1, quick=3.0)
    in_flight: int = option(12, "requests at a time under load", least=1)
    # One core stays for the client: a graph thread that loses its core waits for a time slice, longer than many
    # requests.
    threads: int = option(cores(spare=1), "of the server", least=1)
    batch: int = option(8)
    shared: float = option(0.4)
    chunk: int = option(ServeConfig(models=Path()).chunk_tokens)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: ids of a prompt or source, and tokens wanted."""

    token_ids: tuple[int, ...]
    new: int


@dataclass(frozen=True, slots=True)
class Seen:
    """A request's predictions and measurements in seconds. `total` is the whole call on the server's clock."""

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    predicted: float
    estimated: float
    estimated_finish: float
    measured: float
    total: float


class Workload:
    """Draws requests for a model, the same for the same seed."""

    def __init__(self, config: ModelConfig, settings: PredictionSettings, seed: str) -> None:
        self._source = random.Random(seed)  # noqa: S311 (not for secrets)
        self._settings = settings
        self._is_source = config.is_encoder_decoder
        self._vocab_size = config.source_vocab_size if self._is_source else config.vocab_size
        self._max_prompt = min(config.source_context if self._is_source else config.context // 2, _MAX_CONTEXT // 2)
        self._max_new = min(config.context - 1 if self._is_source else config.context // 2, _MAX_CONTEXT // 4)
        length = self._max_prompt if self._is_source else min(_PREFIX_CHUNKS * settings.chunk, self._max_prompt // 2)
        self._known = [draw(self._source, self._vocab_size, length) for _ in range(4)]

    def next(self) -> Asked:
        """The next request."""
        length = self._length(self._max_prompt)
        token_ids = draw(self._source, self._vocab_size, length)
        if self._source.random() < self._settings.shared:
            known = self._source.choice(self._known)
            # A source is cached as a whole, a prompt by its prefix.
            token_ids = known if self._is_source else [*known, *token_ids][: self._max_prompt]
        return Asked(tuple(token_ids), self._length(self._max_new))

    def yardstick(self) -> Asked:
        """A request with new text whose work is always that of the mean lengths."""
        return Asked(tuple(draw(self._source, self._vocab_size, self._max_prompt // 3)), self._max_new // 3)

    def _length(self, most: int) -> int:
        """Geometric about a third of the maximum, cut to it."""
        return min(1 + int(self._source.expovariate(3 / most)), most)


def measure(settings: PredictionSettings, run: Run) -> dict[str, Any]:
    """One model after the other."""
    found = {}
    trained = sorted(str(path.parent) for path in _TRAINED.glob(f"*/{MANIFEST}"))
    for model in settings.models or (_PRESET, *trained):
        say(f"{model}: {settings.warm_seconds:g} s of warm-up, then {settings.requests} requests")
        name, subject = _find(model, settings, run)
        found[name] = _measure_one(subject, settings)
    verdicts = [each["holds"] for each in found.values() if each["holds"] is not None]
    passed = bool(verdicts) and all(verdicts)
    return {"within": WITHIN, "share": SHARE, "models": found, "passed": passed}


def _find(model: str, settings: PredictionSettings, run: Run) -> tuple[str, Subject]:
    if (Path(model) / MANIFEST).exists():
        return Path(model).name, Subject(Path(model), settings.threads, settings.batch)
    made = models.make_subject(model, settings.precision, run.build, max_batch=settings.batch, threads=settings.threads)
    return f"{Path(model).stem} {settings.precision}", made


def _measure_one(subject: Subject, settings: PredictionSettings) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        # A server serves everything in a folder of artifacts.
        (Path(folder) / "model").symlink_to(subject.folder.resolve(), target_is_directory=True)
        with subject.served("--prefill-chunk", str(settings.chunk), *QUIET, models=Path(folder)) as server:
            alone, loaded, yardsticks, num_unpredicted = asyncio.run(_ask(server.target, subject.config, settings))
    return {
        **judge_promise(judged := judge(alone), yardsticks),
        "alone": judged,
        "load": judge(loaded),
        "num_unpredicted": num_unpredicted,
        "requests": [asdict(seen) for seen in alone],
    }


def judge_promise(alone: Mapping[str, Any], yardsticks: Sequence[float]) -> dict[str, Any]:
    """Whether the promise holds; None where the machine is too unsteady.

    Args:
        alone: of requests sent one at a time, see `judge`.
        yardsticks: seconds of requests of constant work.
    """
    middle = statistics.median(yardsticks)
    steady = sum(abs(seconds / middle - 1) <= WITHIN for seconds in yardsticks) / len(yardsticks)
    holds = all(alone[way]["share_within"] >= SHARE for way in ("cost", "estimate"))
    return {
        "yardstick": {"count": len(yardsticks), "median_seconds": middle, "share_within": steady},
        "holds": holds if holds or steady >= SHARE else None,
    }


async def _ask(
    target: str, config: ModelConfig, settings: PredictionSettings
) -> tuple[list[Seen], list[Seen], list[float], int]:
    """Requests sent one by one, requests under load, the yardsticks' seconds, how many were not predicted."""
    unpredicted: list[Asked] = []
    async with connected(target) as stub:
        warm = Workload(config, settings, f"{settings.seed} warm")
        end, num_warm = time.perf_counter() + settings.warm_seconds, 0
        # With fewer, a server on a busy machine has seen too few steps to predict anything.
        while num_warm < _MIN_WARM_REQUESTS or time.perf_counter() < end:
            await stub.Generate(_request(warm.next()))
            num_warm += 1
        measured = Workload(config, settings, f"{settings.seed} measured")
        alone, yardsticks = list[Seen](), list[float]()
        for number in range(settings.requests):
            if number % YARDSTICK_EVERY == 0:
                answer = await stub.Generate(_request(measured.yardstick()))
                yardsticks.append(answer.cost.measured_seconds)
            alone.append(await _send(stub, measured, unpredicted))
        busy, loaded = Workload(config, settings, f"{settings.seed} load"), list[Seen]()
        end = time.perf_counter() + settings.load_seconds

        async def keep_asking() -> None:
            while time.perf_counter() < end:
                loaded.append(await _send(stub, busy, unpredicted))

        async with asyncio.TaskGroup() as group:
            for _ in range(settings.in_flight):
                group.create_task(keep_asking())
    return alone, loaded, yardsticks, len(unpredicted)


async def _send(stub: GenerationServiceAsyncStub, workload: Workload, unpredicted: list[Asked]) -> Seen:
    """Estimates a request, then runs it; the next one if the server does not predict it yet.

    Raises:
        RuntimeError: if the server predicted none of a hundred.
    """
    while len(unpredicted) < _MAX_UNPREDICTED:
        request = _request(asked := workload.next())
        estimate = await stub.Estimate(pb.EstimateRequest(request=request))
        answer = await stub.Generate(request)
        if estimate.HasField("finish_seconds") and answer.cost.HasField("predicted_seconds"):
            return Seen(
                prompt_tokens=answer.usage.prompt_tokens,
                cached_tokens=answer.usage.cached_tokens,
                new_tokens=answer.usage.generated_tokens,
                predicted=answer.cost.predicted_seconds,
                estimated=estimate.cost.predicted_seconds,
                estimated_finish=estimate.finish_seconds,
                measured=answer.cost.measured_seconds,
                total=answer.timings.total,
            )
        unpredicted.append(asked)
    raise RuntimeError(f"the server did not predict {len(unpredicted)} requests: was it calibrated?")


def _request(asked: Asked) -> pb.GenerateRequest:
    return greedy(pb.GenerateRequest, asked.token_ids, asked.new, response=pb.ResponseOptions(cost=True))


def judge(seen: Sequence[Seen]) -> dict[str, Any]:
    """Relative errors: of service by `Cost` and `Estimate`, of the finish by `Estimate`."""
    return {
        "count": len(seen),
        "cached_share": sum(each.cached_tokens for each in seen) / sum(each.prompt_tokens for each in seen),
        "measured_seconds": percentiles([each.measured for each in seen], 10, 50, 90),
        "cost": _errors([each.predicted / each.measured - 1 for each in seen]),
        "estimate": _errors([each.estimated / each.measured - 1 for each in seen]),
        "finish": _errors([each.estimated_finish / each.total - 1 for each in seen]),
    }


def _errors(errors: Sequence[float]) -> dict[str, float]:
    """Above 0 where too much was predicted."""
    sizes = [abs(error) for error in errors]
    return {
        "share_within": sum(size <= WITHIN for size in sizes) / len(sizes),
        "mean": statistics.mean(sizes),
        "p50": percentile(sizes, 0.5),
        "p90": percentile(sizes, 0.9),
        "max": max(sizes),
        "bias": statistics.mean(errors),
    }


def render(results: Results) -> str:
    """The document."""
    settings, errors, verdicts = results["settings"], [], []
    for model, found in results["models"].items():
        for when in ("alone", "load"):
            each = found[when]
            shared = each["count"], milliseconds(each["measured_seconds"]["p50"]), f"{each['cached_share']:.0%}"
            for way, what in _WAYS.items():
                off = each[way]
                parts = [f"{off[name]:.1%}" for name in ("share_within", "p50", "p90")]
                errors.append([model, when, what, *shared, *parts, f"{off['bias']:+.1%}"])
        same = found["yardstick"]
        unsteady = "not judged: this machine is not steady enough"
        holds = unsteady if found["holds"] is None else verdict(found["holds"])
        median = milliseconds(same["median_seconds"])
        verdicts.append([model, holds, f"{same['count']} times", median, f"{same['share_within']:.1%}"])
    headings = "model|when|predicted by|requests|median|cached|within 20 %|median error|90th|bias"
    lines = [
        "# Predicted and measured",
        "",
        f"{settings['requests']} requests one at a time after {settings['warm_seconds']:g} s of warm-up, then "
        f"{settings['load_seconds']:g} s with {settings['in_flight']} in flight on {settings['batch']} rows; "
        f"{conditions(results)}. Lengths are geometric, outputs as long as asked for; seconds are of service, without "
        "the queue. The finish is the end of the call, queue included.",
        "",
        *table(headings, errors, text_columns=3),
        "",
        f"The promise: {results['share']:.0%} of the requests within {results['within']:.0%} one at a time, by `Cost` "
        "and by `Estimate`. A request of constant work was sent among them: the share of these within "
        f"{results['within']:.0%} of their median is the best that a prediction could reach on this machine.",
        "",
        *table("model|promise|the same work|its median|within 20 % of it", verdicts, text_columns=2),
    ]
    return "\n".join(lines)


def draw_picture(results: Results) -> str:
    """Every request sent by itself as a point, predicted against measured."""
    found = results["models"]
    with drawing("prediction", 3.2 * len(found), 3.0) as (figure, svg):
        for axes, (model, each) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
            measured = [request["measured"] for request in each["requests"]]
            predicted = [request["predicted"] for request in each["requests"]]
            ends = [min(measured + predicted) / 1.2, max(measured + predicted) * 1.2]
            low, high = ([(1 + sign * WITHIN) * end for end in ends] for sign in (-1, 1))
            axes.fill_between(ends, low, high, color="#E69F00", alpha=0.2, linewidth=0)
            axes.plot(ends, ends, color="#555555", linewidth=0.8)
            axes.scatter(measured, predicted, s=6, color="#0072B2", linewidths=0)
            axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=model)
            axes.set_xlabel("seconds measured")
            axes.set_ylabel("seconds predicted")
    return svg.getvalue()


SCENARIO = Scenario(
    __name__, PredictionSettings, measure, render, draw_picture, caption="Each request: predicted over measured"
)
