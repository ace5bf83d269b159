"""`python -m tests.faults.attackers SETTINGS`: everything that one hostile caller can do at once, until stdin closes.

Each attack is a coroutine that makes one attempt. All attacks run side by side, each with a pause between its attempts:
what is measured beside them is the server's work, not this process's. stdout has a line once each attack was made, and
at the end JSON: how often each was made and how its attempts ended. SETTINGS has `target`, `metrics`, `key`, `model`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from proto.inference import open_inference_pb2 as oip
from proto.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from proto.onward.v1 import generation_pb2 as pb
from proto.onward.v1.generation_pb2_grpc import GenerationServiceStub
from tests.faults.http2 import Connection, frame, headers, literal, message_header

HELD_SECONDS = 5.0
ATTEMPT_SECONDS = 10.0
PAUSE_SECONDS = 1.0
_WATCH = b"/grpc.health.v1.Health/Watch"
_GENERATE = b"/onward.v1.GenerationService/Generate"
_STREAM = b"/onward.v1.GenerationService/GenerateStream"
_NICENESS = 19
# Just below the default of --max-message-bytes.
_LARGE_BYTES = (4 << 20) - 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """Whom to attack: addresses as "host:port", a key that may generate, and a model's name."""

    target: str
    metrics: str
    key: str
    model: str


