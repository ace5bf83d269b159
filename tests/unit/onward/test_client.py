"""The client's arithmetic and translations: arguments to messages, statuses to errors, refusals to pauses."""

from __future__ import annotations

import itertools
import math
from typing import Any

import grpc
import pytest

from onward import (
    CallError,
    Chunk,
    ClientError,
    Connection,
    FieldViolation,
    FinishReason,
    InvalidArgument,
    ResourceExhausted,
    RetryPolicy,
    Tls,
    Unavailable,
    chat,
    requests,
)
from onward.answers import StreamFacts, generation
from onward.errors import Details, call_error
from onward.requests import CallOptions, GenerateOptions
from onward.retries import Attempts
from onward.v1 import generation_pb2 as pb
from service.errors import DeadlineUnreachable, InvalidRequest, NotServing, Overloaded, RequestError
from service.transport.status import STATUS_CODES, Status, to_status

FIELDS = set(pb.GenerateRequest.DESCRIPTOR.fields_by_name)
PROMPTS = {field.name for field in pb.GenerateRequest.DESCRIPTOR.oneofs_by_name["prompt"].fields}


def test_options_are_the_fields_of_the_contract_and_no_two_share_a_name() -> None:
    own = FIELDS - PROMPTS - set(requests.GROUPS) - {"timeout_seconds"}
    nested = [set(message.DESCRIPTOR.fields_by_name) for message in requests.GROUPS.values()]
    names = set(GenerateOptions.__annotations__) - set(CallOptions.__annotations__)
    assert names == own.union(*nested)
    assert len(names) == len(own) + sum(map(len, nested))


def test_every_option_is_set_in_its_field() -> None:
    options: GenerateOptions = {
        "request_id": "r",
        "model": "m",
        "priority": 2,
        "partial_on_deadline": True,
        "temperature": 0.0,
        "logit_bias": {3: -1.0},
        "max_tokens": 4,
        "stop": ["a", "b"],
        "beam_size": 3,
        "logprobs": 0,
        "cost": True,
        "timeout_seconds": 1.0,
        "traceparent": "00-0-0-00",
    }
    assert requests.generate("text", options) == pb.GenerateRequest(
        request_id="r",
        model="m",
        text="text",
        priority=2,
        partial_on_deadline=True,
        sampling=pb.SamplingParams(temperature=0.0, logit_bias={3: -1.0}),
        stopping=pb.StoppingParams(max_tokens=4, stop=["a", "b"]),
        beam_search=pb.BeamSearchParams(beam_size=3),
        response=pb.ResponseOptions(logprobs=0, cost=True),
    )
    assert requests.stream("text", options).SerializeToString() == (
        requests.generate("text", options).SerializeToString()
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"json_schema": '{"type": "null"}'}, pb.StructuredOutput(json_schema='{"type": "null"}')),
        ({"json_schema": {"type": "null"}}, pb.StructuredOutput(json_schema='{"type": "null"}')),
        ({"json": True}, pb.StructuredOutput(json=True)),
        ({"regex": "a+"}, pb.StructuredOutput(regex="a+")),
        ({"grammar": "start: A"}, pb.StructuredOutput(grammar="start: A")),
        ({"choice": ("yes", "no")}, pb.StructuredOutput(choice=pb.Choices(texts=["yes", "no"]))),
    ],
)
def test_structured_output_is_given_by_the_name_of_its_form(
    options: GenerateOptions, expected: pb.StructuredOutput
) -> None:
    assert requests.generate("a", options) == pb.GenerateRequest(text="a", structured_output=expected)


def test_several_forms_and_one_text_as_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="only one form of a structured output may be given, got json, regex"):
        requests.generate("a", {"regex": "a", "json": True})
    with pytest.raises(TypeError, match="choice: must be a sequence of texts"):
        requests.generate("a", {"choice": "yes"})


def test_none_is_not_set_and_zero_is() -> None:
    assert requests.generate("a", {"temperature": None, "model": None, "stop": None}) == pb.GenerateRequest(text="a")
    assert not requests.generate("a", {"beam_size": 2, "temperature": None}).HasField("sampling")
    assert requests.generate("a", {"temperature": 0}).sampling.HasField("temperature")


