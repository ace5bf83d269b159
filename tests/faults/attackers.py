"""`python -m tests.faults.attackers SETTINGS`: everything that one hostile caller can do at once, until stdin closes.

Each attack is a coroutine that makes one attempt and returns how its calls or connections ended: the name of a status,
or what became of a connection. `ATTACKS` says of each attack which of these ends it must meet and which it may meet
besides; `problems` finds the others.

The pace: each attack pauses for a second after each of its attempts, whose calls it makes at once, so that what is
measured beside them is the server's work, not this process's. Health is checked 200 times a second.

stdout has lines of JSON, the ends of each attack, counted: one once each attack has met an end that it must meet, or
was attempted so often in vain, and one for each line on stdin. SETTINGS has the fields of `Settings`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from onward.inference import open_inference_pb2 as oip
from onward.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from tests.faults.bounds import LOOK_SECONDS, SLICE_BYTES
from tests.faults.http2 import Connection, code, frame, headers, literal, message_header, varint

MAX_CONNECTIONS = 96
"""Of the server: more than this process and sixteen honest clients have open, but for one attack."""
UNFINISHED_CALLS = 128
"""Of each attack by messages that never end: two by messages of megabytes, two by small ones."""
HELD_CALLS, _RESET_CALLS = 16, 200
# Of all other attacks: rows, texts, checks, requests with ids of others.
_FEW_CALLS = 64
MAX_CALLS = 4 * UNFINISHED_CALLS + 4 * HELD_CALLS + _RESET_CALLS + _FEW_CALLS
"""Calls of all attacks at once."""
MAX_TEXTS = 3
"""Long texts of all attacks at once."""
HELD_SECONDS = 5.0
# After so long a client of rows cancels its calls, and one that checks health asks no more.
PATIENCE_SECONDS = 10.0
# For a server that is busy with all of this. An attempt that takes longer is stuck.
ATTEMPT_SECONDS = 120.0
PAUSE_SECONDS = 1.0
# In vain, until an attack is given up.
MAX_ATTEMPTS = 20
_CHECK = b"/grpc.health.v1.Health/Check"
_WATCH = b"/grpc.health.v1.Health/Watch"
_REFLECTION = b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_GENERATE = b"/onward.v1.GenerationService/Generate"
_STREAM = b"/onward.v1.GenerationService/GenerateStream"
_DETOKENIZE = b"/onward.v1.GenerationService/Detokenize"
_INFER = b"/inference.GRPCInferenceService/ModelStreamInfer"
# Just below the default of --max-message-bytes.
_LARGE_BYTES = (4 << 20) - 1024
_LONG_ID_BYTES = 3 << 20
# A byte that is no UTF-8 by itself: its text has three. So many may be asked for.
_TOKEN, _MOST_IDS = 200, 64 << 10
ANSWER_BYTES = 3 * _MOST_IDS
"""Largest answer that is not taken, of `HELD_CALLS` calls at once."""

Ends = Iterable[str]


@dataclass(frozen=True, slots=True)
class Settings:
    """What is attacked: addresses as "host:port", keys that may generate, and a model's name; how nice the process is.

    Unfinished messages have a key of their own, or they would take the places of the other attacks' messages; and so
    has the message that announces a gibibyte, or it might never get one of theirs.
    """

    target: str
    metrics: str
    key: str
    upload_key: str
    flood_key: str
    model: str
    niceness: int = 0


@dataclass(frozen=True, slots=True)
class Attack:
    """One attempt of an attack, and how it ends.

    Args:
        attempt: returns its ends.
        must: ends of which it meets one at least once, or the attack was not made.
        may: ends that it may meet besides.
    """

    attempt: Callable[[Attacker], Awaitable[Ends]]
    must: frozenset[str]
    may: frozenset[str]

    def is_made(self, ends: Mapping[str, int]) -> bool:
        """Whether one of the ends that it must meet is among its ends."""
        return not self.must.isdisjoint(ends)


def problems(ends: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Attacks that were not made and ends that none of theirs may be, in words.

    Args:
        ends: how often each attack has met each end.
    """
    found = []
    for name, attack in ATTACKS.items():
        met = ends.get(name, {})
        if not attack.is_made(met):
            found.append(f"{name}: must meet {' or '.join(sorted(attack.must))}, met {dict(met)}")
        if others := met.keys() - attack.must - attack.may:
            found.append(f"{name}: may not meet {', '.join(sorted(others))}, met {dict(met)}")
    return found


