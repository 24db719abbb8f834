"""Tensors by name survive the wire bit by bit, and bytes that are none of ours become no array."""

import struct
from collections.abc import Sequence
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from blockrelay.errors import WireError
from blockrelay.onnx_blocks.model_file import DTYPES
from blockrelay.protocol.encoding import codec, named_tensors
from blockrelay.protocol.encoding.forward_segment import ForwardSegment
from blockrelay.protocol.encoding.named_tensors import (
    MAX_NAME_BYTES,
    MAX_TENSORS,
    NamedTensors,
    pack_tensors,
    unpack_tensors,
    weight,
    why_not_sent,
)
from blockrelay.protocol.messages import Forward

NUMBERS = sorted(set(DTYPES.values()))


@st.composite
def parts(draw: st.DrawFn) -> NamedTensors:
    """A part of any shapes; few of them, so that parts of one message are sometimes alike."""
    rows = draw(st.integers(1, 2))
    shapes = st.sampled_from([(), (1,), (1, rows, 3), (1, 1, rows, 2), (0, rows)])
    made = st.sampled_from(NUMBERS).flatmap(lambda dtype: arrays_of.arrays(dtype, shapes))
    names = st.sampled_from(["hidden", "nd", "complex", "v", "größe"])
    return NamedTensors(rows=rows, arrays=draw(st.dictionaries(names, made, max_size=3)))


def same(one: NamedTensors, other: NamedTensors) -> bool:
    return one.rows == other.rows and [
        (name, array.dtype, array.shape, array.tobytes()) for name, array in one.arrays.items()
    ] == [(name, array.dtype, array.shape, array.tobytes()) for name, array in other.arrays.items()]


def rows_of(segments: Sequence[Sequence[NamedTensors]]) -> list[int]:
    return [sum(part.rows for part in segment) for segment in segments]


@given(st.lists(st.lists(parts(), min_size=1, max_size=3), min_size=1, max_size=4))
@settings(max_examples=60)
def test_forwarded_tensors_come_back_as_they_were(made: list[list[NamedTensors]]) -> None:
    segments = tuple(
        ForwardSegment(request_id=f"q{i}", run_id="r", sequence=i, position=i, token_ids=(7,) * rows, ends_known=True)
        for i, rows in enumerate(rows_of(made))
    )
    message = Forward(sender="w", segments=segments, tensors=made, block_seconds={"block_1": 0.5})
    again = Forward.decode({name.encode(): value for name, value in message.encode().items()})
    assert (again.segments, again.rows, again.block_seconds) == (segments, None, {"block_1": 0.5})
    assert [len(segment) for segment in again.tensors] == [len(segment) for segment in made]
    for came, sent in zip(again.tensors, made, strict=True):
        assert all(map(same, came, sent))


@pytest.mark.parametrize("dtype", NUMBERS)
def test_whatever_blocks_may_hand_on_can_travel(dtype: str) -> None:
    sent = NamedTensors(rows=2, arrays={"x": np.array([[0, 1], [1, 0]]).astype(dtype)})
    assert why_not_sent([sent]) == ""
    ((came,),) = unpack_tensors(pack_tensors([[sent]]), [2])
    assert same(came, sent) and not came.arrays["x"].flags.writeable


def test_parts_that_are_alike_travel_in_one_array() -> None:
    """Twenty decode steps say each name, dtype and shape once."""
    made = [[NamedTensors(rows=1, arrays={"hidden": np.full((1, 1, 4), i, np.float32)})] for i in range(20)]
    assert len(pack_tensors(made)) < 600
    came = unpack_tensors(pack_tensors(made), [1] * 20)
    assert [part.arrays["hidden"].ravel().tolist() for (part,) in came] == [[i] * 4 for i in range(20)]


def packed(counts: Sequence[int], groups: Any) -> bytes:
    """As an attacker or another version might write it."""
    data = msgpack.packb({"v": 1, "parts": list(counts), "groups": groups}, default=msgpack_numpy.encode)
    assert data is not None
    return data


ONE = np.zeros((1, 1, 2), np.float32)