def test_prompt_is_text_or_ids_or_a_conversation() -> None:
    turns = chat(("system", "a"), ("user", "b"))
    assert [(turn.role, turn.content) for turn in turns.messages] == [("system", "a"), ("user", "b")]
    assert requests.generate(turns, {}).chat == turns
    assert requests.generate([1, 2], {}).token_ids.ids == [1, 2]
    assert requests.generate("", {}).WhichOneof("prompt") == "text"
    assert requests.score([1], "b", "m") == pb.ScoreRequest(model="m", token_ids=pb.TokenIds(ids=[1]), target_text="b")
    assert requests.score("a", [2], "").target_token_ids.ids == [2]
    assert requests.score("a", None, "").WhichOneof("target") is None


@pytest.mark.parametrize("prompt", [b"bytes", bytearray(b"bytes"), memoryview(b"bytes")])
def test_bytes_are_no_token_ids(prompt: Any) -> None:
    with pytest.raises(TypeError, match="prompt: must be text or token ids"):
        requests.generate(prompt, {})
    with pytest.raises(TypeError, match="target: must be text or token ids"):
        requests.score("a", prompt, "")


@pytest.mark.parametrize(("name", "value"), [("temprature", 1.0), ("max_tokens", 1 << 40), ("seed", -1)])
def test_arguments_that_no_message_can_hold_are_refused_before_sending(name: str, value: Any) -> None:
    options: Any = {name: value}
    with pytest.raises(ValueError, match=name if name == "temprature" else "range"):
        requests.generate("a", options)


def test_deadline_is_written_where_there_is_a_place_for_it() -> None:
    for request in (pb.GenerateRequest(), pb.GenerateStreamRequest()):
        requests.carry_deadline(request, 1.5)
        assert request.timeout_seconds == 1.5
        requests.carry_deadline(request, None)
        assert request.timeout_seconds == 1.5
    estimate = pb.EstimateRequest()
    requests.carry_deadline(estimate, 1.5)
    assert estimate == pb.EstimateRequest()


@pytest.mark.parametrize(("target", "key"), [("", "k"), ("a:1", ""), ("a:1", "k\n"), ("a:1", "é"), ("a:1", "a\x07")])
def test_invalid_connection_is_refused_without_showing_the_key(target: str, key: str) -> None:
    with pytest.raises(ValueError, match=r"^(target|api_key): ") as caught:
        Connection(target, api_key=key)
    assert not key.strip() or key.strip() not in str(caught.value).removeprefix("api_key")


def test_secrets_are_not_shown() -> None:
    tls = Tls(client_certificate=b"certificate", client_key=b"SECRET")
    assert "SECRET" not in repr(Connection("a:1", tls, "SECRET"))


@pytest.mark.parametrize("half", [{"client_key": b"k"}, {"client_certificate": b"c"}])
def test_half_a_client_certificate_is_refused(half: dict[str, bytes]) -> None:
    with pytest.raises(ValueError, match="belong together"):
        Tls(**half)  # type: ignore[arg-type]


