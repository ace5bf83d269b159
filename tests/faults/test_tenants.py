"""One API key with every trick of the wire against another's requests, in a server of its own."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urljoin

import grpc
import pytest

from proto.inference import open_inference_pb2 as oip
from proto.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from proto.onward.v1 import generation_pb2 as pb
from proto.onward.v1.generation_pb2_grpc import GenerationServiceStub
from tests.faults.process import DECODER, SLOTS, ServerProcess, greedy, serving

ATTACKER, VICTIM = "attacker", "victim"
_IN_FLIGHT = 64
_RECORDED = 1 << 18


def by(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {name}"),)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("tenants")
    keys = folder / "keys.toml"
    keys.write_text(
        "".join(
            f'[keys.{name}]\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\npermissions = ["generate"]\n'
            for name in (ATTACKER, VICTIM)
        )
    )
    models = folder / "models"
    models.mkdir()
    with serving(models, "--api-keys", str(keys), "--recorder-steps", str(_RECORDED)) as process:
        yield process


Ask = Callable[[grpc.Channel], None]


def _generate(request: pb.GenerateRequest) -> Ask:
    return lambda channel: GenerationServiceStub(channel).Generate(request, timeout=60, metadata=by(ATTACKER))


def _infer_many(channel: grpc.Channel) -> None:
    """As many requests at once as one stream may have in flight."""
    request = oip.ModelInferRequest(model_name=DECODER)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"3 May")
    request.parameters["max_tokens"].int64_param = 250
    request.parameters["n"].int64_param = SLOTS
    call = GRPCInferenceServiceStub(channel).ModelStreamInfer(
        iter([request] * _IN_FLIGHT), timeout=60, metadata=by(ATTACKER)
    )
    for _ in call:
        pass


def _many(**fields: Any) -> pb.GenerateRequest:
    """As many sequences at once as there are rows."""
    return pb.GenerateRequest(
        model=DECODER, text="3 May", stopping=pb.StoppingParams(max_tokens=250, ignore_eos=True), **fields
    )


TRICKS: Sequence[Ask] = (
    _generate(_many(sampling=pb.SamplingParams(n=SLOTS))),
    _generate(_many(beam_search=pb.BeamSearchParams(beam_size=SLOTS))),
    _generate(greedy(DECODER, text="3 May 1999 " * 20, max_tokens=1)),
    _generate(greedy(DECODER, max_tokens=1)),
    _generate(greedy(DECODER, max_tokens=250)),
    _generate(greedy(DECODER, max_tokens=250, priority=2**31 - 1)),
    _infer_many,
)
FAIR: Sequence[Ask] = (_generate(greedy(DECODER, max_tokens=24)),)


@contextmanager
def load(server: ServerProcess, asks: Sequence[Ask], num_callers: int) -> Iterator[None]:
    """So many callers for each thing that is asked, each again and again while the block lasts."""
    is_over = threading.Event()

    def call_on(ask: Ask) -> None:
        with server.channel() as channel:
            while not is_over.is_set():
                try:
                    ask(channel)
                except grpc.RpcError:
                    # Refused: it comes again at once, whatever it was told.
                    time.sleep(0.001)

    threads = [threading.Thread(target=call_on, args=(ask,)) for ask in asks for _ in range(num_callers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def first_tokens(server: ServerProcess, name: str, count: int, pause: float) -> tuple[list[int], list[float]]:
    """Engine steps, and seconds, until the first tokens of a victim's requests, one after the other: in order."""
    with server.channel() as channel:
        stub = GenerationServiceStub(channel)
        for index in range(count):
            request = greedy(DECODER, max_tokens=8, request_id=f"{name}-{index}")
            assert len(stub.Generate(request, timeout=600, metadata=by(VICTIM)).outputs[0].token_ids) == 8
            time.sleep(pause)
    with urllib.request.urlopen(urljoin(server.metrics_url, "/debug/steps"), timeout=60) as answer:
        log = json.load(answer)["models"][DECODER]
    begins = [row["start_time"] for row in _rows(log["steps"])]
    own = [row for row in _rows(log["requests"]) if row["request_id"].startswith(f"{name}-")]
    assert len(own) == count
    steps = [sum(row["arrival_time"] < begin < row["first_token_time"] for begin in begins) for row in own]
    return sorted(steps), sorted(row["first_token_time"] - row["arrival_time"] for row in own)


def _rows(table: Any) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def p99(values: Sequence[float]) -> float:
    return values[math.ceil(0.99 * len(values)) - 1]


def test_an_attack_on_every_way_keeps_no_other_key_from_its_answers(server: ServerProcess, victims: int) -> None:
    """None is refused, and none waits for the end of the attacker's; how long first tokens take is printed (`-s`).

    Steps here are a millisecond each, so that what they are counted for is mostly the machine's other work: that they
    are at most twice those beside a fair competitor is what `tests/unit/test_fairness.py` holds the scheduler to.
    """
    pause = 1.0 if victims > 100 else 0.02
    with load(server, FAIR, SLOTS // 2):
        fair = first_tokens(server, "fair", victims, pause)
    with load(server, TRICKS, 4):
        attacked = first_tokens(server, "attacked", victims, pause)
    server.settle()
    for name, (steps, seconds) in {"fair": fair, "attacked": attacked}.items():
        for what, values in (("steps", steps), ("seconds", seconds)):
            print(f"first token, {name}: p50 {values[len(values) // 2]:.4g}, p99 {p99(values):.4g} {what}")
    # An attacker's answers have 250 tokens, a step each: whoever waits for one of them waits for more.
    assert attacked[0][len(attacked[0]) // 2] < 125, attacked[0]
    assert server.sample("requests_total", model_name=DECODER, finish_reason="length") > 2 * victims, "nobody attacked"
