"""The check of a GPU on no GPU: all its parts through graphs of standard operators, and what each of them would find.

That every step works is seen by running it; that a check is one, by giving it what it must refuse. Stages run in this
process, which has loaded all they need, but where processes are what is tested.
"""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import batches, captured, ceilings, launch, needs, parity, promises, report, stage, translation
from benchmarks.gpu.batches import Company
from benchmarks.gpu.engines import Answers, EagerSession, draw_prompt, greedy
from benchmarks.gpu.graph_steps import GraphSteps
from benchmarks.gpu.hf_loops import TransformersDecode
from benchmarks.gpu.launch import Order, Processes, Subprocesses, watch
from benchmarks.gpu.needs import Surroundings
from benchmarks.gpu.oracle import Choices, Oracle
from benchmarks.gpu.plan import LARGE, large_config, make_plan
from benchmarks.gpu.results import RESULTS, Journal, Scribe, by_part, passed, read
from benchmarks.gpu.roofline import Ceilings, Work, decode_work, prefill_work, weight_bytes
from benchmarks.gpu.stages import SYSTEMS, brought_models, make_stages, select
from benchmarks.gpu.torch_loops import TorchDecode
from benchmarks.gpu.workshop import Graphs, Workshop, stirred
from model.nn import reference
from model.nn.transformer import DecoderOnly, build
from model.spec import artifact, cost
from model.spec.artifact import Device, Precision
from model.spec.golden import CaseResult, Tolerance
from service.engine.sessions.device_memory import Bindable
from service.engine.sessions.session import Binding, GraphSession
from tests.artifacts import paged_artifact, random_model, tiny_config

PLAN = make_plan(Device.CPU, is_quick=True)
FULL = make_plan(Device.CUDA, is_quick=False)
EXACT = Tolerance(absolute=1e-4)
FACTS = {"machine": "none", "device": "cpu", "is_quick": True, "versions": {}}
SLOW_MACHINE = pytest.mark.timeout(600)
CHECKED = ["ceilings", "parity", "captured", "speed", "batches", "law"]


class InThisProcess:
    """A `Processes` that makes none."""

    def look(self, device: Device, parts: Sequence[str]) -> Surroundings:
        return needs.look(device, parts)

    def run(self, order: Order) -> str | None:
        stage.carry_out(order)
        return None


class Scripted:
    """A `Processes` that computes nothing: each stage ends at once, with such figures, unless it is to die."""

    def __init__(
        self,
        deaths: Mapping[str, str] | None = None,
        rows: Mapping[str, list[dict[str, object]]] | None = None,
        machine: str = "a card",
    ) -> None:
        self.ran: list[str] = []
        self.orders: list[Order] = []
        self._deaths = deaths or {}
        self._rows = rows or {}
        self._machine = machine

    def look(self, device: Device, parts: Sequence[str]) -> Surroundings:
        return Surroundings(self._machine, {"torch": "0"}, {part: [] for part in parts})

    def run(self, order: Order) -> str | None:
        name = order.stage.name
        self.ran.append(name)
        self.orders.append(order)
        scribe = Scribe.resume(name, Journal(order.results))
        if name in self._rows:
            scribe.note("rows", self._rows[name])
        if name in self._deaths:
            return self._deaths[name]
        scribe.end()
        return None


def check(*arguments: str | Path, processes: Processes | None = None) -> tuple[int, dict[str, Any]]:
    """The command, its exit status and the last line of what it prints."""
    said = io.StringIO()
    with redirect_stdout(said):
        status = gpu_check.main([str(argument) for argument in arguments], processes or InThisProcess())
    return status, json.loads(said.getvalue().splitlines()[-1]) if said.getvalue() else {}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], Path]:
    """Every part but the translation, as `--device cpu` runs them."""
    folder = tmp_path_factory.mktemp("gpu-check")
    status, said = check("--device", "cpu", "--only", *CHECKED, "--out", folder)
    return status, said, folder


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    return Scribe("part", Journal(tmp_path / RESULTS), FACTS)


# All of it


@SLOW_MACHINE
def test_every_part_runs_and_holds_on_standard_operators(results: tuple[int, dict[str, Any], Path]) -> None:
    status, said, folder = results
    parts = by_part(read(folder / RESULTS))
    assert list(parts) == CHECKED
    for name, part in parts.items():
        assert (part["is_complete"], part["left_out"], part["is_quick"]) == (True, [], True), name
        assert [claim for claim in part["claims"] if not claim["holds"]] == []
    assert status == 0
    assert said["passed"]
    assert all(said["parts"].values())
    for name, of_one_model in (("parity", 3), ("captured", 1), ("batches", 4)):
        assert len(parts[name]["claims"]) == of_one_model * len(PLAN.proven), name
    # What is only measured at full size is promised of nothing less.
    assert parts["speed"]["claims"] == parts["law"]["claims"] == []


