"""Two processes on gloo are one: the same losses, the same weights, and either goes on where the other stopped.

The processes are started once, as on two machines: by an agent of torch's own launcher for each, which meet at the
first. They write down what they measured (`distributed_worker.py`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from model import checkpoint
from tests.environment import ROOT, environment
from tests.parity.distributed_worker import COMPARISONS, RESUMED, STEPS, make_resumable
from tests.ports import free_port
from tests.training_runs import Quiet, points, run, weights, write_recipe

TOLERANCE = 1e-6
LIMIT_SECONDS = 280

# The first test has the processes started.
pytestmark = [pytest.mark.whole, pytest.mark.timeout(LIMIT_SECONDS + 100)]


def launch(*, nodes: int, processes: int, endpoint: str) -> list[str]:
    """Flags of torchrun, the same on all machines."""
    return [
        "--nnodes", str(nodes), "--nproc-per-node", str(processes), "--rdzv-backend", "c10d",
        "--rdzv-endpoint", endpoint, "--rdzv-id", "run-1",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What two processes measured, and their folder."""
    folder = tmp_path_factory.mktemp("distributed")
    single = folder / "from-one"
    # A run of one process for the two to go on from, and the same one without interruption.
    with pytest.raises(Exception, match="terminated at step 5"):
        run(make_resumable("ddp"), single, at=RESUMED)
    run(make_resumable("ddp"), folder / "whole")
    (folder / "recipe").mkdir()
    write_recipe(folder / "recipe")
    worker = [str(Path(__file__).with_name("distributed_worker.py")), str(folder)]
    environ = environment(OMP_NUM_THREADS="1")
    launcher = [*launch(nodes=2, processes=1, endpoint=f"127.0.0.1:{free_port()}"), "--local-addr", "127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, *worker]
    with ExitStack() as stack:
        agents = [
            stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            )
            for _ in range(2)
        ]
        try:
            with ThreadPoolExecutor(2) as pool:
                said = list(pool.map(lambda agent: agent.communicate(timeout=LIMIT_SECONDS)[1].decode(), agents))
        finally:
            for agent in agents:
                agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    return json.loads((folder / "measured.json").read_text(encoding="utf-8")), folder


@pytest.mark.parametrize("name", COMPARISONS)
def test_two_processes_train_as_one(name: str, measured: tuple[dict[str, Any], Path]) -> None:
    found = measured[0]["comparisons"][name]
    assert len(found["losses"]) == len(found["alone"]) == STEPS
    assert found["losses"] == pytest.approx(found["alone"], abs=TOLERANCE)
    assert found["losses"][-1] < found["losses"][0] - 0.1
    assert found["largest_difference"] <= TOLERANCE
    assert found["num_targets"] == found["num_targets_alone"]
    if name.endswith("fsdp"):
        # Each process holds about half, and neither the whole.
        assert found["local_share"] < 0.6


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_run_goes_on_in_another_number_of_processes(kind: str, measured: tuple[dict[str, Any], Path]) -> None:
    said, folder = measured
    reporter = Quiet()
    # Two processes stopped at step 5; one goes on.
    run(make_resumable(kind), folder / f"{kind}-from-two", resume_run=True, reporter=reporter)
    assert "resuming, but not bit for bit: world_size is 1, was 2" in reporter.lines
    assert_close(folder / "whole", folder / f"{kind}-from-two")
    # One process stopped there; two went on.
    assert said["resumed"][kind] == ["resuming, but not bit for bit: world_size is 2, was 1"]
    assert_close(folder / "whole", folder / f"{kind}-from-one")
    assert checkpoint.load(folder / f"{kind}-from-one").training["world_size"] == 2


def assert_close(first: Path, second: Path) -> None:
    other = weights(second)
    for name, tensor in weights(first).items():
        assert (tensor - other[name]).abs().max().item() <= TOLERANCE, name
    mine, others = ([point["loss"] for point in points(folder) if "loss" in point] for folder in (first, second))
    assert mine == pytest.approx(others, abs=TOLERANCE)


def test_only_the_first_process_writes_and_speaks(measured: tuple[dict[str, Any], Path]) -> None:
    (status, out, err), second = measured[0]["command"]
    assert (status, *second) == (0, 0, "", "")
    said = json.loads(out)
    assert said["steps"] == 4
    assert err.count("step 4/4") == 1
    folder = measured[1] / "command"
    assert said["checkpoint"] == str(folder)
    assert checkpoint.load(folder).training["world_size"] == 2
    assert checkpoint.load(folder / "best").training["validation"] == said["best"]["validation"]


def test_a_stop_in_one_process_stops_all_after_the_same_step(measured: tuple[dict[str, Any], Path]) -> None:
    # The second process alone got the signal.
    for kind in ("ddp", "fsdp"):
        assert measured[0]["stopped"][kind] == [5, 5]
        assert checkpoint.load(measured[1] / f"{kind}-stopped").training["step"] == 5


def test_a_write_that_fails_in_the_first_process_ends_both(measured: tuple[dict[str, Any], Path]) -> None:
    first, second = measured[0]["disk_full"]
    assert "os error 27" in first
    assert "process 0: " in second
    assert all("holds step 2, --resume continues from there" in line for line in (first, second))


def test_processes_with_other_data_are_told_so(measured: tuple[dict[str, Any], Path]) -> None:
    first, second = measured[0]["other_data"]
    assert first == "process 1: data differ from process 0's"
    assert second == "data differ from process 0's"


def test_the_documented_command_for_several_machines_is_launched_as_these_processes_were() -> None:
    document = (ROOT / "docs" / "operate" / "scaling-out.md").read_text(encoding="utf-8")
    (flags,) = re.findall(r"^torchrun (.*?) \\\n\s+-m model train ", document, re.MULTILINE)
    assert flags.split() == launch(nodes=2, processes=8, endpoint="first.example:29500")
