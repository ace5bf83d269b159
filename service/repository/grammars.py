"""Grammars of structured output, compiled off the event loop and cached by content.

A grammar is tried in a child process first (`service.process.grammar_check`), so that a hostile one costs its caller an
error and nobody else more than a wait for one of the compiling threads, which tenants share by turns. Those threads
have low priority, and compiling releases the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue

from service.engine.sampling.grammar import Grammar, GrammarError, Vocabulary
from service.engine.types import StructuredOutput, StructureKind
from service.errors import InvalidRequest, UnsupportedFeature
from service.process.grammar_check import STACK_BYTES, GrammarCheck, describe_grammar, find_keyword
from service.process.text_pool import LONG_BYTES, FairQueue, lower_priority

_NUM_THREADS = 2
# Of all models: compiled grammars and their texts. Beyond it the tenant that takes most loses its oldest.
_MAX_CACHED_BYTES = 128 << 20
# Of the smallest.
_BASE_BYTES = 64 << 10

_Compiled = tuple[Grammar | InvalidRequest, int]
_Key = tuple[Vocabulary, StructuredOutput]
# And the tenant that had it compiled.
_Cached = tuple[str, _Compiled]


class Grammars:
    """Compiles grammars for models. Used on one event loop; threads and children start with the first grammar."""

    def __init__(self) -> None:
        self._checks: SimpleQueue[GrammarCheck] = SimpleQueue()
        self._queue: FairQueue | None = None
        # By vocabulary, which a reloaded model has anew; least recently used first.
        self._cached: OrderedDict[_Key, _Cached] = OrderedDict()
        self._num_cached_bytes: Counter[str] = Counter()
        # What a tenant has compiled now, and how many requests wait for it.
        self._running: dict[tuple[str, _Key], asyncio.Task[_Compiled]] = {}
        self._num_waiting: Counter[asyncio.Task[_Compiled]] = Counter()
        self._is_closed = False

    async def compile(self, tenant: str, vocabulary: Vocabulary | None, asked: StructuredOutput) -> Grammar:
        """The grammar of a structured output, cached if it was compiled before.

        Args:
            tenant: who asks.
            vocabulary: the model's; None where it has none.
            asked: the form.

        Raises:
            UnsupportedFeature: without a vocabulary.
            InvalidRequest: when it is malformed, unsupported or takes too much; naming the keyword in a schema.
        """
        if vocabulary is None:
            raise UnsupportedFeature("structured_output", "needs llguidance and known bytes of all tokens")
        key = vocabulary, asked
        _, known = self._cached.get(key, ("", None))
        if known is not None and isinstance(known[0], Grammar) and known[0].is_spent:
            self._forget(key)
            known = None
        if known is None:
            known = await self._running_or_begun(tenant, key)
        if key in self._cached:
            self._cached.move_to_end(key)
        result, _ = known
        while self._num_cached_bytes.total() > _MAX_CACHED_BYTES:
            self._forget_oldest()
        if isinstance(result, InvalidRequest):
            # Anew, as a traceback belongs to one call.
            raise InvalidRequest(result.field, result.value, result.limit)
        return result

    async def _running_or_begun(self, tenant: str, key: _Key) -> _Compiled:
        """What a tenant's requests wait for together. It ends with the last of them."""
        if (running := self._running.get((tenant, key))) is None:
            running = self._running[tenant, key] = asyncio.ensure_future(self._have_compiled(tenant, key))
        self._num_waiting[running] += 1
        try:
            return await asyncio.shield(running)
        finally:
            self._num_waiting[running] -= 1
            if not self._num_waiting[running]:
                del self._num_waiting[running]
                # A request that comes now begins anew.
                self._running.pop((tenant, key), None)
                running.cancel()

    async def _have_compiled(self, tenant: str, key: _Key) -> _Compiled:
        """Compiles and caches."""
        queue = self._queue = self._queue or self._start()
        # As long work, however short its text: it waits for a thread where tenants take turns, not behind others.
        compiled = await queue.run(tenant, LONG_BYTES, self._compile, *key)
        # Another tenant may have had the same compiled meanwhile.
        if key not in self._cached:
            self._cached[key] = tenant, compiled
            self._num_cached_bytes[tenant] += compiled[1]
        return compiled

    def _forget_oldest(self) -> None:
        """What was used longest ago of the tenant that takes most."""
        [(tenant, _)] = self._num_cached_bytes.most_common(1)
        self._forget(next(key for key, (owner, _) in self._cached.items() if owner == tenant))

    def _forget(self, key: _Key) -> None:
        tenant, (_, num_bytes) = self._cached.pop(key)
        self._num_cached_bytes[tenant] -= num_bytes
        # Tenants without a grammar are not kept.
        self._num_cached_bytes += Counter()

    def close(self) -> None:
        """Ends the threads after their running work, and their children."""
        self._is_closed = True
        if self._queue is not None:
            self._queue.close()
        self._end_children()

    def _end_children(self) -> None:
        """Of checks that no thread uses."""
        with suppress(Empty):
            while True:
                self._checks.get_nowait().close()

    def _start(self) -> FairQueue:
        executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammars", initializer=lower_priority)
        started = threading.Barrier(_NUM_THREADS)
        before = threading.stack_size(STACK_BYTES)
        for _ in range(_NUM_THREADS):
            executor.submit(started.wait)
            self._checks.put(GrammarCheck())
        threading.stack_size(before)
        return FairQueue(executor, _NUM_THREADS)

    def _compile(self, vocabulary: Vocabulary, asked: StructuredOutput) -> _Compiled:
        """On a thread: the grammar, or why there is none; and about the bytes that it takes."""
        num_bytes = _BASE_BYTES + 2 * asked.num_bytes

        def refuse(limit: str) -> _Compiled:
            return InvalidRequest(asked.field, asked.value, limit), num_bytes

        try:
            grammar = describe_grammar(asked.kind, asked.value)
        except ValueError as error:
            return refuse(f"must be a JSON object: {error}")
        check = self._checks.get()
        try:
            verdict = check.try_out(grammar)
        finally:
            self._checks.put(check)
            if self._is_closed:
                self._end_children()
        if verdict.problem is not None:
            is_schema = asked.kind is StructureKind.JSON_SCHEMA
            pointer = find_keyword(str(asked.value), verdict.problem) if is_schema else ""
            if pointer:
                field = f"{asked.field}{pointer}"
                return InvalidRequest(field, pointer.rpartition("/")[2], verdict.problem), num_bytes
            return refuse(verdict.problem)
        try:
            return vocabulary.compile(grammar), num_bytes + verdict.num_bytes
        except GrammarError as error:
            return refuse(str(error))
