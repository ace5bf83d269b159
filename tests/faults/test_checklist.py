"""The rows of docs/operate/reliability.md without a test elsewhere under their name: input or fault, and status.

Rows on garbage, dying clients, signals, the queue, soaks and processes are in the files beside this one.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from model.spec.artifact import hash_file
from onward.v1 import generation_pb2 as pb
from service.engine.batch import ScheduledBatch
from service.engine.kv.reservations import KVBudget
from tests.artifacts import rehash, tiny_artifact, tiny_checkpoint, tiny_config
from tests.fakes import BOS, CONTEXT, FakeRunner, Gate, expected_tokens, spell
from tests.servers import (
    MODEL,
    PROMPT,
    SLOTS,
    Running,
    engine_for,
    eventually,
    generate_request,
    read,
    read_accepted,
    rich_details,
    running,
    served_model,
    status_of,
    tokens_of,
)

# gRPC's poller holds on to every event loop it has met: one for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

Code = grpc.StatusCode


async def test_special_token_text_in_a_prompt_is_ordinary_characters_and_never_control_tokens() -> None:
    from model.spec.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tiny_artifact("decoder-only") / "tokenizer.json")
    plain, special = tokenizer.encode("x"), tokenizer.encode("<eos><bos><pad>")
    # One control token at the beginning, as for any text; the rest spells what was written.
    assert special[: len(plain) - 1] == plain[: len(plain) - 1]
    controls = {0, 1, 2}
    assert not controls & set(special[1:])
    assert len(special) > len(plain)


async def test_prompt_at_least_as_long_as_the_context_is_out_of_range_and_max_tokens_is_cut() -> None:
    async with running() as server:
        limit = server.app.models.resolve(MODEL).max_prompt_tokens
        error = await status_of(server.generation.Generate(generate_request("a" * (limit + 5))))
        assert error.code() is Code.OUT_OF_RANGE
        answer = await server.generation.Generate(generate_request("a" * (limit - 3), max_tokens=60, ignore_eos=True))
        assert 1 <= len(answer.outputs[0].token_ids) < 60


async def test_message_over_the_limit_is_resource_exhausted_and_the_next_is_served() -> None:
    async with running(max_message_bytes=4096) as server:
        error = await status_of(server.generation.Generate(generate_request("a" * 10_000)))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        answer = await server.generation.Generate(generate_request(max_tokens=2))
        assert len(answer.outputs[0].token_ids) == 2


async def test_request_that_can_never_fit_the_kv_budget_is_resource_exhausted_and_the_next_is_served() -> None:
    runner, model = FakeRunner(SLOTS), served_model()
    # Room for one sequence of full length, or several that are shorter.
    engine = engine_for(model, runner, kv_budget=KVBudget(num_bytes=CONTEXT))
    async with running([model], {MODEL: engine}) as server:
        before = len(runner.batches)
        thrice = pb.SamplingParams(temperature=1, n=3)
        error = await status_of(server.generation.Generate(generate_request(sampling=thrice, max_tokens=60)))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        # Nothing is written for an output's last token.
        assert str(error.details()).startswith(f"sampling.n: needs {3 * (CONTEXT - 1)} bytes of K/V")
        # Coming again would not help: there is no word of when.
        assert [each.TypeName() for each in rich_details(error)] == ["google.rpc.BadRequest"]
        assert len(runner.batches) == before
        answer = await server.generation.Generate(generate_request(sampling=thrice, max_tokens=4, ignore_eos=True))
        assert [len(output.token_ids) for output in answer.outputs] == [4] * 3


@pytest.mark.parametrize("is_scarce", [True, False])
async def test_kv_full_for_now_lets_a_request_wait_and_then_serves_it(is_scarce: bool) -> None:
    gate, model = Gate(), served_model()
    runner = FakeRunner(SLOTS, before_run=gate)
    budget = KVBudget(num_bytes=CONTEXT) if is_scarce else None
    async with running([model], {MODEL: engine_for(model, runner, kv_budget=budget)}) as server:
        proven = len(runner.batches)
        # All of them are there before the first goes on.
        with gate.closed():
            calls = [
                await read_accepted(server.stream(max_tokens=CONTEXT - len(PROMPT), ignore_eos=True))
                for _ in range(SLOTS)
            ]
        wanted = expected_tokens(PROMPT, CONTEXT - len(PROMPT))
        assert [tokens_of(await read(call)) for call in calls] == [wanted] * SLOTS
    # There is a slot for each, and memory for one at a time where it is scarce.
    most = max(batch.num_rows for batch in runner.batches[proven:])
    assert most == 1 if is_scarce else most > 1


PHASES: Mapping[str, Callable[[ScheduledBatch], bool]] = {
    # The first of those ahead of it runs.
    "queue": lambda batch: batch.num_rows > 0,
    "prefill": lambda batch: bool(batch.prefills),
    "decode": lambda batch: batch.num_decode_rows > 0,
}
# Of five chunks.
LONG_PROMPT = "a" * 38
NEIGHBOUR = expected_tokens((BOS, *spell("cd")), 20)


def gated(phase: str) -> tuple[Gate, FakeRunner]:
    """A runner that a gate stops in steps of a phase."""
    gate = Gate()
    return gate, FakeRunner(SLOTS, before_run=lambda batch: gate(batch) if PHASES[phase](batch) else None)


async def ask_at(gate: Gate, server: Running, phase: str, **fields: Any) -> tuple[Any, list[Any]]:
    """A stream that has come to a phase, at a closed gate; and those that take all slots before it, for a queue."""
    num_ahead = SLOTS if phase == "queue" else 0
    ahead = [await read_accepted(server.stream("cd", max_tokens=20, ignore_eos=True)) for _ in range(num_ahead)]
    call = await read_accepted(server.stream(LONG_PROMPT, max_tokens=20, ignore_eos=True, **fields))
    await gate.until_entered()
    return call, ahead


@pytest.mark.parametrize("phase", PHASES)
async def test_deadline_passed_in_queue_in_prefill_in_decode_is_deadline_exceeded_and_pages_are_back_in_one_step(
    phase: str,
) -> None:
    (gate, runner), model, has_passed = gated(phase), served_model(), threading.Event()
    engine = engine_for(model, runner, clock=lambda: time.monotonic() + 3600.0 * has_passed.is_set())
    async with running([model], {MODEL: engine}) as server:
        with gate.closed():
            call, ahead = await ask_at(gate, server, phase, timeout_seconds=600.0)
            # In the very step that is under way.
            has_passed.set()
            num_steps = len(runner.batches)
        assert (await status_of(call)).code() is Code.DEADLINE_EXCEEDED
        for each in ahead:
            assert tokens_of(await read(each)) == NEIGHBOUR
        assert await server.until_ended(1 + len(ahead)) == {"deadline": 1} | ({"length": SLOTS} if ahead else {})
        assert server.metric("kv_cache_usage_ratio", model_name=MODEL) == 0
        computed = [batch for batch in runner.batches[num_steps:] if batch.num_rows]
        assert ahead or not computed, "it went on"


@pytest.mark.parametrize("phase", PHASES)
async def test_cancel_in_queue_in_prefill_in_decode_leaves_no_leak_and_neighbours_tokens_bit_identical(
    phase: str,
) -> None:
    gate, runner = gated(phase)
    async with running(runner=runner) as server:
        with gate.closed():
            call, ahead = await ask_at(gate, server, phase)
            call.cancel()
            cancelled = {"grpc_method": "GenerateStream", "grpc_code": "CANCELLED"}
            await eventually(lambda: server.metric("grpc_server_handled_total", **cancelled) == 1)
            beside = [server.stream("cd", max_tokens=20, ignore_eos=True) for _ in range(2)]
        for each in (*ahead, *beside):
            assert tokens_of(await read(each)) == NEIGHBOUR
        assert await server.until_ended(1 + len(ahead) + 2) == {"cancelled": 1, "length": len(ahead) + 2}
        assert server.metric("kv_cache_usage_ratio", model_name=MODEL) == 0


def _link_out(folder: Path) -> None:
    """What it points to is the very file."""
    shutil.move(folder / "decoder.onnx.data", folder.parents[1] / "linked")
    (folder / "decoder.onnx.data").symlink_to(folder.parents[1] / "linked")


def _point_out(folder: Path) -> None:
    """Every checksum is right, and so is the file that lies where the graph wants it."""
    import onnx

    shutil.copy(folder / "decoder.onnx.data", folder.parents[1] / "outside")
    graph = onnx.load(folder / "decoder.onnx", load_external_data=False)
    for tensor in graph.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../../outside" if entry.key == "location" else entry.value
    onnx.save(graph, folder / "decoder.onnx")
    rehash(folder)


CORRUPTED = {
    "wrong hash": lambda folder: (folder / "decoder.onnx").write_bytes(b"x" + (folder / "decoder.onnx").read_bytes()),
    "missing file": lambda folder: (folder / "decoder.onnx.data").unlink(),
    "truncated manifest": lambda folder: (folder / "manifest.json").write_text("{"),
    "file that leaves the folder": lambda folder: _rename_in_manifest(folder, "../golden.npz"),
    "absolute path": lambda folder: _rename_in_manifest(folder, "/etc/passwd"),
    "link that leaves the folder": _link_out,
    "graph with weights out of the folder": _point_out,
    "pickle for golden cases": lambda folder: _replace(folder, "golden.npz", pickle.dumps({"a": Trap()})),
    "graph that is none": lambda folder: _replace(folder, "decoder.onnx", b"garbage"),
    "nested JSON": lambda folder: _replace(folder, "tokenizer.json", b"[" * 100_000),
    "manifest that is a pipe without a writer": lambda folder: os.mkfifo(_without(folder, "manifest.json")),
    "manifest without end": lambda folder: _without(folder, "manifest.json").symlink_to("/dev/zero"),
    "manifest that is a folder": lambda folder: _without(folder, "manifest.json").mkdir(),
    "manifest of a terabyte": lambda folder: os.truncate(folder / "manifest.json", 1 << 40),
    "tokenizer that is a pipe without a writer": lambda folder: os.mkfifo(_without(folder, "tokenizer.json")),
    "tokenizer without end": lambda folder: _without(folder, "tokenizer.json").symlink_to("/dev/zero"),
}


class Trap:
    """What unpickling would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(__file__).with_name("it-was-unpickled"),))


