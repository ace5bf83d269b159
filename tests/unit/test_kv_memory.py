"""The K/V budget is what the operator said, counts in whole pages, and fits into the machine or is refused."""

from __future__ import annotations

import mmap

import pytest

from model.artifact import Device, Manifest, Precision
from model.config import Architecture, ModelConfig
from service.engine import kv_memory
from service.engine.kv_memory import check_memory, plan_kv_memory
from service.errors import StartupError

NUM_SLOTS = 3


def manifest(architecture: Architecture, *, context: int = 100, source_context: int = 0) -> Manifest:
    config = ModelConfig(
        architecture=architecture,
        vocab_size=50,
        context=context,
        source_context=source_context,
        d_model=32,
        num_layers=2,
        num_encoder_layers=2 if architecture is Architecture.ENCODER_DECODER else 0,
        num_heads=2,
        d_ff=64,
    )
    return Manifest(
        config=config,
        device=Device.CPU,
        precision=Precision.FP32,
        opset=24,
        eos_ids=(2,),
        pad_id=0,
        decoder_start_id=1,
        graphs={},
        files={},
    )


DECODER_ONLY = manifest(Architecture.DECODER_ONLY)
ENCODER_DECODER = manifest(Architecture.ENCODER_DECODER, source_context=70)
FAMILIES = pytest.mark.parametrize("one", [DECODER_ONLY, ENCODER_DECODER], ids=lambda one: one.config.architecture)


@FAMILIES
def test_kv_memory_by_default_holds_every_slot_at_full_length(one: Manifest) -> None:
    budget = plan_kv_memory(one, NUM_SLOTS, None)
    config = one.config
    source = config.source_context if config.is_encoder_decoder else 0
    assert budget.num_bytes == NUM_SLOTS * budget.row_bytes(config.context, source)
    assert budget.num_bytes >= NUM_SLOTS * (config.context + source) * config.kv_bytes_per_token


@FAMILIES
def test_kv_memory_is_exactly_what_the_operator_gave(one: Manifest) -> None:
    assert plan_kv_memory(one, NUM_SLOTS, 123_457).num_bytes == 123_457


def test_kv_memory_counts_a_row_in_whole_pages() -> None:
    """A head's positions follow each other: with 16 floats each, 64 of them fill a page."""
    budget = plan_kv_memory(DECODER_ONLY, NUM_SLOTS, None)
    tokens_in_a_page = mmap.PAGESIZE // (DECODER_ONLY.config.head_dim * 4)
    page = tokens_in_a_page * DECODER_ONLY.config.kv_bytes_per_token
    assert [budget.row_bytes(length, 0) for length in (0, 1, tokens_in_a_page)] == [0, page, page]
    assert budget.row_bytes(tokens_in_a_page + 1, 0) == 2 * page


@FAMILIES
def test_kv_memory_without_room_for_one_sequence_is_refused(one: Manifest) -> None:
    least = plan_kv_memory(one, 1, None).num_bytes
    check_memory(one, plan_kv_memory(one, NUM_SLOTS, least), NUM_SLOTS, 0)
    with pytest.raises(StartupError, match=f"kv_memory is {least - 1} bytes, must be at least {least}"):
        check_memory(one, plan_kv_memory(one, NUM_SLOTS, least - 1), NUM_SLOTS, 0)


def test_kv_memory_beyond_the_machine_is_refused_with_the_logits_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = plan_kv_memory(DECODER_ONLY, NUM_SLOTS, None)
    logits = (NUM_SLOTS + 5) * DECODER_ONLY.config.vocab_size * 4 + 5 * budget.token_bytes
    monkeypatch.setattr(kv_memory, "memory_limit", lambda: budget.num_bytes + logits)
    check_memory(DECODER_ONLY, budget, NUM_SLOTS, 5)
    with pytest.raises(StartupError, match=f"{NUM_SLOTS + 6} rows of logits need"):
        check_memory(DECODER_ONLY, budget, NUM_SLOTS, 6)
    monkeypatch.setattr(kv_memory, "memory_limit", lambda: budget.num_bytes - 1)
    with pytest.raises(StartupError, match=f"needs {budget.num_bytes} bytes, there are {budget.num_bytes - 1}"):
        check_memory(DECODER_ONLY, budget, NUM_SLOTS, 0)
