"""One start-up: what `serve` and a replica on Ray both do before they serve, and in which order."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from model import kernels
from model.spec.artifact import Device as BuiltFor
from service import app
from service.config import ServeConfig, parse_command_line
from service.engine.engine import LastRun
from service.engine.sessions.session import GraphError
from service.engine.types import Device
from service.errors import StartupError
from service.repository import startup
from tests.servers import MODEL, SLOTS, engine_for, served_model
from tests.unit.service.engine.proof.test_batch_proof import Dependent, dependent

FLAGS = ["--models", "unused", "--port", "0", "--metrics-port", "0", "--threads", "3", "--no-calibrate"]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """What start-up does to process and machine, which has one model."""
    done: list[object] = []
    model, interval = served_model(), sys.getswitchinterval()

    def note(what: object, result: Any = None) -> Any:
        return lambda *_, **__: (done.append(what), result)[1]

    monkeypatch.setattr(startup, "settle_device", lambda config: note("settle", replace(config, device=Device.CPU))())
    monkeypatch.setattr(startup, "load_models", note("load", (model,)))
    monkeypatch.setattr(startup, "share_threads", lambda threads: done.append(("threads", threads)))
    monkeypatch.setattr(startup, "share_memory", note("share", Mock(parts={MODEL: 1}, kept={}, part_of=lambda _: None)))
    monkeypatch.setattr(startup, "build_engines", lambda *_: note("build", {MODEL: engine_for(model)})())
    monkeypatch.setattr(kernels, "why_not", lambda: None)
    monkeypatch.setattr(kernels, "operators", lambda: ("One",))
    monkeypatch.setattr(kernels, "has_tiles", lambda: False)
    yield done
    sys.setswitchinterval(interval)


async def serve(config: ServeConfig) -> None:
    """What `python -m service serve` does, until it has proven its models."""
    served = app.App.load(config)
    async with served.listening():
        await served.verify_all()


async def replicate(config: ServeConfig, monkeypatch: pytest.MonkeyPatch, targets: Path) -> None:
    """What Ray does with one replica of the same flags."""
    ray: Any = ModuleType("ray")
    ray.serve = Mock(deployment=lambda kind: kind)
    ray.util = Mock(get_node_ip_address=lambda: "127.0.0.1")
    for name, module in {"ray": ray, "ray.serve": ray.serve, "ray.util": ray.util}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "deploy.ray.deployment", raising=False)
    deployment = importlib.import_module("deploy.ray.deployment")

    class Replica(deployment.Replica):  # type: ignore[misc, name-defined]
        def __del__(self) -> None:
            """Ray awaits the other."""

    replica = Replica.__new__(Replica)
    await replica.__init__(FLAGS, str(targets))
    await replica._running.aclose()


@pytest.mark.parametrize("way", ["serve", "Ray"])
async def test_serve_and_a_replica_on_ray_start_alike(
    way: str,
    steps: list[object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    caplog.set_level(logging.INFO, startup.__name__)
    sys.setswitchinterval(0.005)
    config = parse_command_line(["serve", *FLAGS])
    assert isinstance(config, ServeConfig)
    await (serve(config) if way == "serve" else replicate(config, monkeypatch, tmp_path))
    assert steps == ["settle", "load", ("threads", 3), "share", "build"]
    assert sys.getswitchinterval() == pytest.approx(0.0005)
    assert "kernels compute these of our own operators: One" in caplog.messages


@pytest.mark.parametrize(
    "changes", [{"spin": False}, {"device": Device.CUDA}], ids=["threads that do not spin", "a GPU"]
)
def test_threads_are_not_shared_where_spinning_ones_would_be_in_the_way(
    changes: dict[str, Any], steps: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "settle_device", lambda config: config)
    monkeypatch.setattr(startup, "load_models", lambda *_: (served_model(),))
    startup.start_up(ServeConfig(models=Path("unused"), **{"device": Device.CPU, **changes}))
    assert steps == ["share", "build"]


def test_graph_that_fails_in_the_replay_makes_the_model_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = served_model()
    engine = Mock(verify_golden=Mock(side_effect=GraphError("of /a/path")))
    monkeypatch.setattr(startup, "build_engines", lambda *_, **__: {MODEL: engine})
    with pytest.raises(StartupError) as refusal:
        startup.prepare(ServeConfig(models=Path("unused")), model, 1, LastRun())
    (problem,) = refusal.value.problems
    assert problem.startswith("its golden cases could not be replayed, ")
    assert "/a/path" not in problem


@pytest.mark.parametrize("device", BuiltFor)
def test_batch_invariance_is_checked_where_it_is_promised(device: BuiltFor) -> None:
    model = served_model()
    model = replace(model, manifest=replace(model.manifest, device=device))
    engine = engine_for(model, runner := Dependent(SLOTS, dependent))
    parity = startup.prove(model, engine)
    assert parity.passed
    assert parity.batch_invariant is (False if device is BuiltFor.CPU else None)
    assert any(map(dependent, runner.batches)) is (device is BuiltFor.CPU)
