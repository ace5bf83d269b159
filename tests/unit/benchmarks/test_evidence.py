"""The README's figures are those of the data, the data say of which code, and only idle machines measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import evidence
from benchmarks.evidence import BEGIN, CLAIMS, END, TABLES, Claim, Table
from benchmarks.frame.scenario import DOCS, Scenario, Settings, load
from loadtest import provenance
from loadtest.document import DATA
from tests.environment import ROOT

ORIGIN = {"commit": "abc1234", "date": "2026-11-26", "others_share": 0.01}


@pytest.fixture
def sheep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table whose command prints its count; where data go."""
    (tmp_path / "printed.json").write_text('{"count": 3}')
    monkeypatch.setattr(evidence, "TABLES", (Table("sheep", f"json.tool --compact {tmp_path / 'printed.json'}", 1),))
    claims = (Claim("sheep", "sheep", lambda results: str(results["count"]), rank=1), Claim("cows", "cows", str))
    monkeypatch.setattr(evidence, "CLAIMS", claims)
    monkeypatch.setattr(evidence, "FOLDER", tmp_path)
    monkeypatch.setattr(evidence, "README", tmp_path / "README.md")
    monkeypatch.setattr(evidence, "INDEX", tmp_path / "index.md")
    monkeypatch.setattr(evidence, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(evidence, "_busy", lambda: 0.0)
    monkeypatch.setattr(evidence, "watch_others", lambda: lambda: 0.01)
    monkeypatch.setattr(provenance, "is_changed", lambda: False)
    monkeypatch.setattr(provenance, "here", lambda: {"commit": "abc1234", "date": "2026-11-26"})
    monkeypatch.setattr(provenance, "commits_since", lambda commit, _: {"abc1234": 0, "old": 7}.get(commit))
    for page in ("README.md", "index.md"):
        (tmp_path / page).write_text(f"# Farm\n\n{BEGIN}\nnothing\n{END}\n")
    return tmp_path


def test_pages_are_what_their_data_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert evidence.main(["--check"]) == 0


@pytest.fixture
def cows(sheep: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table that a scenario measured, with page, data and picture; where they are."""
    scenario = Scenario(
        "cows",
        Settings,
        lambda *_: {},
        render=lambda results: f"# Cows\n\n{results['count']}",
        draw=lambda results: results["spots"],
        picture_only=("spots",),
    )
    table = Table("cows", "benchmarks run cows --docs", 1)
    monkeypatch.setattr(evidence, "TABLES", (table,))
    monkeypatch.setattr(evidence, "DOCS", sheep)
    monkeypatch.setattr(evidence, "FOLDER", sheep / DATA)
    monkeypatch.setattr(evidence, "load", lambda _: scenario)
    monkeypatch.setattr(Table, "code", ())
    command = f"python -m {table.command}"
    results = ORIGIN | {"command": command, "is_quick": False, "machine": {"amx": False}, "count": 3}
    scenario.write(results | {"spots": "<svg/>"}, sheep)
    evidence.main(["--write"])
    return sheep


def test_a_page_that_was_edited_is_made_anew_and_its_picture_stays(
    cows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, picture = cows / "cows.md", cows / DATA / "cows.svg"
    before = page.read_text()
    assert (evidence.main(["--check"]), picture.read_text()) == (0, "<svg/>")
    for edited in (before.replace("3", "4"), before.replace("cows.svg", "sheep.svg")):
        page.write_text(edited)
        assert evidence.main(["--check"]) == 1
        assert f"{page} differs from what its data give" in capsys.readouterr().err
        assert evidence.main(["--write"]) == 0
        assert (page.read_text(), picture.read_text()) == (before, "<svg/>")


def test_a_page_of_other_code_waits_to_be_measured(cows: Path) -> None:
    (cows / "cows.md").write_text("nothing")
    data = cows / DATA / "cows.json"
    data.write_text(json.dumps(json.loads(data.read_text()) | {"commit": "old"}))
    evidence.main(["--write"])
    assert (cows / "cows.md").read_text() == "nothing"


def test_a_bench_compares_by_the_losses_that_are_known_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "FOLDER", tmp_path)
    monkeypatch.setattr(provenance, "commits_since", lambda *_: 0)
    [bench] = (each for each in TABLES if each.name == "bench-llama-110m-quantized")
    for name in (bench.name, "peers-loss"):
        found = json.loads((ROOT / DOCS / DATA / f"{name}.json").read_text())
        for row in found["rows"] if name == "peers-loss" else ():
            if row["system"] != "onward" and "bits_per_byte" in row:
                row["bits_per_byte"] *= 1.01
        (tmp_path / f"{name}.json").write_text(json.dumps(found | {"others_share": 0.0}))
    ratios = json.loads(evidence.made(bench)[DOCS / DATA / f"{bench.name}.json"])["ratios"]
    assert ratios
    assert not any("/any/" in place for place in ratios), "no peer has as little loss as ours"


def test_a_table_is_measured_once_and_its_figure_reaches_the_readme(sheep: Path) -> None:
    assert evidence.main(["--fresh"]) == 1
    assert evidence.main([]) == 0
    found = json.loads((sheep / "sheep.json").read_text())
    assert (found["count"], found["commit"], found["date"]) == (3, "abc1234", "2026-11-26")
    (sheep / "printed.json").write_text('{"count": 4}')
    assert evidence.main([]) == 0, "nothing is missing"
    assert evidence.main(["--fresh"]) == 0
    assert json.loads((sheep / "sheep.json").read_text())["count"] == 3
    assert evidence.main(["--check"]) == 1
    assert evidence.main(["--write"]) == 0
    assert evidence.main(["--check"]) == 0
    for page in ("README.md", "index.md"):
        assert "| sheep | [3](./sheep.json)" in (sheep / page).read_text()
        assert "cows" not in (sheep / page).read_text(), "nobody counted them"
        assert "hold" not in (sheep / page).read_text()
    (sheep / "sheep.json").write_text(json.dumps(found | {"count": 5, "passed": False}))
    assert evidence.main(["--check"]) == 1
    assert evidence.main(["--write"]) == 0
    assert "| sheep | [5](./sheep.json), its promise does **not** hold |" in (sheep / "index.md").read_text()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "not measured"),
        ({"count": 1}, "not measured"),
        (ORIGIN | {"others_share": 0.2}, "not measured"),
        (ORIGIN | {"others_share": None}, "not measured"),
        (ORIGIN | {"commit": None}, "not measured"),
        (ORIGIN | {"is_quick": True}, "not measured"),
        (ORIGIN | {"command": "python -m sheep --rounds 1"}, "not measured"),
        (ORIGIN | {"commit": "old"}, "measured 2026-11-26 at old, 7 commits of measured code ago"),
        (ORIGIN | {"commit": "strange"}, "measured 2026-11-26 at strange, which is not in this history"),
        (ORIGIN, ""),
    ],
)
def test_data_of_other_code_are_not_taken_for_this_codes(sheep: Path, data: dict[str, Any], said: str) -> None:
    [table] = evidence.TABLES
    if data:
        (sheep / "sheep.json").write_text(json.dumps({"command": f"python -m {table.command}"} | data))
    assert evidence.state(table, sheep) == said


def test_nothing_is_measured_of_uncommitted_code_or_beside_others_or_by_a_command_that_fails(
    sheep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evidence, "_busy", lambda: 0.3)
    assert evidence.main([]) == 1
    assert "others take 30% of the machine" in capsys.readouterr().err
    monkeypatch.setattr(evidence, "_busy", lambda: 0.0)
    monkeypatch.setattr(provenance, "is_changed", lambda: True)
    assert evidence.main([]) == evidence.main(["--fresh"]) == 1
    assert capsys.readouterr().err.count("not committed") == 2
    monkeypatch.setattr(provenance, "is_changed", lambda: False)
    (sheep / "printed.json").unlink()
    assert evidence.main([]) == 1
    assert not (sheep / "sheep.json").exists()


def test_a_table_is_of_older_code_by_what_decides_its_figures_alone() -> None:
    code = {each.name: set(each.code) for each in TABLES}
    assert all({"service", "model", "benchmarks/frame"} <= each for each in code.values())
    assert "benchmarks/scenarios/soak.py" in code["soak"] - code["prefix"]
    assert "benchmarks/scenarios/quality.py" in code["speculation"], "which reads its text"
    for each in TABLES:
        sources = [ROOT / path for path in each.code if path.startswith("benchmarks/scenarios/")]
        uses_peers = any("benchmarks.peers" in path.read_text(encoding="utf-8") for path in sources)
        assert (":(exclude)benchmarks/peers" in each.code) != uses_peers, each.name
    for name, paths in code.items():
        assert (":(exclude)service/transport/http" in paths) != name.startswith("http"), name
        for path in paths:
            assert list(ROOT.glob(path.removeprefix(":(exclude)"))), path


def test_every_claim_has_a_table_and_every_tables_command_is_one_that_its_scenario_takes() -> None:
    assert {claim.table for claim in CLAIMS} <= {each.name for each in TABLES}
    for each in TABLES:
        words = each.command.split()
        if words[:2] == ["benchmarks", "run"]:
            scenario = load(words[2])
            _, run, folder = scenario.parse(words[3:])
            assert (run.name or scenario.name, folder) == (each.name, DOCS)
