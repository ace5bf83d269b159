"""Conversations over real gRPC: rendered by the model's own template, refused where there is none."""

from __future__ import annotations

import grpc

from onward.v1 import generation_pb2 as pb
from onward.v1 import model_pb2
from tests.fakes import BOS, EOS, spell
from tests.servers import generate_request, rich_details, running, served_model, status_of, stream_request

INVALID = grpc.StatusCode.INVALID_ARGUMENT
TEMPLATE = (
    "{% for message in messages %}{{ '<bos>' if message.role == 'user' else '<eos>' }}{{ message.content }}"
    "{% endfor %}{% if messages[-1].content == 'x' %}{{ raise_exception('No x.') }}{% endif %}"
)


def chat(*messages: tuple[str, str]) -> dict[str, object]:
    said = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return {"text": None, "chat": pb.Chat(messages=said)}


async def test_conversation_is_rendered_by_the_models_template() -> None:
    async with running([served_model(chat=TEMPLATE)]) as server:
        conversation = chat(("user", "ab"), ("assistant", "c"), ("user", "d"))
        answer = await server.generation.Generate(generate_request(max_tokens=3, **conversation))
        ids = pb.TokenIds(ids=[BOS, *spell("ab"), EOS, *spell("c"), BOS, *spell("d")])
        same = await server.generation.Generate(generate_request(max_tokens=3, token_ids=ids))
        assert answer.outputs[0].token_ids == same.outputs[0].token_ids
        assert answer.usage.prompt_tokens == 7
        stream = [
            event async for event in server.generation.GenerateStream(stream_request(max_tokens=3, **conversation))
        ]
        assert [token for event in stream for token in event.delta.token_ids] == list(same.outputs[0].token_ids)


async def test_control_tokens_in_content_are_letters() -> None:
    async with running([served_model(chat=TEMPLATE)]) as server:
        answer = await server.generation.Generate(generate_request(max_tokens=1, **chat(("user", "a<eos>b"))))
        # "<" and ">" are no letters of this tokenizer's, which reads them as "z".
        assert answer.usage.prompt_tokens == len([BOS, *spell("azeoszb")])


BAD = [
    ((), INVALID, "prompt.chat.messages", "must have at least 1 message"),
    ((("robot", "a"),), INVALID, "prompt.chat.messages[0].role", "must be one of system, developer, user"),
    ((("user", "a"), ("user", "\ufdd0")), INVALID, "prompt.chat.messages[1].content", "noncharacter U+FDD0"),
    ((("user", "x"),), INVALID, "prompt.chat.messages", "the model's template refuses it: No x."),
    ((("user", "a" * 63),), grpc.StatusCode.OUT_OF_RANGE, "prompt.chat.messages", "must have at most 63 tokens"),
]


async def test_bad_conversation_is_refused_by_its_part() -> None:
    async with running([served_model(chat=TEMPLATE)]) as server:
        for messages, code, field, words in BAD:
            error = await status_of(server.generation.Generate(generate_request(**chat(*messages))), code)
            assert words in str(error.details())
            assert field in str(rich_details(error)) or field in str(error.details())


async def test_model_without_a_template_does_not_offer_chat() -> None:
    async with running([served_model("plain"), served_model("polite", chat=TEMPLATE)]) as server:
        asked = generate_request(model="plain", **chat(("user", "a")))
        error = await status_of(server.generation.Generate(asked), grpc.StatusCode.UNIMPLEMENTED)
        assert error.details() == "prompt.chat: needs a chat template, plain has none: send text"
        for name, offered in (("plain", False), ("polite", True)):
            described = await server.models.GetModel(model_pb2.GetModelRequest(model=name))
            assert described.capabilities.chat is offered
