"""What the scaling study makes of its samples: laws that hold and that do not, controls, drift, exit status, report."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from loadtest import fit, machine, operations, report, scaling, study
from loadtest.fit import Curve
from loadtest.pictures import Evidence
from loadtest.scaling import judge, synthetic
from loadtest.study import Found, Settings
from model.spec import cost
from model.training.presets import resolve

LAW = resolve("law").model
SETTINGS = Settings(threads=2, num_lengths=12)
LENGTHS = tuple(round(64 * 1.5**step / 32) * 32 for step in range(12))
SQUARE = Curve((1e-3, 8e-6, 1.6e-8))
"""n* is 500 tokens."""
TRUTHS = {
    "prefill": SQUARE,
    "prefill_chunked": Curve((1e-3, 9e-6, 0.9e-8)),
    "end_to_end": Curve((3e-3, 9e-6, 0.9e-8)),
    "locust": Curve((4e-3, 9e-6, 0.9e-8)),
    "decode": Curve((3e-4, 5e-7)),
    "no_cache": SQUARE,
    "encoder": Curve((1e-3, 1e-5, 3e-8)),
    "cross_attention": Curve((4e-4, 6e-7)),
    "gru": Curve((1e-3, 4e-5)),
    "gru_whole": Curve((1e-3, 4e-5, 2e-10)),
}


def found(**changes: Curve) -> Found:
    """Samples of a study in which every law holds, but for what is changed."""
    made = Found()
    for index, (series, truth) in enumerate((TRUTHS | changes).items()):
        made.series[series] = list(synthetic(truth.at, LENGTHS, SETTINGS.repeats, index))
    for length in LENGTHS:
        made.series["memory_whole"].append((length, 2e8 + 16.0 * length**2))
        made.series["memory_chunked"].append((length, 2e8 + 4096.0 * length))
        made.series["memory_source"].append((length, 2e8 + 32.0 * length**2))
        made.series["kv"].append((length, float(cost.kv_bytes(LAW, length))))
    made.facts = {
        "config": LAW.to_dict(),
        "gru": {"units": 188, "num_parameters": 525_000},
        "same_tokens_without_cache": [360, 360],
        "others_share": 0.01,
    }
    return made


def outcome(
    samples: Found | Callable[..., Found],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *arguments: str,
) -> tuple[int, dict[str, Any], str]:
    """Exit status, last line and stderr of `make scaling`, had it taken these samples."""
    monkeypatch.setattr(study, "carry_out", samples if callable(samples) else lambda *_: samples)
    monkeypatch.setattr(machine, "watch_others", lambda: lambda: 0.2)
    monkeypatch.setattr(scaling, "judge", functools.partial(judge, draws=200))
    monkeypatch.setattr(scaling, "BUILD", tmp_path / "build")
    monkeypatch.setattr(scaling, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(report, "write", lambda *_: None)
    status = scaling.main(
        ["--threads", "2", "--lengths", "12", "--baseline", str(tmp_path / "docs" / report.RESULTS), *arguments]
    )
    said = capsys.readouterr()
    return status, json.loads(said.out.splitlines()[-1]), said.err


def test_the_law_holds_and_the_last_line_has_the_interfaces_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told, said = outcome(found(), tmp_path, monkeypatch, capsys)
    assert status == 0
    assert "scaling:" not in said
    prefill = told["prefill"]
    assert prefill["c_low"] < 1.6e-8 < prefill["c_high"]
    assert prefill["c"] == pytest.approx(1.6e-8, rel=0.1)
    assert prefill["n_star"] == pytest.approx(500.0, rel=0.2)
    assert prefill["bic_linear"] - prefill["bic_quadratic"] > 10
    assert prefill["bic_cubic"] is not None
    assert prefill["leave_longest_out_error"] < 0.1
    assert prefill["local_slope"] == pytest.approx(1.9, abs=0.05)
    assert told["decode"]["linear"] is True
    assert told["decode"]["slope_low"] < 5e-7 < told["decode"]["slope_high"]
    assert told["no_cache"]["quadratic"] is True
    assert told["controls"]["linear_rejects_quadratic"] is True
    assert told["controls"]["gru_rejects_quadratic"] is True
    assert told["controls"]["quadratic_accepted"] is True
    assert len(told["samples"]) == len(LENGTHS) * SETTINGS.repeats
    assert told["report"].endswith("scaling.html")
    assert told["operations"]["n_star"] == 480.0
    assert [row[0] for row in told["operations"]["prefill"]] == list(LENGTHS)


@pytest.mark.parametrize(
    ("series", "truth", "said"),
    [
        ("prefill", Curve((1e-3, 4e-5)), "prefill of a whole prompt is quadratic in its length: the quadratic"),
        ("prefill_chunked", Curve((1e-3, 4e-5)), "prefill in chunks is quadratic"),
        ("no_cache", Curve((1e-3, 4e-5)), "a token without the cache is quadratic in its context: "),
        ("encoder", Curve((1e-3, 4e-5, 0.0, 5e-12)), "encoding is quadratic in the source's length: BIC prefers cubic"),
        ("decode", SQUARE, "a token with the cache is linear in its context: BIC prefers quadratic"),
        (
            "decode",
            Curve((1e-3,)),
            "a token with the cache is linear in its context: the linear coefficient's interval",
        ),
        (
            "cross_attention",
            SQUARE,
            "a token's cross-attention is linear in the source's length: BIC prefers quadratic",
        ),
        ("gru", SQUARE, "control: a quadratic was found in the recurrent model's times, read in chunks"),
        ("gru_whole", SQUARE, "control: a quadratic was found in the recurrent model's times, read in one run"),
        (
            "prefill",
            Curve((1e-3, 8e-6, 5e-9)),
            "prefill of a whole prompt is quadratic in its length: 5536 tokens are 3.",
        ),
    ],
)
def test_a_law_that_does_not_hold_ends_with_status_1_and_says_which(
    series: str,
    truth: Curve,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, told, errors = outcome(found(**{series: truth}), tmp_path, monkeypatch, capsys)
    assert status == 1
    assert f"scaling: {said}" in errors
    assert "others took 20% of the machine" in errors
    assert told["law_holds"] is False
    for name in ("gru", "gru_whole"):
        assert told["controls"][f"{name}_rejects_quadratic"] is (series != name)
    assert any(objection.startswith(said) for objection in told["objections"])


def test_a_quick_run_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told, said = outcome(found(prefill=Curve((1e-3, 4e-5))), tmp_path, monkeypatch, capsys, "--quick")
    assert status == 0
    assert told["law_holds"] is None
    assert "quadratic" not in said
    assert told["settings"]["overrides"] == ["context=1024", "num_kv_heads=1"]


def test_what_cannot_be_measured_ends_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> Found:
        raise RuntimeError("the server ended before it was ready, exit code 2")

    monkeypatch.setattr(study, "carry_out", fail)
    assert scaling.main([]) == 2
    said = capsys.readouterr()
    assert said.err == "scaling: the server ended before it was ready, exit code 2\n"
    assert said.out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lengths", "9"], "--lengths is 9, must be at least 10"),
        (["--repeats", "14"], "--repeats is 14, must be at least 15"),
        (["--quick", "--docs"], "--quick measures, and has no figures"),
        (["--quick", "--samples", "nowhere.json"], "--quick measures, and has no figures"),
        (["--samples", "nowhere.json"], "--samples is nowhere.json, must be a file"),
        (["--capacity", "nowhere.json"], "--capacity is nowhere.json, must be a file"),
    ],
)
def test_what_was_asked_wrongly_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        scaling.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


# Drift.


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    judged = judge(found(), SETTINGS, draws=200)
    ours = {"processor": "a processor", "cores": 2}
    facts = {"machine": ours, "versions": {"onward": "1"}, "date": "2026-01-01", "quick": False, "seconds": 700.0}
    none = {"compared": None, "reason": "there is no baseline", "objections": []}
    made: dict[str, Any] = json.loads(json.dumps({**facts, **judged, "drift": none, "capacity": None}))
    return made


def changed(results: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    other = copy.deepcopy(results)
    change(other)
    return other


def test_the_same_figures_have_not_drifted(results: dict[str, Any]) -> None:
    found_drift = scaling.drift(results, results)
    assert found_drift["objections"] == []
    assert set(found_drift["compared"].values()) == {1.0}
    assert "prefill.n_star" in found_drift["compared"]


@pytest.mark.parametrize("factor", [0.49, 0.51, 1.99, 2.01])
@pytest.mark.parametrize(("series", "figure"), scaling.DRIFTING)
def test_a_ratio_may_move_by_a_factor_of_two(results: dict[str, Any], series: str, figure: str, factor: float) -> None:
    def move(other: dict[str, Any]) -> None:
        other[series][figure] *= factor

    objections = scaling.drift(changed(results, move), results)["objections"]
    assert bool(objections) is (not 0.5 <= factor <= 2.0)
    assert all(f"{series}.{figure}" in objection for objection in objections)


def test_times_that_are_ten_times_as_long_are_no_drift(results: dict[str, Any]) -> None:
    slow = found()
    slow.series = {name: [(length, 10 * value) for length, value in samples] for name, samples in slow.series.items()}
    slower = results | json.loads(json.dumps(judge(slow, SETTINGS, draws=50)))
    assert slower["prefill"]["c"] == pytest.approx(10 * results["prefill"]["c"])
    assert scaling.drift(slower, results)["objections"] == []


def test_a_law_that_is_gone_has_drifted(results: dict[str, Any]) -> None:
    def lose(other: dict[str, Any]) -> None:
        other["prefill"]["n_star"] = None

    assert scaling.drift(changed(results, lose), results)["objections"] == [
        f"prefill.n_star is None, the baseline's is {results['prefill']['n_star']}"
    ]


def test_another_processor_is_not_compared(results: dict[str, Any]) -> None:
    def move(other: dict[str, Any]) -> None:
        other["machine"]["processor"] = "another"
        other["prefill"]["n_star"] = 1.0

    found_drift = scaling.drift(results, changed(results, move))
    reason = "the baseline's processor is 'another', this one is 'a processor'"
    assert found_drift == {"compared": None, "reason": reason, "objections": []}

    def forget(other: dict[str, Any]) -> None:
        other["machine"]["processor"] = ""

    # Two that nobody knows need not be the same.
    unknown = changed(results, forget)
    assert "is 'unknown'" in scaling.drift(unknown, unknown)["reason"]


@pytest.mark.parametrize(
    ("setting", "value", "is_compared"),
    [("threads", 7, False), ("overrides", ["context=512"], False), ("repeats", 99, True), ("seed", 5, True)],
)
def test_only_settings_that_move_the_ratios_keep_a_run_from_being_compared(
    results: dict[str, Any], setting: str, value: Any, is_compared: bool
) -> None:
    def move(other: dict[str, Any]) -> None:
        other["settings"][setting] = value
        other["prefill"]["n_star"] *= 3

    found_drift = scaling.drift(results, changed(results, move))
    assert bool(found_drift["objections"]) is is_compared
    assert is_compared or found_drift["reason"].startswith(f"{setting} was {value!r} for the baseline")


def test_drift_from_the_stored_baseline_ends_with_status_1(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def move(other: dict[str, Any]) -> None:
        other["prefill"]["n_star"] *= 3
        other["machine"] = machine.describe()

    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / report.RESULTS).write_text(report.dump(changed(results, move)))
    status, told, said = outcome(found(), tmp_path, monkeypatch, capsys)
    assert status == 1
    assert told["law_holds"] is True
    assert "prefill.n_star" in said


def test_a_run_for_the_documents_is_the_next_baseline_and_is_held_to_none(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def move(other: dict[str, Any]) -> None:
        other["prefill"]["n_star"] *= 3
        other["machine"] = machine.describe()

    def write(made: dict[str, Any], folder: Path) -> None:
        (folder / report.RESULTS).write_text(report.dump(made))

    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / report.RESULTS).write_text(report.dump(changed(results, move)))
    monkeypatch.setattr(report, "write_document", write)
    status, told, _ = outcome(found(), tmp_path, monkeypatch, capsys, "--docs")
    assert status == 0
    assert told["drift"]["reason"] == "this run is the new baseline"
    status, told, _ = outcome(found(), tmp_path, monkeypatch, capsys)
    assert status == 0
    assert set(told["drift"]["compared"].values()) == {1.0}


def test_a_refused_law_is_no_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[Path] = []
    monkeypatch.setattr(report, "write_document", lambda _, folder: written.append(folder))
    status, _, said = outcome(found(decode=SQUARE), tmp_path, monkeypatch, capsys, "--docs")
    assert (status, written) == (1, [])
    assert "what is refused is no baseline" in said
    assert outcome(found(), tmp_path, monkeypatch, capsys, "--docs")[0] == 0
    assert written == [tmp_path / "docs"]


def test_anyone_can_judge_the_stored_samples_anew(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(other: dict[str, Any]) -> None:
        # What was judged then does not count, and neither does what was not measured yet.
        other["prefill"]["c"] = other["law_holds"] = None
        other["capacity"] = CAPACITY
        del other["series"]["gru_whole"]

    def fail(*_: object) -> Found:
        raise AssertionError("nothing is to be measured")

    path = tmp_path / "stored.json"
    path.write_text(report.dump(changed(results, spoil)))
    status, told, _ = outcome(fail, tmp_path, monkeypatch, capsys, "--samples", str(path))
    assert status == 0
    assert told["prefill"] == results["prefill"]
    assert told["law_holds"] is True
    assert "gru_whole_rejects_quadratic" not in told["controls"]
    for name in ("machine", "date", "seconds", "settings", "samples"):
        assert told[name] == results[name], name
    assert told["capacity"] == CAPACITY
    other = tmp_path / "capacity.json"
    other.write_text(json.dumps(CAPACITY | {"users": 9}))
    _, told, _ = outcome(fail, tmp_path, monkeypatch, capsys, "--samples", str(path), "--capacity", str(other))
    assert told["capacity"]["users"] == 9


def test_samples_of_a_quick_run_are_no_baseline_either(
    results: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stored.json"
    path.write_text(report.dump(results | {"quick": True}))
    assert scaling.main(["--samples", str(path), "--docs"]) == 2
    assert "is of a quick run, which decides nothing" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("rival", ["linear", "linearithmic", "three_halves"])
def test_no_rival_is_taken_for_a_square(rival: str, seed: int) -> None:
    lengths = study.geometric(64, 16288, 32, 16)
    truth = scaling.rivals(Curve((1e-3, 1e-5)), lengths[-1])[rival]
    assert float(truth(lengths[-1])) == pytest.approx(1e-3 + 1e-5 * lengths[-1])
    assert not fit.examine(synthetic(truth, lengths, 15, seed), 2, draws=50, seed=seed).holds


# Lengths, and the order in which they are asked for.


@pytest.mark.parametrize(
    ("shortest", "longest", "multiple", "count"),
    [
        (64, 8158, 32, 14),
        (128, 8190, 128, 14),
        (64, 8192, 16, 14),
        (64, 1014, 32, 6),
        (128, 1022, 128, 6),
        (7, 7, 1, 1),
    ],
)
def test_lengths_are_distinct_multiples_and_as_geometric_as_that_allows(
    shortest: int, longest: int, multiple: int, count: int
) -> None:
    lengths = study.geometric(shortest, longest, multiple, count)
    assert len(lengths) == len(set(lengths)) == count
    assert lengths == sorted(lengths)
    assert all(length % multiple == 0 for length in lengths)
    assert longest - multiple < lengths[-1] <= longest
    ratio = (longest / shortest) ** (1 / max(1, count - 1))
    wide = [length for length in lengths if length * (ratio - 1) > 2 * multiple]
    assert all(after / before == pytest.approx(ratio, rel=0.3) for before, after in itertools.pairwise(wide))


def test_every_repeat_takes_every_length_once_and_in_another_order() -> None:
    order = list(study.passes(LENGTHS, 20, random.Random(0)))
    repeats = [order[start : start + len(LENGTHS)] for start in range(0, len(order), len(LENGTHS))]
    assert all(sorted(repeat) == sorted(LENGTHS) for repeat in repeats)
    assert len({tuple(repeat) for repeat in repeats}) == 20


# Operations beside times.


# What is computed of a token whose logits are wanted, behind the last layer's attention: W^O, two matrices, the head.
WANTED_FLOPS = 2 * LAW.d_model * (LAW.d_model + 2 * LAW.d_ff + LAW.vocab_size)


def test_a_whole_prompt_costs_what_the_model_costs_but_for_what_nobody_wants() -> None:
    whole = cost.forward_flops(LAW, 1000)
    ours = operations.prefill(LAW, 1000, LAW.context)
    assert ours.attention == whole.attention
    assert whole.linear - ours.linear == 999 * WANTED_FLOPS


def test_in_chunks_attention_costs_about_half_and_the_rest_the_same() -> None:
    whole, chunked = operations.prefill(LAW, 4096, LAW.context), operations.prefill(LAW, 4096, 128)
    assert chunked.linear == whole.linear
    assert chunked.attention / whole.attention == pytest.approx((1 + 128 / 4096) / 2)
    # One token at a time every query meets what is before it and itself: the pairs that the mask allows.
    allowed = cost.attended_pairs(LAW, 100) / cost.computed_pairs(LAW, 100)
    one_by_one, together = operations.prefill(LAW, 100, 1), operations.prefill(LAW, 100, 100)
    assert one_by_one.attention / together.attention == pytest.approx(allowed)


def test_a_token_costs_the_difference_that_it_makes() -> None:
    step = operations.decode(LAW, 500)
    assert step.attention == sum(
        sign * operations.prefill(LAW, length, 1).attention for sign, length in ((1, 500), (-1, 499))
    )
    assert step.linear == operations.prefill(LAW, 500, 1).linear - operations.prefill(LAW, 499, 1).linear + WANTED_FLOPS


def test_operations_cross_where_both_are_equal() -> None:
    at = operations.crossover(LAW)
    assert at == 480.0
    flops = operations.prefill(LAW, 480, LAW.context)
    assert flops.attention == flops.linear - WANTED_FLOPS


# The report.


def test_the_page_needs_no_other_file_and_has_every_picture_and_every_sample(
    results: dict[str, Any], tmp_path: Path
) -> None:
    page = report.write(results, tmp_path)
    text = page.read_text()
    assert text.count("<svg") == len(report.PICTURES)
    assert not re.findall(r'(?:src|href)="(?!#)', text)
    assert "@import" not in text
    assert "The law holds." in text
    inner = re.search(r'<script type="application/json" id="results">(.*?)</script>', text, re.DOTALL)
    assert inner is not None
    assert json.loads(inner[1])["series"] == results["series"]
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)
    assert json.loads((tmp_path / report.RESULTS).read_text()) == results
    for picture in report.PICTURES:
        assert (tmp_path / f"scaling-{picture.name}.png").read_bytes().startswith(b"\x89PNG")
        ElementTree.parse(tmp_path / f"scaling-{picture.name}.svg")


CAPACITY: dict[str, Any] = {
    "date": "2026-01-02T03:04:05+0000",
    "machine": {"processor": "a processor", "cores": 2},
    "model_id": "law",
    "backend": "onward",
    "capacity": 12.5,
    "users": 8,
    "pattern": "poisson",
    "seconds": 60.0,
    "closed_loop": {"output_throughput": 800.0},
    "loads": [
        {
            "load": load,
            "offered_rate": load * 12.5,
            "offered": round(750 * load),
            "finished": round(750 * min(load, 1.0)),
            "refused": round(750 * max(0.0, load - 1.0)),
            "failed": 0,
            "cancelled": 0,
            "missing": 0,
            "duration": 60.0,
            "request_throughput": 12.5 * min(load, 1.0),
            "output_throughput": 800.0 * min(load, 1.0),
            "median_ttft_ms": 50.0 * load,
            "p99_ttft_ms": 100.0 * load,
            "p99_tpot_ms": 5.0,
            "p99_e2el_ms": 900.0 * load,
            "p99_lateness_ms": 0.5,
            "errors": {"RESOURCE_EXHAUSTED": 150} if load > 1.0 else {},
            "error_details": {"RESOURCE_EXHAUSTED": "full"} if load > 1.0 else {},
            "warnings": [],
        }
        for load in (0.5, 0.8, 1.2)
    ],
}


def test_a_capacity_curve_is_shown_where_one_was_given(results: dict[str, Any], tmp_path: Path) -> None:
    without = report.render_page(results, Evidence(results), {})
    assert "<code>python -m loadtest capacity</code> measures a running server" in without
    assert "<svg" not in without
    given = results | {"capacity": CAPACITY}
    page = report.render_page(given, Evidence(given), {})
    assert page.count("<svg") == 1
    cells = (
        "1.2",
        "15.00",
        "900",
        "750",
        "150",
        "0",
        "0",
        "0",
        "12.50",
        "800",
        "60.00",
        "120",
        "5.00",
        "1,080",
        "0.50",
    )
    assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    assert "<li>at 1.2: 150 of RESOURCE_EXHAUSTED (full)</li>" in page
    assert "12.50 requests/s with 8 users" in page
    assert "Measured by <code>python -m loadtest capacity</code>, 2026-01-02; " in page
    assert "; the client ran on a processor, 2 processors." in page
    assert all(each.startswith("capacity") for each in re.findall(r'\bid="([^"]+)"', page) if each != "results")
    document = report.write_document(given, tmp_path).read_text()
    assert f"]({report.CAPACITY}.svg)" in document
    assert f"| {' | '.join(cells)} |" in document
    ElementTree.parse(tmp_path / f"{report.CAPACITY}.svg")
    report.write(given, tmp_path / "build")
    assert (tmp_path / "build" / f"{report.CAPACITY}.png").read_bytes().startswith(b"\x89PNG")


def test_the_controls_say_what_speaks_against_a_square_and_whether_it_is_alone(results: dict[str, Any]) -> None:
    def leave_one(other: dict[str, Any]) -> None:
        other["controls"]["gru_whole_objections"] = ["the quadratic term is 3.0% of the time"]

    told = report.controls(changed(results, leave_one))
    assert len(told) == 6
    assert any(line.startswith("made-up times that are linear: no square, for the quadratic ") for line in told)
    (whole,) = (line for line in told if "reads in one run" in line)
    assert whole.endswith("no square, for the quadratic term is 3.0% of the time, and nothing else speaks against one")
    assert told[-1] == "made-up times that are a square: one"

    def fool(other: dict[str, Any]) -> None:
        other["controls"]["gru_rejects_quadratic"] = other["controls"]["quadratic_accepted"] = False
        del other["controls"]["gru_whole_rejects_quadratic"]

    told = report.controls(changed(results, fool))
    assert [line.rpartition(": ")[2] for line in told[3:]] == [
        "**a square, and there is none**",
        "not measured",
        "**none is found**",
    ]


def test_the_document_shows_the_figures_and_its_pictures(results: dict[str, Any], tmp_path: Path) -> None:
    text = report.write_document(results, tmp_path).read_text()
    prefill = results["prefill"]
    assert f"| {prefill['n_star']:,.0f} (" in text
    assert f"{1e9 * prefill['c_low']:.3g}…{1e9 * prefill['c_high']:.3g}" in text
    for picture in re.findall(r"\]\((\S+\.svg)\)", text):
        assert (tmp_path / picture).is_file()
    assert text.count("](scaling-") == len(report.PICTURES)
    assert "refused" not in text.split("## Method")[0]
    assert "Other processes took 1.0% of the machine. " in text


def test_figures_of_a_busy_machine_are_called_doubtful(results: dict[str, Any]) -> None:
    def crowd(other: dict[str, Any]) -> None:
        other["facts"]["others_share"] = 0.3

    assert "took 30.0% of the machine: **these figures are doubtful**." in report.conditions(changed(results, crowd))


def test_what_we_and_our_children_do_is_not_taken_by_others() -> None:
    others = machine.watch_others()
    began = time.process_time()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    while time.process_time() - began < 0.3:
        pass
    share = others()
    assert share is not None
    assert 0.0 <= share <= 1.0


def test_a_refused_law_is_reported_as_refused(results: dict[str, Any]) -> None:
    refused = found(prefill=Curve((1e-3, 4e-5)))
    other = results | json.loads(json.dumps(judge(refused, SETTINGS, draws=50)))
    page = report.render_page(other, Evidence(other), {})
    assert '<p class="refused"><strong>The law is refused</strong>' in page
    assert "prefill of a whole prompt is quadratic in its length: " in page


@pytest.mark.parametrize("truth", [Curve((1e-3, 4e-5)), Curve((1e-3, 0.0, 1e-8)), Curve((1e-3,))])
def test_every_picture_can_be_drawn_whatever_was_found(results: dict[str, Any], truth: Curve) -> None:
    samples = found(**dict.fromkeys(TRUTHS, truth))
    evidence = Evidence(results | json.loads(json.dumps(judge(samples, SETTINGS, draws=20))))
    for picture in report.PICTURES:
        picture.draw(evidence)
        assert "nan" not in picture.caption(evidence)
