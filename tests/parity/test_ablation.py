"""The ablation: its GRU is as large as the base, rows differ in one thing, its table is what was measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.frame.scenario import Run
from benchmarks.scenarios import ablation as scenario
from benchmarks.training import ablation
from benchmarks.training.ablation import EXPERIMENTS, ROWS, plan
from model.nn.transformer import build, num_parameters
from model.spec import recurrent
from model.training.presets import resolve
from tests.environment import ROOT

DOCS = ROOT / "docs"
TINY = ("d_model=16", "max_examples=40", "batch_tokens=150")


def test_the_gru_is_as_large_as_the_base() -> None:
    base, gru = (run.recipe.model for run in plan(ROWS, seeds=1) if run.row.name in ("base", "gru"))
    wanted = num_parameters(build(base, seed=0))
    distances = {
        hidden: abs(recurrent.num_parameters(replace(gru, hidden=hidden)) - wanted)
        for hidden in (gru.hidden - 1, gru.hidden, gru.hidden + 1)
    }
    assert min(distances, key=distances.__getitem__) == gru.hidden
    assert distances[gru.hidden] / wanted < 0.02


def test_every_row_differs_from_its_experiment_in_its_own_overrides_alone() -> None:
    for row, run in zip(ROWS, plan(ROWS, seeds=1), strict=True):
        experiment = EXPERIMENTS[row.experiment]
        base = resolve(row.preset, (*experiment.overrides, f"steps={experiment.steps}", "seed=0"))
        plain = {**base.model.to_dict(), **base.train.to_dict()}
        changed = {**run.settings["model"], **run.settings["train"]}
        differing = {key for key in plain if plain[key] != changed[key]}
        named = {override.partition("=")[0] for override in row.overrides}
        # What follows from the number of heads goes with it; an override may repeat what the preset has.
        assert differing - {"head_dim", "num_kv_heads"} <= named
        assert differing or not named or row.name in {"pre"}
        assert run.settings["data"] == base.data.to_dict()
    parts = [run.settings for run in plan(ROWS, seeds=1) if run.row.experiment == "parts"]
    assert len({json.dumps(settings) for settings in parts}) == len(parts)


def test_runs_go_seed_after_seed_over_all_rows_with_the_same_data_for_all() -> None:
    runs = plan(ROWS[:2], seeds=2, overrides=["num_heads=2"])
    assert [(run.row.name, run.seed) for run in runs] == [("base", 0), ("learned", 0), ("base", 1), ("learned", 1)]
    assert [run.settings["train"]["seed"] for run in runs] == [0, 0, 1, 1]
    assert all(run.settings["model"]["num_heads"] == 2 for run in runs)
    with pytest.raises(ablation.AblationError, match="--seeds"):
        plan(ROWS[:1], seeds=1, overrides=["seed=3"])


def test_every_row_is_in_the_table_and_the_table_has_no_other() -> None:
    shown = {choice.row for section in scenario.SECTIONS for panel in section.panels for choice in panel.choices}
    assert shown == {row.name for row in ROWS}


@pytest.mark.whole
def test_the_scenario_measures_every_run_once_and_resumes(tmp_path: Path) -> None:
    settings = scenario.AblationSettings(rows=("base", "gru"), seeds=1, steps=4, jobs=1, overrides=TINY)
    first = scenario.measure(settings, Run(tmp_path))["runs"]
    assert [run["row"] for run in first] == ["base", "gru"]
    found = scenario.measure(replace(settings, seeds=2), Run(tmp_path, resume=True))
    assert [(run["row"], run["seed"]) for run in found["runs"]] == [("base", 0), ("gru", 0), ("base", 1), ("gru", 1)]
    assert found["runs"][:2] == first
    for run in found["runs"]:
        assert run["steps"] == 4
        assert 0.0 <= run["exact_match"] <= 1.0
        assert run["seconds_per_step"] > 0.0
        assert [step for step, _ in run["curve"]] == [1, 2, 3, 4]
    assert found["runs"][0]["loss"] != found["runs"][2]["loss"]
    assert found["rows"]["gru"]["model"]["cell"] == "gru"
    assert found["rows"]["base"]["model"]["d_model"] == 16
    about = {"settings": {"jobs": 1}, "machine": {"processor": "p", "cores": 2}}
    assert "GRU" in scenario.render(found | about)
    assert "transformer" in scenario.draw(found | about)


def constructed_results() -> dict[str, object]:
    figures = {
        "base": [(0.97, 0.00651, 0.040), (0.92, 0.0204, 0.042), (0.99, 2.7e-7, 0.041)],
        "rotary": [(1.0, 0.001, 0.05)],
        "post": [(0.0, 2.274, 0.11), (0.0, 2.29, 0.11)],
    }
    return {
        "date": "2026-01-02",
        "machine": {"processor": "a processor", "cores": 2},
        "settings": {"jobs": 2},
        "versions": {"python": "3.0", "torch": "2.0"},
        "num_test_dates": 500,
        "rows": {
            name: {"train": {"steps": 300 if name == "post" else 1000, "learning_rate": 1e-3, "optimizer": "adamw"}}
            for name in figures
        },
        "runs": [
            {
                "row": name,
                "seed": seed,
                "exact_match": exact,
                "loss": loss,
                "seconds_per_step": seconds,
                "num_parameters": 929664,
                "curve": [[100, 1.0 + seed], [200, loss]],
            }
            for name, runs in figures.items()
            for seed, (exact, loss, seconds) in enumerate(runs)
        ],
    }


def test_the_table_has_medians_ranges_and_numbers_of_seeds() -> None:
    lines = scenario.render(constructed_results()).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if re.match(r"\| .* \| \d+ \|$", line)]
    assert rows == [
        ["positions", "sinusoidal", "97.0 (92.0…99.0)", "0.00651 (2.7e-07…0.0204)", "41 (40…42)", "929,664", "3"],
        ["", "rotary", "100.0 (100.0…100.0)", "0.001 (0.001…0.001)", "50 (50…50)", "929,664", "1"],
        ["LayerNorm", "post, no warm-up", "0.0 (0.0…0.0)", "2.28 (2.27…2.29)", "110 (110…110)", "929,664", "2"],
    ]
    text = "\n".join(lines)
    for fact in ("1000 steps", "300 steps", "peak rate 0.001", "500 held-out days", "2026-01-02", "torch 2.0"):
        assert fact in text


def test_the_document_names_files_and_parts_that_are_there() -> None:
    text = (DOCS / "learn" / "model.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:model|benchmarks|export)/[\w/]+\.py)`", text))
    assert len(paths) >= 10
    for path in sorted(paths):
        assert (DOCS.parent / path).is_file(), path
    for names, path in re.findall(r"\*\*: ((?:`\w+`(?:, | and )?)+) in `([\w/]+\.py)`", text):
        source = (DOCS.parent / path).read_text(encoding="utf-8")
        for name in re.findall(r"\w+", names.replace(" and ", " ")):
            assert re.search(rf"^(?:class|def) {name}\b", source, re.MULTILINE), (name, path)
