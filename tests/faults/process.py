"""A server in a process of its own, over tiny real artifacts of both families, for tests that mean it harm.

What it looks like from outside is all that they know: its answers, its metrics, its memory, its exit status.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from model.spec import artifact
from model.spec.chat import ChatSettings
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from tests.artifacts import rehash, tiny_artifact

DECODER, TRANSLATOR = "decoder-only", "encoder-decoder"
MODELS = (DECODER, TRANSLATOR)
LONG = "long"
"""A decoder-only model with room for so many tokens that its streams last for seconds; see `put_long_artifact`."""
LONG_TOKENS = 30_000
SLOTS = 8
_LISTENING = re.compile(r"listening on [\d.]+:(\d+); .*metrics on (\S+)")
_STOP_SECONDS = 60.0
_SETTLE_SECONDS = 120.0


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

    def _samples(self) -> Iterator[Sample]:
        with urllib.request.urlopen(self.metrics_url, timeout=30) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return (sample for family in families for sample in family.samples)

    def metrics(self) -> Mapping[tuple[str, str], float]:
        """Samples by (name without prefix, model or ""), summed over other labels."""
        found: dict[tuple[str, str], float] = defaultdict(float)
        for sample in self._samples():
            found[sample.name.removeprefix("onward_"), sample.labels.get("model_name", "")] += sample.value
        return found

    def sample(self, name: str, **labels: str) -> float:
        """One sample of a metric, by its name without the prefix; 0 while it was never touched."""
        wanted = f"onward_{name}", labels
        return next((each.value for each in self._samples() if (each.name, each.labels) == wanted), 0.0)

    def held(self) -> float:
        """Requests that run or wait, and shares of K/V memory in use, over all models; 0 when nothing is held."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")
        return sum(value for (name, _), value in self.metrics().items() if name in names)

    def settle(self) -> None:
        """Waits until nothing is held.

        Raises:
            AssertionError: when something still is after two minutes: it leaked.
        """
        until(lambda: self.held() == 0, "requests still run or wait")

    def status(self, name: str) -> int:
        """A number of /proc/PID/status, as in "Threads", or "VmRSS" in KiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(re.findall(rf"^{name}:\s+(\d+)", text, re.MULTILINE)[0])

    def forget_peak(self) -> int:
        """Has "VmHWM" of `status` begin anew at the resident memory of now, which is returned, in KiB."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5", encoding="ascii")
        return self.status("VmRSS")

    def num_descriptors(self) -> int:
        """Open files and sockets."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signals it and returns its exit status."""
        self.process.send_signal(number)
        return self.process.wait(_STOP_SECONDS)


@contextmanager
def serving(
    folder: Path,
    *flags: str,
    module: str = "service",
    limit: Callable[[], None] | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[ServerProcess]:
    """Serves both families for the length of the block; killed at its end if it has not been stopped.

    Args:
        folder: an empty one, for the models.
        flags: besides those that keep it small.
        module: what is run in its place, with the same command line.
        limit: run in the child before it starts.
        environment: all of it, in place of our own.
        cwd: the folder that it is started in, in place of our own.
    """
    for model in MODELS:
        if not (folder / model).exists():
            (folder / model).symlink_to(tiny_artifact(model), target_is_directory=True)
    command: Sequence[str] = [
        sys.executable, "-m", module, "serve", "--models", str(folder), "--port", "0", "--metrics-port", "0",
        "--threads", "1", "--no-spin", "--no-calibrate", "--max-batch-size", str(SLOTS), "--log-level", "error", *flags,
    ]  # fmt: skip
    given: dict[str, Any] = {"preexec_fn": limit, "env": environment, "cwd": cwd}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **given) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = _LISTENING.search(line)
            assert found, f"it did not start: {line!r}, {process.wait(_STOP_SECONDS)}"
            yield ServerProcess(process, f"127.0.0.1:{found[1]}", found[2])
        finally:
            process.kill()


def put_complete_artifacts(folder: Path) -> None:
    """Artifacts that offer all there is: attention weights, and a template for conversations."""
    for model in MODELS:
        shutil.copytree(tiny_artifact(model, explain_graph=True), folder / model)
    own = folder / DECODER
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (own / artifact.CHAT).write_text(ChatSettings(template).to_json())
    manifest = artifact.read_manifest(own)
    files = {**manifest.files, artifact.CHAT: artifact.hash_file(own / artifact.CHAT)}
    (own / artifact.MANIFEST).write_text(dataclasses.replace(manifest, files=files).to_json())
    rehash(own)


def put_long_artifact(folder: Path) -> None:
    """The model `LONG`."""
    (folder / LONG).symlink_to(tiny_artifact(DECODER, context=LONG_TOKENS + 384), target_is_directory=True)


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
    """A client that repeats its requests, and must get bit-identical answers beside any other load."""

    def __init__(self, server: ServerProcess) -> None:
        self._stub = GenerationServiceStub(server.channel())
        self.num_checks = 0
        self._expected = {model: self._ask(model) for model in MODELS}

    def check(self) -> None:
        """Asks again.

        Raises:
            AssertionError: when an answer differs.
        """
        for model, expected in self._expected.items():
            assert self._ask(model) == expected

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Asks on and on while the block runs, at the same time as whatever that does.

        Raises:
            AssertionError: when an answer differed, or there was none.
        """
        is_over = threading.Event()
        faults: list[BaseException] = []

        def ask_on() -> None:
            try:
                while not is_over.is_set():
                    self.check()
                    self.num_checks += 1
            except BaseException as error:
                faults.append(error)

        before = self.num_checks
        asking = threading.Thread(target=ask_on)
        asking.start()
        try:
            yield
        finally:
            is_over.set()
            asking.join()
        if faults:
            raise AssertionError("a neighbour was harmed") from faults[0]
        assert self.num_checks > before, "no request ran beside the block"

    def _ask(self, model: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
        request = greedy(model, response=pb.ResponseOptions(logprobs=0))
        (output,) = self._stub.Generate(request, timeout=600).outputs
        return tuple(output.token_ids), tuple(each.logprob for each in output.logprobs)


class Relay:
    """A way to a server that can be cut without a word to either end, as when a machine on it loses its power."""

    def __init__(self, server: ServerProcess) -> None:
        self._port = server.port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._flows = threading.Event()
        self._flows.set()
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def target(self) -> str:
        """Where clients find it."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """Nothing comes through any more, and nothing is closed."""
        self._flows.clear()

    def close(self) -> None:
        """Closes all of it, at last."""
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [client, server]
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while (data := source.recv(4096)) and self._flows.is_set():
                target.sendall(data)
        except OSError:
            return
