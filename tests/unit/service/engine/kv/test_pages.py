"""Memory that goes back: what is released is undefined, what lies beside it is not touched."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from service.engine.kv.pages import Pages


@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.parametrize("num_rows", [3, 300], ids=["small", "mapped"])
@pytest.mark.parametrize("width", [mmap.PAGESIZE // 4, 900, 2500], ids=["page", "less", "more"])
def test_pages_keep_what_lies_beside_a_released_row(num_rows: int, width: int, *, is_sparse: bool) -> None:
    pages = Pages((num_rows, width), np.float32, is_sparse=is_sparse)
    assert not pages.array.any()
    pages.array[:] = np.arange(num_rows * width).reshape(num_rows, width)
    expected = pages.array.copy()
    for row in range(1, num_rows, 2):
        pages.release(pages.array[row])
    np.testing.assert_array_equal(pages.array[::2], expected[::2])
    pages.array[1::2] = 7
    np.testing.assert_array_equal(pages.array[::2], expected[::2])
    assert (pages.array[1::2] == 7).all()


def test_pages_outlive_their_owner_while_a_view_is_left() -> None:
    view = Pages((300, 1000), np.float32, is_sparse=False).array[299]
    view[:] = 3
    assert view.sum() == 3000


def test_pages_that_no_address_space_holds_are_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        Pages((1 << 46,), np.float32, is_sparse=True)
