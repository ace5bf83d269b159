"""The same request over gRPC and over HTTP: the same tokens, text, log-probabilities, reasons and usage."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from onward.v1 import generation_pb2 as pb
from service.transport.http.responses import LOGPROBS
from tests.http_calls import POLITE, ask, serving
from tests.servers import Running, served_model

# Names over HTTP to parts of a request over gRPC, and their draws.
_DRAWS: dict[str, tuple[str, str, Any]] = {
    "temperature": ("sampling", "temperature", lambda rng: rng.choice([0.0, 0.5, 1.0, 1.7])),
    "top_p": ("sampling", "top_p", lambda rng: rng.uniform(0.1, 1)),
    "top_k": ("sampling", "top_k", lambda rng: rng.randint(0, 8)),
    "min_p": ("sampling", "min_p", lambda rng: rng.uniform(0, 0.5)),
    "repetition_penalty": ("sampling", "repetition_penalty", lambda rng: rng.uniform(0.5, 2)),
    "presence_penalty": ("sampling", "presence_penalty", lambda rng: rng.uniform(-2, 2)),
    "frequency_penalty": ("sampling", "frequency_penalty", lambda rng: rng.uniform(-2, 2)),
    "n": ("sampling", "n", lambda rng: rng.randint(1, 4)),
    "logit_bias": ("sampling", "logit_bias", lambda rng: {rng.randint(3, 31): float(rng.randint(-9, 9))}),
    "allowed_token_ids": ("sampling", "allowed_token_ids", lambda rng: sorted(rng.sample(range(3, 32), 12))),
    "max_tokens": ("stopping", "max_tokens", lambda rng: rng.randint(1, 20)),
    "min_tokens": ("stopping", "min_tokens", lambda rng: rng.randint(0, 1)),
    "stop": ("stopping", "stop", lambda rng: [chr(ord("a") + rng.randint(0, 25)) for _ in range(2)]),
    "stop_token_ids": ("stopping", "stop_token_ids", lambda rng: rng.sample(range(3, 32), 2)),
    "ignore_eos": ("stopping", "ignore_eos", lambda rng: rng.random() < 0.5),
    "include_stop_str_in_output": ("stopping", "include_stop_in_output", lambda rng: True),
}
_BEAM_DRAWS: dict[str, tuple[str, Any]] = {
    "length_penalty": ("length_penalty", lambda rng: rng.uniform(-1, 2)),
    "patience": ("patience", lambda rng: rng.choice([0.0, 1.0, 2.0])),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", lambda rng: rng.randint(0, 2)),
}


COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
_ENDS = {pb.FINISH_REASON_LENGTH: "length"}


def draw(rng: random.Random) -> tuple[str, dict[str, Any], pb.GenerateRequest]:
    """One request in both shapes, and its path."""
    path = rng.choice([COMPLETIONS, CHAT, RESPONSES])
    body: dict[str, Any] = {"seed": rng.randrange(2**63)}
    request = pb.GenerateRequest(response=pb.ResponseOptions(logprobs=3))
    text = "".join(rng.choice("abcdefg") for _ in range(rng.choice([1, 3, 9, 30])))
    if path != RESPONSES and rng.random() < 0.2:
        width = rng.randint(1, 4)
        body = {"use_beam_search": True, "n": rng.randint(1, width), "beam_size": width}
        request.beam_search.beam_size, request.beam_search.num_hypotheses = width, body["n"]
        for name, (field, choose) in _BEAM_DRAWS.items():
            if rng.random() < 0.5:
                body[name] = choose(rng)
                setattr(request.beam_search, field, body[name])
        body["max_tokens"] = request.stopping.max_tokens = rng.randint(1, 12)
    else:
        request.sampling.seed = body["seed"]
        for name, (part, field, choose) in _DRAWS.items():
            if rng.random() < 0.4 and not (path == RESPONSES and name == "n"):
                body[name] = value = choose(rng)
                message = getattr(request, part)
                if isinstance(value, dict):
                    getattr(message, field).update(value)
                elif isinstance(value, list):
                    getattr(message, field).extend(value)
                else:
                    setattr(message, field, value)
    if path == COMPLETIONS:
        body |= {"prompt": text, "logprobs": 3, "return_token_ids": True}
        if rng.random() < 0.3:
            body["prompt"] = [rng.randint(3, 31) for _ in text]
            request.token_ids.ids.extend(body["prompt"])
        else:
            request.text = text
        return path, body, request
    request.chat.messages.add(role="user", content=text)
    if path == CHAT:
        body |= {"messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 3}
        body["return_token_ids"] = True
    else:
        body |= {"input": text, "include": [LOGPROBS], "top_logprobs": 3}
        if "max_tokens" in body:
            body["max_output_tokens"] = body.pop("max_tokens")
    return path, body, request


@dataclass(slots=True)
class Read:
    """What a client reads of one output; token ids where they are given."""

    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[float]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    end: str | None = None
    stop: str | int | None = None
    score: float | None = None

    def conclude(self, choice: dict[str, Any]) -> None:
        """Takes why an output ended from its choice, or the last part of it."""
        self.end, self.stop, self.score = choice["finish_reason"], choice.get("stop_reason"), choice.get("score")

    def add(self, text: str, described: Any, token_ids: list[int]) -> None:
        self.text += text
        self.token_ids += token_ids
        if isinstance(described, dict) and "tokens" in described:
            self.logprobs += described["token_logprobs"]
            # Tokens that are spelled alike are one key there.
            self.tops += [[] for _ in described["tokens"]]
        elif described:
            entries = described["content"] if isinstance(described, dict) else described
            self.logprobs += [each["logprob"] for each in entries]
            self.tops += [[top["logprob"] for top in each["top_logprobs"]] for each in entries]


def wanted_of(path: str, output: pb.Output) -> Read:
    read = Read(output.text, end=_ENDS.get(output.finish_reason, "stop"))
    read.logprobs = [own.logprob for own in output.logprobs]
    read.tops = [[] if path == COMPLETIONS else [top.logprob for top in own.top] for own in output.logprobs]
    if path != RESPONSES:
        read.token_ids = list(output.token_ids)
        matched = output.matched_stop.WhichOneof("match")
        read.stop = getattr(output.matched_stop, matched) if matched else None
        read.score = output.score if output.HasField("score") else None
    return read


def read_whole(path: str, values: Any) -> list[Read]:
    if path == RESPONSES:
        read = Read(end={"completed": "stop", "incomplete": "length"}[values["status"]])
        ((part,),) = [item["content"] for item in values["output"]]
        read.add(part["text"], part["logprobs"], [])
        return [read]
    outputs = []
    for choice in values["choices"]:
        outputs.append(Read())
        outputs[-1].conclude(choice)
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        outputs[-1].add(text, choice["logprobs"], choice["token_ids"])
    return outputs


def read_stream(path: str, events: list[Any], count: int) -> tuple[list[Read], Any]:
    """Outputs by their pieces, and the usage."""
    outputs = [Read() for _ in range(count)]
    if path == RESPONSES:
        for event in events:
            if event["type"] == "response.output_text.delta":
                outputs[0].add(event["delta"], event["logprobs"], [])
        values = events[-1]["response"]
        outputs[0].end = read_whole(path, values)[0].end
        return outputs, values["usage"]
    for event in events:
        for choice in event["choices"]:
            text = choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
            outputs[choice["index"]].add(text, choice["logprobs"], choice.get("token_ids", []))
            outputs[choice["index"]].conclude(choice)
    return outputs, events[-1]["usage"]


async def compare(server: Running, path: str, body: dict[str, Any], request: pb.GenerateRequest) -> None:
    await server.generation.Generate(request)  # whose prompt the others find in the cache
    answered = await server.generation.Generate(request)
    wanted = [wanted_of(path, each) for each in answered.outputs]
    whole = await ask(server, path, body)
    assert whole.status == 200, (body, whole.body)
    assert read_whole(path, whole.json) == wanted, body
    options = {} if path == RESPONSES else {"stream_options": {"include_usage": True}}
    streamed = await ask(server, path, {**body, "stream": True, **options})
    outputs, streamed_usage = read_stream(path, streamed.events, len(wanted))
    assert outputs == wanted, body
    kinds = ("input", "output") if path == RESPONSES else ("prompt", "completion")
    for usage in (whole.json["usage"], streamed_usage):
        cached = usage[f"{kinds[0]}_tokens_details"]["cached_tokens"]
        own = answered.usage
        assert (*(usage[f"{kind}_tokens"] for kind in kinds), cached) == (
            own.prompt_tokens, own.generated_tokens, own.cached_tokens
        )  # fmt: skip


async def test_both_transports_give_the_same_answer(
    caplog: pytest.LogCaptureFixture, pytestconfig: pytest.Config
) -> None:
    async with serving([served_model(**POLITE)]) as server:
        for seed in range(300 if pytestconfig.getoption("--whole") else 30):
            await compare(server, *draw(random.Random(seed)))
    # grpc/grpc#25364, #42357: what several event loops beside gRPC's log.
    assert "BlockingIOError" not in caplog.text