class Attacker:
    """One hostile caller, with three keys of its own and with none."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._authorization = ("authorization", f"Bearer {settings.key}")
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(settings.target, options=options) for _ in range(2)]
        self._channel = self._channels[0]
        self._generation = GenerationServiceStub(self._channel)
        self._inference = GRPCInferenceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channels[1])
        self._key, self._upload_key, self._flood_key = (
            (b"authorization", f"Bearer {key}".encode())
            for key in (settings.key, settings.upload_key, settings.flood_key)
        )
        self._threads = ThreadPoolExecutor(64)
        self._source = random.Random(1)
        self.ends: dict[str, Counter[str]] = {name: Counter() for name in ATTACKS}
        self._settled: set[str] = set()

    async def attack(self, is_over: asyncio.Event) -> None:
        """Makes every attack again and again until it is over."""
        # One attack takes all connections that there may be.
        await asyncio.gather(*(each.channel_ready() for each in self._channels))
        async with asyncio.TaskGroup() as group:
            for name, attack in ATTACKS.items():
                group.create_task(self._repeat(name, attack, is_over))
        for each in self._channels:
            await each.close()

    async def _repeat(self, name: str, attack: Attack, is_over: asyncio.Event) -> None:
        ends = self.ends[name]
        for number in itertools.count(1):
            ends.update(await self.attempt(attack))
            if name not in self._settled and (attack.is_made(ends) or number >= MAX_ATTEMPTS):
                self._settled.add(name)
                if self._settled == ATTACKS.keys():
                    self.tell()
            with suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), PAUSE_SECONDS)
                return

    def tell(self) -> None:
        """Writes the ends until now to stdout."""
        sys.stdout.write(json.dumps(self.ends) + "\n")
        sys.stdout.flush()

    async def attempt(self, attack: Attack) -> Ends:
        """Makes one attempt; its ends."""
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS):
                return await attack.attempt(self)
        except TimeoutError:
            return ["stuck"]
        except grpc.aio.AioRpcError as error:
            return [error.code().name]
        except (OSError, EOFError) as error:
            return [type(error).__name__]

    async def held_streams(self, path: bytes, *, has_key: bool = True) -> Ends:
        """Sixteen calls of one connection that take no byte of their answers."""
        requests: dict[bytes, Message] = {
            _WATCH: health_pb2.HealthCheckRequest(),
            _DETOKENIZE: pb.DetokenizeRequest(model=self._settings.model, token_ids=[_TOKEN] * _MOST_IDS),
        }
        stopping = pb.StoppingParams(max_tokens=64)
        request = requests.get(path, pb.GenerateRequest(model=self._settings.model, text="a", stopping=stopping))
        data, keys = request.SerializeToString(), [self._key] * has_key

        def attack(connection: Connection) -> Ends:
            streams = [
                connection.call(path, *keys, head=message_header(len(data)) + data, is_complete=True)
                for _ in range(HELD_CALLS)
            ]
            return _held(connection, streams)

        return await self._raw(attack, window=0)

    async def long_ids_without_window(self) -> Ends:
        """Sixteen requests of one stream, whose ids have 3 MiB. No byte of an answer is taken."""
        rest = self._infer("a").SerializeToString()
        rest += varint(oip.ModelInferRequest.ID_FIELD_NUMBER << 3 | 2) + varint(_LONG_ID_BYTES)
        size = len(rest) + _LONG_ID_BYTES
        head = message_header(size) + rest

        def attack(connection: Connection) -> Ends:
            stream = connection.call(_INFER, self._key, head=head, num_zeros=_LONG_ID_BYTES, num_times=16)
            connection.pump(lambda: stream in connection.ended or connection.sent[stream] > size, ATTEMPT_SECONDS)
            return _held(connection, [stream])

        return await self._raw(attack, window=0)

    async def unfinished(self, path: bytes, num_bytes: int = 4_000_000, *, has_key: bool = False) -> Ends:
        """128 messages of which all comes that the windows let through, but for the last byte; until all are ended."""
        keys = [self._upload_key] * has_key

        def attack(connection: Connection) -> Ends:
            for _ in range(UNFINISHED_CALLS):
                connection.call(path, *keys, head=message_header(num_bytes), num_zeros=num_bytes - 1)
            return _ended(connection)

        return await self._raw(attack)

    async def announced(self) -> Ends:
        """A message that announces a gibibyte, and brings of it a slice between two looks of the server."""

        def attack(connection: Connection) -> Ends:
            head, num_zeros = message_header(1 << 30), (1 << 30) - 1
            stream = connection.call(_GENERATE, self._flood_key, head=head, num_zeros=num_zeros)
            connection.flood(stream, SLICE_BYTES, LOOK_SECONDS)
            return [code(connection.ended[stream]) if stream in connection.ended else _left(connection)]

        return await self._raw(attack)

    async def rapid_resets(self) -> Ends:
        stream = b"".join(
            headers(_GENERATE, stream=each) + frame(3, 0, each, bytes(4)) for each in range(1, 2 * _RESET_CALLS, 2)
        )
        return await self._raw(lambda connection: _answered(connection, stream))

    async def bad_path(self) -> Ends:
        return await self._raw(lambda connection: _answered(connection, headers(b"/\xff\xfe/\xc3(")))

    async def endless_headers(self) -> Ends:
        more = frame(9, 0, 1, literal(b"x-filler", b"y" * 100) * 100)
        begun = frame(1, 0, 1, literal(b":method", b"POST"))
        return await self._raw(lambda connection: _closed(connection, begun + more * 100))

    async def garbage(self) -> Ends:
        data = self._source.randbytes(100_000)
        return await self._raw(lambda connection: _closed(connection, data))

    async def idle_connections(self) -> Ends:
        found = await asyncio.gather(*(self._raw(lambda connection: _held(connection, [])) for _ in range(16)))
        return [end for ends in found for end in ends]

    async def crowd(self) -> Ends:
        """More connections than there may be."""

        def run() -> Ends:
            with _connected(self._port, MAX_CONNECTIONS + 8) as connections:
                return ["open" if _is_greeted(each) else "no place" for each in connections]

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    @property
    def _port(self) -> int:
        return int(self._settings.target.rpartition(":")[2])

    async def _raw(self, attack: Callable[[Connection], Ends], window: int | None = None) -> Ends:
        """Attacks over a connection of its own, if there is a place for it."""

        def run() -> Ends:
            with _connected(self._port, 1, window) as (connection,):
                return attack(connection) if _is_greeted(connection) else ["no place"]

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    async def many_messages(self) -> Ends:
        # An empty message is two bytes: the field's tag and a length of nothing.
        return await self._send(_GENERATE, _field("chat", b"\x0a\x00" * (_LARGE_BYTES // 2)))

    async def large_parameter(self) -> Ends:
        request = self._infer("a")
        request.parameters["allowed_token_ids"].string_param = "[" + "1," * (_LARGE_BYTES // 2 - 128) + "1]"
        await self._inference.ModelInfer(request, metadata=[self._authorization])
        return ["OK"]

    async def long_estimate(self) -> Ends:
        request = pb.GenerateRequest(model=self._settings.model, text="a b" * (_LARGE_BYTES // 3 - 64))
        await self._generation.Estimate(pb.EstimateRequest(request=request), metadata=[self._authorization])
        return ["OK"]

    async def long_tokenize(self) -> Ends:
        text = "a" * (256 << 10)
        request = pb.TokenizeRequest(model=self._settings.model, text=text)
        await self._generation.Tokenize(request, metadata=[self._authorization])
        return ["OK"]

    async def greedy_rows(self, text: str = "a", max_tokens: int = 400, **fields: Any) -> Ends:
        stopping = pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True)
        request = pb.GenerateRequest(model=self._settings.model, text=text, stopping=stopping, **fields)
        return await asyncio.gather(*(self._end_of(request) for _ in range(4)))

    async def crowded_stream(self) -> Ends:
        def requests() -> Iterator[oip.ModelInferRequest]:
            for number in range(64):
                request = self._infer("a" * 100)
                request.id = str(number)
                request.parameters["max_tokens"].int64_param = 400
                request.parameters["n"].int64_param = 16
                yield request

        call = self._inference.ModelStreamInfer(requests(), metadata=[self._authorization])
        ends = []
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                async for answer in call:
                    ends += [answer.error_message[1:].partition("]")[0] or "OK"]
        call.cancel()
        return ends

    async def ids_of_others(self) -> Ends:
        stopping = pb.StoppingParams(max_tokens=1)
        requests = [
            pb.GenerateRequest(model=self._settings.model, text="a", request_id=f"honest-{number}", stopping=stopping)
            for number in range(16)
        ]
        return await asyncio.gather(*map(self._end_of, requests))

    async def checks(self) -> Ends:
        """200 in a second; fewer where each twenty wait behind unfinished checks of this address."""
        ends: list[str] = []
        patience = time.monotonic() + PATIENCE_SECONDS
        for _ in range(10):
            if time.monotonic() > patience:
                break
            calls = (self._health.Check(health_pb2.HealthCheckRequest()) for _ in range(20))
            answers = await asyncio.gather(*calls, return_exceptions=True)
            for answer in answers:
                if isinstance(answer, grpc.aio.AioRpcError):
                    ends.append(answer.code().name)
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    ends.append("OK")
            await asyncio.sleep(0.1)
        return ends

    async def slow_scrapers(self) -> Ends:
        async def send(writer: asyncio.StreamWriter) -> None:
            for byte in b"GET /metrics HTTP/1.1\r\n":
                writer.write(bytes((byte,)))
                await writer.drain()
                await asyncio.sleep(HELD_SECONDS / 23)

        return await asyncio.gather(*(self._scrape(send) for _ in range(64)))

    async def header_flood(self) -> Ends:
        """Headers of the metrics port, of which there is no end."""

        async def send(writer: asyncio.StreamWriter) -> None:
            writer.write(b"GET /metrics HTTP/1.1\r\n")
            while True:
                writer.write(b"x-filler: " + b"y" * 1000 + b"\r\n")
                await writer.drain()

        return await asyncio.gather(*(self._scrape(send) for _ in range(4)))

    async def _scrape(self, send: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> str:
        """Sends until all is sent, or the server hangs up."""
        host, port = self._settings.metrics.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        sending, ended = asyncio.ensure_future(send(writer)), asyncio.ensure_future(reader.read())
        try:
            await asyncio.wait((sending, ended), return_when=asyncio.FIRST_COMPLETED)
            return "closed" if ended.done() or sending.exception() else "held"
        finally:
            for each in (sending, ended):
                each.cancel()
            await asyncio.gather(sending, ended, return_exceptions=True)
            writer.close()

    def _infer(self, text: str) -> oip.ModelInferRequest:
        request = oip.ModelInferRequest(model_name=self._settings.model)
        tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(text.encode())
        return request

    async def generate(self, **fields: Any) -> Ends:
        """One request with these fields."""
        return await self._generate(pb.GenerateRequest(model=self._settings.model, **fields))

    async def _generate(self, request: pb.GenerateRequest) -> Ends:
        await self._generation.Generate(request, metadata=[self._authorization])
        return ["OK"]

    async def _end_of(self, request: pb.GenerateRequest) -> str:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._generate(request)
        except TimeoutError:
            return "cancelled"
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return "OK"

    async def _send(self, path: bytes, data: bytes) -> Ends:
        await self._channel.unary_unary(path.decode())(data, metadata=[self._authorization])
        return ["OK"]


@contextmanager
def _connected(port: int, count: int, window: int | None = None) -> Iterator[list[Connection]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Connection(port, window))) for _ in range(count)]


def _is_greeted(connection: Connection) -> bool:
    """Waits until the server has accepted a connection, or closed it at once for want of a place."""
    return connection.pump(lambda: connection.is_greeted, ATTEMPT_SECONDS)


def _held(connection: Connection, streams: list[int]) -> Ends:
    """Once all streams are answered or ended: what becomes of them in some seconds in which nothing is taken."""
    connection.pump(lambda: connection.begun | connection.ended.keys() >= {*streams}, PATIENCE_SECONDS)
    over = time.monotonic() + HELD_SECONDS
    connection.pump(lambda: time.monotonic() >= over)
    if connection.is_closed or not streams:
        return [_left(connection)]
    waiting = {each: "held" if each in connection.begun else "unanswered" for each in streams}
    return [code(connection.ended[each]) if each in connection.ended else waiting[each] for each in streams]


def _ended(connection: Connection) -> Ends:
    """How all unfinished calls were ended by the server, and whether it hung up."""
    connection.pump(lambda: len(connection.ended) == UNFINISHED_CALLS, ATTEMPT_SECONDS)
    left = [_left(connection)] * (UNFINISHED_CALLS - len(connection.ended))
    return [*map(code, connection.ended.values()), *left]


def _left(connection: Connection) -> str:
    """What became of a connection whose calls are not ended."""
    return "closed" if connection.is_closed else "held"


def _answered(connection: Connection, data: bytes) -> Ends:
    """Whether a ping behind the data is answered."""
    connection.send(data)
    connection.ping()
    connection.pump(lambda: connection.num_pongs > 0, ATTEMPT_SECONDS)
    return ["answered" if connection.num_pongs else _left(connection)]


def _closed(connection: Connection, data: bytes) -> Ends:
    """Whether the server hangs up."""
    connection.send(data)
    connection.pump(lambda: connection.is_closed, ATTEMPT_SECONDS)
    return [_left(connection)]


def _field(name: str, data: bytes) -> bytes:
    """A length-delimited field of a `GenerateRequest`, as the wire has it."""
    # What comes before the text of any such field, if the text is as long.
    spelled = pb.GenerateRequest(model="x" * len(data)).SerializeToString()
    tag = pb.GenerateRequest.DESCRIPTOR.fields_by_name[name].number << 3 | 2
    return bytes((tag,)) + spelled[1 : len(spelled) - len(data)] + data


def _attack(attempt: Callable[[Attacker], Awaitable[Ends]], must: str, may: str = "") -> Attack:
    return Attack(attempt, frozenset(must.split(", ")), frozenset(may.split(", ")) - {""})


_FULL = "RESOURCE_EXHAUSTED"
# A call that is cancelled ran, or waited: for its rows, or until it was read.
_RAN = "OK, cancelled"
_REFUSED = "INVALID_ARGUMENT, OUT_OF_RANGE"
# A read takes too long, or its caller has no place for it.
_READ = "RESOURCE_EXHAUSTED, ABORTED"
# Beside the crowd there is no place for a connection.
_RAW = "no place"
# Until its client is found to have stalled; "reset" where the status would wait behind what the client does not take.
_STALLED = f"{_FULL}, closed, ABORTED, CANCELLED, reset, unanswered, {_RAW}"

_ALLOWED = pb.SamplingParams(allowed_token_ids=[1] * (_LARGE_BYTES - 128))
_IDS = pb.TokenIds(ids=[1] * (_LARGE_BYTES - 64))

ATTACKS: Mapping[str, Attack] = {
    "watchers without a window": _attack(
        lambda attacker: attacker.held_streams(_WATCH, has_key=False), "held", f"{_FULL}, {_RAW}"
    ),
    "streams without a window": _attack(lambda attacker: attacker.held_streams(_STREAM), "held", _STALLED),
    "answers without a window": _attack(lambda attacker: attacker.held_streams(_GENERATE), "held", _STALLED),
    "large answers without a window": _attack(lambda attacker: attacker.held_streams(_DETOKENIZE), "held", _STALLED),
    "long ids without a window": _attack(Attacker.long_ids_without_window, "held, INVALID_ARGUMENT", _STALLED),
    "unfinished messages without a key": _attack(
        lambda attacker: attacker.unfinished(_GENERATE), "UNAUTHENTICATED", _RAW
    ),
    "unfinished messages with a key": _attack(
        lambda attacker: attacker.unfinished(_GENERATE, has_key=True), "ABORTED", f"{_FULL}, {_RAW}"
    ),
    "unfinished health checks": _attack(
        lambda attacker: attacker.unfinished(_CHECK, 1000), "ABORTED", f"{_FULL}, {_RAW}"
    ),
    "unfinished reflection": _attack(
        lambda attacker: attacker.unfinished(_REFLECTION, 1000), "ABORTED", f"{_FULL}, {_RAW}"
    ),
    "message that announces a gibibyte": _attack(Attacker.announced, "ABORTED", f"{_FULL}, {_RAW}"),
    "rapid resets": _attack(Attacker.rapid_resets, "answered", _RAW),
    "endless headers": _attack(Attacker.endless_headers, "closed", _RAW),
    "path that is no UTF-8": _attack(Attacker.bad_path, "answered", _RAW),
    "garbage": _attack(Attacker.garbage, "closed", _RAW),
    "connections that say nothing": _attack(Attacker.idle_connections, "held", _RAW),
    "more connections than there may be": _attack(Attacker.crowd, "no place", "open"),
    "a million empty chat messages": _attack(Attacker.many_messages, "INVALID_ARGUMENT", _READ),
    "a million token ids": _attack(lambda attacker: attacker.generate(token_ids=_IDS), _REFUSED, _READ),
    "a million allowed ids": _attack(
        lambda attacker: attacker.generate(text="a", sampling=_ALLOWED), "INVALID_ARGUMENT", _READ
    ),
    "a million ids in a parameter": _attack(Attacker.large_parameter, "INVALID_ARGUMENT", _READ),
    "one long text": _attack(lambda attacker: attacker.generate(text="a" * (_LARGE_BYTES - 64)), _REFUSED, _READ),
    "one long text to estimate": _attack(Attacker.long_estimate, _REFUSED, _READ),
    "one long text to tokenize": _attack(Attacker.long_tokenize, "OK", _READ),
    "all rows": _attack(lambda attacker: attacker.greedy_rows(sampling=pb.SamplingParams(n=16)), _RAN, _FULL),
    "all rows by beams": _attack(
        lambda attacker: attacker.greedy_rows(beam_search=pb.BeamSearchParams(beam_size=16)), _RAN, _FULL
    ),
    "priority": _attack(
        lambda attacker: attacker.greedy_rows(priority=2**31 - 1), "INVALID_ARGUMENT", f"{_FULL}, cancelled"
    ),
    "long prompts": _attack(lambda attacker: attacker.greedy_rows("a" * 400, max_tokens=100), _RAN, _FULL),
    "64 requests in one stream": _attack(Attacker.crowded_stream, "OK", _FULL),
    "ids of others": _attack(Attacker.ids_of_others, _RAN, _FULL),
    "200 health checks a second": _attack(Attacker.checks, "OK", _FULL),
    "scrapers that send a byte at a time": _attack(Attacker.slow_scrapers, "closed", "held"),
    "endless headers of a scrape": _attack(Attacker.header_flood, "closed"),
}


async def _main(settings: Settings) -> None:
    os.nice(settings.niceness)
    is_over = asyncio.Event()
    attacker = Attacker(settings)

    def answer_ends() -> None:
        # This process's parent closes stdin, or is gone.
        if not os.read(sys.stdin.fileno(), 100):
            is_over.set()
            return
        attacker.tell()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), answer_ends)
    await attacker.attack(is_over)


if __name__ == "__main__":
    asyncio.run(_main(Settings(**json.loads(sys.argv[1]))))
