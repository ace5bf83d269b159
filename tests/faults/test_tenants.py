"""One API key with every trick of the wire against another's requests: how many steps these wait for a first token.

The server is real, in the test's own process, over a fake model. Its engine is held while requests are on their way:
what is counted are the steps from the moment at which the engine has the request, and neither the machine's load nor
the network's delays change their number.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from onward.inference import open_inference_pb2 as oip
from onward.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from onward.v1 import generation_pb2 as pb
from service.engine.batch import ScheduledBatch
from service.engine.queueing.tenants import SLICE_STEPS
from service.engine.scheduler import EngineLimits
from tests.fakes import CONTEXT, FakeRunner, fake_engine
from tests.identities import by, keys_file
from tests.servers import MODEL, Running, eventually, generate_request, running, served_model, stream_request

ATTACKER, FAIR, VICTIM = "attacker", "fair", "victim"
ROWS, CHUNK = 8, 8
LIMITS = EngineLimits(max_batch_size=ROWS, prefill_chunk=CHUNK, max_prefill_tokens=CHUNK)
"""A chunk is all of a step's prompt tokens, so that prompts of two keys take turns."""
NUM_CHUNKS = 3
"""Of a victim's prompt."""
NUM_TOKENS = 20
"""Of a victim's answer: more than the attacker is kept out for, so that it takes the rows meanwhile."""
_GAP = NUM_TOKENS
"""Steps between two of a victim's requests, at least.

As half of all steps are the victim's, a request lives for 2 * (NUM_TOKENS + 2 * NUM_CHUNKS) = 52 of them: there are
never more than 3 when another comes, which stays within a share of ROWS / 2.
"""
_CALLERS = 2
_IN_FLIGHT = 8
_OK = "OK"
DRAWN = "many-at-once"
_LETTERS = [chr(ord("a") + index) for index in range(26)]


