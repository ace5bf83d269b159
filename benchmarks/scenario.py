"""What the scenarios share: a model with random weights behind a server of its own, streams with a clock, results.

A scenario is a situation with a promise, such as `benchmarks.interference` or `benchmarks.prefix`; its command line is
`benchmarks.scenario_options`. Throughput beside peers is `benchmarks.bench`.
Times are seconds on this process's clock, the client's.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shlex
import shutil
import sys
import time
from asyncio import Event
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.onward import export, version
from benchmarks.peers.protocol import Options
from loadtest.child import run_module
from loadtest.machine import describe
from model.spec.config import ModelConfig
from onward.v1 import generation_pb2 as pb
from service.config import ServeConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from onward.v1.generation_pb2_grpc import GenerationServiceAsyncStub

BUILD = Path("build/bench")
NUM_SPECIAL = 4
"""Ids below are control tokens: prompts have none."""
QUIET = ("--no-metrics", "--log-level", "warning")
"""Flags for a server that only works."""


@dataclass(slots=True)
class Answer:
    """A stream so far. `arrivals` has a time for each token: those of one message came at the same moment."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    """Tokens of the prompt that the server did not have to compute; known at the end."""

    @property
    def first_token_seconds(self) -> float:
        """From the question to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """When each wait for a next token began and ended."""
        return list(zip(self.arrivals, self.arrivals[1:], strict=False))


async def follow(
    stub: GenerationServiceAsyncStub,
    prompt: Sequence[int],
    new: int,
    *,
    model: str = "",
    seen: Callable[[Answer], None] = lambda _: None,
    stop: Event | None = None,
) -> Answer:
    """Asks for so many greedy tokens and notes when each arrives.

    Args:
        stub: of a server.
        prompt: token ids.
        new: how many to generate.
        model: by name; of a server with one it need not be told.
        seen: called after every message.
        stop: when set, the stream is given up at its next message.

    Raises:
        RuntimeError: when the stream ends without having been given up and without all its tokens.
    """
    request = pb.GenerateStreamRequest(
        model=model,
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingParams(max_tokens=new, ignore_eos=True),
    )
    answer = Answer(time.perf_counter())
    call = stub.GenerateStream(request)
    async for event in call:
        answer.arrivals += [time.perf_counter()] * len(event.delta.token_ids)
        if event.HasField("summary"):
            answer.cached_tokens = event.summary.usage.cached_tokens
        seen(answer)
        if stop is not None and stop.is_set():
            call.cancel()
            return answer
    if len(answer.arrivals) != new:
        raise RuntimeError(f"asked for {new} tokens, got {len(answer.arrivals)}")
    return answer


def draw(source: random.Random, vocab_size: int, length: int) -> list[int]:
    """A random prompt."""
    return [source.randrange(NUM_SPECIAL, vocab_size) for _ in range(length)]


def percentile(values: Collection[float], share: float) -> float:
    """The smallest of the values that is not exceeded by this share of them."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def default_prefill_chunk() -> int:
    """What the server takes where it is not told."""
    return ServeConfig(models=Path()).chunk_tokens


def make_checkpoint(source: str, folder: Path) -> None:
    """A checkpoint with random weights from seed 0 of a preset or recipe file, unless the folder has one.

    Raises:
        RuntimeError: with what the trainer said.
    """
    if (folder / "run.json").exists():
        return
    run_module("model", "init", source, "--out", str(folder), "--seed", "0")


def digest(config: ModelConfig) -> str:
    """Tells models apart: eight hexadecimal digits of what they are."""
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()[:8]


def make_artifact(source: str, precision: str, *, build: Path, max_batch: int, threads: int) -> Options:
    """Exports random weights for a scenario, anew each time: the exporter may have changed.

    Raises:
        RuntimeError: when the weights or the artifact cannot be made.
    """
    folder = build / "scenarios" / Path(source).stem
    shutil.rmtree(folder / precision, ignore_errors=True)
    make_checkpoint(source, folder / "checkpoint")
    options = Options(folder / "checkpoint", folder, precision, threads, max_batch, context=0)
    export(options)
    return options


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return describe()


def facts(name: str, settings: DataclassInstance) -> dict[str, Any]:
    """What the results of every scenario begin with: which it is, of which version, with which settings, and where."""
    return {"scenario": name, "version": version(), "settings": asdict(settings), "machine": machine()}


def command_line(name: str) -> str:
    """The command that runs this process, a module of `benchmarks`, as people would give it again."""
    return shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])


def tell(
    name: str,
    measure: Callable[[], Mapping[str, Any]],
    render: Callable[[Mapping[str, Any]], str],
    folder: Path,
    draw_picture: Callable[[Mapping[str, Any]], str] | None = None,
    untold: Collection[str] = (),
    module: str | None = None,
) -> int:
    """Measures a scenario, writes its results, document and picture into a folder, and prints the results as JSON.

    The document ends with the command that gave it, `module` where that has another name; what is `untold` is for the
    picture alone. Returns the exit status: 1, and why on stderr, if it cannot be measured.
    """
    try:
        results = measure()
    except RuntimeError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    told = {key: value for key, value in results.items() if key not in untold}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(told, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    document = f"{render(results)}\nMeasured by `{command_line(module or name)}`.\n"
    (folder / f"{name}.md").write_text(document, encoding="utf-8")
    if draw_picture is not None:
        (folder / f"{name}.svg").write_text(draw_picture(results), encoding="utf-8")
    print(json.dumps(told, allow_nan=False))
    return 0


def milliseconds(seconds: float) -> str:
    """For people."""
    return f"{1e3 * seconds:.1f} ms"
