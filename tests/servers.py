"""A whole server in the test's own process: real gRPC on a loopback port, real engines over fake models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tokenizers
from grpc_health.v1 import health_pb2_grpc
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry
from tokenizers import decoders, models, pre_tokenizers, processors

from model.spec.artifact import Device, Manifest, Precision
from model.spec.chat import Chat, ChatSettings
from model.spec.config import Architecture, ModelConfig
from model.spec.generation import NO_RULES, GenerationRules
from model.spec.golden import CaseResult, Feed, GoldenCase
from model.spec.tokenizer import Tokenizer
from onward.inference import open_inference_pb2 as oip
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from onward.v1.model_pb2_grpc import ModelServiceStub
from service.app import App, Endpoint
from service.config import ServeConfig
from service.engine.engine import Engine
from service.engine.interfaces import StepEngine
from service.engine.sampling.grammar import Vocabulary
from service.engine.scheduler import EngineLimits
from service.repository.models import Parity, ServedModel
from service.telemetry.tracing import Tracer
from tests.fakes import BOS, CONTEXT, EOS, NUM_SPECIAL, PAD, VOCAB_SIZE, FakeRunner, fake_engine, noise, spell

MODEL = "fake"
# The tokens of the prompt "ab".
PROMPT = (BOS, *spell("ab"))
SLOTS = 4
CONFIG = ServeConfig(
    models=Path("unused"),
    port=0,
    metrics=False,
    max_batch_size=SLOTS,
    max_queue_size=4,
    calibrate=False,
    drain_grace_seconds=60.0,
)
TRUSTED = CaseResult("trusted", 0.0, 0.0, 1.0, 1.0, passed=True)
GREEDY = pb.SamplingParams(temperature=0.0)


def letter_tokenizer(*, ends_with_eos: bool = False) -> Tokenizer:
    """The tokenizer of `tests.fakes.letters`: one lower-case letter a token, other characters read as "z"."""
    alphabet = [chr(ord("a") + i) for i in range(26)] + [
        chr(ord("A") + i) for i in range(VOCAB_SIZE - NUM_SPECIAL - 26)
    ]
    vocab = {piece: i for i, piece in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    inner = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="z"))
    inner.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    template, special = ("$A <eos>", ("<eos>", EOS)) if ends_with_eos else ("<bos> $A", ("<bos>", BOS))
    inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=[special])
    return Tokenizer(inner)


def golden_case(*, encoder_decoder: bool = False, error: float = 0.0) -> GoldenCase:
    """What `FakeRunner` answers on its noise, off by `error`, decoding token by token."""
    sequence = np.array([BOS, 5, 6], np.int64)
    source = np.array([7, 8, EOS], np.int64)
    sources = (source,) if encoder_decoder else ()
    ends = range(1, len(sequence) + 1)
    logits = [noise(source.tolist() if sources else (), sequence[:end].tolist()) for end in ends]
    steps = tuple((Feed(0, end - 1, 1),) for end in ends)
    return GoldenCase("noise", (sequence,), sources, steps, np.stack(logits) + np.float32(error))


def served_model(
    name: str = MODEL,
    *,
    context: int = CONTEXT,
    encoder_decoder: bool = False,
    golden_error: float = 0.0,
    precision: Precision = Precision.FP32,
    generation: GenerationRules = NO_RULES,
    chat: str | None = None,
) -> ServedModel:
    """What the server knows of a fake model; `chat` is the source of its template."""
    encoder: dict[str, Any] = {"num_encoder_layers": 1, "source_context": context} if encoder_decoder else {}
    family = Architecture.ENCODER_DECODER if encoder_decoder else Architecture.DECODER_ONLY
    config = ModelConfig(
        architecture=family,
        vocab_size=VOCAB_SIZE,
        context=context,
        d_model=8,
        num_layers=1,
        num_heads=1,
        d_ff=8,
        **encoder,
    )
    manifest = Manifest(
        config=config,
        device=Device.CPU,
        precision=precision,
        opset=1,
        eos_ids=(EOS,),
        pad_id=PAD,
        decoder_start_id=BOS,
        graphs={},
        files={},
        generation=generation,
    )
    tokenizer = letter_tokenizer(ends_with_eos=encoder_decoder)
    return ServedModel(
        name=name,
        manifest=manifest,
        prompt_tokenizer=tokenizer,
        output_tokenizer=tokenizer,
        golden_cases=(golden_case(encoder_decoder=encoder_decoder, error=golden_error),),
        chat=None if chat is None else Chat(ChatSettings(chat), tokenizer),
        vocabulary=Vocabulary(tokenizer, VOCAB_SIZE, (EOS,)),
    )


def engine_for(model: ServedModel, runner: FakeRunner | None = None, **options: Any) -> Engine:
    """An engine over a fake runner, of the shape that the model says."""
    config = model.manifest.config
    return fake_engine(
        runner or FakeRunner(SLOTS),
        encoder_decoder=config.is_encoder_decoder,
        limits=EngineLimits(max_batch_size=SLOTS, prefill_chunk=8, max_prefill_tokens=16),
        context=config.context,
        decode=model.output_tokenizer.decode,
        generation=model.manifest.generation,
        **options,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that listens, and clients to it."""

    app: App
    endpoint: Endpoint
    registry: CollectorRegistry
    channel: grpc.aio.Channel
    generation: GenerationServiceStub
    models: ModelServiceStub
    health: health_pb2_grpc.HealthStub

    def stream(self, text: str = "ab", **fields: Any) -> Any:
        """A greedy stream of the fake model; `stop`, `max_tokens` … go into `stopping`."""
        return self.generation.GenerateStream(stream_request(text, **fields))

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value now; 0 where it was never touched."""
        return self.registry.get_sample_value(f"onward_{name}", labels) or 0.0

    def ended(self, model: str = MODEL) -> dict[str, int]:
        """How many requests ended in which way."""
        samples = [sample for metric in self.registry.collect() for sample in metric.samples]
        return {
            sample.labels["finish_reason"]: int(sample.value)
            for sample in samples
            if sample.name == "onward_requests_total" and sample.labels["model_name"] == model and sample.value
        }

    async def until_handled(self, method: str, code: str) -> None:
        """Waits until a call of a method ended with a status, for the first time."""
        labels = {"grpc_method": method, "grpc_code": code}
        await eventually(lambda: self.metric("grpc_server_handled_total", **labels) == 1)

    async def until_ended(self, count: int, model: str = MODEL) -> dict[str, int]:
        """How `count` requests ended, once they have; then none may run or wait."""
        await eventually(lambda: sum(self.ended(model).values()) >= count)
        assert self.metric("num_requests_running", model_name=model) == 0
        assert self.metric("num_requests_waiting", model_name=model) == 0
        return self.ended(model)

    @property
    def num_streams(self) -> int:
        """Requests that hold a place."""
        return self.app._engine.num_streams

    async def until_idle(self, model: str = MODEL) -> dict[str, int]:
        """How requests ended, once none is left."""
        await eventually(lambda: self.num_streams == 0)
        return self.ended(model)


@asynccontextmanager
async def running(
    served: Collection[ServedModel] | None = None,
    engines: Mapping[str, StepEngine] | None = None,
    *,
    runner: FakeRunner | None = None,
    verify: bool = True,
    trust: bool = False,
    tracer: Tracer | None = None,
    **changes: Any,
) -> AsyncIterator[Running]:
    """Runs a server over fake models: by default one, on `runner`. `changes` are to `CONFIG`.

    `trust` serves without replaying the golden cases, which a scripted runner would fail.
    """
    served = served or [served_model()]
    engines = engines or {model.name: engine_for(model, runner) for model in served}
    registry = CollectorRegistry()
    app = App(replace(CONFIG, **changes), served, engines, registry, tracer=tracer)
    async with app.listening() as endpoint, connect(app, endpoint, registry) as server:
        if trust:
            for model in served:
                app.models.verified(model, Parity((TRUSTED,)))
        elif verify:
            await app.verify_all()
        yield server


@asynccontextmanager
async def connect(app: App, endpoint: Endpoint, registry: CollectorRegistry) -> AsyncIterator[Running]:
    """Clients to a listening server."""
    async with grpc.aio.insecure_channel(f"{endpoint.host}:{endpoint.port}") as channel:
        yield Running(
            app=app,
            endpoint=endpoint,
            registry=registry,
            channel=channel,
            generation=GenerationServiceStub(channel),
            models=ModelServiceStub(channel),
            health=health_pb2_grpc.HealthStub(channel),
        )


def generate_request(text: str = "ab", **fields: Any) -> pb.GenerateRequest:
    """A greedy request; `max_tokens`, `stop`, `stop_token_ids`, … go into `stopping`."""
    stopping = {name: fields.pop(name) for name in list(fields) if name in pb.StoppingParams.DESCRIPTOR.fields_by_name}
    prompt = {} if "token_ids" in fields else {"text": text}
    return pb.GenerateRequest(**{"sampling": GREEDY, "stopping": pb.StoppingParams(**stopping), **prompt, **fields})


def stream_request(text: str = "ab", **fields: Any) -> pb.GenerateStreamRequest:
    """The same, to be streamed."""
    return pb.GenerateStreamRequest.FromString(generate_request(text, **fields).SerializeToString())


def infer_request(
    text: str = "ab", request_id: str = "", model: str = MODEL, **parameters: Any
) -> oip.ModelInferRequest:
    """A greedy request of the Open Inference Protocol."""
    request = oip.ModelInferRequest(model_name=model, id=request_id)
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text.encode())
    for name, value in {"temperature": 0, **parameters}.items():
        field = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], field, value)
    return request


async def nothing() -> AsyncIterator[bytes]:
    """The input of a call whose request never comes."""
    await asyncio.Event().wait()
    yield b""


def kinds(events: list[pb.GenerateStreamResponse]) -> list[str]:
    return [str(event.WhichOneof("event")) for event in events]


def text_of(events: list[pb.GenerateStreamResponse]) -> str:
    return "".join(event.delta.text for event in events)


def tokens_of(events: list[pb.GenerateStreamResponse]) -> list[int]:
    return [token for event in events for token in event.delta.token_ids]


async def read(call: Any) -> list[pb.GenerateStreamResponse]:
    """The rest of a stream, read as `read_accepted` reads: the two ways of gRPC must not be mixed on one call."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def read_accepted(call: Any) -> Any:
    event = await call.read()
    assert event.WhichOneof("event") == "accepted"
    return call


