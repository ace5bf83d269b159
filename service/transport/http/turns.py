"""The input of `/v1/responses`, an item after the other, as the messages of a conversation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model.spec.chat import Message
from onward.v1 import generation_pb2 as pb
from service.transport.http.thoughts import with_thoughts

Values = dict[str, Any]


class Turns:
    """A conversation of items: an assistant's thoughts are part of the text that follows, calls of the message before.

    Each message is made once, however many items it has.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._messages: list[Message] = []
        self._thoughts: list[str] = []
        self._calls: list[Values] = []

    def add_thoughts(self, text: str) -> None:
        """Adds what an assistant thought before what follows."""
        if text:
            self._end_calls()
            self._thoughts.append(with_thoughts(text, ""))

    def add_call(self, call: Values) -> None:
        """Adds a call of a tool to the assistant's message before, or to one without a text."""
        self._end_thoughts()
        if not (self._messages and self._messages[-1].role == "assistant"):
            self._messages.append(Message("assistant", ""))
            # gRPC's message has no calls: `with_tools` replaces the conversation.
            self._request.chat.messages.add(role="assistant")
        self._calls.append(call)

    def add(self, message: pb.ChatMessage, call_id: str = "") -> None:
        """Adds a message; `call_id` names the call whose result a tool's is."""
        self._end_calls()
        if message.role == "assistant":
            message.content = "".join((*self._thoughts, message.content))
            self._thoughts.clear()
        self._end_thoughts()
        self._request.chat.messages.append(message)
        self._messages.append(Message(message.role, message.content, (), call_id))

    def messages(self) -> list[Message]:
        """All of them, which ends the conversation."""
        self._end_calls()
        self._end_thoughts()
        return self._messages

    def _end_thoughts(self) -> None:
        if self._thoughts:
            self.add(pb.ChatMessage(role="assistant"))

    def _end_calls(self) -> None:
        if self._calls:
            self._messages[-1] = replace(self._messages[-1], tool_calls=tuple(self._calls))
            self._calls.clear()
