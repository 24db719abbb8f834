"""The record of a stored page: it decodes to the page that the reader expects, or not at all."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay_worker.kv.store.record import PageShape, decode_record, encode_record

SHAPE = PageShape(kv_heads=2, head_dim=8, dtype=np.float16)
NAME = bytes(range(32))
RNG = np.random.default_rng(5)
KEYS = RNG.standard_normal((2, 8, 16)).astype(np.float16)
VALUES = RNG.standard_normal((2, 16, 8)).astype(np.float16)
RECORD = bytes(encode_record(NAME, 7, SHAPE, KEYS, VALUES))


def test_a_record_gives_back_its_keys_and_values() -> None:
    halves = decode_record(RECORD, NAME, 7, SHAPE)
    assert halves is not None
    assert [bytes(half) for half in halves] == [KEYS.tobytes(), VALUES.tobytes()]
    assert len(RECORD) == SHAPE.record_bytes


@given(st.integers(0, len(RECORD) * 8 - 1))
def test_any_flipped_bit_makes_it_a_miss(bit: int) -> None:
    broken = bytearray(RECORD)
    broken[bit // 8] ^= 1 << bit % 8
    assert decode_record(bytes(broken), NAME, 7, SHAPE) is None


@given(st.integers(0, len(RECORD) - 1), st.binary(max_size=8))
def test_a_record_cut_short_or_too_long_is_a_miss(length: int, more: bytes) -> None:
    assert decode_record(RECORD[:length], NAME, 7, SHAPE) is None
    assert not more or decode_record(RECORD + more, NAME, 7, SHAPE) is None


@pytest.mark.parametrize(
    ("name", "block", "shape"),
    [
        (bytes(32), 7, SHAPE),
        (NAME, 8, SHAPE),
        (NAME, 7, replace(SHAPE, kv_heads=1, head_dim=16)),
        (NAME, 7, PageShape(kv_heads=1, head_dim=8, dtype=np.float32)),
    ],
)
def test_another_page_block_shape_or_precision_is_a_miss(name: bytes, block: int, shape: PageShape) -> None:
    assert decode_record(RECORD, name, block, shape) is None


def test_zeros_are_no_record() -> None:
    assert decode_record(bytes(len(RECORD)), NAME, 7, SHAPE) is None
