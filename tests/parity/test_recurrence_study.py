"""The recurrence study: its data, its measurements, and in small what it is to show. No time is asserted."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.frame.scenario import Run
from benchmarks.frame.statistics import mean_interval
from benchmarks.scenarios import recurrence
from benchmarks.training import lengths
from benchmarks.training.lengths import Job, Network, Training
from model.data import dates
from model.data.batches import pad
from model.nn.networks import build
from model.nn.transformer import num_parameters
from model.spec.recurrent import Cell

SMALL = Training(Job.REVERSE, Network.FIXED, seed=0, steps=200, longest=16, batch_tokens=512)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_networks_of_a_job_are_about_equally_large() -> None:
    for job in Job:
        sizes = [num_parameters(build(lengths.configure(replace(SMALL, job=job, network=each)))) for each in Network]
        assert max(sizes) / min(sizes) < 1.04


def test_a_batch_is_its_seeds_and_its_numbers_and_every_octave_comes() -> None:
    for job in Job:
        training = replace(SMALL, job=job, longest=256)
        batches = [lengths.make_batch(training, index) for index in range(60)]
        for index in (0, 7):
            assert np.array_equal(batches[index].source_ids, lengths.make_batch(training, index).source_ids)
            other = lengths.make_batch(replace(training, seed=1), index)
            assert not np.array_equal(batches[index].source_ids, other.source_ids)
        longest = [int(batch.source_lengths.max()) - 1 for batch in batches]
        for octave in job.octaves(256):
            assert any(octave // 2 < length <= octave for length in longest)


def test_targets_are_what_the_jobs_say() -> None:
    source = np.random.default_rng(0)
    for pair in lengths.make_pairs(Job.COPY, 9, 5, source):
        assert [*pair.source[:-1]] == pair.target
    for pair in lengths.make_pairs(Job.REVERSE, 9, 5, source):
        assert [*pair.source[:-1]][::-1] == pair.target
    tokenizer = lengths._tokenizer()
    for pair in lengths.make_pairs(Job.DATES, 100, 20, source):
        assert len(pair.source) == 101
        day = datetime.date.fromisoformat(tokenizer.decode(pair.target))
        assert not dates.is_held_out(day)
        texts = [dates.write(day, *kind).text for kind in product(dates.LOCALES, dates.FORMATS)]
        assert any(f" {tokenizer.decode(tokenizer.encode(text))} " in tokenizer.decode(pair.source) for text in texts)
    for pair in lengths.make_pairs(Job.DATES, 100, 20, source, is_test=True):
        assert dates.is_held_out(datetime.date.fromisoformat(tokenizer.decode(pair.target)))


@pytest.mark.parametrize("network", lengths.TIMED)
def test_one_more_token_has_the_logits_of_the_whole_target(network: Network) -> None:
    model = lengths._fresh(replace(SMALL, network=network, longest=32)).eval()
    short, long = (lengths.make_pairs(Job.COPY, length, 2, np.random.default_rng(length)) for length in (7, 12))
    pairs = [*short, *long]
    sources, rows, written = lengths._tensors(pad(pairs))
    with torch.inference_mode():
        step = lengths.stepper(model, sources, rows, written[:, :5])
        whole = model(sources, rows, written[:, :6])
        torch.testing.assert_close(step(written[:, 5:6])[:, 0], whole[:, 5], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_vanish_through_cells_and_not_through_attention(seed: int) -> None:
    found = {of: lengths.gradients(of, 64, seed) for of in (*Cell, Network.TRANSFORMER)}
    for cell in Cell:
        decay = [found[cell][distance] for distance in (0, 4, 16, 60)]
        assert decay[0] == 1.0
        assert all(after < before / 2 for before, after in pairwise(decay))
    assert found[Cell.RNN][60] < 1e-8
    # A forget gate that begins open lets an LSTM's through longest.
    assert found[Cell.LSTM][16] > 10 * max(found[Cell.RNN][16], found[Cell.GRU][16])
    far, near = found[Network.TRANSFORMER][48:], found[Network.TRANSFORMER][1:17]
    assert sum(far) / 16 > 0.3 * sum(near) / 16


@pytest.mark.whole
def test_one_fixed_vector_falls_with_the_length_and_attention_does_not() -> None:
    fixed, attention = (
        lengths.train(replace(SMALL, network=each))["accuracy"] for each in (Network.FIXED, Network.ATTENTION)
    )
    assert fixed["16"] < 0.7 * fixed["8"]
    assert attention["16"] > 0.75 * attention["8"]
    assert attention["16"] > fixed["16"] + 0.3


def test_intervals_are_students() -> None:
    assert mean_interval([0.5]) == (0.5, 0.5, 0.5)
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx(
        (2.0, 2.0 - 4.3027 / 3**0.5, 2.0 + 4.3027 / 3**0.5), rel=1e-4
    )


@pytest.mark.whole
def test_the_study_measures_each_figure_once_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = recurrence.RecurrenceSettings(seeds=1, steps=1, longest=64, batch_tokens=64, jobs=1)
    first = recurrence.measure(settings, Run(tmp_path))
    assert len(first["trainings"]) == len(Job) * len(Network)
    assert len(first["gradients"]) == len(Cell) + 1
    assert len(first["times"]) == 3 * len(lengths.TIMED)
    best = {
        network: min((each for each in first["rates"] if each["network"] == network), key=lambda each: each["loss"])
        for network in Network
    }
    assert {(each["network"], each["rate"]) for each in first["trainings"]} == {
        (network, each["rate"]) for network, each in best.items()
    }
    capsys.readouterr()
    again = recurrence.measure(settings, Run(tmp_path, resume=True))
    assert again == first
    assert capsys.readouterr().err == ""
    about = {
        "settings": asdict(settings),
        "machine": {"processor": "p", "cores": 2},
        "is_quick": True,
        "others_share": None,
        "command": "the command",
        "commit": "abc",
    }
    # As of a second seed, whose copies are all right.
    right = {str(length): 1.0 for length in Job.COPY.octaves(64)}
    again["trainings"] += [
        {**each, "seed": 1, "accuracy": each["accuracy"] | (right if each["job"] == Job.COPY else {})}
        for each in first["trainings"]
    ]
    recurrence.SCENARIO.write(json.loads(json.dumps(about | again)), tmp_path)
    document = (tmp_path / "recurrence.md").read_text(encoding="utf-8")
    for job in Job:
        assert f"## {job.capitalize()}" in document
    assert " to 100)" in document
    assert document.count("| additive attention |") == 2 * len(Job) + 2
    assert "<svg" in (tmp_path / "data" / "recurrence.svg").read_text(encoding="utf-8")
