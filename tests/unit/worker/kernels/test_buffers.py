"""Buffers of memory that the system does not give."""

from collections.abc import Callable
from typing import Any

import pytest

from blockrelay_worker.kernels.buffers import huge_page_bytes, untouched_bytes


@pytest.mark.parametrize("make", [untouched_bytes, huge_page_bytes])
def test_memory_that_the_system_does_not_give_is_a_memory_error(make: Callable[[int], Any]) -> None:
    """Buffers raise MemoryError where mmap raises OSError, so that callers have one error to look for."""
    with pytest.raises(MemoryError, match="the system gives no"):
        make(1 << 60)
    assert not make(1 << 22).any()
