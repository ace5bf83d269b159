"""The measurement frame: settings become options, results become files, journals resume, statistics are right."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.frame import scenario
from benchmarks.frame.errors import ArgumentError
from benchmarks.frame.journal import Journal
from benchmarks.frame.rounds import interleaved, shuffled
from benchmarks.frame.scenario import Run, Scenario, Settings, option
from benchmarks.frame.statistics import bootstrap, percentile, ratio_of_medians
from benchmarks.frame.tables import replace, table
from loadtest import provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class SheepSettings(Settings):
    """Settings of the scenario below."""

    field: Path = option(text="where they are")  # noqa: RUF009
    names: tuple[str, ...] = option(("dolly",), "of sheep", choices=("dolly", "shaun"), spaced=True)
    pens: tuple[int, ...] = option((4, 9), "sizes", least=1, quick=(2,))
    seconds: float = option(9.0, "to count for", flag="for while", above=0.0, quick=1.0)
    wool: bool = option(False, "weigh it too")
    hidden: int = option(5, quick=1)


def count(settings: SheepSettings, run: Run) -> dict[str, Any]:
    if "shaun" in settings.names:
        raise RuntimeError("shaun is away")
    if settings.field == Path("sea"):
        raise ArgumentError("there is no sheep in the sea")
    return {"count": len(settings.names), "points": [1.5], "passed": not run.is_quick}


SHEEP = Scenario(
    __name__,
    SheepSettings,
    count,
    lambda results: f"# {results['count']} sheep of {results['settings']['field']}\n",
    lambda results: f"<svg>{results['points']}</svg>",
    caption="All of them",
    picture_only=("points",),
    must_hold=True,
    is_resumable=True,
)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scenario, "BUILD", tmp_path / "build")
    monkeypatch.setattr(scenario, "DOCS", tmp_path / "docs")
    return tmp_path


def test_settings_are_options_and_what_is_not_given_is_default_or_under_quick_small() -> None:
    settings, run, _ = SHEEP.parse(["hill", "--for", "2.5", "--pens", "7,8", "--threads", "3", "--wool", "--docs"])
    assert settings == SheepSettings(field=Path("hill"), pens=(7, 8), seconds=2.5, threads=3, wool=True)
    assert (run.is_quick, run.resume) == (False, False)
    repeated, *_ = SHEEP.parse(["hill", "--while", "2.5", "--pens", "7", "--pens", "8", "--threads", "3", "--wool"])
    assert repeated == settings
    for given, names in ((["dolly", "shaun"], ("dolly", "shaun")), (["dolly,shaun"], ("dolly", "shaun")), ([], ())):
        assert SHEEP.parse(["hill", "--names", *given])[0].names == names
    settings, run, _ = SHEEP.parse(["hill", "--quick", "--for", "3", "--resume"])
    assert settings == SheepSettings(field=Path("hill"), pens=(2,), seconds=3.0, hidden=1), "given options win"
    assert (run.is_quick, run.resume) == (True, True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["hill", "--threads", "0"], "argument --threads: is '0', must be a whole number at least 1"),
        (["hill", "--threads", "1.5"], "must be a whole number at least 1"),
        (["hill", "--for", "nan"], "argument --for/--while: is 'nan', must be a number above 0"),
        (["hill", "--pens", "4,0"], "argument --pens: is '0'"),
        (["hill", "--names", "ba"], "argument --names: is 'ba', must be one of dolly, shaun"),
        (["hill", "--hidden", "3"], "unrecognized arguments: --hidden"),
        ([], "required: field"),
    ],
)
def test_wrong_arguments_are_refused_by_name(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        SHEEP.parse(given)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_results_become_a_line_data_a_document_and_a_picture(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "is_changed", lambda: False)
    monkeypatch.setattr(provenance, "here", lambda: {"commit": "abc", "date": "2026-11-26"})
    assert SHEEP.run(["green hill", "--docs"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["scenario"], line["count"], line["settings"]["field"]) == ("test_frame", 1, "green hill")
    assert "onnxruntime" in line["version"]
    assert line["machine"]["cores"] >= 1
    assert "points" not in line
    assert line["command"] == "python -m benchmarks run test_frame 'green hill' --docs"
    assert (line["commit"], line["date"]) == ("abc", "2026-11-26")
    docs = folders / "docs"
    assert json.loads((docs / "data" / "test_frame.json").read_text()) == line
    assert (docs / "data" / "test_frame.svg").read_text() == "<svg>[1.5]</svg>"
    assert (
        (docs / "test_frame.md")
        .read_text()
        .startswith(
            "# 1 sheep of green hill\n\n![All of them](data/test_frame.svg)\n\n"
            "Measured by `python -m benchmarks run test_frame 'green hill' --docs` at abc on 2026-11-26."
        )
    )
    monkeypatch.setattr(provenance, "is_changed", lambda: True)
    assert SHEEP.run(["green hill", "--docs"]) == 2, "of code that nobody can look up"
    assert SHEEP.run(["green hill"]) == 0


def test_a_promise_that_must_hold_is_the_exit_status_and_quick_figures_are_marked(folders: Path) -> None:
    assert SHEEP.run(["hill", "--quick"]) == 1
    assert "its figures say nothing" in (folders / "build" / "test_frame.md").read_text()


def test_what_cannot_be_measured_is_said_and_writes_nothing(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert SHEEP.run(["hill", "--names", "shaun"]) == 1
    assert capsys.readouterr().err == "test_frame: shaun is away\n"
    assert SHEEP.run(["sea"]) == 2
    assert capsys.readouterr().err == "test_frame: there is no sheep in the sea\n"
    assert not (folders / "build").exists()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bench", ["--models", "none"]),
        ("bench", ["--systems", "llama.cpp", "--in-place"]),
        ("fleet", ["--servers", "3,2"]),
        ("quality", ["none"]),
        ("graphs", ["none", "--variants", "plain"]),
        ("graphs", ["none", "--variants", "plain", "--prefill", "--decode", "one"]),
        ("ablation", ["--set", "none=1"]),
        ("ablation", ["--set", "seed=1"]),
        ("ablation", ["--resume"]),
    ],
)
def test_arguments_that_no_parser_refuses_are_wrong_all_the_same(
    name: str, arguments: list[str], tmp_path: Path
) -> None:
    assert scenario.load(name).run([*arguments, "--build", str(tmp_path / "build")]) == 2
    assert not (tmp_path / "build" / f"{name}.json").exists()


def test_a_journal_resumes_without_what_failed_and_only_under_the_same_facts(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.jsonl"
    journal = Journal.open(path, {"rounds": 2, "where": Path("a")}, resume=False)
    good = {"round": 0, "points": [{"value": 1.0}]}
    for entry in (good, {"round": 1, "error": "killed"}, {"round": 2, "points": [{"value": 1.0}, {"error": "late"}]}):
        journal.record(entry)
    with path.open("a") as file:
        file.write('{"round": 3, "po')
    resumed = Journal.open(path, {"rounds": 2, "where": Path("a")}, resume=True)
    assert resumed.entries == [good]
    resumed.record({"round": 1})
    assert Journal.open(path, {"rounds": 2, "where": "a"}, resume=True).entries == [good, {"round": 1}]
    with pytest.raises(RuntimeError, match="other settings"):
        Journal.open(path, {"rounds": 3}, resume=True)
    with pytest.raises(RuntimeError, match="nothing to resume"):
        Journal.open(tmp_path / "none.jsonl", {}, resume=True)
    assert Journal.open(path, {"rounds": 3}, resume=False).entries == []


def test_a_journal_that_cannot_be_written_anew_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    Journal.open(path, {}, resume=False).record({"error": "is measured again"})
    before = path.read_bytes()

    def kill(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.frame.journal.os.fsync", kill)
    with pytest.raises(KeyboardInterrupt):
        Journal.open(path, {}, resume=True)
    assert path.read_bytes() == before


def test_rounds_have_everything_once_in_an_order_that_the_seed_decides() -> None:
    first = list(interleaved(5, "abcdef", seed=1))
    assert first == list(interleaved(5, "abcdef", seed=1)) != list(interleaved(5, "abcdef", seed=2))
    orders = ["".join(thing for number, thing in first if number == each) for each in range(5)]
    assert {"".join(sorted(order)) for order in orders} == {"abcdef"}
    assert len(set(orders)) > 1
    assert shuffled("abcdef", 1, 0) == list(orders[0])


def test_a_percentile_is_a_value_that_was_seen() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([3.0], 0.01) == 3.0


def test_an_interval_covers_the_median_as_often_as_it_says_and_draws_the_same_rounds_of_all_series() -> None:
    rng = np.random.default_rng(0)
    draws = [bootstrap(statistics.median, rng.normal(5.0, 2.0, 9).tolist()) or (0.0, 0.0) for _ in range(200)]
    assert np.mean([low < 5.0 < high for low, high in draws]) == pytest.approx(0.95, abs=0.04)
    assert bootstrap(statistics.median, [1.0] * 4) is None
    slow = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert bootstrap(ratio_of_medians, [2 * each for each in slow], slow) == (2.0, 2.0)


def test_tables_align_figures_and_marked_parts_are_replaced() -> None:
    lines = table("what|how many", [["sheep", 3], ["cows", "4"]])
    assert lines == ["| what | how many |", "| --- | ---: |", "| sheep | 3 |", "| cows | 4 |"]
    assert replace("a\n<b>\nold\n<e>\nc", "<b>", "<e>", "new") == "a\n<b>\nnew\n<e>\nc"
    with pytest.raises(ValueError, match="lacks <b> or <e>"):
        replace("a <e> <b>", "<b>", "<e>", "new")
