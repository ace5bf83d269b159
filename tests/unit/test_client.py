"""The small client: what it prints, and what it exits with when the answer is not whole."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from proto.onward.v1 import generation_pb2 as pb
from service import client
from service.config import AskConfig

DELTA = pb.GenerateStreamResponse(delta=pb.GenerateStreamResponse.Delta(text="hello"))
SUMMARY = pb.GenerateStreamResponse(summary=pb.GenerateStreamResponse.Summary())


def ask(monkeypatch: pytest.MonkeyPatch, events: Sequence[pb.GenerateStreamResponse | None]) -> tuple[int, str, str]:
    """Exit status, output and errors for a stream of `events`; None is a Ctrl-C."""

    class Stub:
        def __init__(self, channel: Any) -> None:
            pass

        def GenerateStream(self, request: Any, timeout: float | None) -> Iterator[pb.GenerateStreamResponse]:  # noqa: N802
            for event in events:
                if event is None:
                    raise KeyboardInterrupt
                yield event

    monkeypatch.setattr(client, "GenerationServiceStub", Stub)
    out, err = io.StringIO(), io.StringIO()
    status = client.ask(AskConfig(model="m", text="a", stream=True), out, err)
    return status, out.getvalue(), err.getvalue()


def test_whole_stream_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, [DELTA, SUMMARY]) == (0, "hello\n", "")


def test_stream_without_summary_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, [DELTA]) == (1, "hello\n", "the stream ended before the answer did\n")


def test_interrupt_ends_the_client_as_shells_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, [DELTA, None]) == (130, "hello", "\n")
