"""What `benchmarks.loading` makes of given times, what its watching sees, and that it runs; no time asserted."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from benchmarks import loading, scenario
from benchmarks.peers.onward import MODEL
from benchmarks.peers.protocol import Options
from benchmarks.scenario import Answer
from tests.artifacts import tiny_artifact


def test_waits_belong_to_the_changes_that_they_overlap() -> None:
    stream = Answer(0.0, [1.0, 2.0, 3.0, 5.0, 9.0, 10.0, 11.0, 12.0])
    timeline = loading.Timeline((stream,), 1.5, {"load": [(4.0, 4.5)], "reload": [(9.5, 10.5), (11.2, 11.3)]})
    found = loading.judge(timeline, lead=1)
    # What began before the watching did does not count, nor what ends when the first change has begun.
    assert (found["before"]["count"], found["before"]["max"]) == (1, 1.0)
    assert (found["changes"]["load"]["count"], found["changes"]["load"]["max"]) == (1, 2.0)
    assert found["changes"]["reload"]["count"] == 3
    assert found["changes"]["reload"]["seconds"] == pytest.approx(0.55)


class Clock:
    """A clock that the watched work alone sets; it knows which threads have looked at it since."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looks = threading.Condition()
        self._lookers: set[int] = set()

    def __call__(self) -> float:
        with self._looks:
            self._lookers.add(threading.get_ident())
            self._looks.notify_all()
            return self._seconds

    def pass_unseen(self) -> str:
        """Five seconds without a look, as when the work holds the interpreter's lock."""
        with self._looks:
            self._seconds += 5.0
        return "given"

    def pass_watched(self) -> str:
        """Five seconds, after each of which the event loop and the thread have looked."""
        for _ in range(5):
            with self._looks:
                self._seconds += 1.0
                self._lookers.clear()
                assert self._looks.wait_for(lambda: len(self._lookers) == 2, timeout=60)
        return "given"


def test_a_silence_lasts_as_long_as_the_work_lets_neither_the_loop_nor_a_thread_look() -> None:
    for silence in (5.0, 1.0):
        clock = Clock()
        work = clock.pass_unseen if silence == 5.0 else clock.pass_watched
        assert loading._watched(work, clock) == ({"seconds": 5.0, "loop": silence, "thread": silence}, "given")


def test_loading_is_measured_amid_streams_of_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "fp32" / MODEL
    place.parent.mkdir()
    place.symlink_to(tiny_artifact("decoder-only", context=1024), target_is_directory=True)
    options = Options(tmp_path, tmp_path, "fp32", threads=1, max_batch=2, context=0)
    monkeypatch.setattr(scenario, "make_artifact", lambda *_, **__: options)
    settings = loading.Settings(precision="fp32", streams=2, stream_prompt=4, lead=2, window=32, repeats=1)
    results = loading.measure(settings, tmp_path)
    assert set(results["changes"]) == {"load", "reload", "unload"}
    assert all(change["count"] >= 1 for change in results["changes"].values())
    assert set(results["stages"]) == set(loading.STAGES)
    json.dumps(results, allow_nan=False)
    text = loading.render(results)
    assert "| sessions and K/V |" in text
    assert "| reload |" in text
