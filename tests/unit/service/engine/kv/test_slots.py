"""Slots are dense, unique and accounted for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.kv.slots import SlotTable


def test_slots_full_table_refuses() -> None:
    table: SlotTable[str] = SlotTable(1)
    table.append("a")
    with pytest.raises(IndexError, match="all 1 slots are taken"):
        table.append("b")


@pytest.mark.parametrize("slot", [-1, 1, 5])
def test_slots_removing_a_free_slot_is_refused(slot: int) -> None:
    table: SlotTable[str] = SlotTable(4)
    table.append("a")
    with pytest.raises(IndexError, match="is free"):
        table.remove(slot)


def test_slots_need_a_capacity() -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        SlotTable(0)


def test_slots_an_owner_with_a_row_gets_no_second_one() -> None:
    table: SlotTable[str] = SlotTable(3)
    table.append("a")
    table.append("b")
    with pytest.raises(ValueError, match="a has slot 0"):
        table.append("a")
    with pytest.raises(ValueError, match="a has slot 0"):
        table.replace(1, "a")
    table.check_invariants()
    assert list(table) == ["a", "b"]


def test_slots_a_replaced_owner_leaves_its_row_to_the_next() -> None:
    table: SlotTable[str] = SlotTable(2)
    table.append("a")
    table.replace(0, "b")
    table.check_invariants()
    assert table.slot_of("b") == 0
    with pytest.raises(KeyError):
        table.slot_of("a")


@given(st.lists(st.one_of(st.none(), st.integers(0, 7)), max_size=60))
def test_slots_contents_that_follow_the_moves_stay_with_their_owner(actions: list[int | None]) -> None:
    """None appends, a number removes that slot; `contents` is a buffer that only the returned moves change."""
    table: SlotTable[int] = SlotTable(8)
    contents: dict[int, int] = {}
    for owner, slot in enumerate(actions):
        if slot is None and table.num_free:
            contents[table.append(owner)] = owner
        elif slot is not None and slot < len(table):
            move = table.remove(slot)
            assert (move is None) == (slot == len(table))
            if move is not None:
                contents[move.target] = contents[move.source]
        table.check_invariants()
        assert [contents[row] for row in range(len(table))] == list(table)
        assert [table.slot_of(owner) for owner in table] == list(range(len(table)))