@pytest.mark.parametrize(
    ("counts", "groups", "why"),
    [
        ([1], [[[0], 1, [["x", np.array([object()])]]]], "not allowed"),
        ([1], [[[0], 1, [["x", np.array(["text"])]]]], "not allowed"),
        ([1], [[[0], 1, [["x", ONE.astype(">f4")]]]], "not allowed"),
        ([1], [[[0], 1, [["x", np.zeros(1, [("a", "<f4")])]]]], "not allowed"),
        ([1], [[[0], 1, [["x", np.float32(1)]]]], "no array"),
        ([1], [[[0], 1, [["x", [1.0]]]]], "no array"),
        ([1], [[[0], 1, [["x", np.zeros((2, 1), np.float32)]]]], "no array of 1 parts"),
        ([1], [[[0], 1, [["x" * (MAX_NAME_BYTES + 1), ONE]]]], "longer than"),
        ([1], [[[0], 1, [[7, ONE]]]], "expected text"),
        ([1], [[[0], 1, [["x", ONE], ["x", ONE]]]], "comes twice"),
        ([1], [[[0], 1, [[f"x{i}", ONE] for i in range(MAX_TENSORS + 1)]]], "257 tensors"),
        ([1], [[[0], 2, [["x", ONE]]]], "are not a segment of 1"),
        ([2], [[[0], 0, [["x", ONE]]], [[1], 1, [["x", ONE]]]], "are not a segment of 1"),
        ([1], [[[1], 1, [["x", ONE]]]], "parts are not those"),
        ([1, 0], [[[0], 1, [["x", ONE]]]], "parts are not those of 1 segments"),
        ([2], [[[0], 1, [["x", ONE]]]], "parts are not those"),
        ([2**48], [[[0], 1, [["x", ONE]]]], "parts are not those"),
        ([1], [[[0], 1, [["x", ONE]]], [[0], 1, [["x", ONE]]]], "comes twice"),
        ([1], [[[-1], 1, [["x", ONE]]]], "whole number"),
        ([1], [[[0], 1]], "does not decode"),
        ([1], 5, "expected a list"),
    ],
)
def test_what_is_no_such_message_is_refused(counts: list[int], groups: Any, why: str) -> None:
    with pytest.raises(WireError, match=why):
        decode(packed(counts, groups))


def decode(data: bytes) -> object:
    """In a message of one row."""
    segment = ForwardSegment(request_id="q", run_id="r", sequence=0, position=0, token_ids=(7,), ends_known=True)
    head = Forward(sender="w", segments=(segment,)).encode()["head"]
    return Forward.decode({b"head": head, b"tensors": data})


@pytest.mark.parametrize("shape", [[1, 1, 3], [1, 1, 1], [1], [2**40, 2**40], [1, -1, -2], [1, 1, 2.0], [[1], 2], 2])
def test_an_array_of_another_size_than_it_says_is_refused(shape: Any) -> None:
    data = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": shape, b"data": bytes(8)}
    with pytest.raises(WireError):
        decode(packed([1], [[[0], 1, [["x", data]]]]))


def test_what_is_cut_off_is_refused_wherever_that_is() -> None:
    whole = pack_tensors([[NamedTensors(rows=1, arrays={"x": np.ones((1, 1, 2), np.float16)})]])
    assert decode(whole)
    for size in range(len(whole)):
        with pytest.raises(WireError):
            decode(whole[:size])


def test_arrays_may_not_be_more_than_a_message_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by bytes nor by their number: an array without elements costs something too."""
    large = NamedTensors(rows=1, arrays={"x": np.zeros(4096, np.float32)})
    many = NamedTensors(rows=1, arrays={f"x{i}": np.zeros(0, np.float32) for i in range(20)})
    sent = {id(part): pack_tensors([[part]]) for part in (large, many)}
    for part in (large, many):
        monkeypatch.setattr(named_tensors, "MAX_MESSAGE_WEIGHT", weight([part]))
        assert why_not_sent([part]) == "" and decode(sent[id(part)])
        monkeypatch.setattr(named_tensors, "MAX_MESSAGE_WEIGHT", weight([part]) - 1)
        with pytest.raises(WireError, match=r"of more than|over the limit"):
            decode(sent[id(part)])
        assert "lower BLOCKRELAY_MAX_ROWS" in why_not_sent([part])
    assert len(sent[id(large)]) < weight([large]) and len(sent[id(many)]) < weight([many])


def test_a_list_may_not_promise_more_than_a_message_may_have() -> None:
    claim = b"\x83\xa1v\x01\xa5parts\x90\xa6groups" + struct.pack(">BI", 0xDD, 1 << 20)
    with pytest.raises(WireError, match="exceeds max_array_len"):
        decode(claim + bytes(1 << 20))


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({f"x{i}": ONE for i in range(MAX_TENSORS + 1)}, "257 tensors, and the limit is 256"),
        ({"x": np.array([None])}, "tensors of object"),
        ({"x" * 513: ONE}, "longer than 512 bytes"),
    ],
)
def test_a_sender_knows_what_no_receiver_takes(arrays: dict[str, Any], why: str) -> None:
    assert why in why_not_sent([NamedTensors(rows=1, arrays=arrays)])


def test_the_dtypes_of_a_message_are_those_of_blocks() -> None:
    assert {np.dtype(name).newbyteorder("<").str for name in NUMBERS} == codec.ALLOWED_DTYPES
