"""Thoughts of an answer, however it is cut into pieces."""

from __future__ import annotations

import itertools
import json
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.v1 import generation_pb2 as pb
from service.engine.types import FinishReason, SamplingParams, TokenLogprobs
from service.errors import RequestError
from service.generator import Accepted, Finished, Part, Piece
from service.transport.http.answers import Answer, ChatAnswer
from service.transport.http.requests import Asked, decode_chat
from service.transport.http.responses import ResponseAnswer, decode_response
from service.transport.http.thoughts import ThoughtParser, decode_thinking
from service.transport.http.tools import Tools
from tests.unit.service.transport.http.test_tools import call, tools_of

SPLIT = [
    # Text, whether it begins within thoughts, thoughts, content.
    ("<think>\nhm\n\n1 < 2\n</think>\n\nYes.\n", False, "hm\n\n1 < 2", "Yes.\n"),
    (" \n<think></think>Yes.", False, "", "Yes."),
    ("\nhm\n</think>\n\nYes.</think>", True, "hm", "Yes.</think>"),
    ("hm </thin", True, "hm </thin", ""),
    ("\x1f<think>hm</think>", False, "", "\x1f<think>hm</think>"),
    ("<think>\nhm\n", False, "hm\n", ""),
    ("Yes.<think>hm</think>", False, "", "Yes.<think>hm</think>"),
    (" <thi", False, "", " <thi"),
    ("", True, "", ""),
]


def answering(
    kind: type[Answer] = ChatAnswer, *, tools: Tools | None = None, form: str = "", is_within: bool = False
) -> Any:
    chat = SimpleNamespace(has_tagged_calls=True, has_thoughts=True, begins_within_thoughts={None: is_within})
    # Each token is a letter, as far as these are counted.
    tokenizer = SimpleNamespace(token_bytes=lambda token_id: bytes([token_id]))
    model: Any = SimpleNamespace(output_tokenizer=tokenizer, chat=chat)
    request = pb.GenerateRequest()
    if form:
        request.structured_output.regex = form
    answer = kind(Asked(request=request, tools=tools), SamplingParams(), lambda _: model)
    answer.accepted(Accepted("id", "m", 3))
    return answer


def message(texts: list[str], **settings: Any) -> dict[str, Any]:
    """The answer's message, which is the same in a stream."""
    parts: list[Part] = [Piece(0, text, tuple(text.encode()), ()) for text in texts]
    parts.append(Finished(0, FinishReason.END_OF_SEQUENCE, None, None))
    (choice,) = answering(**settings).whole(parts)["choices"]
    found: dict[str, Any] = choice["message"]
    streamed = answering(**settings)
    deltas = [chunk["choices"][0]["delta"] for part in parts for chunk in streamed.chunks(part)]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == (found.get(name) or "")
    return found


def test_an_answer_has_its_thoughts_in_a_field_of_their_own() -> None:
    found = message(["<thi", "nk>\nhm\n</think>", "\n\nYes."])
    assert (found["reasoning_content"], found["content"]) == ("hm", "Yes.")
    found = message(["hm</th", "ink>", "\nYes."], is_within=True)
    assert (found["reasoning_content"], found["content"]) == ("hm", "Yes.")
    assert "reasoning_content" not in message(["Yes."])
    # What follows a form does so from its first character.
    assert message(["<think>a</think>b"], form=".*", is_within=True)["content"] == "<think>a</think>b"


@given(st.sampled_from(SPLIT), st.lists(st.integers(0, 40), max_size=6))
def test_tokens_of_thoughts_are_counted_up_to_their_end(case: tuple[str, bool, str, str], cuts: list[int]) -> None:
    text, is_within, thoughts, _ = case
    parser = ThoughtParser(is_within=is_within)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    tokens = [text[a:b] for a, b in itertools.pairwise(places) if a < b]
    for token in tokens:
        parser.count(token.encode())
    ends = "</think>" in text and (is_within or text.lstrip(" \n").startswith("<think>"))
    end = text.index("</think>") + len("</think>") if ends else len(text)
    # Those that begin ahead of the end of thoughts.
    expected = sum(at < end for at in sorted(set(places))[:-1]) if thoughts or ends else 0
    assert parser.num_tokens == expected