@SLOW_MACHINE
def test_batches_are_what_they_are_called_and_change_no_token(results: tuple[int, dict[str, Any], Path]) -> None:
    found = by_part(read(results[2] / RESULTS))["batches"]["figures"]["batches"]
    assert {(each["model"], each["kind"]) for each in found} == {
        (model, kind) for model in PLAN.proven for kind in ("ragged", "mixed", "preempted", "shared")
    }
    for each in found:
        assert each["happened"]
        # One near-tie may fall otherwise in another order of additions.
        assert each["requests"] - each["same"] == each["ties"] <= 1
        assert each["requests"] >= PLAN.rows
        assert (each["preemptions"] > 0) == (each["kind"] == "preempted")
        if each["kind"] == "shared":
            assert each["cached_tokens"] >= (PLAN.rows - 1) * PLAN.block_size


@SLOW_MACHINE
def test_every_system_is_measured_in_every_size_beside_the_roofline(results: tuple[int, dict[str, Any], Path]) -> None:
    parts = by_part(read(results[2] / RESULTS))
    rows = parts["speed"]["figures"]["rows"]
    decode = {(row["system"], row["size"]) for row in rows if row["metric"] == "decode"}
    prefill = {(row["system"], row["size"]) for row in rows if row["metric"] == "prefill"}
    assert decode == {(name, size) for name in ("onward", "onward-graph", *OTHERS) for size in PLAN.batches}
    assert prefill == {(name, size) for name in ("onward", *OTHERS) for size in PLAN.prefill_lengths}
    rates = parts["ceilings"]["figures"]
    ceiling = Ceilings(max(rates["bytes_per_second"].values()), max(rates["flops_per_second"]["fp32"].values()))
    config = PLAN.timed["tiny"]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(row["size"] / row["seconds"])
        assert row["share"] == pytest.approx(row["tokens_per_second"] / row["roofline"])
        if row["metric"] == "prefill":
            best = prefill_work(config, row["size"], 4).seconds(ceiling)
        else:
            best = decode_work(config, row["size"], PLAN.decode_prompt + PLAN.decode_new // 2, 4).seconds(ceiling)
        assert row["roofline"] == pytest.approx(row["size"] / best)
    ours = [row for row in rows if (row["system"], row["metric"]) == ("onward", "decode")]
    assert all(row["host_seconds"] > 0 and row["graph_seconds"] > 0 for row in ours)
    (fit,) = parts["law"]["figures"]["fits"]
    assert [length for length, _ in fit["samples"]] == list(PLAN.law_lengths)


OTHERS = ("torch-cuda-graph", "transformers")


@SLOW_MACHINE
def test_the_document_has_every_part_and_is_none_for_docs(
    results: tuple[int, dict[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = results[2]
    document = (folder / report.DOCUMENT).read_text(encoding="utf-8")
    for word in ("onward-graph", "transformers", "torch-cuda-graph", "GB/s", "TFLOP/s", "preempted", "A quick run"):
        assert word in document
    assert "**not run**" not in document
    assert "**not run yet**: translation" in document
    monkeypatch.chdir(tmp_path)
    assert check("--report", "--out", folder, "--docs")[0] == 2
    assert not (tmp_path / "docs").exists()
    status, said = check("--report", "--out", folder)
    assert (status, said["passed"]) == (0, True)


@SLOW_MACHINE
def test_the_recipe_is_trained_and_served_with_the_translations_of_pytorch(tmp_path: Path) -> None:
    status, said = check("--device", "cpu", "--only", "translation", "--out", tmp_path)
    (part,) = read(tmp_path / RESULTS).values()
    assert (status, said["passed"]) == (0, True), part["left_out"]
    figures = part["figures"]
    assert (figures["training"]["step"], figures["training"]["is_cut"]) == (3, False)
    # One near-tie may fall otherwise in another order of additions.
    assert figures["num_pairs"] - 1 <= figures["served"]["same_as_pytorch"] <= figures["num_pairs"]
    assert figures["num_pairs"] > 5
    assert figures["served"]["bleu"] == pytest.approx(figures["pytorch"]["bleu"], abs=0.5)
    assert "tok:13a" in figures["served"]["bleu_signature"]
    assert "served, fp32" in (tmp_path / report.DOCUMENT).read_text(encoding="utf-8")


# What does not work out


def test_a_part_that_lacks_a_library_is_told_and_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without_scipy(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "scipy" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_scipy)
    status, said = check("--device", "cpu", "--only", "ceilings", "law", "--out", tmp_path)
    assert status == 1
    assert said["parts"] == {"ceilings": True, "law": False}
    assert read(tmp_path / RESULTS)["law/tiny"]["left_out"] == [{"what": "law/tiny", "why": "needs scipy"}]
    assert "**not run**: law/tiny: needs scipy" in (tmp_path / report.DOCUMENT).read_text(encoding="utf-8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_nothing_is_measured_in_its_place(tmp_path: Path) -> None:
    status, said = check("--only", "ceilings", "captured", "--out", tmp_path)
    assert (status, said["passed"]) == (1, False)
    for part in read(tmp_path / RESULTS).values():
        assert "a CUDA device that torch sees" in part["left_out"][0]["why"]
        assert part["figures"] == {}


def test_what_was_found_before_a_failure_is_kept_and_what_was_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = Journal(tmp_path / RESULTS)
    Scribe("parity/tiny", earlier, FACTS).note("greedy", [])

    def refuse(*_: Any) -> Callable[[], object]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ceilings, "_product", refuse)
    status, _ = check("--device", "cpu", "--only", "ceilings", "--out", tmp_path)
    parts = read(tmp_path / RESULTS)
    assert status == 1
    assert parts["ceilings"]["left_out"] == [{"what": "the rest", "why": "RuntimeError: out of memory"}]
    assert parts["ceilings"]["figures"]["bytes_per_second"]["copy"] > 0
    assert parts["parity/tiny"]["figures"] == {"greedy": []}


def test_a_part_whose_time_is_up_is_left_out(tmp_path: Path) -> None:
    status, _ = check("--device", "cpu", "--only", "ceilings", "--budget", "1e-9", "--out", tmp_path)
    assert status == 1
    assert read(tmp_path / RESULTS)["ceilings"]["left_out"] == [{"what": "ceilings", "why": "the time is up"}]


# Processes


def test_a_stage_that_dies_costs_no_other_one(tmp_path: Path) -> None:
    deaths = {"parity/tiny": "the process ended by SIGABRT; it last said: error 700"}
    processes = Scripted(deaths, {"parity/tiny": [{"size": 1}]})
    status, said = check("--device", "cpu", "--out", tmp_path, processes=processes)
    every = [each.name for each in make_stages(PLAN, [], 1.0)]
    assert processes.ran == every
    found = read(tmp_path / RESULTS)
    assert found["parity/tiny"]["figures"] == {"rows": [{"size": 1}]}
    (left_out,) = found["parity/tiny"]["left_out"]
    assert left_out == {"what": "the rest", "why": "the process ended by SIGABRT; it last said: error 700"}
    assert [name for name, each in found.items() if not passed(each)] == ["parity/tiny"]
    assert (status, said["passed"]) == (1, False)
    assert [name for name, is_passed in said["parts"].items() if not is_passed] == ["parity"]
    document = (tmp_path / report.DOCUMENT).read_text(encoding="utf-8")
    assert "**not run**: parity/tiny, the rest: the process ended by SIGABRT; it last said: error 700" in document


def test_a_stage_that_came_to_its_end_may_fall_on_its_way_out(tmp_path: Path) -> None:
    class Falling(Scripted):
        def run(self, order: Order) -> str | None:
            super().run(order)
            return "the process ended by SIGSEGV"

    status, said = check("--device", "cpu", "--only", "law", "--out", tmp_path, processes=Falling())
    assert (status, said["parts"]) == (0, {"law": True})


def test_a_device_that_does_not_answer_is_told_and_nothing_is_run(tmp_path: Path) -> None:
    class Silent(Scripted):
        def look(self, device: Device, parts: Sequence[str]) -> Surroundings:
            raise RuntimeError("the device could not be asked: timed out after 120 s")

    processes = Silent()
    status, said = check("--only", "parity", "--out", tmp_path, processes=processes)
    assert (status, said["passed"], processes.ran) == (1, False, [])
    for each in read(tmp_path / RESULTS).values():
        assert each["left_out"][0]["why"] == "needs a device that answers"


def test_the_same_command_goes_on_where_another_run_ended(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--resume", "--only", "parity", "law", "--out", tmp_path)
    dying = Scripted({"parity/tiny-encoder-decoder": "its time was up after 9 s"})
    assert check(*arguments, processes=dying)[0] == 1
    again = Scripted()
    assert check(*arguments, processes=again)[0] == 0
    assert again.ran == ["parity/tiny-encoder-decoder"]
    assert read(tmp_path / RESULTS)["parity/tiny-encoder-decoder"]["left_out"] == []
    # What was found on another machine is none of this one's, and without the flag all is run anew.
    elsewhere, anew = Scripted(machine="another card"), Scripted()
    assert check(*arguments, processes=elsewhere)[0] == 0
    assert check(*(each for each in arguments if each != "--resume"), processes=anew)[0] == 0
    assert elsewhere.ran == anew.ran == ["parity/tiny", "parity/tiny-encoder-decoder", "law/tiny"]


def test_each_stage_has_its_own_time_within_that_of_all(tmp_path: Path) -> None:
    began = time.monotonic()
    processes = Scripted()
    check("--device", "cpu", "--budget", "100", "--train-budget", "300", "--out", tmp_path, processes=processes)
    ended = time.monotonic()
    for order in processes.orders:
        if order.stage.part == "translation":
            assert began + 300 <= order.ends <= ended + 300
        else:
            assert order.ends <= ended + 100
            assert order.ends <= ended + order.stage.seconds
    assert Order.from_json(processes.orders[0].to_json()) == processes.orders[0]
    brought = replace(processes.orders[0], artifacts=tmp_path)
    assert Order.from_json(brought.to_json()) == brought


def test_what_is_promised_is_run_first() -> None:
    names = [each.name for each in make_stages(FULL, [], 540.0)]
    promised = [
        "ceilings",
        *("parity/llama-110m", "parity/en-de-25m", "captured/llama-110m", "captured/en-de-25m"),
        *(f"speed/{LARGE}/onward", f"speed/{LARGE}/transformers"),
    ]
    assert names[: len(promised)] == promised
    assert names[-1] == "translation"
    assert next(name for name in names if name.startswith("small/")) == "small/llama-110m/onward"
    assert set(needs.MODULES) == {each.part for each in make_stages(FULL, [], 540.0)}


def test_a_document_that_cannot_be_written_costs_no_stage(tmp_path: Path) -> None:
    processes = Scripted(rows={"speed/tiny/onward": [{"unheard": "of"}]})
    with pytest.raises(KeyError):
        check("--device", "cpu", "--only", "speed", "--out", tmp_path, processes=processes)
    assert processes.ran == ["ceilings", *(f"speed/tiny/{system}" for system in SYSTEMS)]
    assert all(map(passed, read(tmp_path / RESULTS).values()))


def test_stages_are_asked_for_by_part_or_by_name() -> None:
    every = make_stages(FULL, [], 540.0)

    def names(*asked: str) -> list[str]:
        return [each.name for each in select(every, asked)]

    assert names() == [each.name for each in every]
    assert names("parity") == ["parity/llama-110m", "parity/en-de-25m"]
    # A share is one of the ceilings of the same run.
    assert names(f"speed/{LARGE}/onward") == ["ceilings", f"speed/{LARGE}/onward"]
    assert names("law/llama-110m", "captured") == ["captured/llama-110m", "captured/en-de-25m", "law/llama-110m"]
    with pytest.raises(ValueError, match=r"--only has speed/llama, there are ceilings, parity, .*law/llama-1.1b"):
        names("speed/llama")


def test_an_unknown_stage_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--device", "cpu", "--only", "speeed", "--out", tmp_path, processes=Scripted())[0] == 2
    assert "--only has speeed, there are ceilings" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_promises_of_speed_are_judged_by_what_its_stages_found(tmp_path: Path) -> None:
    rows = rows_of_speed()
    by_system = {
        f"speed/{LARGE}/{system}": [row for row in rows if row["system"] == system]
        for system in ("onward", "transformers")
    }
    status, said = check("--only", "speed", "--out", tmp_path, processes=Scripted(rows=by_system))
    claims = read(tmp_path / RESULTS)[gpu_check.PROMISES]["claims"]
    assert (len(claims), all(claim["holds"] for claim in claims)) == (6, True)
    assert (status, said["parts"]) == (0, {"ceilings": True, "speed": True})
    # A part of which a stage did not come to its end has not passed, whatever is known of it.
    dying = Scripted({f"speed/{LARGE}/transformers": "its time was up after 330 s"}, {f"speed/{LARGE}/onward": rows})
    assert check("--only", "speed", "--out", tmp_path / "dying", processes=dying)[0] == 1


def test_a_process_is_ended_with_its_children_when_its_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_STOP_SECONDS", 0.5)

    class Begun(subprocess.Popen[bytes]):
        """Its time is up when it and its child have begun, however long that takes."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout != 3.0:
                return super().wait(timeout)
            while not (tmp_path / "begun").exists():
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(launch.subprocess, "Popen", Begun)
    # Deaf to what is polite, with a child that is so as well.
    child_says = f"echo $BASHPID >{tmp_path}/child; touch {tmp_path}/begun; sleep 600"
    script = f"trap '' TERM; echo begun; ({child_says}) & wait"
    why = watch(["/bin/bash", "-c", script], 3.0)
    assert why == "its time was up after 3 s; it last said: begun"
    child = int((tmp_path / "child").read_text())
    # The test's own timeout is the limit.
    while is_alive(child):
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    """Whether a process computes or waits: one that has ended and that nobody has asked after does neither."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo fine", None),
        ("echo one; echo two >&2; exit 3", "the process ended with 3; it last said: one\ntwo"),
        ("kill -ABRT $$", "the process ended by SIGABRT"),
    ],
)
def test_how_a_process_ended_is_told(script: str, why: str | None) -> None:
    assert watch(["/bin/bash", "-c", script], 60.0) == why


@SLOW_MACHINE
def test_stages_run_in_processes_of_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, said = check("--device", "cpu", "--only", "ceilings", "--out", tmp_path, processes=Subprocesses())
    assert (status, said["parts"]) == (0, {"ceilings": True})
    found = read(tmp_path / RESULTS)["ceilings"]
    assert found["figures"]["bytes_per_second"]["copy"] > 0
    assert found["versions"]["torch"] == torch.__version__
    assert "ceilings: copy" in capfd.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@SLOW_MACHINE
def test_on_a_card_answers_and_captured_steps_hold_at_small_sizes(tmp_path: Path) -> None:
    asked = ("--quick", "--only", "parity", "captured", "batches", "--budget", "500", "--out", tmp_path)
    status, _ = check(*asked, processes=Subprocesses())
    failed = {name: each for name, each in read(tmp_path / RESULTS).items() if not passed(each)}
    assert (status, failed) == (0, {})


# Results


def test_a_part_passes_when_it_has_ended_with_nothing_left_out_and_all_claims_kept(scribe: Scribe) -> None:
    scribe.claim("one", "1", holds=True)
    assert not scribe.passed
    scribe.end()
    assert scribe.passed
    scribe.leave_out("something", "no time")
    assert not scribe.passed
    other = Scribe("other", Journal(scribe.journal_path), FACTS)
    other.claim("two", "0", holds=False)
    other.end()
    parts = read(scribe.journal_path)
    assert not any(map(passed, parts.values()))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--budget", "0"], "--budget is 0, must be above 0"),
        (["--artifacts", "/nowhere"], "--artifacts is /nowhere, which is not there"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.main([*arguments, "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


# What each check would find


def tiny_oracle() -> tuple[Oracle, list[int], list[int]]:
    """An oracle, a prompt, and what it answers itself."""
    model = stirred(build(tiny_config("decoder-only"), 3))
    prompt = draw_prompt(288, 9, 1)
    return Oracle(model), prompt, reference.greedy(model, prompt, max_tokens=12)


def test_a_greedy_choice_that_is_not_float32s_is_wrong_unless_it_is_a_tie() -> None:
    oracle, prompt, chosen = tiny_oracle()
    right = oracle.judge(prompt, chosen, EXACT)
    assert (right.num, right.num_alike, right.num_wrong, right.widest_gap) == (12, 12, 0, 0.0)
    changed = [*chosen[:11], (chosen[11] + 1) % 288]
    wrong = oracle.judge(prompt, changed, EXACT)
    assert (wrong.num_alike, wrong.num_wrong) == (11, 1)
    # A tie where both logits together may be off by as much, and not a little less.
    for share, num_wrong in ((0.49, 1), (0.51, 0)):
        judged = oracle.judge(prompt, changed, Tolerance(relative=share * wrong.widest_gap))
        assert (judged.num_alike, judged.num_wrong) == (11, num_wrong)
    both = right + wrong
    assert (both.num, both.agreement, both.widest_gap) == (24, 23 / 24, wrong.widest_gap)


def test_another_model_is_judged_by_what_it_would_choose_after_the_same_tokens() -> None:
    oracle, prompt, chosen = tiny_oracle()
    changed = [*chosen[:11], (chosen[11] + 1) % 288]
    same = oracle.judge_model(stirred(build(tiny_config("decoder-only"), 3)), prompt, changed, EXACT)
    assert (same.num, same.num_alike, same.num_wrong) == (12, 12, 0)
    untied = stirred(build(tiny_config("decoder-only", tie_embeddings=False), 4))
    other = oracle.judge_model(untied, prompt, changed, EXACT)
    assert (other.num, other.num_alike < 6, other.num_wrong > 6) == (12, True, True)
    encoder_decoder = stirred(build(tiny_config("encoder-decoder"), 3))
    assert Oracle(encoder_decoder).judge_model(encoder_decoder, prompt, chosen, EXACT).num_alike == 12


@pytest.mark.parametrize(
    ("precision", "ours", "theirs", "holds"),
    [
        (Precision.FP16, 4950, 4800, True),
        (Precision.FP16, 4949, 4800, False),
        (Precision.BF16, 4950, 5000, True),
        (Precision.BF16, 4876, 4900, True),
        (Precision.BF16, 4874, 4900, False),
    ],
)
def test_fp16_agrees_with_float32_and_bf16_as_often_as_pytorch_does(
    precision: Precision, ours: int, theirs: int, holds: bool, scribe: Scribe
) -> None:
    choices, by_torch = (Choices(5000, alike, 0, 0.1) for alike in (ours, theirs))
    result = CaseResult("prefill-1", 0.0, 0.0, 1.0, 0.1, passed=True)
    parity.claim(scribe, "a model", precision, (result,), choices, by_torch, Tolerance(relative=0.1))
    *others, agreement = read(scribe.journal_path)["part"]["claims"]
    assert all(claim["holds"] for claim in others)
    assert agreement["holds"] == holds
    assert f"{ours / 5000:.2%} of 5000, PyTorch's {theirs / 5000:.2%}" == agreement["found"]


def test_answers_may_part_at_a_tie_and_nowhere_else() -> None:
    oracle, prompt, chosen = tiny_oracle()
    other = [*chosen[:5], (chosen[5] + 1) % 288, *chosen[6:]]
    assert oracle.is_tie(prompt, chosen, chosen, EXACT)
    assert not oracle.is_tie(prompt, chosen, other, EXACT)
    assert not oracle.is_tie(prompt, other, chosen, EXACT)
    assert not oracle.is_tie(prompt, chosen, chosen[:-1], EXACT)
    assert oracle.is_tie(prompt, chosen, other, Tolerance(absolute=100.0))


def test_a_batch_that_changes_an_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, prompt, chosen = tiny_oracle()
    arrivals = [(0, greedy(f"r{number}", prompt, 12)) for number in range(3)]

    def serve(_: object, asked: Sequence[tuple[int, Any]]) -> Answers:
        answers = Answers()
        for _, request in asked:
            answers.tokens[request.request_id] = list(chosen)
        if len(asked) > 1:
            answers.tokens["r1"][3] ^= 1
        return answers

    monkeypatch.setattr(batches, "serve", serve)
    monkeypatch.setattr(batches, "forget", lambda _: None)
    found = batches.compare(None, Company("ragged", arrivals, lambda _: True), oracle, EXACT)  # type: ignore[arg-type]
    assert (found["requests"], found["same"], found["ties"]) == (3, 2, 0)


def test_a_single_bit_that_differs_and_what_is_no_number_are_found() -> None:
    draw = np.random.default_rng(0)
    first = [{"logits": draw.standard_normal((2, 8), np.float32)} for _ in range(4)]
    second = [{"logits": step["logits"].copy()} for step in first]
    assert captured.differing(first, second) == []
    second[2]["logits"].view(np.int32)[1, 5] ^= 1
    assert captured.differing(first, second) == [2]
    first[0]["logits"][0, 0] = second[0]["logits"][0, 0] = np.nan
    assert captured.differing(first, second) == [0, 2]


def test_the_script_of_captured_steps_has_all_that_captures_may_break() -> None:
    script = captured.write_script(FULL.proven["llama-110m"], FULL)
    assert len(script) == 1 + FULL.captured_steps
    assert {step.size for step in script} == {None, (8, 512), (8, 1024), (1, 512), (1, 1024)}
    fives = [step for step in script if step.size and step.batch.num_decode_rows == 5]
    assert {step.size for step in fives} == {(8, 512), (8, 1024)}
    # Right up to the last key of a class, and the first of the next one right after it.
    lengths = [step.longest for step in fives]
    assert {512, 513} <= set(lengths)
    mixed = [number for number, step in enumerate(script) if step.batch.prefills and step.batch.num_decode_rows]
    assert len(mixed) >= 5
    assert script[mixed[0] - 1].size == script[mixed[0] + 1].size == (8, 512)
    assert script[mixed[-2] - 1].size == script[mixed[-2] + 1].size == (8, 1024)
    assert 15 <= sum(step.batch.wants_all_logits for step in script) <= 35
    # No row has a gap, and what begins anew begins at its beginning.
    computed = [0] * FULL.rows
    for step in script:
        for chunk in step.batch.prefills:
            assert (chunk.start, step.batch.decode[chunk.slot].is_padding if step.batch.decode else True) == (0, True)
        for slot, row in enumerate(step.batch.decode):
            if not row.is_padding:
                assert row.position == computed[slot]
                computed[slot] += 1
        for chunk in step.batch.prefills:
            computed[chunk.slot] = len(chunk.token_ids)


def test_the_script_for_an_encoder_decoder_encodes_beside_rows_that_decode() -> None:
    script = captured.write_script(FULL.proven["en-de-25m"], FULL)
    assert {step.size for step in script} == {None, (8, 512), (1, 512)}
    assert sum(bool(step.batch.encodes) and step.batch.num_decode_rows > 1 for step in script) >= 5
    assert all(row.source_length for step in script for row in step.batch.decode)


class Forgetful(GraphSession):
    """Repeats a run by doing nothing: what it put out before is still there."""

    def bind(self, inputs: Mapping[str, Bindable], outputs: Mapping[str, Bindable]) -> Binding:
        binding = super().bind(inputs, outputs)
        run, seen = binding.run, set[int]()

        def repeat(number: int | None = None) -> None:
            if number is None or number not in seen:
                run(number)
            seen.add(-1 if number is None else number)

        binding.run = repeat  # type: ignore[method-assign]
        return binding


@SLOW_MACHINE
def test_runs_that_are_repeated_wrongly_are_found_and_eager_ones_have_no_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = paged_artifact("decoder-only", context=768)
    graphs = Graphs("tiny", folder, artifact.load(folder))
    script = captured.write_script(graphs.config, PLAN)
    numbers: list[int | None] = []
    run = Binding.run

    def note(self: Binding, number: int | None = None) -> None:
        numbers.append(number)
        run(self, number)

    monkeypatch.setattr(Binding, "run", note)
    eager = captured.play(graphs, PLAN, script, EagerSession)
    assert set(numbers) == {None}
    numbers.clear()
    again = captured.play(graphs, PLAN, script, GraphSession)
    # By its number each size is known from then on: runs of the others between them change nothing of that.
    wanted = [step.size for step in script]
    assert [number for number in numbers if number] == [
        1 + [size for size in dict.fromkeys(wanted) if size].index(size) for size in wanted if size
    ]
    assert (eager.num_sizes, again.num_sizes) == (4, 4)
    assert captured.differing(eager.outputs, again.outputs) == []
    kinds = {name.split()[0] for output in eager.outputs for name in output}
    assert kinds == {"logits", "highest", "ids"}
    wrong = captured.play(graphs, PLAN, script, Forgetful)
    decoding = [number for number, size in enumerate(wanted) if size]
    different = captured.differing(eager.outputs, wrong.outputs)
    assert set(decoding[6:]) <= set(different)


@SLOW_MACHINE
@pytest.mark.parametrize("family", ["decoder-only", "encoder-decoder"])
def test_steps_of_a_graph_by_itself_answer_as_pytorch_does(family: str) -> None:
    folder = paged_artifact(family)
    graphs, config = Graphs(family, folder, artifact.load(folder)), tiny_config(family)
    model = random_model(config)
    draw = np.random.default_rng(4)
    sources = draw.integers(3, 288, (3, 20)) if config.is_encoder_decoder else None
    fed = draw.integers(0, config.vocab_size, (3, 20))
    steps = GraphSteps(graphs, 3, 20, sources)
    found = []
    for position in range(20):
        steps.feed(fed[:, position].tolist(), position)
        steps.run(1)
        found.append(steps.read())
    for row in range(3):
        source = None if sources is None else sources[row].tolist()
        logits = reference.logits(model, fed[row].tolist(), source).numpy()
        np.testing.assert_allclose([step["logits"][row] for step in found], logits, atol=2e-5)
        assert [step["candidate_ids"][row, 0] for step in found] == logits.argmax(-1).tolist()
    with pytest.raises(ValueError, match=r"position is 20, must be in \[0, 20\)"):
        steps.feed([0, 0, 0], 20)


def test_models_are_taken_from_where_they_were_made_before_if_they_are_those_asked_for(tmp_path: Path) -> None:
    from model import checkpoint
    from model.tokenizer_training import one_word_per_id

    config = PLAN.proven["tiny"]
    model = stirred(build(config, 5))
    texts = {"tokenizer.json": one_word_per_id(config.vocab_size, config.architecture).to_json()}
    checkpoint.save(tmp_path / "tiny" / "checkpoint", model, config, texts, {})
    said: list[str] = []
    workshop = Workshop(PLAN, tmp_path / "graphs", tmp_path, said.append)
    taken = workshop.model("tiny", config)
    assert torch.equal(taken.embedding.tokens.weight, model.embedding.tokens.weight)
    longer = workshop.model("tiny", replace(config, context=128))
    assert longer.config.context == 128
    assert any("has other sizes than are asked for" in text for text in said)
    checkpoint.save(tmp_path / "trained" / "checkpoint", model, config, texts, {})
    assert brought_models(tmp_path, PLAN) == ["trained"]
    assert workshop.brought("trained") == config
    assert [each.name for each in make_stages(PLAN, ["trained"], 1.0) if each.part == "parity"][-1] == "parity/trained"


@SLOW_MACHINE
def test_graphs_are_made_once_for_all_processes_and_anew_for_another_model(tmp_path: Path) -> None:
    config = replace(PLAN.proven["tiny"], num_layers=1, d_model=32, vocab_size=16)
    said: list[str] = []
    first, second, other = (
        Workshop(PLAN, tmp_path, None, said.append).graphs("tiny", each, Precision.FP32)
        for each in (config, config, replace(config, d_ff=64))
    )
    assert [text for text in said if text.startswith("graphs")] == ["graphs of tiny in fp32"] * 2
    assert (first.folder, first.manifest) == (second.folder, second.manifest)
    assert other.folder != first.folder
    # By what files take a server knows what weights do.
    sizes = {path.name: path.stat().st_size for path in first.folder.iterdir() if path.name != "manifest.json"}
    assert {name: entry.num_bytes for name, entry in first.manifest.files.items()} == sizes
    assert "decoder.onnx.data" in sizes
    assert not list(tmp_path.glob("unfinished-*"))


# Who is compared with


def llama(*, tied: bool) -> tuple[DecoderOnly, list[list[int]], list[list[int]]]:
    """A model, prompts of one length, and what the reference makes of them."""
    config = tiny_config("decoder-only", tie_embeddings=tied, num_heads=4, num_kv_heads=2)
    model = stirred(build(config, 11))
    assert isinstance(model, DecoderOnly)
    prompts = [draw_prompt(288, 13, number) for number in range(3)]
    return model, prompts, [reference.greedy(model, prompt, max_tokens=9) for prompt in prompts]


def test_the_plain_torch_loop_writes_what_the_reference_writes() -> None:
    model, prompts, expected = llama(tied=False)
    loop = TorchDecode(model, 3, 32)
    for _ in range(2):
        loop.prefill(torch.tensor(prompts))
        loop.capture()
        written = [loop.tokens]
        for _ in range(8):
            loop.step()
            written.append(loop.tokens)
        assert [list(row) for row in zip(*written, strict=True)] == expected


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_with_our_weights_writes_what_the_reference_writes(tied: bool) -> None:
    model, prompts, expected = llama(tied=tied)
    theirs = TransformersDecode(model, "cpu")
    for kept_capacity in (0, 32, 32):
        assert theirs.generate(torch.tensor(prompts), 9, kept_capacity) == expected
    logits = reference.logits(model, prompts[0])[-1]
    torch.testing.assert_close(theirs.prefill(torch.tensor(prompts[:1])), logits, atol=1e-5, rtol=1e-5)


# The arithmetic


def test_the_large_model_reads_a_billion_weights_in_a_step() -> None:
    config = large_config(4096)
    table = 32000 * 2048
    assert cost.num_parameters(config) == 1_100_048_384
    assert weight_bytes(config, 2) == 2 * (1_100_048_384 - table)
    assert weight_bytes(replace(config, tie_embeddings=True), 2) == weight_bytes(config, 2)


def test_a_step_takes_as_long_as_the_slower_of_memory_and_products() -> None:
    ceiling = Ceilings(bytes_per_second=4e12, flops_per_second=8e14)
    assert Work(4e9, 8e11).seconds(ceiling) == 1e-3
    assert Work(4e9, 8e12).seconds(ceiling) == 1e-2
    config = large_config(4096)
    one, many = (decode_work(config, batch, 1000, 2) for batch in (1, 100))
    kv = 22 * 2 * 4 * 64 * 2 * 1000
    assert many.num_bytes - one.num_bytes == 99 * kv
    assert many.flops == pytest.approx(100 * one.flops)
    # Two operations for each weight but the table that is looked up, and the pairs of a whole context.
    assert one.flops == pytest.approx(2 * (1_100_048_384 - 32000 * 2048 - 45 * 2048) + 22 * 4 * 2048 * 1000)
    prompt = prefill_work(config, 1000, 2)
    layers = 1_100_048_384 - 2 * 32000 * 2048 - 45 * 2048
    attention = 22 * 4 * 2048 * (1000 * 1001 // 2)
    # Of all tokens but the last nothing that follows the last layer's attention: W^O and three matrices.
    behind = 2048 * 2048 + 3 * 2048 * config.d_ff
    assert prompt.flops == pytest.approx(2 * 1000 * layers - 2 * 999 * behind + 2 * 32000 * 2048 + attention)


def rows_of_speed(**changes: float) -> list[dict[str, object]]:
    values = {"share1": 0.7, "share4096": 0.5, "ours": 100.0, "theirs": 90.0} | changes
    rows: list[dict[str, object]] = []
    for batch in (1, 8, 32, 128):
        for system, rate in (("onward", values["ours"]), ("transformers", values["theirs"])):
            rows.append({"system": system, "metric": "decode", "size": batch, "tokens_per_second": rate * batch})
    rows.append({"system": "onward", "metric": "prefill", "size": 4096, "tokens_per_second": 1.0})
    for row in rows:
        row |= {"model": LARGE, "precision": "bf16", "roofline": 1.0, "graph_seconds": None, "host_seconds": None}
        row["share"] = values["share4096" if row["metric"] == "prefill" else "share1"]
    return rows


@pytest.mark.parametrize(
    ("changes", "num_kept"),
    [({}, 6), ({"share1": 0.59}, 5), ({"share4096": 0.39}, 5), ({"theirs": 101.0}, 2)],
)
def test_promises_of_speed_are_kept_or_not(changes: dict[str, float], num_kept: int, scribe: Scribe) -> None:
    promises.judge(scribe, rows_of_speed(**changes), FULL)
    claims = read(scribe.journal_path)["part"]["claims"]
    assert (len(claims), sum(claim["holds"] for claim in claims)) == (6, num_kept)


def test_what_was_not_measured_keeps_no_promise(scribe: Scribe) -> None:
    rows = [row for row in rows_of_speed() if row["system"] != "transformers"]
    promises.judge(scribe, rows, FULL)
    claims = read(scribe.journal_path)["part"]["claims"]
    assert [claim["found"] for claim in claims if not claim["holds"]] == ["not measured"] * 4


def test_training_that_is_not_over_in_time_is_ended_and_goes_on_to_be_scored(scribe: Scribe, tmp_path: Path) -> None:
    script = "trap 'exit 143' TERM; echo step 40 >&2; while :; do sleep 0.1; done"
    found = translation.train(["/bin/sh", "-c", script], tmp_path / "log", 2.0, scribe)
    assert found["is_cut"]
    assert found["seconds"] >= 2.0
    done = translation.train(["/bin/sh", "-c", """echo '{"bleu": 1}'"""], tmp_path / "log", 60.0, scribe)
    assert (done["is_cut"], done["result"]) == (False, {"bleu": 1})
    with pytest.raises(RuntimeError, match="training ended with 3: no such corpus"):
        translation.train(["/bin/sh", "-c", "echo no such corpus >&2; exit 3"], tmp_path / "log", 60.0, scribe)
