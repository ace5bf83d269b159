"""The same request over gRPC and over HTTP: the same tokens, text, log-probabilities, reasons and usage."""

from __future__ import annotations

import random
from typing import Any

from onward.v1 import generation_pb2 as pb
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


def draw(rng: random.Random) -> tuple[dict[str, Any], pb.GenerateRequest]:
    """One request in both shapes."""
    body: dict[str, Any] = {"return_token_ids": True, "seed": rng.randrange(2**63)}
    request = pb.GenerateRequest(response=pb.ResponseOptions(logprobs=3))
    text = "".join(rng.choice("abcdefg") for _ in range(rng.randint(1, 9)))
    if rng.random() < 0.2:
        width = rng.randint(1, 4)
        body = {"return_token_ids": True, "use_beam_search": True, "n": rng.randint(1, width), "beam_size": width}
        request.beam_search.beam_size, request.beam_search.num_hypotheses = width, body["n"]
        for name, (field, choose) in _BEAM_DRAWS.items():
            if rng.random() < 0.5:
                body[name] = choose(rng)
                setattr(request.beam_search, field, body[name])
        body["max_tokens"] = request.stopping.max_tokens = rng.randint(1, 12)
    else:
        request.sampling.seed = body["seed"]
        for name, (part, field, choose) in _DRAWS.items():
            if rng.random() < 0.4:
                body[name] = value = choose(rng)
                message = getattr(request, part)
                if isinstance(value, dict):
                    getattr(message, field).update(value)
                elif isinstance(value, list):
                    getattr(message, field).extend(value)
                else:
                    setattr(message, field, value)
    if rng.random() < 0.5:
        body |= {"messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 3}
        request.chat.messages.add(role="user", content=text)
    else:
        body |= {"prompt": text, "logprobs": 3}
        request.text = text
    return body, request


async def compare(server: Running, body: dict[str, Any], request: pb.GenerateRequest) -> None:
    wanted = await server.generation.Generate(request)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    whole = await ask(server, path, body)
    assert whole.status == 200, (body, whole.body)
    choices = whole.json["choices"]
    assert [choice["token_ids"] for choice in choices] == [list(each.token_ids) for each in wanted.outputs], body
    chat = "messages" in body
    texts = [choice["message"]["content"] if chat else choice["text"] for choice in choices]
    assert texts == [each.text for each in wanted.outputs], body
    logprobs = [
        [each["logprob"] for each in choice["logprobs"]["content"]] if chat else choice["logprobs"]["token_logprobs"]
        for choice in choices
    ]
    assert logprobs == [[own.logprob for own in each.logprobs] for each in wanted.outputs], body
    if chat:
        tops = [
            [[top["logprob"] for top in each["top_logprobs"]] for each in choice["logprobs"]["content"]]
            for choice in choices
        ]
        assert tops == [[[top.logprob for top in own.top] for own in each.logprobs] for each in wanted.outputs]
    usage = whole.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
        wanted.usage.prompt_tokens,
        wanted.usage.generated_tokens,
    )
    reasons = {pb.FINISH_REASON_LENGTH: "length"}
    assert [choice["finish_reason"] for choice in choices] == [
        reasons.get(each.finish_reason, "stop") for each in wanted.outputs
    ]
    streamed = await ask(server, path, {**body, "stream": True})
    pieces = [""] * len(choices)
    token_ids: list[list[int]] = [[] for _ in choices]
    for event in streamed.events:
        for choice in event["choices"]:
            pieces[choice["index"]] += choice["delta"].get("content", "") if chat else choice["text"]
            token_ids[choice["index"]] += choice.get("token_ids", [])
    assert pieces == texts, body
    assert token_ids == [choice["token_ids"] for choice in choices], body


async def test_both_transports_give_the_same_answer() -> None:
    async with serving([served_model(**POLITE)]) as server:
        for seed in range(60):
            await compare(server, *draw(random.Random(seed)))