@pytest.mark.parametrize(
    ("has_switch", "has_thoughts", "refused"),
    [(True, True, set()), (True, False, set()), (False, True, {"none"}), (False, False, {"medium"})],
)
def test_thoughts_are_switched_by_a_template_that_can_or_are_as_they_are(
    has_switch: bool, has_thoughts: bool, refused: set[str]
) -> None:
    chat: Any = SimpleNamespace(has_thinking_switch=has_switch, has_thoughts=has_thoughts)
    for effort, is_on in (("none", False), ("medium", True)):
        switch = decode_thinking({}, "reasoning_effort", effort)
        assert switch is not None
        assert switch.is_on == is_on
        with pytest.raises(RequestError, match="reasoning_effort") if effort in refused else nullcontext():
            switch.check(chat)
        own = decode_thinking({"chat_template_kwargs": {"enable_thinking": is_on}}, "reasoning_effort", None)
        assert own is not None
        with pytest.raises(RequestError, match="enable_thinking") if not has_switch else nullcontext():
            own.check(chat)
    for wrong in ("low", "", 1, ["none"]):
        with pytest.raises(RequestError, match="reasoning_effort"):
            decode_thinking({}, "reasoning_effort", wrong)
    with pytest.raises(RequestError, match="must not be set with"):
        decode_thinking({"chat_template_kwargs": {"enable_thinking": True}}, "reasoning_effort", "none")


def test_calls_follow_thoughts() -> None:
    said = "<think>\nhm\n</think>\n\nSo:" + call("f", {"city": "a"})
    found = message([said[:20], said[20:]], tools=tools_of())
    assert (found["reasoning_content"], found["content"]) == ("hm", "So:")
    assert [each["function"]["name"] for each in found["tool_calls"]] == ["f"]
    # Behind its tag the grammar lets nothing but a call follow, within thoughts, too.
    found = message(["<think>\nhm\n", *call("f", {"city": "a"})], tools=tools_of())
    assert (found["reasoning_content"], found["content"]) == ("hm", None)
    assert [each["function"]["name"] for each in found["tool_calls"]] == ["f"]
    must = message([call("f", {"city": "a"})], tools=tools_of(tool_choice="required"), form=".*", is_within=True)
    assert len(must["tool_calls"]) == 1


@pytest.mark.parametrize("content", ["Yes.", None, ""])
def test_earlier_thoughts_are_ahead_of_their_answer_as_templates_look_for_them(content: str | None) -> None:
    said = {"role": "assistant", "content": content, "reasoning_content": "hm"}
    asked = decode_chat({"messages": [{"role": "user", "content": "a"}, said]})
    assert asked.request.chat.messages[1].content == f"<think>\nhm\n</think>\n\n{content or ''}"


def parts_of(texts: list[str], reason: FinishReason) -> list[Part]:
    """Each character is a token, and its log-probability is its place."""
    at = itertools.count()
    pieces = [
        Piece(0, text, tuple(text.encode()), tuple(TokenLogprobs(-next(at), (), ()) for _ in text)) for text in texts
    ]
    return [*pieces, Finished(0, reason, None, None)]