def rich_details(error: grpc.aio.AioRpcError) -> Any:
    status = rpc_status.from_call(error)
    assert status is not None
    assert status.code == error.code().value[0]
    return status.details


async def status_of(call: Any, code: grpc.StatusCode | None = None) -> grpc.aio.AioRpcError:
    """The error with which a call ends. Fails the test if it succeeds, or ends with another status than `code`."""
    error = None
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as caught:
        error = caught
    assert error is not None, "the call succeeded"
    assert code in (None, error.code()), error
    return error


async def expire(ask: Callable[[float], Any], is_known: Callable[[], bool]) -> None:
    """Calls with a deadline that passes, until `is_known`: the server has noticed one.

    On a busy machine a short deadline may pass before the server has the call, so each attempt has twice the time of
    the one before. Admission by deadline must be off, or a slow server would refuse the call.
    """
    timeout = 0.05
    while not is_known():
        error = await status_of(ask(timeout))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED, f"{error.code()}: {error.details()}"
        # The server notices later than the caller.
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await eventually(is_known)
        timeout *= 2


async def eventually(condition: Callable[[], bool]) -> None:
    """Waits for a condition that another thread or task will make true; the test's own timeout is the limit."""
    while not condition():  # noqa: ASYNC110 — it is the engine thread that is waited for
        await asyncio.sleep(0.001)
