"""How well a server foretells what requests take: predictions beside measurements, one at a time and under load.

    python -m benchmarks.prediction [--model MODEL …] [--precision int8] [--requests 300] [--warm 60] [--load 30]
                                    [--in-flight 12] [--quick] [--docs]

A MODEL is a preset, exported with random weights, or the folder of an artifact; by default `llama-110m` and whatever
lies under `build/models`. Each has a server of its own. After a time of warm running, requests are sent one by one,
prompts and outputs of geometrically distributed lengths, outputs as long as they are asked for, some of the prompts
with a beginning (some of the sources with a text) that others have, too, so that cached tokens matter. Before each,
`Estimate` is asked; the answer's `Cost` has what was predicted when the request came, and the seconds of service it
then took, without the queue. The promise is

    within 20 % of what was measured for 90 % of the requests, for `Cost` and for `Estimate`

Amid them, after every `YARDSTICK_EVERY`th, goes one whose work is always the same: so many of these as lie within 20 %
of their own median is what anyone could foretell on this machine. Where that is below 90 % itself, for requests so
short that the machine's own unrest outweighs them, the promise is not judged, and the report says so.

Then the same under load, with more in flight than fit into a batch: what is off is reported, and nothing promised; the
queue is foretold there as well, so that an estimate's finish can be held against the time that the whole call took. The
last line on stdout is one JSON object; report and picture go to `build/bench`.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio

from benchmarks import scenario
from benchmarks.frame.pictures import drawing
from benchmarks.frame.servers import serving
from benchmarks.peers.onward import artifact
from benchmarks.scenario import draw, milliseconds, percentile
from benchmarks.scenario_options import ScenarioSettings, at_least, new_parser, read_settings
from model.spec.artifact import MANIFEST, load
from model.spec.config import ModelConfig
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

NAME = "prediction"
MODELS = Path("build/models")
WITHIN = 0.2
SHARE = 0.9
"""The promise: so many of the requests within so much of what was measured."""
YARDSTICK_EVERY = 4
"""After so many requests follows one of always the same work."""
# A server foretells once it knows of a few steps of each kind.
_MAX_UNPREDICTED = 100
_MIN_WARM_REQUESTS = 32
_MOST_CONTEXT = 1024
"""Lengths are drawn for a context of no more than this, so that a request takes seconds and not minutes."""
_PREFIX_CHUNKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ScenarioSettings):
    """What is measured. `shared` is the share of requests whose prompt begins as others do, or whose source is theirs.

    `batch` is how many rows the server has, fewer than are `in_flight` under load, so that there is a queue.
    """

    models: tuple[str, ...] = ("llama-110m",)
    requests: int = 300
    warm_seconds: float = 60.0
    load_seconds: float = 30.0
    in_flight: int = 12
    batch: int = 8
    shared: float = 0.4
    chunk: int = 128


@dataclass(frozen=True, slots=True)
class Asked:
    """One request to be sent: ids of a prompt or source, and tokens wanted."""

    token_ids: tuple[int, ...]
    new: int


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: what was foretold and what came, in seconds. `total` is the whole call on the server's clock."""

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    predicted: float
    estimated: float
    estimated_finish: float
    measured: float
    total: float


