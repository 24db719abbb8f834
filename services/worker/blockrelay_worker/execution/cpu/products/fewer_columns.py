"""A skeleton graph for fewer columns than its folder's: the same bytes but for the numbers that say how many.

It is read and written in protobuf's wire format (field numbers as in onnx.proto), for workers have no `onnx`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

_Value: TypeAlias = int | bytes
_Change: TypeAlias = Callable[[_Value], _Value]

_MODEL_GRAPH, _GRAPH_INITIALIZER, _GRAPH_OUTPUT = 7, 5, 12
_TENSOR_DIMS, _TENSOR_EXTERNAL, _ENTRY_KEY, _ENTRY_VALUE = 1, 13, 1, 2
#: From an output to its dimensions: type, tensor type, shape, dimension, and the number in one.
_OUTPUT_TO_DIMENSION = (2, 1, 2, 1)
_DIMENSION_VALUE = 1
_VARINT, _BYTES = 0, 2
#: Kinds of fields that have a fixed size, in bytes.
_FIXED = {1: 8, 5: 4}


def with_columns(graph: bytes, columns: int, fewer: int) -> bytes:
    """The model `graph`, whose matrix has `columns`, for `fewer` of them. Pure."""

    def column_count(value: _Value) -> _Value:
        assert value == columns, "the output is as wide as the matrix"
        return fewer

    def initializer(value: _Value) -> _Value:
        found = list(_fields(_message(value)))
        if not any(number == _TENSOR_EXTERNAL for number, _, _ in found):
            return value  # it is not supplied: the same for all columns
        last = max(index for index, (number, _, _) in enumerate(found) if number == _TENSOR_DIMS)
        number, kind, dims = found[last]
        if kind == _VARINT:
            assert dims == columns, "the last dimension of weights is their columns"
            found[last] = (number, kind, fewer)
        else:  # packed
            *others, count = _varints(_message(dims))
            assert count == columns, "the last dimension of weights is their columns"
            found[last] = (number, kind, b"".join(map(_varint, (*others, fewer))))
        return _changed(_joined(found), {_TENSOR_EXTERNAL: entry})

    def entry(value: _Value) -> _Value:
        fields = {number: field for number, _, field in _fields(_message(value))}
        if fields[_ENTRY_KEY] != b"length":
            return value
        length = int(_message(fields[_ENTRY_VALUE])) // columns * fewer
        return _changed(_message(value), {_ENTRY_VALUE: lambda _: b"%d" % length})

    output: _Change = _inside({_DIMENSION_VALUE: column_count})
    for number in reversed(_OUTPUT_TO_DIMENSION):
        output = _inside({number: output})
    return _changed(graph, {_MODEL_GRAPH: _inside({_GRAPH_INITIALIZER: initializer, _GRAPH_OUTPUT: output})})


def _inside(changes: Mapping[int, _Change]) -> _Change:
    return lambda value: _changed(_message(value), changes)


def _changed(message: bytes, changes: Mapping[int, _Change]) -> bytes:
    """The message with the fields of these numbers changed."""
    return _joined((number, kind, changes.get(number, _same)(value)) for number, kind, value in _fields(message))


def _same(value: _Value) -> _Value:
    return value


def _message(value: _Value) -> bytes:
    assert isinstance(value, bytes), "not a message"
    return value


def _joined(fields: Iterator[tuple[int, int, _Value]] | list[tuple[int, int, _Value]]) -> bytes:
    parts: list[bytes] = []
    for number, kind, value in fields:
        parts.append(_varint(number << 3 | kind))
        if isinstance(value, int):
            parts.append(_varint(value))
        else:
            parts += [_varint(len(value)), value] if kind == _BYTES else [value]
    return b"".join(parts)


def _fields(message: bytes) -> Iterator[tuple[int, int, _Value]]:
    """Number, wire type and value of each field, in order."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield number, kind, value
            continue
        size = _FIXED.get(kind, 0)
        if kind == _BYTES:
            size, at = _read_varint(message, at)
        yield number, kind, message[at : at + size]
        at += size


def _varints(packed: bytes) -> Iterator[int]:
    at = 0
    while at < len(packed):
        value, at = _read_varint(packed, at)
        yield value


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])
