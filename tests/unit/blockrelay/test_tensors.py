"""Tensors in JSON and tensor results: what goes in comes out, and nothing else gets in."""

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from blockrelay.errors import BadRequest, WireError
from blockrelay.protocol import tensors
from tests.support.json_tensors import json_tensor


def decode(value: object, max_elements: int = 1000) -> Any:
    return tensors.decode_tensor(value, param="input_ids", max_elements=max_elements)


def raw(dtype: str, shape: list[int], data: bytes) -> dict[str, Any]:
    return {"_tensor_": True, "dtype": dtype, "shape": shape, "data_b64": base64.b64encode(data).decode()}


def test_the_example_of_the_contract_decodes_in_both_spellings() -> None:
    flat = decode({"_tensor_": True, "data": [0, 1, 2, 3]})
    assert decode([0, 1, 2, 3]).tolist() == decode([[0, 1, 2, 3]]).tolist() == flat.tolist()
    packed = decode(raw("int64", [1, 4], np.arange(4, dtype="<i8").tobytes()))
    assert flat.dtype == packed.dtype == np.int64
    assert flat.shape == packed.shape == (1, 4)
    assert (flat == packed).all()


def test_a_nested_list_keeps_its_own_axes() -> None:
    assert decode({"_tensor_": True, "data": [[1, 2], [3, 4]]}).tolist() == [[1, 2], [3, 4]]


@given(st.sampled_from(tensors.DTYPES), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.randoms())
def test_every_allowed_array_survives_the_round_trip(dtype: str, shape: list[int], random: Any) -> None:
    values = np.array([random.randrange(2) for _ in range(int(np.prod(shape)))], dtype=dtype).reshape(shape)
    back = decode(json_tensor(values), max_elements=5**4)
    assert back.dtype == values.dtype
    assert back.shape == values.shape
    assert (back == values).all()


