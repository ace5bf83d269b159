"""The benchmark's conduct, with systems that only pretend: nothing left out, nothing left running, no time asserted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.frame.journal import Journal
from benchmarks.frame.roofline import best_limits, roofline
from benchmarks.peers.child import SystemFailed, running
from benchmarks.peers.systems import CUDA_SYSTEMS, OURS, SYSTEMS, InstallError, SystemSpec, python_of
from benchmarks.scenarios import _bench_report, bench
from benchmarks.scenarios.bench import Bench, BenchSettings, Point, Prompts, Weights, points, ratios_of, rows_of
from model.spec.config import Architecture, ModelConfig

CONFIG = ModelConfig(
    architecture=Architecture.DECODER_ONLY, vocab_size=64, context=64, d_model=8, num_layers=1, num_heads=1, d_ff=8
)
LIMITS = {"read_gb_per_second": [[1, 20.0], [1 << 30, 10.0]], "gemm": {"fp32": 100.0, "bf16": 400.0}}
SETTINGS = BenchSettings(
    models=("tiny",),
    systems=("good",),
    precisions=("fp32",),
    batches=(1, 2),
    prompts=(16, 128),
    decode_prompt=8,
    decode_new=8,
    rounds=2,
    repeats=1,
    quality_new=3,
    # On a busy machine a system that does answer may take a while.
    prepare_timeout=100,
    load_timeout=100,
    call_timeout=100,
)


def fake(name: str, behaviour: str = "", **changes: Any) -> SystemSpec:
    spec = SystemSpec(
        name=name, module="tests.fake_peer", precisions={"fp32": "f32"}, environment={"FAKE_PEER": behaviour}
    )
    return replace(spec, **changes)


def weights(tmp_path: Path) -> dict[str, Weights]:
    return {"tiny": Weights(config=CONFIG, checkpoint=tmp_path / "ours", hugging_face=tmp_path / "theirs")}


def agreement(model: str, prompts: Any, answers: Any) -> float:
    assert model == "tiny"
    assert len(prompts) == len(answers) == SETTINGS.quality_prompts
    return sum(token == 7 for answer in answers for token in answer) / sum(map(len, answers))


def measure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *specs: SystemSpec,
    settings: BenchSettings = SETTINGS,
    resume: bool = False,
) -> tuple[list[dict[str, Any]], Journal]:
    """Rows, and the journal."""
    monkeypatch.setattr(Bench, "_limits", lambda self: LIMITS)
    settings = replace(settings, systems=tuple(spec.name for spec in specs))
    journal = Journal.open(tmp_path / "journal.jsonl", {}, resume=resume)
    bench = Bench(settings, tmp_path, {spec.name: spec for spec in specs}, weights(tmp_path))
    bench.prepare()
    bench.run(journal)
    return rows_of(journal.entries, settings, weights(tmp_path), agreement), journal


def by_point(rows: list[dict[str, Any]], system: str) -> dict[tuple[str, int, int], dict[str, Any]]:
    return {(row["metric"], row["batch"], row["prompt"]): row for row in rows if row["system"] == system}


def test_rows_hold_the_median_of_every_round_and_what_it_was_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = measure(tmp_path, monkeypatch, fake("good"))
    found = by_point(rows, "good")
    # A prompt longer than the context is cut to leave room for one token.
    assert sorted(found) == [("decode", 1, 8), ("decode", 2, 8), ("prefill", 1, 16), ("prefill", 1, 63)]
    for row in rows:
        assert (row["version"], row["model"], row["precision"], row["unit"]) == ("1.2", "tiny", "fp32", "tokens/s")
        assert len(row["samples"]) == len(row["noise"]) == 2
        assert min(row["samples"]) <= row["value"] <= max(row["samples"])
        assert row["agreement"] == 1.0
        assert row["roofline"] > 0
        assert "error" not in row


def test_every_round_starts_a_process_of_its_own_and_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(tmp_path, monkeypatch, fake("good"))
    lines = (tmp_path / "work" / "cpu" / "tiny" / "good" / "log").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["prepare", "close", "load", "close", "load", "close"]
    processes = [int(line.split()[1]) for line in lines if line.startswith("load")]
    assert len(set(processes)) == 2
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("crashes", "generate: ended with exit code 3: out of luck"),
        ("hangs", "generate: no answer in 5 s"),
        ("short", "RuntimeError: asked for 2 x 2 tokens, got [1, 1]"),
    ],
)
def test_a_system_that_fails_at_one_point_keeps_what_came_before_and_has_rows_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, said: str
) -> None:
    settings = replace(SETTINGS, rounds=1, call_timeout=5.0 if behaviour == "hangs" else 100.0)
    rows, _ = measure(tmp_path, monkeypatch, fake("bad", behaviour), settings=settings)
    found = by_point(rows, "bad")
    assert len(found) == 4
    assert found["decode", 1, 8]["value"] > 0
    assert found["decode", 2, 8]["value"] is None
    if behaviour == "short":  # it still answers, and knows of one token only
        assert "asked for 2 x 2 tokens" in found["decode", 2, 8]["error"]
        assert found["prefill", 1, 16]["value"] > 0
    else:
        assert {row["error"] for row in found.values() if row["value"] is None} == {said}
        assert found["prefill", 1, 16]["value"] is None


def test_a_system_that_cannot_be_installed_or_converted_or_lacks_a_precision_is_a_row_and_never_an_omission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "venvs" / "absent" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.with_name("pip").touch()
    python.write_text("#!/bin/sh\necho no such wheel\nexit 1\n")
    python.chmod(0o755)
    absent = fake("absent", installs=(("install", "nothing"),))
    settings = replace(SETTINGS, rounds=1, precisions=("fp32", "int8"))
    specs = (absent, fake("refuses", "refuses"), fake("good"))
    rows, _ = measure(tmp_path, monkeypatch, *specs, settings=settings)
    assert len(rows) == 3 * 2 * 4
    errors = {(row["system"], row["precision"]): row.get("error") for row in rows}
    assert errors["absent", "fp32"] == "not installed: no such wheel"
    assert errors["refuses", "fp32"] == f"RuntimeError: cannot convert {tmp_path}/ours"
    assert errors["good", "fp32"] is None
    assert {errors[name, "int8"] for name in ("absent", "refuses", "good")} == {"int8 is not offered"}
    assert all(row["value"] is None for row in rows if "error" in row)


def test_a_run_resumes_without_what_was_measured_and_with_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, journal = measure(tmp_path, monkeypatch, fake("good"))
    broken = Journal.open(tmp_path / "journal.jsonl", {}, resume=False)
    for entry in journal.entries:
        broken.record(entry if entry["round"] == 0 else {**entry, "error": "killed"})
    resumed, again = measure(tmp_path, monkeypatch, fake("good"), resume=True)
    assert [entry["round"] for entry in again.entries] == [0, 0, 1, 1]
    assert again.entries[:2] == journal.entries[:2]
    assert [row["samples"][0] for row in resumed] == [row["samples"][0] for row in rows]


def test_prompts_are_the_same_for_every_system_and_never_the_same_twice() -> None:
    first, second = Prompts(64, "seed"), Prompts(64, "seed")
    drawn = [first.draw(2, 16) for _ in range(3)]
    assert drawn == [second.draw(2, 16) for _ in range(3)]
    flat = [tuple(prompt) for prompts in drawn for prompt in prompts]
    assert len(set(flat)) == 6
    assert all(4 <= token < 64 for prompt in flat for token in prompt)


def test_decode_is_not_measured_where_the_context_has_no_room_for_it() -> None:
    assert points(replace(SETTINGS, decode_new=57), CONFIG) == [Point("prefill", 1, 16), Point("prefill", 1, 63)]


def row(system: str, precision: str, value: float | None, **fields: Any) -> dict[str, Any]:
    made = {
        "system": system,
        "version": "1",
        "model": "tiny",
        "precision": precision,
        "metric": "decode",
        "batch": 8,
        "prompt": 128,
        "value": value,
        "unit": "tokens/s",
        "samples": [] if value is None else [value],
        "noise": [] if value is None else [0.0],
        "agreement": None,
        "roofline": None,
    }
    return made | fields


def test_ratios_compare_with_the_best_peer_of_the_same_precision_and_of_any() -> None:
    rows = [
        row("onward", "fp32", 90.0),
        row("onward-engine", "fp32", 110.0),
        row("onward", "int8", 300.0),
        row("onward-engine", "int8", None, error="refused"),
        row("vllm", "fp32", 100.0, agreement=0.5),
        row("vllm", "bf16", 200.0, agreement=0.5),
        row("transformers", "fp32", 50.0),
    ]
    ratios = ratios_of(rows)
    vllm = {"best_peer": "vllm", "best_peer_agreement": 0.5}

    def ratio(precision: str | None, served: float | None, engine: float | None, peer: str) -> dict[str, Any]:
        ours = {"onward": served, "onward-unary": None, "onward-engine": engine}
        ours |= {"precision": precision, "interval": None, "loss": None}
        return {**ours, **vllm, "best_peer_precision": peer, "best_peer_loss": None}

    assert ratios == {
        "tiny/fp32/decode/8/128": ratio("fp32", 0.9, 1.1, "fp32"),
        "tiny/bf16/decode/8/128": ratio(None, None, None, "bf16"),
        "tiny/any/decode/8/128": ratio("int8", 1.5, 0.55, "bf16"),
    }
    rounds = [90.0, 80.0, 100.0, 95.0, 85.0]
    rows[0]["samples"], rows[4]["samples"] = rounds, [each * 2 for each in rounds]
    assert ratios_of(rows)["tiny/fp32/decode/8/128"]["interval"] == (0.5, 0.5), "rounds are drawn in pairs"
    assert set(OURS) < set(SYSTEMS)


def test_the_ratio_at_any_precision_is_of_a_pair_of_equal_losses() -> None:
    rows = [
        row("onward", "int4", 400.0),
        row("onward", "int8", 300.0),
        row("onward-engine", "int8", 330.0),
        row("vllm", "int4", 500.0),
        row("vllm", "int8", 150.0),
        row("ctranslate2-workers", "int8", 200.0),
        row("llama.cpp", "int8", 900.0),
    ]
    losses = {("onward", "int4"): 1.6, ("onward", "int8"): 1.5, ("vllm", "int4"): 1.7, ("vllm", "int8"): 1.5}

    def found(**changes: float) -> dict[str, Any] | None:
        known = losses | {("ctranslate2", "int8"): 1.501} | {(name, "int8"): loss for name, loss in changes.items()}
        return ratios_of(rows, known).get("tiny/any/decode/8/128")

    fair = found()
    assert fair is not None
    assert (fair["precision"], fair["onward"], fair["onward-engine"]) == ("int8", 1.5, 1.65)
    assert (fair["loss"], fair["best_peer"], fair["best_peer_loss"]) == (1.5, "ctranslate2-workers", 1.501)
    lossier = found(ctranslate2=1.51)
    assert lossier is not None
    assert lossier["best_peer"] == "vllm", "a peer with more loss than ours does not count"
    assert found(ctranslate2=1.51, vllm=1.51) is None
    assert "tiny/any/decode/8/128" not in ratios_of(rows, {}), "what was not measured does not count"
    assert ratios_of(rows, {})["tiny/int4/decode/8/128"]["onward"] == 0.8


def test_a_limit_is_the_most_that_any_round_saw() -> None:
    other = {"read_gb_per_second": [[1, 12.0], [1 << 30, 12.0]], "gemm": {"fp32": 90.0}}
    reads = [[1, 20.0], [1 << 30, 12.0]]
    assert best_limits([LIMITS, other]) == {"read_gb_per_second": reads, "gemm": {"bf16": 400.0, "fp32": 100.0}}
    assert best_limits([]) is None


def test_the_roofline_of_decode_is_bandwidth_at_one_sequence_and_arithmetic_at_many() -> None:
    one, two = (roofline(CONFIG, LIMITS, "fp32", ("decode", batch, 8), 8) for batch in (1, 2))
    assert one is not None
    assert two is not None
    assert one < two <= 2 * one
    slow = LIMITS | {"gemm": {"fp32": 1e-6}}
    many = [roofline(CONFIG, slow, "fp32", ("decode", batch, 8), 8) for batch in (1, 32)]
    assert many[0] == pytest.approx(many[1])
    assert roofline(CONFIG, None, "fp32", ("prefill", 1, 8), 8) is None


def test_the_roofline_of_what_caches_hold_is_at_their_rate() -> None:
    cached, read = (
        roofline(CONFIG, LIMITS | {"read_gb_per_second": [[1, 20.0], [size, 10.0]]}, "fp32", ("decode", 1, 8), 8)
        for size in (1 << 30, 2)
    )
    assert cached == pytest.approx(2 * (read or 0))


def test_the_roofline_of_keys_and_values_in_eight_bits_is_higher_where_they_are_what_is_read() -> None:
    limits = LIMITS | {"gemm": {"fp32": 1e9, "int8": 1e9}}
    place = ("decode", 32, 8)
    known = {
        precision: roofline(CONFIG, limits, precision, place, 8)
        for precision in ("fp32", "fp32-kv8", "int8", "int8-kv8", "int4-kv8", "fp9-kv8")
    }
    assert known["fp9-kv8"] is None
    assert (known["fp32"] or 0) < (known["fp32-kv8"] or 0) < (known["int8-kv8"] or 0) < (known["int4-kv8"] or 0)


def results(rows: list[dict[str, Any]]) -> Mapping[str, Any]:
    return {
        "rows": rows,
        "ratios": ratios_of(rows),
        "settings": {"rounds": 3, "threads": 2, "is_quick": False},
        "command": "bench",
        "commit": "abc",
        "date": "2026-11-26",
        "others_share": 0.01,
        "machine": {"processor": "some processor", "cores": 2},
        "limits": LIMITS,
    }


def test_the_report_shows_values_shares_noise_and_failures() -> None:
    rows = [
        row("onward", "fp32", 90.4, roofline=180.0, agreement=1.0),
        row("vllm", "fp32", 100.0, noise=[0.2]),
        row("ctranslate2", "fp32", None, error="not installed: no such `wheel`"),
    ]
    text = _bench_report.render(results(rows))
    assert "| onward | 1 | fp32 | 90 (50%) | 100.0% |" in text
    assert "| vllm | 1 | fp32 | 100† | - |" in text
    assert "| ctranslate2 | 1 | fp32 | failed | - |" in text
    assert "- **ctranslate2**, tiny, fp32 (decode 8 x 128): `not installed: no such 'wheel'`" in text
    assert "| tiny/fp32/decode/8/128 | 0.90 | - | - | fp32 | vllm fp32 | - |" in text
    picture = _bench_report.draw(rows)
    assert picture.lstrip().startswith("<?xml")
    assert "onward fp32" in picture
    assert _bench_report.draw(rows) == picture


def test_a_report_of_nothing_but_failures_is_still_drawn() -> None:
    rows = [row("vllm", "fp32", None, error="no")]
    assert "failed" in _bench_report.render(results(rows))
    assert "<svg" in _bench_report.draw(rows)


def test_a_child_that_does_not_speak_the_protocol_is_named_and_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('hello', flush=True); import time; time.sleep(60)"]
    with running(command, {}, tmp_path / "log") as child:
        with pytest.raises(SystemFailed, match="not an answer: b'hello'"):
            child.ask({"do": "load"}, 100)
        assert not child.is_usable


def test_a_score_is_the_systems_own_and_no_other_number(tmp_path: Path) -> None:
    question = {"do": "score", "windows": [([5, 6, 7], 2), ([5, 6], 1)]}
    for behaviour in ("", "short"):
        with fake("peer", behaviour).started(
            Path(sys.executable), tmp_path, tmp_path, tmp_path / "log", precision="fp32", threads=1
        ) as child:
            if not behaviour:
                assert child.ask(question, 100)["nats"] == 1.5
                continue
            with pytest.raises(SystemFailed, match="the log-probabilities add up to nan"):
                child.ask(question, 100)


def test_an_environment_is_made_once_for_the_same_pins(tmp_path: Path) -> None:
    python = tmp_path / "peer" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.with_name("pip").touch()
    python.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/said\n")
    python.chmod(0o755)
    spec = fake("peer", installs=(("install", "a==1"), ("install", "b==2")))
    assert python_of(spec, tmp_path, 10) == python_of(spec, tmp_path, 10) == python
    said = (tmp_path / "said").read_text().splitlines()
    assert [line.split()[-1] for line in said] == ["a==1", "b==2"]
    python_of(replace(spec, installs=(("install", "a==2"),)), tmp_path, 10)
    assert len((tmp_path / "said").read_text().splitlines()) == 3
    python.write_text("#!/bin/sh\nexec sleep 5\n")
    with pytest.raises(InstallError, match=r"not installed in 0\.1 s"):
        python_of(replace(spec, installs=(("install", "c"),)), tmp_path, 0.1)


def test_every_peer_has_a_script_that_knows_its_command_line() -> None:
    for spec in (*SYSTEMS.values(), *CUDA_SYSTEMS.values()):
        assert Path(*spec.module.split(".")).with_suffix(".py").is_file()


def test_the_command_line_of_make_bench_is_kept() -> None:
    given = ["--models", "llama-110m,gpt2-124m", "--systems", "onward,vllm", "--precisions", "int8,int4-kv8"]
    settings, run, _ = bench.SCENARIO.parse([*given, "--rounds", "5", "--quick", "--resume"])
    assert (settings.models, settings.systems) == (("llama-110m", "gpt2-124m"), ("onward", "vllm"))
    assert (settings.precisions, settings.rounds, settings.repeats) == (("int8", "int4-kv8"), 5, 1)
    assert (run.is_quick, run.resume) == (True, True)
    assert bench.SCENARIO.printed == ("rows", "ratios")


@pytest.mark.whole
def test_the_systems_of_a_card_are_measured_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real systems, one process each, with a tiny model; the same command as on a card but for the device."""
    recipe = tmp_path / "tiny.json"
    sizes = {"vocab_size": 64, "context": 64, "d_model": 32, "num_layers": 1, "num_heads": 2, "d_ff": 32}
    recipe.write_text(json.dumps({"model": {"architecture": "decoder-only", **sizes}}))
    given = ["--models", str(recipe), "--in-place", "--precisions", "fp32", "--prompts", "16", "--batches", "1"]
    given += ["--quick", "--threads", "1", "--build", str(tmp_path / "build")]
    assert bench.SCENARIO.run([*given, "--new", "8", "--metrics", "prefill"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(said) == {"rows", "ratios"}
    assert [(row["system"], row["metric"]) for row in said["rows"]] == [(name, "prefill") for name in CUDA_SYSTEMS]
    for row in said["rows"]:
        assert row["value"] > 0
        assert row["roofline"] > 0
        assert row["agreement"] > 0.9
    assert said["ratios"]["tiny/fp32/prefill/1/16"]["onward-engine"] > 0
    assert "onward-engine" in (tmp_path / "build" / "bench.md").read_text()
