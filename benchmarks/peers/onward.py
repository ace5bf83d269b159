"""Ours as systems under test, speaking the peers' protocol: behind gRPC, or the engine alone in this process.

    python -m benchmarks.peers.onward --folder CHECKPOINT --work DIR --precision fp32
    python -m benchmarks.peers.onward_engine --folder CHECKPOINT --work DIR --precision fp32

Both run the same artifact, which `python -m export` makes from the checkpoint: a precision that it refuses is a failure
with its words. `-kv8` behind a precision keeps keys and values in eight bits.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import grpc

from benchmarks.frame.servers import serving
from benchmarks.peers.protocol import Options, main
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub

MODEL = "model"
KV_BITS = "-kv"
"""What a precision and the bits of its keys and values are joined by, where these are fewer than float32's."""
_MAX_SAID = 500


def artifact(options: Options) -> Path:
    """Where the artifact of a precision lies; its parent is a folder that the server can be given."""
    return options.work / options.precision / MODEL


@cache
def _exporter() -> str:
    """A digest of the exporter's sources: what another one has made is another artifact."""
    folder = Path(__file__).parents[2] / "export"
    sources = [(path.name, path.read_bytes()) for path in sorted(folder.glob("*.py"))]
    return hashlib.sha256(repr(sources).encode()).hexdigest()


def export(options: Options) -> None:
    """Exports the checkpoint, unless this very exporter has done so before or somebody else has put an artifact there.

    Raises:
        RuntimeError: with the exporter's last words.
    """
    place = artifact(options)
    stamp = place.parent.with_suffix(".exporter")
    if place.exists() and (not stamp.exists() or stamp.read_text(encoding="utf-8") == _exporter()):
        return
    shutil.rmtree(place.parent, ignore_errors=True)
    staged = options.work / f"{options.precision}.part"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    precision, _, kv_bits = options.precision.partition(KV_BITS)
    command = [sys.executable, "-m", "export", str(options.folder), "--out", str(staged / MODEL)]
    command += ["--precision", precision, *(["--kv-cache", f"int{kv_bits}"] if kv_bits else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"export exited with {done.returncode}: {done.stderr.strip()[-_MAX_SAID:]}")
    staged.rename(place.parent)
    stamp.write_text(_exporter(), encoding="utf-8")


class Onward:
    """A server in a process of its own on a loopback port, asked over gRPC, one unary call for each prompt."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._resources = ExitStack()
        self._stub: GenerationServiceStub | None = None

    def prepare(self) -> None:
        """Exports."""
        export(self._options)

    def load(self) -> str:
        """Starts the server and waits until its proof is done."""
        flags = ("--threads", str(self._options.threads), "--max-batch-size", str(self._options.max_batch))
        folder = artifact(self._options).parent
        target = self._resources.enter_context(serving(folder, *flags, "--no-metrics"))
        self._stub = GenerationServiceStub(self._resources.enter_context(grpc.insecure_channel(target)))
        return version()

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """All calls at once; the answers in order."""
        if self._stub is None:
            raise RuntimeError("not loaded")
        calls = [self._stub.Generate.future(_request(prompt, new)) for prompt in prompts]
        return [list(call.result().outputs[0].token_ids) for call in calls]

    def translate(
        self, sources: Sequence[Sequence[int]], lengths: Sequence[int], _: Mapping[str, Any], in_flight: int
    ) -> list[list[int]]:
        """A call for each source, so many at a time; the server batches as it likes."""
        if self._stub is None:
            raise RuntimeError("not loaded")
        gate, calls = threading.Semaphore(in_flight), []
        for source, length in zip(sources, lengths, strict=True):
            gate.acquire()
            calls.append(self._stub.Generate.future(_request(source, length)))
            calls[-1].add_done_callback(lambda _: gate.release())
        return [list(call.result().outputs[0].token_ids) for call in calls]

    def close(self) -> None:
        """Stops the server."""
        self._resources.close()


def version() -> str:
    """This distribution's version and ONNX Runtime's."""
    return f"{installed('onward')} (onnxruntime {installed('onnxruntime')})"


def _request(prompt: Sequence[int], new: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingParams(max_tokens=new, ignore_eos=True),
    )


if __name__ == "__main__":
    main(Onward)