def prompt(number: int, num_tokens: int) -> str:
    """A text of so many tokens, the first one being the model's own, whose first chunk is no other number's."""
    letters = [_LETTERS[number // 26**place % 26] for place in range(4)]
    return "".join(itertools.islice(itertools.cycle(letters), num_tokens - 1))


class Steps:
    """A `before_run` that counts the engine's steps, and can hold them back.

    `first` has the step in which a first token is chosen, by the request's seed.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first: dict[int, int] = {}
        self.is_held = False
        self._hold_at: float = math.inf
        self._may_run = threading.Event()

    def __call__(self, batch: ScheduledBatch) -> None:
        self.count += 1
        for sample in batch.samples:
            self.first.setdefault(sample.seed, self.count)
        if self.count >= self._hold_at:
            self.is_held = True
            self._may_run.wait()

    @contextmanager
    def held(self, num_steps: int) -> Iterator[None]:
        """So many steps may begin in the block; the last of these, and none after it, ends once the block does."""
        self.is_held = False
        self._may_run.clear()
        self._hold_at = self.count + num_steps
        try:
            yield
        finally:
            self._hold_at = math.inf
            self._may_run.set()


Ask = Callable[[Running, str, int], Awaitable[object]]
"""Sends a request with an id and a number of its own, and reads all of the answer."""


def _generate(num_tokens: int = 3, **fields: Any) -> Ask:
    def ask(server: Running, request_id: str, number: int) -> Awaitable[object]:
        asked = generate_request(prompt(number, num_tokens), request_id=request_id, ignore_eos=True, **fields)
        return server.generation.Generate(asked, **by(ATTACKER))

    return ask


async def _stream(server: Running, request_id: str, number: int) -> None:
    asked = stream_request(prompt(number, CHUNK), request_id=request_id, max_tokens=40, ignore_eos=True)
    async for _ in server.generation.GenerateStream(asked, **by(ATTACKER)):
        pass


async def _infer_many(server: Running, request_id: str, number: int) -> None:
    """Many requests at once in one stream, each of as many sequences as there are rows."""
    requests = []
    for index in range(_IN_FLIGHT):
        request = oip.ModelInferRequest(model_name=MODEL, id=f"{request_id}-{index}")
        tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(prompt(number, CHUNK).encode())
        request.parameters["max_tokens"].int64_param = 40
        request.parameters["n"].int64_param = ROWS
        requests.append(request)
    async for answer in GRPCInferenceServiceStub(server.channel).ModelStreamInfer(iter(requests), **by(ATTACKER)):
        assert not answer.error_message, answer.error_message


_ALL_ROWS = pb.SamplingParams(n=ROWS)
TRICKS: Mapping[str, Ask] = {
    "outputs": _generate(max_tokens=50, sampling=_ALL_ROWS),
    "beams": _generate(max_tokens=50, sampling=None, beam_search=pb.BeamSearchParams(beam_size=ROWS)),
    "long-prompts": _generate(CONTEXT - 1, max_tokens=1),
    "long-prompts-with-outputs": _generate(CONTEXT - 10, max_tokens=10, sampling=_ALL_ROWS),
    "single-tokens": _generate(max_tokens=1),
    "long-answers": _generate(max_tokens=CONTEXT - 4),
    "priority": _generate(max_tokens=50, priority=2**31 - 1),
    "streams": _stream,
    DRAWN: _infer_many,
}
REFUSED: Mapping[str, str] = {"priority": "INVALID_ARGUMENT"}
"""How calls of these tricks end; all others are answered: there are places for all that is in flight."""


def in_engine(server: Running, prefix: str) -> int:
    """How many requests with ids that begin so were handed to the engine and are not over.

    Those of the Open Inference Protocol get ids from the server, which have no colon.
    """
    live = [stream.request_id for stream in server.app._engine._streams.values() if stream.request is not None]
    ids = (each if ":" in each else f"{DRAWN}:" for each in live)
    return sum(each.startswith(prefix) for each in ids)


async def until_in_engine(server: Running, prefix: str, count: int = 1) -> None:
    await eventually(lambda: in_engine(server, prefix) >= count)


Ends = Mapping[str, Counter[str]]


@asynccontextmanager
async def attack(server: Running) -> AsyncIterator[Ends]:
    """Some callers for each trick, each again and again while the block lasts; how their calls end."""
    ends: Ends = {name: Counter() for name in TRICKS}
    numbers = itertools.count(1)
    is_over = False

    async def call_on(name: str, ask: Ask) -> None:
        while not is_over:
            number = next(numbers)
            try:
                await ask(server, f"{name}:{number}", number)
                ends[name][_OK] += 1
            except grpc.aio.AioRpcError as error:
                ends[name][error.code().name] += 1

    async with asyncio.TaskGroup() as group:
        for name, ask in TRICKS.items():
            for _ in range(_CALLERS):
                group.create_task(call_on(name, ask))
        try:
            yield ends
        finally:
            is_over = True


def _has_grown(counts: Counter[str], before: int) -> bool:
    return counts.total() > before


async def until_all_attack(server: Running, ends: Ends) -> None:
    """Waits until every trick's calls are with the engine, or have been refused once more since.

    Of `DRAWN`, whose streams have many requests each, one stream is enough.
    """
    before = {name: ends[name].total() for name in REFUSED}
    for name in TRICKS:
        if name in REFUSED:
            await eventually(partial(_has_grown, ends[name], before[name]))
        else:
            await until_in_engine(server, f"{name}:", _CALLERS)


async def first_tokens(
    server: Running, steps: Steps, seeds: Collection[int], arrive: Callable[[int], Awaitable[None]], *, gap: int = 0
) -> list[int]:
    """Steps to the first tokens of a victim's requests; in order.

    Args:
        server: asked.
        steps: the engine's.
        seeds: one for each request.
        arrive: brings what is to be in the engine before a request, while no step ends.
        gap: least steps between two requests; 0 has each begin on an idle engine.
    """
    found, calls = [], []
    for seed in seeds:
        # At another point of the slices each time.
        with steps.held(gap + seed % (2 * SLICE_STEPS) if gap else 1):
            await arrive(seed)
            await eventually(lambda: steps.is_held)
            asked = generate_request(
                prompt(26**3 * 25 + seed, NUM_CHUNKS * CHUNK),
                sampling=pb.SamplingParams(temperature=0.0, seed=seed),
                request_id=f"{VICTIM}:{seed}:",
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
            )
            calls.append(server.generation.Generate(asked, **by(VICTIM)))
            await until_in_engine(server, f"{VICTIM}:{seed}:")
            found.append((seed, steps.count))
        if not gap:
            await eventually(lambda: server.num_streams == 0)
    for call in calls:
        assert len((await call).outputs[0].token_ids) == NUM_TOKENS
    return sorted(steps.first[seed] - count for seed, count in found)


def p99(values: list[int]) -> int:
    return values[math.ceil(0.99 * len(values)) - 1]


async def test_an_attack_on_every_way_makes_no_first_token_wait_twice_as_long_as_a_fair_competitor(
    tmp_path: Path, victims: int
) -> None:
    """With every trick in the engine whenever a request of the other key arrives; none of these is refused.

    The fair competitor brings as many prompts of a step as its share has rows. With `--victims 300` the same is asked
    of as many requests.
    """
    # An attacker's request of all rows has them for a slice; then chunks of two keys take turns.
    bound = SLICE_STEPS + 2 * NUM_CHUNKS
    steps, model = Steps(), served_model()
    engine = fake_engine(FakeRunner(ROWS, before_run=steps), limits=LIMITS, decode=model.output_tokenizer.decode)

    calls: list[Awaitable[Any]] = []

    async def fair_competitor(seed: int) -> None:
        asked = [
            generate_request(prompt(seed * ROWS + index, CHUNK), request_id=f"{FAIR}:{index}", max_tokens=16)
            for index in range(ROWS // 2)
        ]
        calls.extend(server.generation.Generate(each, **by(FAIR)) for each in asked)
        await until_in_engine(server, f"{FAIR}:", len(asked))

    async with running(
        [model],
        {MODEL: engine},
        api_keys=keys_file(tmp_path, **dict.fromkeys((ATTACKER, FAIR, VICTIM), "")),
        max_batch_size=ROWS,
        max_queue_size=_CALLERS * (len(TRICKS) + _IN_FLIGHT),
    ) as server:
        fair = await first_tokens(server, steps, range(1, victims + 1), fair_competitor)
        assert len(await asyncio.gather(*calls)) == victims * ROWS // 2
        async with attack(server) as ends:
            attacked = await first_tokens(
                server, steps, range(victims + 1, 2 * victims + 1), lambda _: until_all_attack(server, ends), gap=_GAP
            )
    print(f"steps to the first token: p99 {p99(fair)} beside a fair competitor, {p99(attacked)} under attack")
    for name, counts in ends.items():
        assert set(counts) == {REFUSED.get(name, _OK)}, f"{name}: {counts}"
    # Chunks of two keys take turns.
    assert 2 * NUM_CHUNKS - 1 <= p99(fair) <= 2 * NUM_CHUNKS, fair
    # So that a wait within the bound is at most twice as long as beside a fair competitor.
    assert bound <= 2 * p99(fair)
    assert p99(attacked) <= bound, attacked