REFUSED: dict[str, tuple[object, str]] = {
    "a bare list of texts": (["1"], "not int64"),
    "a bare number": (7, '"_tensor_": true'),
    "no mark": ({"data": [1]}, '"_tensor_": true'),
    "an unknown field": ({"_tensor_": True, "data": [1], "strides": [1]}, "strides"),
    "neither form": ({"_tensor_": True}, "either data or data_b64"),
    "both forms": ({**raw("int64", [1], bytes(8)), "data": [0]}, "either data or data_b64"),
    "raw bytes without a shape": ({"_tensor_": True, "dtype": "int64", "data_b64": ""}, "needs dtype and shape"),
    "an object dtype": (raw("object", [1], bytes(8)), "dtype must be one of"),
    "a NumPy spelling of object": (raw("|O", [1], bytes(8)), "dtype must be one of"),
    "a structured dtype": ({**raw("int64", [1], bytes(8)), "dtype": [["a", "<i8"]]}, "dtype must be one of"),
    "an unknown dtype": (raw("bfloat16", [1], bytes(2)), "dtype must be one of"),
    "wrong base64": ({**raw("int64", [1], bytes(8)), "data_b64": "@@@"}, "not base64"),
    "base64 that is no ASCII": ({**raw("int64", [1], bytes(8)), "data_b64": "é"}, "not base64"),
    "bytes that are no text": ({**raw("int64", [1], bytes(8)), "data_b64": 7}, "must be a string"),
    "too few bytes": (raw("int64", [1, 4], bytes(31)), "31 bytes"),
    "too many bytes": (raw("int64", [1, 4], bytes(40)), "40 bytes"),
    "a huge shape": (raw("int64", [1 << 40, 1 << 40], b""), "more than 1000 elements"),
    "a huge shape that multiplies to nothing": (raw("int64", [1 << 62, 0], b""), "more than 1000 elements"),
    "a negative axis": (raw("int64", [-1], bytes(8)), "shape must be"),
    "a boolean axis": (raw("int64", [True], bytes(8)), "shape must be"),  # type: ignore[list-item]
    "no axes": (raw("int64", [], bytes(8)), "shape must be"),
    "ragged data": ({"_tensor_": True, "data": [[1, 2], [3]]}, "ragged"),
    "data of mixed depth": ({"_tensor_": True, "data": [[1], 2]}, "nested list"),
    "data too deep": ({"_tensor_": True, "data": [[[[[[[[[1]]]]]]]]]}, "nested list"),
    "text as a number": ({"_tensor_": True, "data": ["1"]}, "not int64"),
    "a fraction as int64": ({"_tensor_": True, "data": [1.5]}, "not int64"),
    "a number beyond its dtype": ({"_tensor_": True, "data": [1 << 70]}, "beyond int64"),
    "too many elements": ({"_tensor_": True, "data": [0] * 1001}, "more than 1000 elements"),
    "data that does not fill the shape": ({"_tensor_": True, "data": [1, 2], "shape": [3]}, "needs another number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_tensor_is_refused_by_the_name_of_its_field(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(BadRequest) as refused:
        decode(value)
    assert refused.value.param == "input_ids"
    assert message in str(refused.value)


def test_logits_beyond_float16_saturate() -> None:
    values = tensors.to_float16(np.array([[1e6, -1e6, 1.0]], dtype=np.float32))
    assert values.tolist() == [[65504.0, -65504.0, 1.0]]


@pytest.mark.parametrize("count", [0, 1, 2, 3, tensors.PIECE_BYTES // 2, tensors.PIECE_BYTES + 5])
def test_pieces_are_what_a_tensor_says_at_once(count: int) -> None:
    array = np.arange(count, dtype=np.float16).reshape(1, count)
    pieces = list(tensors.base64_pieces(array))
    assert b"".join(pieces).decode() == json_tensor(array)["data_b64"]
    assert all(len(piece) <= tensors.PIECE_BYTES // 3 * 4 for piece in pieces)


def test_a_result_has_its_values_bit_for_bit() -> None:
    rows = np.array([[1.5, -0.0, np.inf], [np.nan, 2.0**-149, 3.0]], dtype=np.float32)
    assert tensors.encode_result(rows)[tensors.HEADER_BYTES :] == rows.tobytes()


def read_in_pieces(stored: bytes, into: NDArray[np.float16], size: int) -> None:
    reader = tensors.ResultReader(into)
    end = tensors.HEADER_BYTES + reader.begin(stored[: tensors.HEADER_BYTES])
    for start in range(tensors.HEADER_BYTES, end, size):
        reader.push(stored[start : min(end, start + size)])
    reader.end()


@pytest.mark.parametrize("size", [4, 12, 40, 1000])
@pytest.mark.parametrize("wanted", [1, 3, 5])
def test_a_result_that_is_read_in_pieces_is_what_it_is_as_a_whole(size: int, wanted: int) -> None:
    rows = np.random.default_rng(1).standard_normal((5, 7), np.float32) * 1e5  # some are beyond float16
    into = np.zeros((wanted, 7), np.float16)
    read_in_pieces(tensors.encode_result(rows), into, size)
    assert into.tobytes() == tensors.to_float16(rows[-wanted:]).tobytes()


@pytest.mark.parametrize("damage", ["cut", "magic", "version", "bit", "rows", "columns", "short", "empty"])
def test_a_damaged_result_is_noticed(damage: str) -> None:
    good = tensors.encode_result(np.ones((2, 3), dtype=np.float32))
    bad = {
        "cut": good[:-4],
        "magic": b"X" + good[1:],
        "version": good[:4] + b"\2" + good[5:],
        "bit": good[:-1] + bytes([good[-1] ^ 1]),
        "rows": tensors.encode_result(np.ones((1, 3), dtype=np.float32)),
        "columns": tensors.encode_result(np.ones((2, 4), dtype=np.float32)),
        "short": good[:10],
        "empty": b"",
    }[damage]
    with pytest.raises(WireError):
        read_in_pieces(bad, np.zeros((2, 3), np.float16), 8)


def test_a_result_is_rows_of_float32_and_nothing_else() -> None:
    with pytest.raises(WireError):
        tensors.encode_result(np.ones((2, 3), dtype=np.float64))  # type: ignore[arg-type]