class Failed(grpc.RpcError):
    """A call that ended as a status says."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._status.code

    def details(self) -> str:
        return self._status.message

    def trailing_metadata(self) -> Any:
        return self._status.trailing_metadata


def failed(error: RequestError) -> CallError:
    return call_error(Failed(to_status(error)), "r")


def test_every_status_of_the_server_has_a_class_of_its_own() -> None:
    codes = set(STATUS_CODES.values())
    kinds = {code: type(call_error(Failed(Status(code, "words")), None)) for code in codes}
    assert CallError not in kinds.values()
    assert len(set(kinds.values())) == len(codes)
    assert all(kind.__name__.upper() == code.name.replace("_", "") for code, kind in kinds.items())
    other = call_error(Failed(Status(grpc.StatusCode.DATA_LOSS, "words")), None)
    assert (type(other), other.code, str(other)) == (CallError, grpc.StatusCode.DATA_LOSS, "DATA_LOSS: words")


def test_error_names_the_field_the_moment_and_the_request() -> None:
    invalid = failed(InvalidRequest("sampling.top_p", 2.0, "must be at most 1"))
    assert isinstance(invalid, InvalidArgument)
    assert invalid.violations == (FieldViolation("sampling.top_p", "sampling.top_p: must be at most 1, got 2.0"),)
    assert (invalid.request_id, invalid.retry_after_seconds, invalid.reason) == ("r", None, None)
    overloaded = failed(Overloaded("m", 8, 8, 1.25))
    assert isinstance(overloaded, ResourceExhausted)
    assert overloaded.retry_after_seconds == 1.25
    assert isinstance(overloaded.__cause__, Failed)


@pytest.mark.parametrize("retry", [None, 0.5])
def test_refusal_by_deadline_has_its_numbers(retry: float | None) -> None:
    numbers = {"queue_seconds": 1.0, "prefill_seconds": 2.0, "decode_seconds": 3.0, "left_seconds": 4.0}
    error = failed(DeadlineUnreachable(**numbers, retry_after_seconds=retry))
    assert (error.reason, error.retry_after_seconds) == ("DEADLINE_UNREACHABLE", retry)
    assert error.facts["predicted_decode_seconds"] == "3.000000"


@pytest.mark.parametrize("blob", [b"\xff\xff", to_status(Overloaded("m", 1, 1, 1.0)).trailing_metadata[0][1]])
def test_details_that_are_another_status_or_garbage_do_not_hide_the_status(blob: bytes) -> None:
    status = Status(grpc.StatusCode.UNAVAILABLE, "no healthy upstream", (("grpc-status-details-bin", blob),))
    error = call_error(Failed(status), None)
    assert isinstance(error, Unavailable)
    assert (error.message, error.retry_after_seconds) == ("no healthy upstream", None)


def error_of(kind: type[CallError], retry: float | None = None) -> CallError:
    return kind(grpc.StatusCode.UNKNOWN, "", details=Details(retry_after_seconds=retry))


def test_pauses_grow_to_their_limit_and_begin_where_the_server_says() -> None:
    policy = RetryPolicy(initial_backoff_seconds=0.25, max_backoff_seconds=1.0)
    unavailable, full = error_of(Unavailable), error_of(ResourceExhausted, 2.0)
    longest = [policy.pause_seconds(unavailable, attempt, lambda: 1.0) for attempt in (1, 2, 3, 4, 5000)]
    assert longest == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert policy.pause_seconds(unavailable, 3, lambda: 0.0) == 0.0
    pauses = [policy.pause_seconds(full, 2, lambda share=share: share) for share in (0.0, 0.5, 1.0)]
    assert pauses == [2.0, 2.25, 2.5]


@pytest.mark.parametrize(
    ("error", "is_repeatable", "helps"),
    [
        (error_of(ResourceExhausted, 0.0), False, True),
        (error_of(ResourceExhausted), True, False),
        (error_of(Unavailable), True, True),
        (error_of(Unavailable), False, False),
        (error_of(InvalidArgument, 1.0), True, False),
    ],
)
def test_only_refusals_with_a_delay_and_unavailable_are_retried(
    error: CallError, is_repeatable: bool, helps: bool
) -> None:
    attempts = Attempts(RetryPolicy(), None, is_repeatable=is_repeatable)
    if helps:
        assert attempts.pause_seconds(error) >= 0
    else:
        with pytest.raises(CallError) as caught:
            attempts.pause_seconds(error)
        assert caught.value is error


@pytest.mark.parametrize("most", [1, 2, 5])
def test_tries_are_bounded(most: int) -> None:
    attempts = Attempts(RetryPolicy(max_attempts=most), None)
    for _ in range(most - 1):
        attempts.pause_seconds(error_of(Unavailable))
    with pytest.raises(Unavailable):
        attempts.pause_seconds(error_of(Unavailable))


def test_pause_that_would_outlast_the_deadline_is_not_begun() -> None:
    now = itertools.count(100)
    attempts = Attempts(RetryPolicy(max_attempts=100), 10.0, clock=lambda: next(now), draw=lambda: 0.0)
    assert attempts.left_seconds == 9.0
    assert attempts.pause_seconds(error_of(ResourceExhausted, 7.5)) == 7.5
    with pytest.raises(ResourceExhausted):
        attempts.pause_seconds(error_of(ResourceExhausted, 7.0))
    assert [attempts.left_seconds for _ in range(8)] == [6, 5, 4, 3, 2, 1, 0, 0]


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf])
def test_timeout_that_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="timeout_seconds: must be finite and above 0"):
        Attempts(RetryPolicy(), seconds)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"initial_backoff_seconds": -1.0},
        {"initial_backoff_seconds": 6.0},
        {"max_backoff_seconds": math.inf},
        {"max_backoff_seconds": math.nan},
    ],
)
def test_policy_that_cannot_be_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^(max_attempts|initial_backoff_seconds): "):
        RetryPolicy(**wrong)


def test_finish_reasons_are_the_contracts() -> None:
    names = {name.removeprefix("FINISH_REASON_").lower() for name in pb.FinishReason.keys()}  # noqa: SIM118 (no dict)
    assert {*FinishReason} == (names - {"unspecified"}) | {"unknown"}


def test_answer_of_a_newer_server_is_read_all_the_same() -> None:
    answer = pb.GenerateResponse(outputs=[pb.GenerationOutput(finish_reason=99)])  # type: ignore[arg-type]
    assert generation(answer).finish_reason is FinishReason.UNKNOWN
    facts = StreamFacts(None)
    assert facts._take(pb.GenerateStreamResponse()) is None
    assert not facts.is_complete


def test_generation_has_the_answers_fields() -> None:
    output = pb.GenerationOutput(
        index=0, text="a", token_ids=[5], finish_reason=pb.FINISH_REASON_STOP, matched_stop=pb.MatchedStop(text="b")
    )
    best = pb.GenerationOutput(index=1, text="b", finish_reason=pb.FINISH_REASON_END_OF_SEQUENCE, score=-0.5)
    answer = pb.GenerateResponse(outputs=[output, best], model="m", request_id="r", usage=pb.Usage(prompt_tokens=3))
    found = generation(answer)
    assert (found.text, found.model, found.request_id) == ("a", "m", "r")
    assert (found.cost, found.usage.prompt_tokens) == (None, 3)
    first, second = found.outputs
    assert (first.token_ids, first.matched_stop, first.score) == ((5,), "b", None)
    assert (second.finish_reason, second.matched_stop, second.score) == (FinishReason.END_OF_SEQUENCE, None, -0.5)
    answer.cost.attended_pairs = 7
    cost = generation(answer).cost
    assert cost is not None
    assert cost.attended_pairs == 7


def test_stream_has_outputs_as_chunks_and_the_rest_as_attributes() -> None:
    facts = StreamFacts("mine")
    event = pb.GenerateStreamResponse
    events = [
        event(accepted=event.Accepted(request_id="mine", model="m")),
        event(prompt=event.Prompt(logprobs=[pb.TokenLogprobs(logprob=-1.0)])),
        event(prompt=event.Prompt(logprobs=[pb.TokenLogprobs(logprob=-2.0)])),
        event(delta=event.Delta(output_index=1, text="a", token_ids=[5])),
        event(finished=event.Finished(output_index=1, finish_reason=pb.FINISH_REASON_LENGTH, score=-0.25)),
        event(summary=event.Summary(usage=pb.Usage(generated_tokens=1), cost=pb.Cost(attended_pairs=7))),
    ]
    chunks = [chunk for each in events if (chunk := facts._take(each)) is not None]
    assert chunks == [
        Chunk(output_index=1, text="a", token_ids=(5,)),
        Chunk(output_index=1, finish_reason=FinishReason.LENGTH, score=-0.25),
    ]
    assert (facts.request_id, facts.model, facts.is_complete) == ("mine", "m", True)
    assert [each.logprob for each in facts.prompt_logprobs] == [-1.0, -2.0]
    assert facts.cost is not None
    assert facts.cost.attended_pairs == 7
    assert issubclass(CallError, ClientError)


def test_channel_comes_back_as_soon_as_the_client_does() -> None:
    policy = RetryPolicy(initial_backoff_seconds=0.25, max_backoff_seconds=2.0)
    assert dict(policy.channel_options) == {
        "grpc.initial_reconnect_backoff_ms": 250,
        "grpc.max_reconnect_backoff_ms": 2000,
    }
    assert isinstance(failed(NotServing("draining")), Unavailable)