def _replace(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    rehash(folder)


def _without(folder: Path, name: str) -> Path:
    """The path of a file that is not there any more."""
    (folder / name).unlink()
    return folder / name


def _rename_in_manifest(folder: Path, name: str) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = manifest["files"].pop("golden.npz")
    path.write_text(json.dumps(manifest))


GRAPHS = ("graph with weights out of the folder", "graph that is none")
"""What is only found by who builds an engine of it."""


@pytest.mark.parametrize("kinds", [sorted({*CORRUPTED}.difference(GRAPHS)), *([kind] for kind in GRAPHS)])
async def test_bad_model_file_is_refused_at_the_start_with_an_exit_code_that_is_not_0(
    tmp_path: Path, kinds: Sequence[str]
) -> None:
    folders = {kind: tmp_path / "models" / kind.replace(" ", "-") for kind in kinds}
    for kind, folder in folders.items():
        shutil.copytree(tiny_artifact("decoder-only"), folder)
        CORRUPTED[kind](folder)
    command = [sys.executable, "-m", "service", "serve", "--models", tmp_path / "models", "--port", "0", "--no-metrics"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2, done.stderr
    refused = [line for line in done.stderr.splitlines() if line.startswith("onward: ")]
    assert all(any(folder.name in line for line in refused) for folder in folders.values()), done.stderr
    assert "Traceback" not in done.stderr
    assert not Path(__file__).with_name("it-was-unpickled").exists()


async def test_pickle_checkpoint_is_refused_and_nothing_of_it_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from export.__main__ import main as export
    from model.checkpoint import WEIGHTS

    folder = tiny_checkpoint(tmp_path / "checkpoint", tiny_config("decoder-only"))
    (folder / WEIGHTS).write_bytes(pickle.dumps({"weights": Trap()}))
    run = json.loads((folder / "run.json").read_text())
    run["files"][WEIGHTS] = hash_file(folder / WEIGHTS).sha256
    (folder / "run.json").write_text(json.dumps(run))
    assert export([str(folder), "--out", str(tmp_path / "out")]) != 0
    assert WEIGHTS in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not Path(__file__).with_name("it-was-unpickled").exists()


async def test_scrape_while_saturated_answers_and_labels_do_not_explode() -> None:
    gate = Gate()
    async with running(metrics=True, metrics_port=0, runner=FakeRunner(SLOTS, before_run=gate)) as server:
        url = f"http://{server.endpoint.host}:{server.endpoint.metrics_port}/metrics"

        def scrape() -> int:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return int(answer.read().count(b"\n"))

        await server.generation.Generate(generate_request(max_tokens=1))
        await status_of(server.generation.Generate(generate_request(model="nobody")))
        before = await asyncio.to_thread(scrape)
        asking = asyncio.gather(
            *(status_of(server.generation.Generate(generate_request(model=f"nobody-{n}"))) for n in range(100)),
            *(
                status_of(server.channel.unary_unary(f"/onward.v1.GenerationService/Method{n}")(b""))
                for n in range(100)
            ),
        )
        # Every slot and every place is taken, and no step ends: a scrape waits for none.
        with gate.closed():
            busy = [await read_accepted(server.stream(max_tokens=50, ignore_eos=True)) for _ in range(SLOTS * 2)]
            await gate.until_entered()
            during = [await asyncio.to_thread(scrape) for _ in range(5)]
            await asking
        for call in busy:
            await read(call)
        after = await asyncio.to_thread(scrape)
    # A few more reasons and codes, but nothing for each name that was made up.
    assert max(after, *during) < before + 60
