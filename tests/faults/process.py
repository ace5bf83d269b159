"""A server in a process of its own, over tiny real artefacts of both families, for tests that mean it harm.

What it looks like from outside is all that they know: its answers, its metrics, its memory, its exit status.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from proto.onward.v1 import generation_pb2 as pb
from proto.onward.v1.generation_pb2_grpc import GenerationServiceStub
from tests.artifacts import tiny_artifact

DECODER, TRANSLATOR = "decoder-only", "encoder-decoder"
MODELS = (DECODER, TRANSLATOR)
SLOTS = 8
_LISTENING = re.compile(r"listening on [\d.]+:(\d+); .*metrics on (\S+)")
_STOP_SECONDS = 60.0
_SETTLE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that runs.

    Args:
        process: itself.
        target: "host:port" of its gRPC port.
        metrics_url: where its metrics are.
    """

    process: subprocess.Popen[str]
    target: str
    metrics_url: str

    @property
    def port(self) -> int:
        """Of gRPC."""
        return int(self.target.rpartition(":")[2])

    def channel(self, *options: tuple[str, Any]) -> grpc.Channel:
        """A connection of its own."""
        return grpc.insecure_channel(self.target, [("grpc.use_local_subchannel_pool", 1), *options])

    def metrics(self) -> Mapping[tuple[str, str], float]:
        """Samples by (name without prefix, model or ""), summed over other labels."""
        with urllib.request.urlopen(self.metrics_url, timeout=30) as answer:
            text = answer.read().decode()
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = sample.name.removeprefix("onward_"), sample.labels.get("model_name", "")
                found[key] = found.get(key, 0.0) + sample.value
        return found

    def held(self) -> float:
        """Requests that run or wait, and shares of K/V memory in use, over all models; 0 when nothing is held."""
        names = ("num_requests_running", "num_requests_waiting")
        metrics = self.metrics()
        return sum(metrics.get((name, model), 0.0) for name in names for model in MODELS)

    def settle(self) -> None:
        """Waits until nothing is held.

        Raises:
            AssertionError: when something still is after half a minute: it leaked.
        """
        until(lambda: self.held() == 0, "requests still run or wait")

    def status(self, name: str) -> int:
        """A number of /proc/PID/status, as in "Threads", or "VmRSS" in KiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(re.findall(rf"^{name}:\s+(\d+)", text, re.MULTILINE)[0])

    def num_descriptors(self) -> int:
        """Open files and sockets."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signals it and returns its exit status."""
        self.process.send_signal(number)
        return self.process.wait(_STOP_SECONDS)


@contextmanager
def serving(
    folder: Path, *flags: str, module: str = "service", limit: Callable[[], None] | None = None
) -> Iterator[ServerProcess]:
    """Serves both families for the length of the block; killed at its end if it has not been stopped.

    Args:
        folder: an empty one, for the models.
        flags: besides those that keep it small.
        module: what is run in its place, with the same command line.
        limit: run in the child before it starts.
    """
    for model in MODELS:
        if not (folder / model).exists():
            (folder / model).symlink_to(tiny_artifact(model), target_is_directory=True)
    command: Sequence[str] = [
        sys.executable, "-m", module, "serve", "--models", str(folder), "--port", "0", "--metrics-port", "0",
        "--threads", "1", "--no-spin", "--max-batch-size", str(SLOTS), "--log-level", "error", *flags,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=limit) as process:  # noqa: PLW1509
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = _LISTENING.search(line)
            assert found, f"it did not start: {line!r}, {process.wait(_STOP_SECONDS)}"
            yield ServerProcess(process, f"127.0.0.1:{found[1]}", found[2])
        finally:
            process.kill()


def until(condition: Callable[[], bool], complaint: str, seconds: float = _SETTLE_SECONDS) -> None:
    """Waits for a condition, and fails with the complaint where it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.02)


def greedy(model: str, text: str = "3 May", max_tokens: int = 24, **fields: Any) -> pb.GenerateRequest:
    """A request whose answer is always the same."""
    return pb.GenerateRequest(
        model=model,
        text=text,
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        **fields,
    )


def streamed(request: pb.GenerateRequest) -> pb.GenerateStreamRequest:
    """The same, to be streamed."""
    return pb.GenerateStreamRequest.FromString(request.SerializeToString())


class Neighbour:
    """Somebody who asks the same all the while, and must have the same answers, bit for bit, whoever else is there."""

    def __init__(self, server: ServerProcess) -> None:
        self._stub = GenerationServiceStub(server.channel())
        self._expected = {model: self._ask(model) for model in MODELS}

    def check(self) -> None:
        """Asks again.

        Raises:
            AssertionError: when an answer differs.
        """
        for model, expected in self._expected.items():
            assert self._ask(model) == expected

    def _ask(self, model: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
        request = greedy(model, response=pb.ResponseOptions(logprobs=0))
        (output,) = self._stub.Generate(request, timeout=60).outputs
        return tuple(output.token_ids), tuple(each.logprob for each in output.logprobs)
