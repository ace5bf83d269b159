"""`Explain` off the hot path: one worker thread with a short queue; graphs are loaded on first use.

    take a slot ─> tokenize ─> generate greedily, if no target is given ─> wait for the worker ─> run ─> answer

Only the worker touches the loaded graphs; slots are counted on the event loop. A server without `Explain` calls has
neither the thread nor a graph; unloading a model releases its graph. The generation is an ordinary request to the
engine and counted as one. Knows neither protobuf nor gRPC.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Protocol

from service.access import current_caller
from service.engine.types import SamplingParams, StoppingParams
from service.errors import AnswerTooLarge, PromptTooLong, UnsupportedFeature
from service.explain import explaining
from service.explain.explaining import ExplainCall, ExplainTask, Explanation, Float32, Selection
from service.generator import GenerateCall, Generator, Piece
from service.process.text_pool import LONG_BYTES, FairQueue, TenantSlots, TextPool
from service.repository.entry import Models
from service.repository.models import ServedModel, prompt_field, text_size

_LOGGER = logging.getLogger(__name__)

MAX_WAITING = 8
"""Calls that may wait for the worker; each holds only its tokens."""

_ADVICE = "ask for fewer layers, heads or kinds"
_MIN_RETRY_SECONDS = 0.05


class AttentionSource(Protocol):
    """Computes attention weights, as `service.engine.sessions.attention.AttentionGraph` does."""

    def run(self, decoder: tuple[int, ...], source: tuple[int, ...], outputs: tuple[str, ...]) -> list[Float32]:
        """Weights `[H, queries, keys]` of each output."""
        ...


class Explainer:
    """Answers calls for attention weights, one at a time.

    Args:
        generator: generates missing targets.
        models: the served models.
        load: loads a model's explain graph; called on the worker, once per model.
        texts: tokenizes prompts.
        max_tokens: most tokens of a source, and most that a decoder reads.
        max_message_bytes: largest answer.
    """

    def __init__(
        self,
        generator: Generator,
        models: Models,
        load: Callable[[ServedModel], AttentionSource],
        texts: TextPool,
        max_tokens: int,
        max_message_bytes: int,
    ) -> None:
        self._generator = generator
        self._models = models
        self._load = load
        self._texts = texts
        self._max_tokens = max_tokens
        self._max_message_bytes = max_message_bytes
        # Starts its thread at the first call.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="explain")
        self._graphs: dict[str, tuple[ServedModel, AttentionSource]] = {}
        self._queue = FairQueue(self._worker, 1)
        self._is_used = False
        self._places = TenantSlots("Explain", 1 + MAX_WAITING)
        self._last_seconds = 1.0

    async def explain(self, call: ExplainCall, time_remaining: float | None) -> Explanation:
        """Computes attention weights. Canceling ends the wait; a run in progress completes and is discarded.

        Raises:
            RequestError: of the request.
        """
        deadline = None if time_remaining is None else time.monotonic() + time_remaining
        tenant = current_caller().tenant
        with self._places.take(tenant, max(self._last_seconds, _MIN_RETRY_SECONDS)):
            model, selection, task = await self._prepare(call, deadline)
            # A reload may have replaced the model meanwhile.
            while self._models.resolve(model.name) is not model:
                model, selection, task = await self._prepare(call, deadline)
            self._is_used = True
            found, self._last_seconds = await self._queue.run(tenant, LONG_BYTES, self._compute, model, task, selection)
            return found

    def models_changed(self) -> None:
        """Releases the graphs of unloaded and replaced models."""
        if self._is_used:
            self._worker.submit(self._keep, [self._models.resolve(name) for name in self._models.names])

    def close(self) -> None:
        """Ends the worker; waiting calls are canceled."""
        self._is_used = False
        self._queue.close()

    async def _prepare(self, call: ExplainCall, deadline: float | None) -> tuple[ServedModel, Selection, ExplainTask]:
        """Makes every check of a call, and generates the target if none is given."""
        model = self._models.resolve(call.model)
        self._models.require_serving(model.name)
        if not model.explains:
            why = f"is not offered for {model.name}, which was exported without --explain-graph"
            raise UnsupportedFeature("Explain", why)
        selection = explaining.select(model, call)
        tenant, num_bytes = current_caller().tenant, text_size(call.prompt) + text_size(call.target)
        prompt, target = await self._texts.run(tenant, num_bytes, explaining.encode, model, call, self._max_tokens)
        if not target:
            target = await self._generate(model, call, prompt, selection, deadline)
        task = ExplainTask.of(model, prompt, target)
        num_bytes = selection.num_bytes(len(task.decoder), len(task.source))
        if num_bytes > self._max_message_bytes:
            raise AnswerTooLarge(num_bytes, self._max_message_bytes, _ADVICE)
        return model, selection, task

    async def _generate(
        self,
        model: ServedModel,
        call: ExplainCall,
        prompt: tuple[int, ...],
        selection: Selection,
        deadline: float | None,
    ) -> tuple[int, ...]:
        """Generates greedily, at most as many tokens as the answer can explain."""
        config = model.manifest.config
        room = min(explaining.target_room(config, len(prompt), self._max_tokens), call.max_tokens)
        fits = explaining.fitting_room(
            selection, len(prompt), room, self._max_message_bytes, has_source=config.is_encoder_decoder
        )
        if not fits:
            limit = f"must leave room for an answer of {self._max_message_bytes} bytes; {_ADVICE}"
            raise PromptTooLong(prompt_field(call.prompt), len(prompt), limit)
        request = GenerateCall(
            request_id=call.request_id,
            model=model.name,
            prompt=prompt,
            target_prefix="",
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(max_tokens=fits),
            beam_search=None,
            logprobs=None,
            prompt_logprobs=None,
            wants_cost=False,
            priority=0,
            timeout_seconds=None,
            partial_on_deadline=False,
        )
        token_ids: list[int] = []
        left = None if deadline is None else deadline - time.monotonic()
        async with aclosing(self._generator.run(request, left, is_streamed=False)) as parts:
            async for part in parts:
                if isinstance(part, Piece):
                    token_ids += part.token_ids
        return tuple(token_ids)

    def _compute(self, model: ServedModel, task: ExplainTask, selection: Selection) -> tuple[Explanation, float]:
        """On the worker: the answer and its seconds. Loads the graph if the model has none."""
        began = time.monotonic()
        known, graph = self._graphs.get(model.name, (None, None))
        if graph is None or known is not model:
            graph = self._load(model)
            self._graphs[model.name] = model, graph
        weights = graph.run(task.decoder, task.source, selection.outputs)
        found = explaining.explanation(model, task, selection, weights)
        seconds = time.monotonic() - began
        lengths = len(task.decoder), len(task.source)
        _LOGGER.info("explained %s over %d decoder and %d source tokens in %.3f s", model.name, *lengths, seconds)
        return found, seconds

    def _keep(self, served: Sequence[ServedModel]) -> None:
        """On the worker: releases the graphs of all other models."""
        kept = {name: entry for name, entry in self._graphs.items() if any(entry[0] is model for model in served)}
        for name in self._graphs.keys() - kept.keys():
            _LOGGER.info("released the explain graph of %s", name)
        self._graphs = kept