class Workload:
    """Draws requests for a model, the same ones for the same seed."""

    def __init__(self, config: ModelConfig, settings: Settings, seed: str) -> None:
        self._source = random.Random(seed)  # noqa: S311 (not for secrets)
        self._settings = settings
        self._is_source = config.is_encoder_decoder
        self._vocab_size = config.source_vocab_size if self._is_source else config.vocab_size
        self._most_prompt = min(config.source_context if self._is_source else config.context // 2, _MOST_CONTEXT // 2)
        self._most_new = min(config.context - 1 if self._is_source else config.context // 2, _MOST_CONTEXT // 4)
        length = self._most_prompt if self._is_source else min(_PREFIX_CHUNKS * settings.chunk, self._most_prompt // 2)
        self._known = [draw(self._source, self._vocab_size, length) for _ in range(4)]

    def next(self) -> Asked:
        """The next request."""
        length = self._length(self._most_prompt)
        token_ids = draw(self._source, self._vocab_size, length)
        if self._source.random() < self._settings.shared:
            known = self._source.choice(self._known)
            # A source is known as a whole, a prompt by its beginning.
            token_ids = known if self._is_source else [*known, *token_ids][: self._most_prompt]
        return Asked(tuple(token_ids), self._length(self._most_new))

    def yardstick(self) -> Asked:
        """A request whose text is new and whose work is always the same, that of the mean lengths."""
        return Asked(tuple(draw(self._source, self._vocab_size, self._most_prompt // 3)), self._most_new // 3)

    def _length(self, most: int) -> int:
        """Geometrically distributed about a third of the most, cut to it."""
        return min(1 + int(self._source.expovariate(3 / most)), most)


def measure(settings: Settings, build: Path) -> dict[str, Any]:
    """Serves one model after the other and measures each."""
    subjects = {}
    for model in settings.models:
        print(
            f"{model}: {settings.warm_seconds:g} s of warm running, then {settings.requests} requests", file=sys.stderr
        )
        name, folder = _find(model, settings, build)
        subjects[name] = _measure_one(folder, settings)
    verdicts = [found["holds"] for found in subjects.values() if found["holds"] is not None]
    passed = bool(verdicts) and all(verdicts)
    return scenario.facts(NAME, settings) | {"within": WITHIN, "share": SHARE, "models": subjects, "passed": passed}


def _find(model: str, settings: Settings, build: Path) -> tuple[str, Path]:
    """A model's name and its artifact's folder, made first if it is a preset."""
    if (Path(model) / MANIFEST).exists():
        return Path(model).name, Path(model)
    options = scenario.make_artifact(
        model, settings.precision, build=build, max_batch=settings.batch, threads=settings.threads
    )
    return f"{Path(model).stem} {settings.precision}", artifact(options)


def _measure_one(folder: Path, settings: Settings) -> dict[str, Any]:
    config = load(folder).config
    flags = ["--threads", str(settings.threads), "--max-batch-size", str(settings.batch)]
    flags += ["--prefill-chunk", str(settings.chunk), *scenario.QUIET]
    with tempfile.TemporaryDirectory() as models:
        # The server serves all that lies beside it.
        (Path(models) / "model").symlink_to(folder.resolve(), target_is_directory=True)
        with serving(Path(models), *flags) as target:
            alone, loaded, yardsticks, num_unpredicted = asyncio.run(_ask(target, config, settings))
    return {
        **verdict(judged := judge(alone), yardsticks),
        "alone": judged,
        "load": judge(loaded),
        "num_unpredicted": num_unpredicted,
        "requests": [asdict(seen) for seen in alone],
    }


def verdict(alone: Mapping[str, Any], yardsticks: Sequence[float]) -> dict[str, Any]:
    """Whether the promise holds, None where nobody could keep it.

    Args:
        alone: what requests that were sent one at a time came to, see `judge`.
        yardsticks: seconds of requests of always the same work amid them.
    """
    middle = statistics.median(yardsticks)
    steady = sum(abs(seconds / middle - 1) <= WITHIN for seconds in yardsticks) / len(yardsticks)
    holds = all(alone[way]["share_within"] >= SHARE for way in ("cost", "estimate"))
    return {
        "yardstick": {"count": len(yardsticks), "median_seconds": middle, "share_within": steady},
        "holds": holds if holds or steady >= SHARE else None,
    }


async def _ask(target: str, config: ModelConfig, settings: Settings) -> tuple[list[Seen], list[Seen], list[float], int]:
    """Warms up, then asks one request after the other, then several at a time.

    Returns:
        Those sent one by one, those sent together, the seconds of the yardsticks amid the former, and how many requests
        besides the server did not predict.
    """
    unpredicted: list[Asked] = []
    async with _stub(target) as stub:
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


@asynccontextmanager
async def _stub(target: str) -> AsyncIterator[GenerationServiceAsyncStub]:
    async with grpc.aio.insecure_channel(target) as channel:
        yield GenerationServiceStub(channel)


async def _send(stub: GenerationServiceAsyncStub, workload: Workload, unpredicted: list[Asked]) -> Seen:
    """Has a request estimated, then runs it. Where the server has seen too little to predict it, the next one.

    Raises:
        RuntimeError: when the server has predicted none of a hundred.
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
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=asked.token_ids),
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingParams(max_tokens=asked.new, ignore_eos=True),
        response=pb.ResponseOptions(cost=True),
    )


def judge(seen: Sequence[Seen]) -> dict[str, Any]:
    """How far off predictions were, of service by `Cost` and `Estimate` and of the finish by `Estimate`."""
    return {
        "count": len(seen),
        "cached_share": sum(each.cached_tokens for each in seen) / sum(each.prompt_tokens for each in seen),
        "measured_seconds": {
            "p10": percentile([each.measured for each in seen], 0.1),
            "p50": percentile([each.measured for each in seen], 0.5),
            "p90": percentile([each.measured for each in seen], 0.9),
        },
        "cost": _errors([each.predicted / each.measured - 1 for each in seen]),
        "estimate": _errors([each.estimated / each.measured - 1 for each in seen]),
        "finish": _errors([each.estimated_finish / each.total - 1 for each in seen]),
    }


def _errors(errors: Sequence[float]) -> dict[str, float]:
    """Of relative errors, above 0 where too much was predicted."""
    sizes = [abs(error) for error in errors]
    return {
        "share_within": sum(size <= WITHIN for size in sizes) / len(sizes),
        "mean": statistics.mean(sizes),
        "p50": percentile(sizes, 0.5),
        "p90": percentile(sizes, 0.9),
        "max": max(sizes),
        "bias": statistics.mean(errors),
    }


def render(results: Mapping[str, Any]) -> str:
    """The document, in Markdown."""
    settings = results["settings"]
    lines = [
        "# Predicted and measured",
        "",
        f"{settings['requests']} requests one at a time after {settings['warm_seconds']:g} s of warm running, then "
        f"{settings['load_seconds']:g} s with {settings['in_flight']} in flight on {settings['batch']} rows; "
        f"{settings['threads']} threads, on {results['machine']['processor']}. Lengths are geometric, outputs as long "
        "as asked for; seconds are of service, without the queue. The finish is the end of the call, queue and all.",
        "",
        "| model | when | requests | median | cached | foretold by | within 20 % | median error | 90th | bias |",
        "|---|---|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    for model, found in results["models"].items():
        for when in ("alone", "load"):
            each = found[when]
            for way, what in (("cost", "`Cost`"), ("estimate", "`Estimate`"), ("finish", "`Estimate`, the finish")):
                errors = each[way]
                lines.append(
                    f"| {model} | {when} | {each['count']} | {milliseconds(each['measured_seconds']['p50'])} | "
                    f"{each['cached_share']:.0%} | {what} | {errors['share_within']:.1%} | {errors['p50']:.1%} | "
                    f"{errors['p90']:.1%} | {errors['bias']:+.1%} |"
                )
    lines += [
        "",
        f"The promise: {results['share']:.0%} of the requests within {results['within']:.0%} one at a time, by `Cost` "
        "and by `Estimate`. Amid the requests one of always the same work was sent: how often it took the same time, "
        f"within {results['within']:.0%} of its median, is what anyone could foretell on this machine.",
        "",
        "| model | promise | the same work | its median | within 20 % of it |",
        "|---|---|---:|---:|---:|",
        *(_verdict_line(model, found) for model, found in results["models"].items()),
        "",
        f"![Each request: what was predicted over what was measured]({NAME}.svg)",
        "",
    ]
    return "\n".join(lines)


def _verdict_line(model: str, found: Mapping[str, Any]) -> str:
    """A row of the table of verdicts."""
    words = {True: "holds", False: "does **not** hold", None: "not judged: this machine is not steady enough"}
    same = found["yardstick"]
    return (
        f"| {model} | {words[found['holds']]} | {same['count']} times | {milliseconds(same['median_seconds'])} | "
        f"{same['share_within']:.1%} |"
    )


def draw_picture(results: Mapping[str, Any]) -> str:
    """Every request sent by itself as a point, predicted against measured, as SVG."""
    models = results["models"]
    with drawing(NAME, 3.2 * len(models), 3.0) as (figure, svg):
        for axes, (model, found) in zip(figure.subplots(1, len(models), squeeze=False)[0], models.items(), strict=True):
            measured = [each["measured"] for each in found["requests"]]
            predicted = [each["predicted"] for each in found["requests"]]
            ends = [min(measured + predicted) / 1.2, max(measured + predicted) * 1.2]
            axes.fill_between(
                ends,
                [(1 - WITHIN) * end for end in ends],
                [(1 + WITHIN) * end for end in ends],
                color="#E69F00",
                alpha=0.2,
                linewidth=0,
            )
            axes.plot(ends, ends, color="#555555", linewidth=0.8)
            axes.scatter(measured, predicted, s=6, color="#0072B2", linewidths=0)
            axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=model)
            axes.set_xlabel("seconds measured")
            axes.set_ylabel("seconds predicted")
    return svg.getvalue()


def main() -> int:
    """Measures, and says it all on the last line of stdout."""
    settings, folder = _parse(sys.argv[1:])
    return scenario.tell(NAME, lambda: measure(settings, scenario.BUILD), render, folder, draw_picture)


def _default_models() -> tuple[str, ...]:
    trained = sorted(path.parent for path in MODELS.glob(f"*/{MANIFEST}"))
    return ("llama-110m", *map(str, trained))


def _parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    parser = new_parser(NAME, __doc__, quick="few requests, little warmth", model="")
    parser.add_argument(
        "--model",
        action="append",
        dest="models",
        metavar="MODEL",
        help="a preset or an artifact's folder; may be given several times",
    )
    parser.add_argument("--requests", type=at_least(1))
    parser.add_argument(
        "--warm", type=at_least(0.0), dest="warm_seconds", metavar="WARM", help="seconds of warm running"
    )
    parser.add_argument("--load", type=at_least(0.1), dest="load_seconds", metavar="LOAD", help="seconds under load")
    parser.add_argument("--in-flight", type=at_least(1), help="requests at a time under load")
    # One processor stays for the client: a graph's thread that has to wait for it waits for a whole turn of the
    # system's scheduler, which is longer than many a request of a small model, and nothing that a server foretells.
    threads = max(1, (os.cpu_count() or 1) - 1)
    defaults = Settings(models=_default_models(), threads=threads, chunk=scenario.default_prefill_chunk())
    settings, folder = read_settings(parser, arguments, defaults, _shorten)
    # What an option is given several times for is a list.
    return replace(settings, models=tuple(settings.models)), folder


def _shorten(settings: Settings) -> Settings:
    return replace(
        settings,
        requests=min(30, settings.requests),
        warm_seconds=min(3.0, settings.warm_seconds),
        load_seconds=min(3.0, settings.load_seconds),
    )


if __name__ == "__main__":
    sys.exit(main())