def built(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that a client builds of a stream's events; each must come in its place."""
    output: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            output.append(event["item"])
        elif kind == "content_part.added":
            output[event["output_index"]]["content"].append(event["part"])
        elif kind.endswith("text.delta"):
            assert output[-1]["status"] == "in_progress"
            (part,) = output[-1]["content"]
            assert output[-1]["id"] == event["item_id"]
            part["text"] += event["delta"]
            part.setdefault("logprobs", []).extend(event.get("logprobs", ()))
        elif kind == "function_call_arguments.delta":
            output[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "output_item.done":
            item, mine = event["item"], output[event["output_index"]]
            for part in mine.get("content", ()):
                if part["type"] == "reasoning_text":
                    del part["logprobs"]
            assert mine | {"status": item["status"]} == item
            mine["status"] = item["status"]
    return output


@pytest.mark.parametrize("reason", [FinishReason.END_OF_SEQUENCE, FinishReason.LENGTH])
@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        *SPLIT,
        ("<think>hm</think>So:" + 2 * call("f", {"city": "a"}), False, "hm", "So:"),
        ("hm</think>" + call("f", {"city": "a"}), True, "hm", ""),
    ],
)
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 160), max_size=6))
def test_a_response_has_its_thoughts_as_an_item_however_they_come(
    case: tuple[str, bool, str, str], cuts: list[int], has_tools: bool, reason: FinishReason
) -> None:
    text, is_within, thoughts, content = case
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    tools = tools_of() if has_tools else None
    content = content if has_tools or "<tool_call>" not in text else text.partition("</think>")[2]
    parts = parts_of([text[a:b] for a, b in itertools.pairwise(places)], reason)
    answer = answering(ResponseAnswer, tools=tools, is_within=is_within)
    whole = json.loads(answer.encode(answer.whole(parts)))
    stream = answering(ResponseAnswer, tools=tools, is_within=is_within)
    events = [json.loads(stream.encode(event)) for part in parts for event in stream.chunks(part)]
    assert built(events) == whole["output"] == events[-1].get("response", whole)["output"]
    kinds = {item["type"]: item for item in whole["output"]}
    assert (kinds["reasoning"]["content"][0]["text"] if thoughts else "") == thoughts
    assert ("reasoning" in kinds) == bool(thoughts)
    assert ("message" in kinds) == (bool(content) or not thoughts)
    assert ("function_call" in kinds) == (has_tools and "<tool_call>" in text)
    is_cut = reason is FinishReason.LENGTH
    if thoughts:
        assert kinds["reasoning"]["status"] == ("incomplete" if is_cut and "</think>" not in text else "completed")
    if "message" in kinds:
        (part,) = kinds["message"]["content"]
        assert part["text"] == content
        # Every token behind the thoughts, once: line breaks have theirs, too.
        may_think = is_within or text.lstrip(" \n").startswith("<think>")
        begin = text.index("</think>") + len("</think>") if may_think and "</think>" in text else 0
        end = begin + len(part["logprobs"]) if "function_call" in kinds else len(text)
        assert [-each["logprob"] for each in part["logprobs"]] == list(range(begin, end))


def test_a_responses_thoughts_come_back_ahead_of_what_followed_them() -> None:
    thoughts = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    asked = {"role": "user", "content": "a"}
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    request = decode_response({"input": [asked, thoughts, said, asked, thoughts]}).request
    contents = [(each.role, each.content) for each in request.chat.messages]
    alone = "<think>\nhm\n</think>\n\n"
    assert contents == [("user", "a"), ("assistant", alone + "Yes."), ("user", "a"), ("assistant", alone)]
    # Without text they say nothing; two in a row are of one answer.
    bare = thoughts | {"content": None, "encrypted_content": None}
    more = decode_response({"input": [asked, bare, thoughts, bare, thoughts, said]}).request
    assert [each.content for each in more.chat.messages] == ["a", 2 * alone + "Yes."]
    for changes, field in (
        ({"summary": [{"type": "summary_text", "text": "hm"}]}, "input[1].summary"),
        ({"encrypted_content": "x"}, "input[1].encrypted_content"),
        ({"content": 0}, "input[1].content"),
    ):
        with pytest.raises(RequestError, match=re.escape(field)):
            decode_response({"input": [asked, thoughts | changes]})
    messages = decode_response({"input": [asked, thoughts, called], "tools": tools}).messages
    assert [(each.role, each.content, len(each.tool_calls)) for each in messages] == [
        ("user", "a", 0),
        ("assistant", alone, 1),
    ]
