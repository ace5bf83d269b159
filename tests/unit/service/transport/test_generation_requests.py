"""What the generation service holds of a request while its answer is awaited: what was decoded, and no more."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from onward.v1 import generation_pb2 as pb
from service.config import RequestLimits
from service.transport import analysis_codec, codec
from service.transport.generation import GenerationServicer


class Request:
    """A request with the fields that the servicer reads itself. Messages of protobuf know no weak references."""

    model, side, text, token_ids = "fake", pb.TEXT_SIDE_UNSPECIFIED, "ab", (1, 2)
    request = SimpleNamespace(model="fake")

    def HasField(self, name: str) -> bool:  # noqa: N802 (protobuf's)
        return False


class Awaited(Exception):
    """What the request is while its answer is awaited: None once it is gone."""


@pytest.mark.parametrize(
    "method", ["Generate", "GenerateStream", "Tokenize", "Detokenize", "Score", "Estimate", "Explain"]
)
async def test_no_method_holds_its_request_while_it_waits(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "decode_generate", lambda *_: None)
    for name in ("decode_score", "decode_explain"):
        monkeypatch.setattr(analysis_codec, name, lambda *_: None)
    request = Request()
    gone = weakref.ref(request)

    async def answer(*_: object) -> None:
        raise Awaited(gone())

    async def parts(*_: object, **__: object) -> Any:
        raise Awaited(gone())
        yield

    tokenizer = SimpleNamespace(encode=list, encode_plain=list)
    model = SimpleNamespace(prompt_tokenizer=tokenizer, output_tokenizer=tokenizer)
    backend: Any = SimpleNamespace(
        run=parts, score=answer, estimate=answer, explain=answer, counting_refusal=lambda _: nullcontext()
    )
    models: Any = SimpleNamespace(resolve=lambda _: model, defaults=lambda _: None)
    texts: Any = SimpleNamespace(run=answer)
    servicer = GenerationServicer(backend, backend, models, RequestLimits(), texts)
    context: Any = SimpleNamespace(time_remaining=lambda: None)
    call = getattr(servicer, method)(request, context)
    del request
    with pytest.raises(Awaited) as caught:
        await (anext(call) if method == "GenerateStream" else call)
    assert caught.value.args == (None,)
