"""The K/V budget is what the operator said, counts in whole pages, and fits into the machine or is refused."""

from __future__ import annotations

import dataclasses
import mmap

import pytest

from model.spec.artifact import (
    DECODER,
    MOVE,
    Device,
    FileEntry,
    GraphSpec,
    KVFormat,
    KVLayout,
    KVPrecision,
    Manifest,
    Precision,
)
from model.spec.config import Architecture, ModelConfig
from service.engine.kv import budget as kv_memory
from service.engine.kv.budget import (
    check_device_memory,
    check_host_memory,
    check_memory,
    device_overhead_bytes,
    graph_bytes,
    plan_kv_memory,
    prefault_bytes,
    step_bytes,
)
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
def test_kv_memory_in_eight_bits_has_four_times_the_tokens_in_a_page_and_sources_too(one: Manifest) -> None:
    whole = plan_kv_memory(one, NUM_SLOTS, None)
    eight = plan_kv_memory(dataclasses.replace(one, kv_cache=KVFormat(KVPrecision.INT8, "none")), NUM_SLOTS, None)
    assert (eight.page_tokens, eight.source_page_tokens) == (4 * whole.page_tokens, 4 * whole.source_page_tokens)
    assert (4 * eight.token_bytes, 4 * eight.source_token_bytes) == (whole.token_bytes, whole.source_token_bytes)
    page = eight.source_page_tokens
    assert eight.row_bytes(0, page + 1) == 2 * eight.row_bytes(0, 1) == whole.row_bytes(0, 2 * page) // 4


@FAMILIES
def test_kv_memory_without_room_for_one_sequence_is_refused(one: Manifest) -> None:
    least = plan_kv_memory(one, 1, None).num_bytes
    check_memory(one, plan_kv_memory(one, NUM_SLOTS, least), NUM_SLOTS, 0)
    with pytest.raises(StartupError, match=f"kv_memory is {least - 1} bytes, must be at least {least}"):
        check_memory(one, plan_kv_memory(one, NUM_SLOTS, least - 1), NUM_SLOTS, 0)


def test_kv_memory_beyond_the_machine_is_refused_with_the_logits_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = plan_kv_memory(DECODER_ONLY, NUM_SLOTS, None)
    logits = (NUM_SLOTS + 5) * DECODER_ONLY.config.vocab_size * 4 + 5 * budget.token_bytes
    besides = logits + prefault_bytes(DECODER_ONLY, budget, NUM_SLOTS)
    monkeypatch.setattr(kv_memory, "memory_limit", lambda: budget.num_bytes + besides)
    check_memory(DECODER_ONLY, budget, NUM_SLOTS, 5)
    with pytest.raises(StartupError, match=f"{NUM_SLOTS + 6} rows of logits need"):
        check_memory(DECODER_ONLY, budget, NUM_SLOTS, 6)
    monkeypatch.setattr(kv_memory, "memory_limit", lambda: budget.num_bytes - 1)
    with pytest.raises(StartupError, match=f"needs {budget.num_bytes} bytes, there are {budget.num_bytes - 1}"):
        check_memory(DECODER_ONLY, budget, NUM_SLOTS, 0)


PAGED = KVFormat(KVPrecision.BF16, layout=KVLayout.PAGED, block_size=16)


def on_cuda(one: Manifest) -> Manifest:
    return dataclasses.replace(one, device=Device.CUDA, precision=Precision.BF16, kv_cache=PAGED)


@FAMILIES
def test_kv_memory_on_a_device_counts_in_blocks_of_two_bytes_each(one: Manifest) -> None:
    budget = plan_kv_memory(on_cuda(one), NUM_SLOTS, None)
    config = one.config
    assert budget.token_bytes == config.kv_bytes_per_token // 2
    num_blocks = -(-config.context // 16) + -(-config.source_context // 16)
    assert budget.num_bytes == NUM_SLOTS * num_blocks * 16 * budget.token_bytes


@FAMILIES
def test_kv_memory_beyond_the_device_is_refused_with_what_steps_take_beside_it(one: Manifest) -> None:
    one = on_cuda(one)
    budget = plan_kv_memory(one, NUM_SLOTS, None)
    besides = device_overhead_bytes(one, NUM_SLOTS, 64)
    check_device_memory(one, budget, NUM_SLOTS, 64, budget.num_bytes + besides)
    left = budget.num_bytes + besides - 1
    problem = f"K/V need {budget.num_bytes} bytes and steps {besides}, the device has {left} left"
    with pytest.raises(StartupError, match=problem):
        check_device_memory(one, budget, NUM_SLOTS, 64, left)
    least = plan_kv_memory(one, 1, None).num_bytes
    with pytest.raises(StartupError, match=f"kv_memory is {least - 1} bytes, must be at least {least}"):
        check_device_memory(one, plan_kv_memory(one, NUM_SLOTS, least - 1), NUM_SLOTS, 64, 1 << 40)


@FAMILIES
def test_what_a_step_has_in_hand_grows_with_its_tokens_and_holds_their_logits(one: Manifest) -> None:
    one = on_cuda(one)
    sizes = [step_bytes(one, 1, num_tokens) for num_tokens in (0, 512, 1024)]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 512 * one.config.vocab_size * (2 + 4)
    more_rows = device_overhead_bytes(one, 8, 0) - device_overhead_bytes(one, 4, 0)
    assert more_rows > 4 * one.config.vocab_size * 4


def test_a_graphs_limit_on_a_device_has_room_for_its_own_weights_and_no_other_graphs() -> None:
    sizes = {"decoder.onnx": 3, "decoder.onnx.data": 500, "move.onnx": 20, "golden.npz": 9_000}
    one = dataclasses.replace(
        on_cuda(DECODER_ONLY),
        files={name: FileEntry("0" * 64, size) for name, size in sizes.items()},
        graphs={DECODER: GraphSpec("decoder.onnx", (), ()), MOVE: GraphSpec("move.onnx", (), ())},
    )
    in_hand = step_bytes(one, NUM_SLOTS, 64)
    assert graph_bytes(one, DECODER, NUM_SLOTS, 64) == 503 + in_hand
    assert graph_bytes(one, MOVE, NUM_SLOTS, 64) == 20 + in_hand


def test_what_a_device_records_is_counted_for_every_size_of_rows_and_lengths() -> None:
    def overhead(context: int, num_slots: int) -> int:
        one = on_cuda(manifest(Architecture.DECODER_ONLY, context=context))
        return device_overhead_bytes(one, num_slots, 0)

    # Of four rows there are sizes of 1, 2 and 4, up to 512 tokens and up to 1024.
    record = overhead(513, 4) - overhead(512, 4)
    assert record > 3 << 20
    assert overhead(1025, 4) - overhead(1024, 4) == record
    assert overhead(513, 1) - overhead(512, 1) == record // 3


def test_logits_that_the_host_has_no_room_for_beside_a_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = on_cuda(DECODER_ONLY)
    # Of three slots and five tokens twice, of the slots once more.
    needed = (2 * (NUM_SLOTS + 5) + NUM_SLOTS) * one.config.vocab_size * 4
    monkeypatch.setattr(kv_memory, "memory_limit", lambda: needed)
    check_host_memory(one, NUM_SLOTS, 5)
    monkeypatch.setattr(kv_memory, "memory_limit", lambda: needed - 1)
    with pytest.raises(StartupError, match=f"19 rows of logits need {needed} bytes of this host's memory"):
        check_host_memory(one, NUM_SLOTS, 5)
