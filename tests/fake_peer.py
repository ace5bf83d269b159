"""A pretended system under test; FAKE_PEER in its environment says how it misbehaves."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks.peers import protocol
from benchmarks.peers.protocol import Options, System, Window, main


class FakePeer(System):
    """Says 7. By its clock each token takes a millisecond, and nothing else does, however busy the machine is."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._now = 0.0
        vars(protocol)["time"] = SimpleNamespace(perf_counter=self._clock)
        self._behaviour = os.environ.get("FAKE_PEER", "")

    def _clock(self) -> float:
        # A call takes a moment at least.
        self._now += 1e-6
        return self._now

    def prepare(self) -> None:
        with (self._options.work / "log").open("a") as log:
            log.write("prepare\n")
        if self._behaviour == "refuses":
            raise RuntimeError(f"cannot convert {self._options.folder}")

    def load(self) -> str:
        print("noise on stdout")
        with (self._options.work / "log").open("a") as log:
            log.write(f"load {os.getpid()}\n")
        return "1.2"

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        batch = len(prompts)
        if self._behaviour == "crashes" and batch == 2:
            print("out of luck", file=sys.stderr)
            os._exit(3)
        if self._behaviour == "hangs" and batch == 2:
            time.sleep(60)
        if self._behaviour == "short" and batch == 2:
            return [[7]] * batch
        self._now += 0.001 * new
        return [[7] * new for _ in prompts]

    def score(self, windows: Sequence[Window]) -> float:
        return float("nan") if self._behaviour == "short" else 0.5 * sum(scored for _, scored in windows)

    def translate(self, sources: Sequence[Sequence[int]], lengths: Sequence[int], batching: Any, in_flight: int) -> Any:
        self._now += 1e-4 * sum(lengths)
        if self._behaviour == "short":
            return [[7]] * len(sources)
        return [[7] * length for length in lengths]

    def close(self) -> None:
        with (self._options.work / "log").open("a") as log:
            log.write("close\n")


if __name__ == "__main__":
    main(FakePeer)
