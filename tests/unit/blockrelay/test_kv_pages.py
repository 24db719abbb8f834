"""KV as tensors and as pages: what goes in comes out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockrelay.errors import WireError
from blockrelay.protocol.encoding.kv_pages import KvShape, field


@given(
    heads=st.integers(1, 3),
    size=st.sampled_from([2, 8]),
    tokens=st.integers(1, 50),
    dtype=st.sampled_from([np.float16, np.float32]),
)
@settings(max_examples=50)
def test_full_pages_come_back_and_what_is_behind_them_is_left_out(
    heads: int, size: int, tokens: int, dtype: type[np.float16] | type[np.float32]
) -> None:
    shape = KvShape(heads, size, dtype)
    numbers = np.arange(2 * heads * tokens * size, dtype=dtype).reshape(2, heads, tokens, size)
    pages = shape.to_pages(numbers[0], numbers[1])
    assert len(pages) == tokens // 16 and all(len(page) == 16 * shape.token_bytes for page in pages)
    whole = len(pages) * 16
    for read in (whole, max(0, whole - 3)):
        keys, values = shape.from_pages(pages, read)
        assert keys.dtype == values.dtype == dtype
        assert (keys == numbers[0, :, :read]).all() and (values == numbers[1, :, :read]).all()


def test_a_page_of_another_size_is_no_page() -> None:
    shape = KvShape(2, 8, np.float16)
    with pytest.raises(WireError, match="1023 bytes instead of 1024"):
        shape.from_pages([b"x" * 1023], 16)
    assert field(3, 12) == "3.12"
