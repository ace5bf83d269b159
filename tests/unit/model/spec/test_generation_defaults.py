"""A model's own defaults of a request's fields: what its import recorded, and its family."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from model.spec.generation import WIRE_DEFAULTS, GenerationDefaults, ignored_defaults, read_defaults
from tests.servers import served_model

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
SUMMARIES = {"length_penalty": 2.0, "max_length": 142, "no_repeat_ngram_size": 3, "num_beams": 4}


@pytest.mark.parametrize(
    ("recorded", "is_encoder_decoder", "expected"),
    [
        ({}, False, {}),
        ({}, True, {"temperature": 0.0}),
        (QWEN3, False, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"do_sample": False, "temperature": 0.6}, False, {"temperature": 0.0}),
        ({"temperature": 0.6}, False, {"temperature": 0.6}),
        ({"temperature": 0.6}, True, {"temperature": 0.0}),
        ({"do_sample": True}, True, {}),
        (SUMMARIES, True, {"temperature": 0.0, "length_penalty": 2.0, "no_repeat_ngram_size": 3}),
        ({"max_new_tokens": 2048}, False, {"max_tokens": 2048}),
    ],
)
def test_own_defaults_are_what_the_import_recorded(
    recorded: dict[str, Any], is_encoder_decoder: bool, expected: dict[str, Any]
) -> None:
    assert read_defaults(recorded, is_encoder_decoder=is_encoder_decoder) == GenerationDefaults(**expected)


# Values that no request could have. An artifact is untrusted.
UNFIT = {
    "temperature": float("nan"),
    "top_p": 0.0,
    "top_k": 2**31,
    "min_p": True,
    "repetition_penalty": 2.5,
    "max_new_tokens": 0,
    "length_penalty": "1",
    "no_repeat_ngram_size": 1.5,
    "num_beams": 4,
}


def test_values_that_no_request_could_have_are_skipped_and_named() -> None:
    assert read_defaults(UNFIT, is_encoder_decoder=False) == WIRE_DEFAULTS
    assert ignored_defaults({**UNFIT, "do_sample": True}) == list(UNFIT)


@pytest.mark.parametrize("training", [{}, {"imported": None}, {"imported": {"generation_defaults": [1]}}])
def test_manifests_without_a_record_have_their_familys_defaults(training: dict[str, Any]) -> None:
    for encoder_decoder, temperature in ((False, 1.0), (True, 0.0)):
        manifest = dataclasses.replace(served_model(encoder_decoder=encoder_decoder).manifest, training=training)
        assert manifest.generation_defaults == GenerationDefaults(temperature=temperature)
