"""Training configurations: everything that is wrong is said at once."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest

from model.training.config import (
    OptimizerName,
    Parallelism,
    Schedule,
    TrainConfig,
    TrainConfigError,
    TrainDevice,
    TrainPrecision,
)

VALID: dict[str, Any] = {"steps": 100, "batch_tokens": 512}


def problems(values: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(TrainConfigError) as caught:
        TrainConfig.from_dict(values)
    return caught.value.problems


def test_a_configuration_survives_json() -> None:
    config = TrainConfig(**VALID, optimizer=OptimizerName.ADAMW, precision=TrainPrecision.FP32, seed=7)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_strings_become_choices() -> None:
    config = TrainConfig.from_dict(
        {
            **VALID,
            "optimizer": "adamw",
            "precision": "bf16",
            "schedule": "noam",
            "device": "cuda",
            "parallelism": "fsdp",
        }
    )
    assert config.optimizer is OptimizerName.ADAMW
    assert config.precision is TrainPrecision.BF16
    assert config.schedule is Schedule.NOAM
    assert config.device is TrainDevice.CUDA
    assert config.parallelism is Parallelism.FSDP


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gradient_accumulation", 0),
        ("log_every", 0),
        ("epsilon", 0.0),
        ("label_smoothing", 1.0),
        ("label_smoothing", -0.1),
        ("evaluate_every", -1),
        ("schedule", "linear"),
        ("device", "tpu"),
        ("parallelism", "tensor"),
    ],
)
def test_a_value_out_of_its_range_is_reported_by_name(name: str, value: object) -> None:
    (problem,) = problems({**VALID, name: value})
    assert problem.startswith(f"{name} is ")


def test_patience_needs_scores_to_lose_it_over() -> None:
    assert problems({**VALID, "patience": 2}) == ("patience is 2, evaluate_every must then be at least 1",)
    assert TrainConfig(**VALID, patience=2, evaluate_every=5).patience == 2


def test_the_papers_schedule_needs_a_warm_up() -> None:
    (problem,) = problems({**VALID, "schedule": "noam", "warmup_fraction": 0.0})
    assert problem == "warmup_fraction is 0.0, schedule noam needs at least one step of it"


def test_every_invalid_field_is_reported_at_once() -> None:
    found = problems({"steps": 0, "batch_tokens": -1, "optimizer": "sgd", "warmup_fraction": 1.5, "beta2": 1.0})
    assert [problem.split()[0] for problem in found] == [
        "optimizer",
        "steps",
        "batch_tokens",
        "warmup_fraction",
        "beta2",
    ]


def test_unknown_missing_and_mistyped_fields_are_reported_together() -> None:
    found = problems({"step": 3, "batch_tokens": "many", "seed": True})
    assert found == (
        "unknown field 'step'",
        "steps is missing",
        "batch_tokens is 'many', must be int",
        "seed is True, must be int",
    )


def test_no_number_may_be_infinite_or_none_at_all() -> None:
    names = [field.name for field in dataclasses.fields(TrainConfig) if str(field.type) == "float"]
    assert "learning_rate" in names
    for name, value in itertools.product(names, (math.nan, math.inf, -math.inf)):
        (problem,) = problems({**VALID, name: value})
        assert problem.startswith(f"{name} is {value}")


def test_whole_numbers_stand_for_real_ones() -> None:
    assert TrainConfig.from_dict({**VALID, "gradient_clip": 1}).gradient_clip == 1


def test_shares_of_the_run_round_to_whole_steps() -> None:
    config = TrainConfig(steps=10, batch_tokens=1, warmup_fraction=0.25, long_fraction=0.15)
    assert config.warmup_steps == 2
    assert config.long_steps == 2
