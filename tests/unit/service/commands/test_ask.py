"""The small client: what it prints, and what it exits with when the answer is not whole."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest

from onward.v1 import generation_pb2 as pb
from service.commands import ask as client
from service.config import AskConfig

DELTA = pb.GenerateStreamResponse(delta=pb.GenerateStreamResponse.Delta(text="hello"))
requests: list[pb.GenerateStreamRequest] = []
SUMMARY = pb.GenerateStreamResponse(summary=pb.GenerateStreamResponse.Summary())


def delta(index: int, text: str) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(delta=pb.GenerateStreamResponse.Delta(output_index=index, text=text))


def finished(index: int) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(finished=pb.GenerateStreamResponse.Finished(output_index=index))


def ask(
    monkeypatch: pytest.MonkeyPatch, events: Sequence[pb.GenerateStreamResponse | None], **options: Any
) -> tuple[int, str, str]:
    """Exit status, output and errors for a stream of `events`; None is a Ctrl-C."""

    requests.clear()

    class Call:
        def __init__(self) -> None:
            self._left = list(events)

        def __iter__(self) -> Call:
            return self

        def __next__(self) -> pb.GenerateStreamResponse:
            if not self._left:
                raise StopIteration
            if (event := self._left.pop(0)) is None:
                raise KeyboardInterrupt
            return event

        def cancel(self) -> bool:
            return True

    class Stub:
        def __init__(self, channel: Any) -> None:
            pass

        def GenerateStream(self, request: Any, timeout: float | None, metadata: Any) -> Call:  # noqa: N802
            assert timeout is None
            requests.append(request)
            return Call()

    monkeypatch.setattr("onward.methods.GenerationServiceStub", Stub)
    out, err = io.StringIO(), io.StringIO()
    status = client.ask(AskConfig(model="m", text="a", stream=True, **options), out, err)
    return status, out.getvalue(), err.getvalue()


def test_whole_stream_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, [DELTA, SUMMARY]) == (0, "hello\n", "")


def test_stream_without_summary_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, [DELTA]) == (1, "hello\n", "the stream ended before the answer did\n")


def test_interrupt_ends_the_client_as_shells_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, [DELTA, None]) == (130, "hello", "\n")


def test_several_answers_are_printed_each_when_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        delta(0, "a"),
        delta(1, "x"),
        delta(0, "b"),
        finished(1),
        finished(2),
        delta(0, "c"),
        finished(0),
        SUMMARY,
    ]
    assert ask(monkeypatch, events, n=3) == (0, "[1] x\n[2] \n[0] abc\n", "")


def test_beams_are_asked_for_in_place_of_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, [SUMMARY], n=2, beam_size=4)
    ask_beams = requests[0]
    ask(monkeypatch, [SUMMARY], n=2)
    ask_draws = requests[0]
    assert ask_beams.beam_search == pb.BeamSearchParams(beam_size=4, num_hypotheses=2)
    assert not ask_beams.sampling.ListFields()
    assert ask_draws.sampling == pb.SamplingParams(n=2)
    assert not ask_draws.HasField("beam_search")
