"""The small client: what it prints, and what it exits with when the answer is not whole."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from onward.v1 import generation_pb2 as pb
from service.commands import ask as client
from service.config import AskConfig, parse

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
            requests.append(request)
            return Call()

    monkeypatch.setattr("onward.methods.GenerationServiceStub", Stub)
    out, err = io.StringIO(), io.StringIO()
    config = options.pop("config", None) or AskConfig(model="m", text="a", stream=True, **options)
    status = client.ask(config, out, err)
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


def test_schema_is_read_from_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"const": "é"}', encoding="utf-8")
    ask(monkeypatch, [SUMMARY], json_schema=tmp_path / "schema.json")
    assert requests[0].structured_output.json_schema == '{"const": "é"}'


def test_beams_are_asked_for_in_place_of_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, [SUMMARY], n=2, beam_size=4)
    ask_beams = requests[0]
    ask(monkeypatch, [SUMMARY], n=2)
    ask_draws = requests[0]
    assert ask_beams.beam_search == pb.BeamSearchParams(beam_size=4, num_hypotheses=2)
    assert not ask_beams.sampling.ListFields()
    assert ask_draws.sampling == pb.SamplingParams(n=2)
    assert not ask_draws.HasField("beam_search")


# Each flag of a request, and the field that it sets. Others are of the connection and the output.
FLAGS = {
    "--priority 5": pb.GenerateStreamRequest(priority=5),
    "--timeout-seconds 2.5": pb.GenerateStreamRequest(timeout_seconds=2.5),
    "--partial-on-deadline": pb.GenerateStreamRequest(partial_on_deadline=True),
    "--target-prefix b": pb.GenerateStreamRequest(target_prefix="b"),
    "--temperature 0": pb.GenerateStreamRequest(sampling=pb.SamplingParams(temperature=0)),
    "--top-p 0.5": pb.GenerateStreamRequest(sampling=pb.SamplingParams(top_p=0.5)),
    "--top-k 0": pb.GenerateStreamRequest(sampling=pb.SamplingParams(top_k=0)),
    "--min-p 0.1": pb.GenerateStreamRequest(sampling=pb.SamplingParams(min_p=0.1)),
    "--repetition-penalty 1.5": pb.GenerateStreamRequest(sampling=pb.SamplingParams(repetition_penalty=1.5)),
    "--presence-penalty -1": pb.GenerateStreamRequest(sampling=pb.SamplingParams(presence_penalty=-1)),
    "--frequency-penalty 2": pb.GenerateStreamRequest(sampling=pb.SamplingParams(frequency_penalty=2)),
    "--seed 0": pb.GenerateStreamRequest(sampling=pb.SamplingParams(seed=0)),
    "--n 2": pb.GenerateStreamRequest(sampling=pb.SamplingParams(n=2)),
    "--logit-bias 4=-100,5=2.5": pb.GenerateStreamRequest(sampling=pb.SamplingParams(logit_bias={4: -100, 5: 2.5})),
    "--allowed-token-ids 4,5": pb.GenerateStreamRequest(sampling=pb.SamplingParams(allowed_token_ids=[4, 5])),
    "--max-tokens 3": pb.GenerateStreamRequest(stopping=pb.StoppingParams(max_tokens=3)),
    "--min-tokens 3": pb.GenerateStreamRequest(stopping=pb.StoppingParams(min_tokens=3)),
    "--stop [x": pb.GenerateStreamRequest(stopping=pb.StoppingParams(stop=["[x"])),
    '--stop ["x","y"]': pb.GenerateStreamRequest(stopping=pb.StoppingParams(stop=["x", "y"])),
    "--stop-token-ids 4,5": pb.GenerateStreamRequest(stopping=pb.StoppingParams(stop_token_ids=[4, 5])),
    "--ignore-eos": pb.GenerateStreamRequest(stopping=pb.StoppingParams(ignore_eos=True)),
    "--include-stop-in-output": pb.GenerateStreamRequest(stopping=pb.StoppingParams(include_stop_in_output=True)),
    "--regex a+": pb.GenerateStreamRequest(structured_output=pb.StructuredOutput(regex="a+")),
    '--choice ["x","y"]': pb.GenerateStreamRequest(
        structured_output=pb.StructuredOutput(choice=pb.Choices(texts=["x", "y"]))
    ),
    "--beam-size 2": pb.GenerateStreamRequest(beam_search=pb.BeamSearchParams(beam_size=2)),
    "--length-penalty 0": pb.GenerateStreamRequest(beam_search=pb.BeamSearchParams(length_penalty=0)),
    "--patience 0": pb.GenerateStreamRequest(beam_search=pb.BeamSearchParams(patience=0)),
    "--no-repeat-ngram-size 0": pb.GenerateStreamRequest(beam_search=pb.BeamSearchParams(no_repeat_ngram_size=0)),
}


@pytest.mark.parametrize("flags", FLAGS)
def test_flag_sets_its_field_alone(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(["ask", "m", "a", "--stream", *flags.split()], {})
    monkeypatch.setattr("onward.retries.Attempts.left_seconds", getattr(config, "timeout_seconds", None))
    assert ask(monkeypatch, [SUMMARY], config=config)[0] == 0
    expected = pb.GenerateStreamRequest(model="m", text="a")
    expected.MergeFrom(FLAGS[flags])
    sent = requests[0]
    # A group without a field says nothing.
    if not expected.HasField("stopping"):
        assert not sent.stopping.ListFields()
        sent.ClearField("stopping")
    assert sent == expected


@pytest.mark.parametrize(
    ("flags", "roles"), [(["--chat"], ["user"]), (["--system", "s"], ["system", "user"]), ([], [])]
)
def test_text_is_a_message_of_a_conversation_where_that_is_asked(
    flags: list[str], roles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(monkeypatch, [SUMMARY], config=parse(["ask", "m", "a", "--stream", *flags], {}))
    assert [message.role for message in requests[0].chat.messages] == roles
    assert requests[0].text == ("" if roles else "a")
