"""The scaling study's verdicts: claims, controls, drift, exit status, report."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import pickle
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch
from xml.etree import ElementTree

import pytest

from loadtest import machine
from loadtest.document import to_page
from loadtest.scaling import command, fit, judge, operations, report, study
from loadtest.scaling.evidence import Evidence
from loadtest.scaling.fit import Curve, Regimes
from loadtest.scaling.judge import drift, synthetic
from loadtest.scaling.study import Found, StudySettings
from model.spec import cost
from model.training.presets import resolve

LAW = resolve("law").model
SETTINGS = StudySettings(threads=2, num_lengths=12)
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
    """Samples of a study in which every claim holds, except for the changed series."""
    made = Found()
    for index, (series, truth) in enumerate((TRUTHS | changes).items()):
        # As the study does: several of each prompt and source.
        repeats = SETTINGS.repeats * (3 if series in ("decode", "cross_attention") else 1)
        made.series[series] = list(synthetic(truth.at, LENGTHS, repeats, index))
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


@pytest.fixture(scope="module", autouse=True)
def examined_once() -> Iterator[None]:
    """Equal samples are examined once in a module, as most series are the same in every test."""
    examine, known = fit.examine, dict[bytes, fit.Examination]()

    def remember(*asked: Any, **options: Any) -> fit.Examination:
        key = pickle.dumps((asked, sorted(options.items())))
        if key not in known:
            known[key] = examine(*asked, **options)
        return known[key]

    with patch.object(fit, "examine", remember):
        yield


class Run(Protocol):
    def __call__(self, samples: Found | Callable[..., Found], *arguments: str) -> tuple[int, dict[str, Any], str]: ...


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit status, last line and stderr of `make scaling` with these samples; nothing is drawn."""
    monkeypatch.setattr(machine, "watch_others", lambda: lambda: 0.01)
    monkeypatch.setattr(command, "judge", functools.partial(judge.judge, draws=200))
    monkeypatch.setattr(command, "BUILD", tmp_path / "build")
    monkeypatch.setattr(command, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(report, "write", lambda *_: None)

    def run(samples: Found | Callable[..., Found], *arguments: str) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setattr(study, "carry_out", samples if callable(samples) else lambda *_: samples)
        baseline = str(tmp_path / "docs" / "data" / report.RESULTS)
        status = command.main(["--threads", "2", "--lengths", "12", "--baseline", baseline, *arguments])
        said = capsys.readouterr()
        return status, json.loads(said.out.splitlines()[-1]), said.err

    return run


def test_the_law_holds_and_the_last_line_has_the_interfaces_keys(run: Run) -> None:
    status, results, said = run(found())
    assert status == 0
    assert "scaling:" not in said
    prefill = results["prefill"]
    assert prefill["c_low"] < 1.6e-8 < prefill["c_high"]
    assert prefill["c"] == pytest.approx(1.6e-8, rel=0.1)
    assert prefill["n_star"] == pytest.approx(500.0, rel=0.2)
    assert prefill["bic_linear"] - prefill["bic_quadratic"] > 10
    assert prefill["bic_cubic"] is not None
    assert prefill["leave_longest_out_error"] < 0.1
    assert prefill["local_slope"] == pytest.approx(1.9, abs=0.05)
    assert results["decode"]["linear"] is True
    assert results["decode"]["slope_low"] < 5e-7 < results["decode"]["slope_high"]
    assert results["no_cache"]["quadratic"] is True
    controls = results["controls"]
    assert [controls[f"{name}_rejects_quadratic"] for name in ("linear", "gru")] == [True, True]
    assert controls["quadratic_accepted"] is True
    assert len(results["samples"]) == len(LENGTHS) * SETTINGS.repeats
    assert results["report"].endswith("scaling.html")
    assert results["operations"]["n_star"] == 480.0
    assert [row[0] for row in results["operations"]["prefill"]] == list(LENGTHS)


LINE, CONSTANT, CUBE = Curve((1e-3, 4e-5)), Curve((1e-3,)), Curve((1e-3, 4e-5, 0.0, 5e-12))


@pytest.mark.parametrize(
    ("series", "truth", "said"),
    [
        ("prefill", LINE, "prefill of a whole prompt is quadratic in its length: the quadratic"),
        ("prefill", Curve((1e-3, 8e-6, 5e-9)), "prefill of a whole prompt is quadratic in its length: at 5536 tokens"),
        ("prefill_chunked", LINE, "prefill in chunks is quadratic"),
        ("no_cache", LINE, "a token without the cache is quadratic in its context: "),
        ("encoder", CUBE, "encoding is quadratic in the source's length: BIC prefers cubic"),
        ("decode", CONSTANT, "a token with the cache is linear in its context: the linear coefficient's interval"),
        ("cross_attention", SQUARE, "a token's cross-attention is linear in the source's length: BIC"),
        ("gru", SQUARE, "control: quadratic growth was found in the recurrent model's times, read in chunks"),
        ("gru_whole", SQUARE, "control: quadratic growth was found in the recurrent model's times, read in one run"),
    ],
)
def test_a_claim_that_fails_ends_with_status_1_and_is_named(run: Run, series: str, truth: Curve, said: str) -> None:
    status, results, errors = run(found(**{series: truth}))
    assert status == 1
    assert f"scaling: {said}" in errors
    assert results["law_holds"] is False
    for name in ("gru", "gru_whole"):
        assert results["controls"][f"{name}_rejects_quadratic"] is (series != name)
    assert any(objection.startswith(said) for objection in results["objections"])


SCATTER = Curve((3e-4, 5e-8))


@pytest.mark.parametrize(
    ("others", "is_refused", "status"),
    [(0.04, True, 1), (0.1, False, 0), (0.1, True, 3), (0.3, False, 3)],
)
def test_a_busy_machine_makes_a_run_inconclusive(
    run: Run, monkeypatch: pytest.MonkeyPatch, others: float, is_refused: bool, status: int
) -> None:
    monkeypatch.setattr(machine, "watch_others", lambda: lambda: others)
    written: list[Path] = []
    monkeypatch.setattr(report, "write_document", lambda _, folder: written.append(folder))
    ended, results, said = run(found(decode=SQUARE) if is_refused else found(), "--docs")
    assert ended == status
    assert results["law_holds"] is {0: True, 1: False, 3: None}[status]
    assert bool(written) is (status == 0)
    assert (f"inconclusive: other processes took {others:.0%} of the machine" in said) is (status == 3)


def test_a_verdict_that_its_resamples_do_not_have_is_inconclusive(run: Run) -> None:
    samples = found()
    # Two samples in five took 2.5 times as long: any draw of fifteen may have more or fewer.
    samples.series["decode"] = [
        (length, seconds * (2.5 if index % 5 < 2 else 1.0))
        for index, (length, seconds) in enumerate(synthetic(SCATTER.at, LENGTHS, 15, 0))
    ]
    status, results, said = run(samples)
    assert status == 3
    assert results["agreement"] < judge.STABLE
    assert "inconclusive: only" in said


@pytest.mark.parametrize(
    ("caches", "knees"),
    [
        # 2 KiB of keys and values per token, and lengths from 64 to 5,536.
        ([32 << 10, 1 << 20, 32 << 20], [512.0]),
        ([256 << 10, 4 << 20], [128.0, 2048.0]),
        # Two lengths are no regime.
        ([128 << 10, 192 << 10, 6 << 20, 8 << 20], []),
        ([], []),
    ],
)
def test_knees_are_where_keys_and_values_fill_a_cache(caches: list[int], knees: list[float]) -> None:
    samples = found()
    samples.facts["caches"] = caches
    assert judge.knees_of(samples, "decode") == knees


def test_a_prompt_has_a_coefficient_of_its_own_beyond_a_cache(run: Run) -> None:
    samples = found(prefill=Curve((1e-3, 8e-6, 1.6e-8, 4e-8), Regimes(2, (2048.0,))))
    samples.facts["caches"] = [4 << 20]
    status, results, _ = run(samples)
    prefill = results["prefill"]
    assert (status, prefill["knees"], prefill["holds"], prefill["quadratic"]) == (0, [2048.0], True, False)
    assert prefill["c_by_regime"] == pytest.approx([1.6e-8, 4e-8], rel=0.15)


def test_a_quick_run_decides_nothing(run: Run) -> None:
    status, results, said = run(found(prefill=LINE), "--quick")
    assert status == 0
    assert results["law_holds"] is None
    assert "quadratic" not in said
    assert results["settings"]["overrides"] == ["context=1024", "num_kv_heads=1"]


def test_a_failed_measurement_ends_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> Found:
        raise RuntimeError("the server ended before it was ready, exit code 2")

    monkeypatch.setattr(study, "carry_out", fail)
    assert command.main([]) == 2
    said = capsys.readouterr()
    assert said.err == "scaling: the server ended before it was ready, exit code 2\n"
    assert said.out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--lengths 9", "--lengths is 9, must be at least 10"),
        ("--quick --docs", "--quick measures, and has no figures"),
        ("--quick --samples nowhere.json", "--quick measures, and has no figures"),
        ("--capacity nowhere.json", "--capacity is nowhere.json, must be a file"),
    ],
)
def test_bad_options_are_refused(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


# Drift.


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    judged = judge.judge(found(), SETTINGS, draws=200)
    ours = {"processor": "a processor", "cores": 2}
    facts = {"machine": ours, "versions": {"onward": "1"}, "date": "2026-01-01", "quick": False, "seconds": 700.0}
    facts["doubt"] = None
    none = {"compared": None, "reason": "there is no baseline", "objections": []}
    made: dict[str, Any] = json.loads(json.dumps({**facts, **judged, "drift": none, "capacity": None}))
    return made


def changed(results: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with these values at these dotted paths."""
    other = copy.deepcopy(results)
    for path, value in changes.items():
        *parents, last = path.split(".")
        functools.reduce(dict.__getitem__, parents, other)[last] = value
    return other


@pytest.mark.parametrize(("series", "figure"), judge.DRIFTING)
def test_a_ratio_may_move_by_a_factor_of_two(results: dict[str, Any], series: str, figure: str) -> None:
    name = f"{series}.{figure}"
    for factor, is_drift in ((0.49, True), (0.51, False), (1.99, False), (2.01, True)):
        objections = drift(changed(results, {name: factor * results[series][figure]}), results)["objections"]
        assert bool(objections) is is_drift, factor
        assert all(name in objection for objection in objections)


def test_times_that_are_ten_times_as_long_are_no_drift(results: dict[str, Any]) -> None:
    slow = found()
    slow.series = {name: [(length, 10 * value) for length, value in samples] for name, samples in slow.series.items()}
    slower = results | json.loads(json.dumps(judge.judge(slow, SETTINGS, draws=50)))
    assert slower["prefill"]["c"] == pytest.approx(10 * results["prefill"]["c"])
    assert drift(slower, results)["objections"] == []


def test_a_figure_that_became_infinite_has_drifted(results: dict[str, Any]) -> None:
    assert drift(changed(results, {"prefill.n_star": None}), results)["objections"] == [
        f"prefill.n_star is None, the baseline's is {results['prefill']['n_star']}"
    ]


def test_another_or_an_unknown_processor_is_not_compared(results: dict[str, Any]) -> None:
    other = changed(results, {"machine.processor": "another", "prefill.n_star": 1.0})
    reason = "the baseline's processor is 'another', this one is 'a processor'"
    assert drift(results, other) == {"compared": None, "reason": reason, "objections": []}
    unknown = changed(results, {"machine.processor": ""})
    assert "is 'unknown'" in drift(unknown, unknown)["reason"]


@pytest.mark.parametrize(
    ("setting", "value", "is_compared"),
    [("threads", 7, False), ("overrides", ["context=512"], False), ("repeats", 99, True)],
)
def test_only_settings_that_move_the_ratios_prevent_a_comparison(
    results: dict[str, Any], setting: str, value: Any, is_compared: bool
) -> None:
    moved = {f"settings.{setting}": value, "prefill.n_star": 3 * results["prefill"]["n_star"]}
    compared = drift(results, changed(results, moved))
    assert bool(compared["objections"]) is is_compared
    assert is_compared or compared["reason"].startswith(f"{setting} was {value!r} for the baseline")


def test_drift_ends_with_status_1_until_a_run_for_the_documents_is_the_next_baseline(
    run: Run, results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(made: dict[str, Any], folder: Path) -> None:
        (folder / "data" / report.RESULTS).write_text(report.dump(made))

    monkeypatch.setattr(report, "write_document", write)
    (tmp_path / "docs" / "data").mkdir(parents=True)
    moved = {"prefill.n_star": 3 * results["prefill"]["n_star"], "machine": machine.describe()}
    write(changed(results, moved), tmp_path / "docs")
    status, printed, said = run(found())
    assert (status, printed["law_holds"]) == (1, True)
    assert "prefill.n_star" in said
    status, printed, _ = run(found(), "--docs")
    assert (status, printed["drift"]["reason"]) == (0, "this run is the new baseline")
    status, printed, _ = run(found())
    assert (status, set(printed["drift"]["compared"].values())) == (0, {1.0})


def test_a_refused_law_is_no_baseline(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr(report, "write_document", lambda _, folder: written.append(folder))
    status, _, said = run(found(decode=SQUARE), "--docs")
    assert (status, written) == (1, [])
    assert "only a run in which the law holds is a baseline" in said


def test_stored_samples_can_be_judged_again(run: Run, results: dict[str, Any], tmp_path: Path) -> None:
    def fail(*_: object) -> Found:
        raise AssertionError("nothing is to be measured")

    # Verdicts in the file do not count, and a series may be missing.
    stored = changed(results, {"prefill.c": None, "law_holds": None, "capacity": CAPACITY})
    del stored["series"]["gru_whole"]
    path, other = tmp_path / "stored.json", tmp_path / "capacity.json"
    path.write_text(report.dump(stored))
    other.write_text(json.dumps(CAPACITY | {"users": 9}))
    status, printed, _ = run(fail, "--samples", str(path))
    assert status == 0
    assert printed["law_holds"] is True
    assert "gru_whole_rejects_quadratic" not in printed["controls"]
    for name in ("prefill", "machine", "date", "seconds", "settings", "samples"):
        assert printed[name] == results[name], name
    assert printed["capacity"] == CAPACITY
    assert run(fail, "--samples", str(path), "--capacity", str(other))[1]["capacity"]["users"] == 9


def test_samples_of_a_quick_run_are_no_baseline_either(
    results: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stored.json"
    path.write_text(report.dump(results | {"quick": True}))
    assert command.main(["--samples", str(path), "--docs"]) == 2
    assert "is of a quick run, which decides nothing" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rival", ["linear", "linearithmic", "three_halves"])
def test_no_rival_is_found_quadratic(rival: str, seed: int) -> None:
    lengths = study.geometric(64, 16288, 32, 16)
    truth = judge.rivals(Curve((1e-3, 1e-5)), lengths[-1])[rival]
    assert float(truth(lengths[-1])) == pytest.approx(1e-3 + 1e-5 * lengths[-1])
    assert not fit.examine(synthetic(truth, lengths, 15, seed), 2, draws=50, seed=seed).holds


# Lengths and their order.


@pytest.mark.parametrize(
    ("shortest", "longest", "multiple", "count"),
    [
        (64, 8158, 32, 14),
        (128, 8190, 128, 14),
        (128, 1022, 128, 6),
        (7, 7, 1, 1),
    ],
)
def test_lengths_are_distinct_multiples_and_nearly_geometric(
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


# Operations.


# FLOPs of a token with logits, behind the last layer's attention: W^O, two matrices, the head.
LAST_FLOPS = 2 * LAW.d_model * (LAW.d_model + 2 * LAW.d_ff + LAW.vocab_size)


def test_a_whole_prompt_costs_a_forward_pass_without_the_logits_of_other_positions() -> None:
    whole = cost.forward_flops(LAW, 1000)
    ours = operations.prefill(LAW, 1000, LAW.context)
    assert ours.attention == whole.attention
    assert whole.linear - ours.linear == 999 * LAST_FLOPS


def test_in_chunks_attention_costs_about_half_and_the_rest_the_same() -> None:
    whole, chunked = operations.prefill(LAW, 4096, LAW.context), operations.prefill(LAW, 4096, 128)
    assert chunked.linear == whole.linear
    assert chunked.attention / whole.attention == pytest.approx((1 + 128 / 4096) / 2)
    # One token a chunk: exactly the pairs that the causal mask allows.
    allowed = cost.attended_pairs(LAW, 100) / cost.computed_pairs(LAW, 100)
    one_by_one, together = operations.prefill(LAW, 100, 1), operations.prefill(LAW, 100, 100)
    assert one_by_one.attention / together.attention == pytest.approx(allowed)


def test_operations_cross_where_both_are_equal() -> None:
    assert operations.crossover(LAW) == 480.0
    flops = operations.prefill(LAW, 480, LAW.context)
    assert flops.attention == flops.linear - LAST_FLOPS


# The report.


def test_the_page_needs_no_other_file_and_has_every_picture_and_every_sample(
    results: dict[str, Any], tmp_path: Path
) -> None:
    text = report.write(results, tmp_path).read_text()
    assert text.count("<svg") == len(report.PICTURES)
    assert not re.findall(r'(?:src|href)="(?!#)', text)
    assert "@import" not in text
    assert "The law holds." in text
    inner = re.search(r'<script type="application/json" id="results">(.*?)</script>', text, re.DOTALL)
    assert inner is not None
    assert json.loads(inner[1]) == results == json.loads((tmp_path / report.RESULTS).read_text())
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert {*re.findall(r"url\(#([^)]+)\)", text), *re.findall(r'href="#([^"]+)"', text)} <= set(ids)
    for picture in report.PICTURES:
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


def page(results: dict[str, Any]) -> str:
    """The page without the study's own pictures."""
    return to_page(report.TITLE, report.blocks(results, pictures=()), results)


def test_a_capacity_curve_is_shown_if_given(results: dict[str, Any], tmp_path: Path) -> None:
    without = page(results)
    assert "<code>python -m loadtest capacity</code> measures a running server" in without
    assert "<svg" not in without
    given = results | {"capacity": CAPACITY}
    text = page(given)
    assert text.count("<svg") == 1
    row = "1.2 15.00 900 750 150 0 0 0 12.50 800 60.00 120 5.00 1,080 0.50"
    cells = row.split()
    assert "".join(f"<td>{cell}</td>" for cell in cells) in text
    assert "<li>at 1.2: 150 of RESOURCE_EXHAUSTED (full)</li>" in text
    assert "12.50 requests/s with 8 users" in text
    assert "Measured by <code>python -m loadtest capacity</code>, 2026-01-02; " in text
    assert "; the client ran on a processor, 2 processors." in text
    document = report.write_document(given, tmp_path).read_text()
    assert f"](data/{report.CAPACITY}.svg)" in document
    assert f"| {' | '.join(cells)} |" in document
    ElementTree.parse(tmp_path / "data" / f"{report.CAPACITY}.svg")


def test_the_controls_list_their_objections(results: dict[str, Any]) -> None:
    one = {"controls.gru_whole_objections": ["the quadratic term is 3.0% of the time"]}
    lines = report.controls(changed(results, one))
    assert len(lines) == 12
    assert lines[0].startswith("synthetic times that are linear: no quadratic, because ")
    (whole,) = (line for line in lines if "reads in one run" in line)
    assert whole.endswith("no quadratic, because the quadratic term is 3.0% of the time (the only objection)")
    assert lines[-2] == "synthetic times that are quadratic: found quadratic"
    assert lines[-1] == "synthetic times of a cached token that are linear: found linear"
    fooled = {"controls.gru_rejects_quadratic": False, "controls.quadratic_accepted": False}
    fooled = changed(results, fooled | {"controls.cached_square_objections": []})
    del fooled["controls"]["gru_whole_rejects_quadratic"]
    ends = [line.rpartition(": ")[2] for line in report.controls(fooled)]
    assert ends[4:6] == ["**wrongly found quadratic**", "not measured"]
    assert ends[9:11] == ["**wrongly found linear**", "**wrongly refused**"]


def test_the_document_shows_the_figures_and_its_pictures(results: dict[str, Any], tmp_path: Path) -> None:
    text = report.write_document(results, tmp_path).read_text()
    prefill = results["prefill"]
    assert f"| {prefill['n_star']:,.0f} (" in text
    assert f"{1e9 * prefill['c_low']:.3g}…{1e9 * prefill['c_high']:.3g}" in text
    for picture in re.findall(r"\]\((\S+\.svg)\)", text):
        assert (tmp_path / picture).is_file()
    assert text.count("](data/scaling-") == len(report.PICTURES)
    assert "| refused |" not in text
    assert "Other processes took 1.0% of the machine. " in text
    busy = changed(results, {"facts.others_share": 0.3})
    assert "took 30.0% of the machine: **these figures are doubtful**." in report.conditions(busy)


@pytest.mark.parametrize("truth", [LINE, Curve((1e-3, 0.0, 1e-8)), CONSTANT])
def test_every_picture_can_be_drawn_and_a_refused_law_is_marked(results: dict[str, Any], truth: Curve) -> None:
    samples = found(**dict.fromkeys(TRUTHS, truth))
    refused = results | json.loads(json.dumps(judge.judge(samples, SETTINGS, draws=20)))
    evidence = Evidence(refused)
    for picture in report.PICTURES:
        picture.draw(evidence)
        assert "nan" not in picture.caption(evidence)
    assert '<p class="refused"><strong>The law is refused</strong>' in page(refused)
