"""Replicas on a real Ray Serve for the tests of it: started, watched, and asked beside a server by itself."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.infra.ray_serve import RayServe, on_ray
from onward.inference import open_inference_pb2 as oip
from onward.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from onward.v1 import generation_pb2 as pb
from onward.v1.generation_pb2_grpc import GenerationServiceStub
from tests.artifacts import tiny_artifact
from tests.faults.callers import SECONDS
from tests.faults.process import DECODER, MODELS, SLOTS, greedy, streamed, until

CONTEXT = 2048
PATIENCE = 240.0
"""Seconds for Ray to replace a replica on a machine that has much else to do."""
FLAGS = ("--threads", "1", "--no-spin", "--no-calibrate", "--max-batch-size", str(SLOTS), "--log-level", "error")


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas on Ray, and the folder where Prometheus finds them."""

    ray: RayServe
    targets: Path
    channel: grpc.Channel

    @property
    def generation(self) -> Any:
        return GenerationServiceStub(self.channel)

    def addresses(self) -> list[str]:
        """Where their metrics are."""
        found = [json.loads(path.read_text()) for path in sorted(self.targets.glob("*.json"))]
        return [address for groups in found for group in groups for address in group["targets"]]

    def samples(self, name: str, **labels: str) -> list[float]:
        """A metric of each replica that is there, by its name without the prefix, summed over labels not given."""
        values = []
        for address in self.addresses():
            try:
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
                    families = list(text_string_to_metric_families(answer.read().decode()))
            except OSError:  # it was killed, and nobody has come in its place yet
                continue
            values.append(
                sum(
                    sample.value
                    for family in families
                    for sample in family.samples
                    if sample.name == f"onward_{name}" and labels.items() <= sample.labels.items()
                )
            )
        return values

    def are_busy(self) -> bool:
        """Whether both have streams."""
        running = self.samples("num_requests_running")
        return len(running) == 2 and all(running)

    def until_two(self, old: Collection[int] = ()) -> None:
        """Waits until there are two that have proven their models, none of them an old one."""

        def are_there() -> bool:
            pids = self.ray.replicas()
            counts = {len(pids), len(self.addresses()), len(self.samples("model_serving"))}
            return counts == {2} and not set(pids) & set(old)

        until(are_there, "there are not two", PATIENCE)

    def settle(self) -> None:
        """Waits until no replica holds anything."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")
        until(lambda: not any(sum(self.samples(name)) for name in names), "requests still run or wait", SECONDS)


@contextmanager
def replicas(folder: Path, *words: str, flags: Sequence[str] = ()) -> Iterator[Replicas]:
    """Two of them with both families, unless words say otherwise; their decoder has room for streams that last."""
    models, targets = folder / "models", folder / "targets"
    models.mkdir()
    for model in MODELS:
        overrides = {"context": CONTEXT} if model == DECODER else {}
        (models / model).symlink_to(tiny_artifact(model, **overrides), target_is_directory=True)
    given = ("--models", str(models), "--targets", str(targets), "--cores", "0.5", *words, "--", *FLAGS, *flags)
    with (
        on_ray("deploy.ray", *given) as ray,
        grpc.insecure_channel(ray.target, [("grpc.use_local_subchannel_pool", 1)]) as channel,
    ):
        yield Replicas(ray, targets, channel)


LOST, BROKEN = {"UNAVAILABLE", "UNKNOWN"}, {"CANCELLED", "INTERNAL", "UNAVAILABLE", "UNKNOWN"}
"""How whole answers end whose replica is killed, and streams."""


def infer_request(model: str = DECODER, **fields: Any) -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(model_name=model, **fields)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"3 May")
    request.parameters["max_tokens"].int64_param = 4
    request.parameters["temperature"].double_param = 0
    return request


def status_of(call: Callable[..., Any], *arguments: Any, timeout: float = SECONDS, **options: Any) -> Any:
    """The error with which a call ends."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, timeout=timeout, **options)
    return caught.value


def told(error: Any) -> tuple[Any, ...]:
    """All that a caller hears of an error."""
    details = [value for name, value in error.trailing_metadata() or () if name == "grpc-status-details-bin"]
    return error.code(), error.details(), details


def generate(**fields: Any) -> Callable[[grpc.Channel], Any]:
    request = greedy(fields.pop("model", DECODER), **fields)
    return lambda channel: status_of(GenerationServiceStub(channel).Generate, request)


def stream(**fields: Any) -> Callable[[grpc.Channel], Any]:
    request = streamed(greedy(fields.pop("model", DECODER), **fields))
    return lambda channel: status_of(lambda *given, **more: list(streaming(channel)(*given, **more)), request)


def streaming(channel: grpc.Channel) -> Any:
    return GenerationServiceStub(channel).GenerateStream


def raw(path: str, message: bytes = b"") -> Callable[[grpc.Channel], Any]:
    return lambda channel: status_of(channel.unary_unary(path), message)


_GENERATE = "/onward.v1.GenerationService/Generate"
REFUSED: Mapping[str, Callable[[grpc.Channel], Any]] = {
    "value beyond its limit": generate(max_tokens=0),
    "prompt too long, streamed": stream(text="a" * 5000),
    "unknown model": generate(model="nobody"),
    "not offered": lambda channel: status_of(
        GenerationServiceStub(channel).Generate,
        pb.GenerateRequest(model=DECODER, chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="ab")])),
    ),
    "no such method": raw("/onward.v1.GenerationService/Nothing"),
    "no such service": raw("/nobody.Service/Nothing"),
    "no message": raw(_GENERATE, b"\xff\xff"),
    "message too large": generate(text="a" * (4 << 20)),
    "unknown model by the other protocol": lambda channel: status_of(
        GRPCInferenceServiceStub(channel).ModelInfer, infer_request("nobody")
    ),
}


def services(channel: grpc.Channel) -> list[str]:
    """What reflection lists."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    (answer,) = stub.ServerReflectionInfo(requests, timeout=SECONDS)
    return sorted(each.name for each in answer.list_services_response.service)


def tokens_of(replicas: Replicas, request: pb.GenerateRequest) -> tuple[int, ...]:
    return tuple(replicas.generation.Generate(request, timeout=SECONDS).outputs[0].token_ids)
