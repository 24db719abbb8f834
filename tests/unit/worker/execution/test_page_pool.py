"""The page pool hands out each page once."""

import numpy as np
import pytest

from blockrelay.errors import OutOfPages
from blockrelay_worker.execution.cpu.page_memory import PageMemory
from blockrelay_worker.execution.page_layout import PageLayout, pages_for
from blockrelay_worker.execution.page_pool import PagePool

LAYOUT = PageLayout(layers=2, kv_heads=2, head_dim=8)


def test_pages_go_out_and_come_back() -> None:
    pool = PagePool(LAYOUT, 4)
    first = pool.allocate(3)
    assert first == [0, 1, 2]
    assert (pool.free_pages, pool.used_pages) == (1, 3)
    pool.free([1])
    assert pool.allocate(2) == [1, 3]
    pool.check_integrity()


def test_a_request_that_does_not_fit_takes_nothing() -> None:
    pool = PagePool(LAYOUT, 4)
    pool.allocate(3)
    with pytest.raises(OutOfPages, match="2 KV pages were requested and 1 of 4 are free"):
        pool.allocate(2)
    assert pool.free_pages == 1
    pool.check_integrity()


@pytest.mark.parametrize("pages", [[0, 0], [3], [9]])
def test_freeing_what_is_not_handed_out_is_a_bug(pages: list[int]) -> None:
    pool = PagePool(LAYOUT, 4)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="not allocated"):
        pool.free(pages)


def test_arrays_have_the_kernels_shapes_and_alignment() -> None:
    memory = PageMemory(PageLayout(layers=2, kv_heads=3, head_dim=24, dtype=np.float32), 5)
    assert [array.shape for array in memory.k_pages] == [(5, 3, 24, 16)] * 2
    assert [array.shape for array in memory.v_pages] == [(5, 3, 16, 24)] * 2
    for array in (*memory.k_pages, *memory.v_pages):
        assert array.dtype == np.float32
        assert array.ctypes.data % 64 == 0
        assert array.flags.writeable
    assert LAYOUT.bytes_per_page == 2 * 2 * 2 * 8 * 16 * 2


def test_a_stage_of_the_head_alone_has_no_arrays_but_counts() -> None:
    memory = PageMemory(PageLayout(layers=0, kv_heads=2, head_dim=8), 3)
    assert memory.k_pages == []
    assert memory.pool.allocate(3) == [0, 1, 2]


def test_tokens_fill_pages_of_sixteen() -> None:
    assert [pages_for(tokens) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]