class Attacker:
    """One hostile caller, with a key of its own and with none."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._authorization = ("authorization", f"Bearer {settings.key}")
        self._channel = grpc.aio.insecure_channel(settings.target, options=[("grpc.max_send_message_length", -1)])
        self._generation = GenerationServiceStub(self._channel)
        self._inference = GRPCInferenceServiceStub(self._channel)
        self._key = b"authorization", f"Bearer {settings.key}".encode()
        self._threads = ThreadPoolExecutor(64)
        self._source = random.Random(1)
        self.ends: dict[str, Counter[str]] = {name: Counter() for name in self.attacks}

    @property
    def attacks(self) -> Mapping[str, Callable[[], Awaitable[str]]]:
        """One attempt of each, by name; returns how it ended."""
        return {
            "watchers without a window": self.watch_without_window,
            "streams without a window": self.stream_without_window,
            "answers without a window": self.answer_without_window,
            "unfinished messages without a key": self.unfinished_without_key,
            "unfinished messages with a key": self.unfinished_with_key,
            "rapid resets": self.rapid_resets,
            "endless headers": self.endless_headers,
            "path that is no UTF-8": self.bad_path,
            "garbage": self.garbage,
            "a million empty chat messages": self.many_messages,
            "a million token ids": self.many_ids,
            "a million allowed ids": self.many_allowed_ids,
            "a million ids in a parameter": self.large_parameter,
            "one long text": self.long_text,
            "one long text to estimate": self.long_estimate,
            "one long text to tokenize": self.long_tokenize,
            "all rows": self.all_rows,
            "all rows by beams": self.all_beams,
            "priority": self.priority,
            "long prompts": self.long_prompts,
            "64 requests in one stream": self.crowded_stream,
            "ids of others": self.ids_of_others,
            "scrapers that send a byte at a time": self.slow_scrapers,
            "connections that say nothing": self.idle_connections,
        }

    async def attack(self, is_over: asyncio.Event) -> None:
        """Makes every attack again and again until it is over."""
        async with asyncio.TaskGroup() as group:
            for name, attempt in self.attacks.items():
                group.create_task(self._repeat(name, attempt, is_over))
        await self._channel.close()

    async def _repeat(self, name: str, attempt: Callable[[], Awaitable[str]], is_over: asyncio.Event) -> None:
        ends = self.ends[name]
        while not is_over.is_set():
            try:
                async with asyncio.timeout(ATTEMPT_SECONDS):
                    ends[await attempt()] += 1
            except TimeoutError:
                ends["cancelled"] += 1
            except grpc.aio.AioRpcError as error:
                ends[error.code().name] += 1
            except (OSError, EOFError) as error:
                ends[type(error).__name__] += 1
            if ends.total() == 1 and all(self.ends.values()):
                sys.stdout.write("every attack was made\n")
                sys.stdout.flush()
            with suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), PAUSE_SECONDS)

    async def watch_without_window(self) -> str:
        return await self._held_streams(_WATCH)

    async def stream_without_window(self) -> str:
        return await self._held_streams(_STREAM, self._key)

    async def answer_without_window(self) -> str:
        return await self._held_streams(_GENERATE, self._key)

    async def _held_streams(self, path: bytes, *metadata: tuple[bytes, bytes]) -> str:
        """Sixteen calls of one connection that take no byte, and a client that answers every ping."""
        request = pb.GenerateRequest(model=self._settings.model, text="a", stopping=pb.StoppingParams(max_tokens=64))
        data = b"" if path is _WATCH else request.SerializeToString()

        def attack(connection: Connection) -> None:
            for _ in range(16):
                connection.call(path, *metadata, head=message_header(len(data)) + data, num_zeros=0)

        return await self._raw(attack, window=0)

    async def unfinished_without_key(self) -> str:
        return await self._unfinished()

    async def unfinished_with_key(self) -> str:
        return await self._unfinished(self._key)

    async def _unfinished(self, *metadata: tuple[bytes, bytes]) -> str:
        """128 messages of 4 MB, of which all comes that the windows let through, but for the last byte."""

        def attack(connection: Connection) -> None:
            for _ in range(128):
                connection.call(_GENERATE, *metadata, head=message_header(4_000_000), num_zeros=3_999_999)

        return await self._raw(attack)

    async def rapid_resets(self) -> str:
        stream = b"".join(headers(_GENERATE, stream=each) + frame(3, 0, each, bytes(4)) for each in range(1, 401, 2))
        return await self._raw(lambda connection: connection.send(stream), 1.0)

    async def endless_headers(self) -> str:
        more = frame(9, 0, 1, literal(b"x-filler", b"y" * 100) * 100)
        begun = frame(1, 0, 1, literal(b":method", b"POST"))
        return await self._raw(lambda connection: connection.send(begun + more * 100), 1.0)

    async def bad_path(self) -> str:
        return await self._raw(lambda connection: connection.send(headers(b"/\xff\xfe/\xc3(")), 1.0)

    async def garbage(self) -> str:
        data = self._source.randbytes(100_000)
        return await self._raw(lambda connection: connection.send(data), 1.0)

    async def idle_connections(self) -> str:
        ends = await asyncio.gather(*(self._raw(lambda _: None) for _ in range(16)))
        return " ".join(sorted(set(ends)))

    async def _raw(
        self, attack: Callable[[Connection], object], seconds: float = HELD_SECONDS, window: int | None = None
    ) -> str:
        """Attacks over a connection, then answers pings and sends what may be sent, for so long."""

        def run() -> str:
            connection = Connection(int(self._settings.target.rpartition(":")[2]), window)
            try:
                attack(connection)
                over = time.monotonic() + seconds
                connection.pump(lambda: time.monotonic() >= over)
                return "closed" if connection.is_closed else "held"
            finally:
                connection.close()

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    async def many_messages(self) -> str:
        # An empty message is two bytes: the field's tag and a length of nothing.
        return await self._send(_GENERATE, _field("chat", b"\x0a\x00" * (_LARGE_BYTES // 2)))

    async def many_ids(self) -> str:
        ids = pb.TokenIds(ids=[1] * (_LARGE_BYTES - 64))
        return await self._generate(pb.GenerateRequest(model=self._settings.model, token_ids=ids))

    async def many_allowed_ids(self) -> str:
        sampling = pb.SamplingParams(allowed_token_ids=[1] * (_LARGE_BYTES - 128))
        return await self._generate(pb.GenerateRequest(model=self._settings.model, text="a", sampling=sampling))

    async def large_parameter(self) -> str:
        request = self._infer("a")
        request.parameters["allowed_token_ids"].string_param = "[" + "1," * (_LARGE_BYTES // 2 - 128) + "1]"
        await self._inference.ModelInfer(request, metadata=[self._authorization])
        return "OK"

    async def long_text(self) -> str:
        return await self._generate(pb.GenerateRequest(model=self._settings.model, text="a" * (_LARGE_BYTES - 64)))

    async def long_estimate(self) -> str:
        request = pb.GenerateRequest(model=self._settings.model, text="a b" * (_LARGE_BYTES // 3 - 64))
        await self._generation.Estimate(pb.EstimateRequest(request=request), metadata=[self._authorization])
        return "OK"

    async def long_tokenize(self) -> str:
        text = "a" * (256 << 10)
        request = pb.TokenizeRequest(model=self._settings.model, text=text)
        await self._generation.Tokenize(request, metadata=[self._authorization])
        return "OK"

    async def all_rows(self) -> str:
        return await self._greedy_rows(sampling=pb.SamplingParams(n=16))

    async def all_beams(self) -> str:
        return await self._greedy_rows(beam_search=pb.BeamSearchParams(beam_size=16))

    async def priority(self) -> str:
        return await self._greedy_rows(priority=2**31 - 1)

    async def long_prompts(self) -> str:
        return await self._greedy_rows(text="a" * 400)

    async def _greedy_rows(self, text: str = "a", **fields: Any) -> str:
        stopping = pb.StoppingParams(max_tokens=400, ignore_eos=True)
        request = pb.GenerateRequest(model=self._settings.model, text=text, stopping=stopping, **fields)
        ends = await asyncio.gather(*(self._end_of(self._generate(request)) for _ in range(4)))
        return " ".join(sorted(set(ends)))

    async def crowded_stream(self) -> str:
        def requests() -> Any:
            for number in range(64):
                request = self._infer("a" * 100)
                request.id = str(number)
                request.parameters["max_tokens"].int64_param = 400
                request.parameters["n"].int64_param = 16
                yield request

        call = self._inference.ModelStreamInfer(requests(), metadata=[self._authorization])
        errors: Counter[str] = Counter()
        async for answer in call:
            errors[answer.error_message[:20].partition("]")[0] + "]" if answer.error_message else "OK"] += 1
        return " ".join(sorted(errors))

    async def ids_of_others(self) -> str:
        requests = [
            pb.GenerateRequest(
                model=self._settings.model,
                text="a",
                request_id=f"honest-{number}",
                stopping=pb.StoppingParams(max_tokens=1),
            )
            for number in range(16)
        ]
        ends = await asyncio.gather(*(self._end_of(self._generate(request)) for request in requests))
        return " ".join(sorted(set(ends)))

    async def slow_scrapers(self) -> str:
        host, port = self._settings.metrics.rsplit(":", 1)

        async def scrape() -> None:
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                for byte in b"GET /metrics HTTP/1.1\r\n":
                    writer.write(bytes((byte,)))
                    await writer.drain()
                    await asyncio.sleep(HELD_SECONDS / 23)
                await reader.read(1)
            finally:
                writer.close()

        found = await asyncio.gather(*(scrape() for _ in range(64)), return_exceptions=True)
        return " ".join(sorted({"held" if error is None else type(error).__name__ for error in found}))

    def _infer(self, text: str) -> oip.ModelInferRequest:
        request = oip.ModelInferRequest(model_name=self._settings.model)
        tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(text.encode())
        return request

    async def _generate(self, request: pb.GenerateRequest) -> str:
        await self._generation.Generate(request, metadata=[self._authorization])
        return "OK"

    async def _end_of(self, call: Awaitable[str]) -> str:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)

    async def _send(self, path: bytes, data: bytes) -> str:
        await self._channel.unary_unary(path.decode())(data, metadata=[self._authorization])
        return "OK"


def _field(name: str, data: bytes) -> bytes:
    """A length-delimited field of a `GenerateRequest`, as the wire has it."""
    # What comes before the text of any such field, if the text is as long.
    spelled = pb.GenerateRequest(model="x" * len(data)).SerializeToString()
    tag = pb.GenerateRequest.DESCRIPTOR.fields_by_name[name].number << 3 | 2
    return bytes((tag,)) + spelled[1 : len(spelled) - len(data)] + data


async def _main(settings: Settings) -> None:
    # The server's cores are its own.
    os.nice(_NICENESS)
    is_over = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Whoever started this closes stdin, or is gone.
    loop.add_reader(sys.stdin.fileno(), is_over.set)
    attacker = Attacker(settings)
    began = time.monotonic()
    await attacker.attack(is_over)
    found = {name: dict(ends) for name, ends in attacker.ends.items()}
    sys.stdout.write(json.dumps({"seconds": time.monotonic() - began, "attacks": found}) + "\n")


if __name__ == "__main__":
    asyncio.run(_main(Settings(**json.loads(sys.argv[1]))))
