"""Calls of tools: the grammar that models are held to, and the parser of what they say, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.types import StructuredOutput, StructureKind
from service.transport.http.tools import CallParser, Tools, decode_tools
from tests.structured import VOCAB_SIZE, compiled, tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tools_of(**fields: Any) -> Tools:
    listed = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("f", "g")]
    tools = decode_tools({"tools": listed, **fields}, is_nested=True)
    assert tools is not None
    return tools


def call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def follow(tools: Tools, text: str, *, is_tagged: bool = True) -> bool | None:
    """Whether the answer may end behind a text; None where it may not come so far."""
    matcher = compiled(StructuredOutput(StructureKind.GRAMMAR, tools.grammar(is_tagged=is_tagged))).start()
    for token_id in tokenizer().encode_plain(text):
        row = np.zeros(VOCAB_SIZE, np.float32)
        matcher.mask(row)
        if np.isneginf(row[token_id]):
            return None
        matcher.add(token_id)
    assert matcher.problem is None
    row = np.zeros(VOCAB_SIZE, np.float32)
    matcher.mask(row)
    return matcher.is_complete or not np.isneginf(row[2])


GOOD, BAD = call("f", {"city": "a"}), call("f", {"town": "a"})
FOLLOWED: list[tuple[dict[str, Any], str, bool | None]] = [
    ({}, "", True),
    ({}, "Is 1 < 2? <tool", True),
    ({}, GOOD, True),
    ({}, f"Let me see.\n{GOOD}\n{call('g', {'city': '</tool_call>'})}", True),
    ({}, GOOD[:-1], False),
    ({}, f"é{BAD}", None),
    ({}, "a<tool_call>b", None),
    ({}, call("h", {"city": "a"}), None),
    ({}, f"{GOOD} and", None),
    ({"parallel_tool_calls": False}, f"a{GOOD}", True),
    ({"parallel_tool_calls": False}, f"{GOOD}\n", None),
    ({"tool_choice": "required"}, "", False),
    ({"tool_choice": "required"}, "Let", None),
    ({"tool_choice": "required"}, f"{GOOD}\n{GOOD}", True),
    ({"tool_choice": "required"}, BAD, None),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, GOOD, None),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, GOOD, True),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, f"{GOOD}\n", None),
]


@pytest.mark.parametrize(("fields", "text", "may_end"), FOLLOWED)
def test_text_is_free_up_to_a_tag_and_calls_never_are(fields: dict[str, Any], text: str, may_end: bool | None) -> None:
    """Also by the model's own choice, as was not so in vllm-project/vllm#49661."""
    assert follow(tools_of(**fields), text) is may_end


def test_template_without_tags_has_one_bare_call() -> None:
    tools = tools_of(tool_choice="required")
    assert follow(tools, '{"name": "g", "arguments": {"city": "}"}}', is_tagged=False)
    assert follow(tools, GOOD, is_tagged=False) is None


VALUES = st.dictionaries(st.text(max_size=4), st.recursive(st.text('a"\\\\{}[]<', max_size=6), st.lists, max_leaves=4))


@given(
    content=st.text("a<tol_ca>\n", max_size=12).filter(lambda text: "<tool_call>" not in f"{text}<"),
    calls=st.lists(st.tuples(st.sampled_from(["f", "g"]), VALUES), max_size=3),
    cuts=st.lists(st.integers(0, 300), max_size=12),
    is_tagged=st.booleans(),
)
def test_parser_finds_the_calls_however_the_text_is_cut(
    content: str, calls: list[tuple[str, Any]], cuts: list[int], is_tagged: bool
) -> None:
    text = content + "\n".join(call(name, arguments) for name, arguments in calls)
    if not is_tagged:
        calls = [*calls, ("f", {})][:1]
        content, text = "", f'{{"name": "{calls[0][0]}", "arguments": {json.dumps(calls[0][1])}}}'
    parser = CallParser(is_tagged=is_tagged, call_id="call")
    said, found = "", []
    ends = sorted({*(min(cut, len(text)) for cut in cuts), len(text)})
    for start, end in zip([0, *ends], ends, strict=False):
        more, deltas = parser.take(text[start:end], is_last=end == len(text))
        said += more
        for delta in deltas:
            if delta["index"] == len(found):
                found.append((delta["id"], delta["function"]["name"], ""))
            else:
                assert set(delta) == {"index", "function"}
            call_id, name, so_far = found[delta["index"]]
            found[delta["index"]] = call_id, name, so_far + delta["function"]["arguments"]
    assert said == content
    assert [(name, json.loads(arguments)) for _, name, arguments in found] == calls
    assert [call_id for call_id, *_ in found] == [f"call_{index}" for index in range(len(calls))]
    assert parser.is_whole is bool(calls)


def test_cut_call_is_not_whole() -> None:
    for size in range(len(GOOD)):
        parser = CallParser(is_tagged=True, call_id="call")
        parser.take(GOOD[:size], is_last=True)
        assert not parser.is_whole
