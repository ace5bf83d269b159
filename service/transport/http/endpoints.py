"""The routes: completions, and what is known of models, text and the server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from onward.v1 import generation_pb2 as pb
from service.access import current_caller
from service.config import RequestLimits
from service.errors import InvalidRequest, NotServing
from service.generator import within
from service.process.text_pool import TextPool
from service.repository.entry import Models
from service.repository.models import Conversation, ServedModel, check_ids, text_size
from service.transport import codec
from service.transport.http.calls import Request, Route
from service.transport.http.completions import Completions
from service.transport.http.exchange import encode
from service.transport.http.fields import refuse_others, renaming, set_field, set_text, take
from service.transport.http.requests import add_messages
from service.transport.wire_limits import MAX_FIELDS

Values = dict[str, Any]

_OWNER = "onward"


def max_elements(models: Models, limits: RequestLimits) -> int:
    """The most elements of a body: of any served model, the longest prompt in ids or its whole vocabulary."""
    configs = [models.resolve(name).manifest.config for name in models.names]
    longest = max((max(each.context, each.source_context, each.vocab_size) for each in configs), default=0)
    return MAX_FIELDS + limits.max_logit_bias + max(longest, limits.max_detokenize_tokens)


def make_routes(
    completions: Completions, models: Models, limits: RequestLimits, texts: TextPool
) -> Mapping[str, Route]:
    """What answers each path."""
    about = _About(models)
    words = _Texts(completions, models, limits, texts)
    return {
        "/v1/chat/completions": Route("POST", completions.chat, "Generate"),
        "/v1/completions": Route("POST", completions.complete, "Generate"),
        "/v1/responses": Route("POST", completions.respond, "Generate"),
        "/v1/models": Route("GET", about.models, "ListModels"),
        "/v1/models/": Route("GET", about.model, "GetModel"),
        "/tokenize": Route("POST", words.tokenize, "Tokenize"),
        "/detokenize": Route("POST", words.detokenize, "Detokenize"),
        "/health": Route("GET", about.health),
        "/version": Route("GET", about.version),
    }


class _About:
    """What is served."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._created = int(time.time())

    async def models(self, request: Request) -> bytes:  # noqa: ARG002 (a handler's)
        """`/v1/models`."""
        described = [self._describe(self._models.resolve(name)) for name in self._models.names]
        return encode({"object": "list", "data": described})

    async def model(self, request: Request) -> bytes:
        """`/v1/models/NAME`."""
        return encode(self._describe(self._models.resolve(request.name)))

    async def health(self, request: Request) -> bytes:
        """`/health`: whether every model serves. Needs no key, so it names no model.

        Raises:
            NotServing: when one does not, or the server is stopping, also where no model is served.
        """
        if request.exchange.is_last or not all(entry.is_serving for entry in self._models.entries.values()):
            raise NotServing("starting, stopping, or a model does not answer")
        return encode({"status": "serving"})

    async def version(self, request: Request) -> bytes:  # noqa: ARG002 (a handler's)
        """`/version`."""
        return encode({"version": version("onward")})

    def _describe(self, model: ServedModel) -> Values:
        """A model; `max_model_len` is vLLM's name of the context."""
        described = {"id": model.name, "object": "model", "created": self._created, "owned_by": _OWNER}
        return {**described, "max_model_len": _context(model)}


class _Texts:
    """Text to tokens and back, in vLLM's shape."""

    def __init__(self, completions: Completions, models: Models, limits: RequestLimits, texts: TextPool) -> None:
        self._completions = completions
        self._models = models
        self._limits = limits
        self._texts = texts

    async def tokenize(self, request: Request) -> bytes:
        """`/tokenize`: a text, or a conversation by the model's template."""
        async with within(request.deadline):
            return await self._tokenize(request)

    async def detokenize(self, request: Request) -> bytes:
        """`/detokenize`: the text of token ids, as of an answer's."""
        async with within(request.deadline):
            return await self._detokenize(request)

    async def _tokenize(self, request: Request) -> bytes:
        num_body_bytes = len(request.body)
        values = await self._completions.parsed(request)
        refuse_others(values, ("model", "prompt", "messages", "add_special_tokens", "return_token_strs"), {}, ())
        model = self._models.resolve(take(values, "model", str, "a string") or "")
        is_bare = take(values, "add_special_tokens", bool, "true or false") is False
        has_strings = take(values, "return_token_strs", bool, "true or false") or False

        def decode() -> str | Conversation:
            message = pb.GenerateRequest()
            if values.get("messages") is None:
                set_text(message, "text", values.get("prompt"), "prompt")
                return message.text
            if values.get("prompt") is not None or is_bare:
                raise InvalidRequest("messages", "given", "must be set without prompt and add_special_tokens")
            with renaming("messages"):
                add_messages(message, values["messages"], "messages")
                return codec.conversation(message)

        prompt = await self._completions.off_loop(num_body_bytes, decode)
        max_bytes, num_bytes = self._limits.max_tokenize_bytes, text_size(prompt)
        if num_bytes > max_bytes:
            field = "messages" if isinstance(prompt, Conversation) else "prompt"
            raise InvalidRequest(field, num_bytes, f"must have at most {max_bytes} bytes")

        def work() -> bytes:
            if isinstance(prompt, Conversation):
                with renaming("messages", {"prompt.chat": "messages"}):
                    token_ids = list(model.encode_prompt(prompt))
            else:
                tokenizer = model.prompt_tokenizer
                token_ids = (tokenizer.encode_plain if is_bare else tokenizer.encode)(prompt)
            answer: Values = {"count": len(token_ids), "max_model_len": _context(model), "tokens": token_ids}
            strings = [model.prompt_tokenizer.token(each) or "" for each in token_ids] if has_strings else None
            return encode({**answer, "token_strs": strings})

        return await self._texts.run(current_caller().tenant, num_bytes, work)

    async def _detokenize(self, request: Request) -> bytes:
        num_body_bytes = len(request.body)
        values = await self._completions.parsed(request)
        refuse_others(values, ("model", "tokens"), {}, ())
        model = self._models.resolve(take(values, "model", str, "a string") or "")
        given, most = take(values, "tokens", list, "a list of token ids"), self._limits.max_detokenize_tokens
        if given is not None and len(given) > most:
            raise InvalidRequest("tokens", len(given), f"must have at most {most} entries")

        def decode() -> tuple[int, ...]:
            message = pb.GenerateRequest()
            set_field(message, "token_ids.ids", "tokens", given)
            return tuple(message.token_ids.ids)

        token_ids = await self._completions.off_loop(num_body_bytes, decode)

        def work() -> bytes:
            check_ids("tokens", token_ids, model.output_tokenizer.vocab_size)
            return encode({"prompt": model.output_tokenizer.decode(token_ids)})

        return await self._texts.run(current_caller().tenant, len(token_ids), work)


def _context(model: ServedModel) -> int:
    return model.manifest.config.context
