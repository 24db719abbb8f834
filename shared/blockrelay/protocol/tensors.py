"""Tensors in the JSON of clients, and tensor results as the last stage stores them on the payload Redis.

JSON form: `{"_tensor_": true, "dtype", "shape", "data_b64"}` with little-endian raw bytes in
base64, or `{"_tensor_": true, "data": [...]}` with a nested list, int64 unless `dtype` says otherwise, or that list
alone; a flat list without `shape` gets one leading batch axis.

Result form: 20 bytes of header (magic, version, crc32 of the values, rows, columns; little-endian), then float32 rows.
"""

import base64
import binascii
import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import BadRequest, WireError

#: The closed list of dtypes a client may send. Objects, strings and complex numbers are not among them.
DTYPES = ("bool", "int8", "uint8", "int32", "int64", "float16", "float32")
MAX_AXES = 8
#: A multiple of 3, so that the base64 of each piece ends without padding, but for the last.
PIECE_BYTES = 3 << 16
_FIELDS = frozenset({"_tensor_", "dtype", "shape", "data_b64", "data"})
_MAGIC = b"BRRT"
_HEADER = struct.Struct("<4sIIII")
_VERSION = 1
HEADER_BYTES = _HEADER.size


def decode_tensor(value: object, *, param: str, max_elements: int) -> NDArray[Any]:
    """Returns the array in a JSON tensor; C order, native dtype from DTYPES, at least one axis.

    Checks `shape` before it decodes the elements. Raises BadRequest with `param` for anything that is not such a
    tensor: an object without `_tensor_`, unknown field, dtype outside the list, wrong base64, more than `max_elements`
    elements, bytes that do not fill the shape, a ragged list, a number that is not of the dtype.
    """
    if isinstance(value, list):
        return _from_list(cast(list[object], value), np.dtype(np.int64), None, param, max_elements)
    if not isinstance(value, dict) or cast(dict[str, Any], value).get("_tensor_") is not True:
        raise BadRequest(f'{param} must be a tensor: an object with "_tensor_": true, or a list', param=param)
    fields = cast(dict[str, Any], value)
    for name in fields:
        if name not in _FIELDS:
            raise BadRequest(f"{param} has an unknown field {name!r}", param=param)
    if ("data" in fields) == ("data_b64" in fields):
        raise BadRequest(f"{param} needs either data or data_b64", param=param)
    shape = _shape(fields["shape"], param, max_elements) if "shape" in fields else None
    if "data" in fields:
        return _from_list(fields["data"], _dtype(fields.get("dtype", "int64"), param), shape, param, max_elements)
    if "dtype" not in fields or shape is None:
        raise BadRequest(f"{param}: data_b64 needs dtype and shape", param=param)
    return _from_base64(fields["data_b64"], _dtype(fields["dtype"], param), shape, param)


def to_float16(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """Converts to float16: rounds to even, clips at the largest finite float16, keeps NaN."""
    limit = np.float32(65504.0)
    return np.clip(values, -limit, limit).astype(np.float16)


def base64_pieces(array: NDArray[Any]) -> Iterator[bytes]:
    """Yields the field `data_b64` of a JSON tensor in pieces.

    A piece takes a fraction of a millisecond, so that a server can handle other requests while it answers with a
    hundred megabytes.
    """
    raw = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
    for start in range(0, len(raw), PIECE_BYTES):
        yield base64.b64encode(raw[start : start + PIECE_BYTES].tobytes())


def result_bytes(rows: int, vocab: int) -> int:
    """Returns the length in bytes of `encode_result` for [rows, vocab]."""
    return _HEADER.size + 4 * rows * vocab


def encode_result(rows: NDArray[np.float32]) -> bytes:
    """Returns logits float32 [n, vocab] as the bytes stored in `result:<id>`. Raises WireError for other arrays."""
    if rows.dtype != np.float32 or rows.ndim != 2:
        raise WireError(f"a result is float32 [n, vocab], not {rows.dtype} of {rows.ndim} axes")
    raw = np.ascontiguousarray(rows, dtype="<f4").tobytes()
    return _HEADER.pack(_MAGIC, _VERSION, zlib.crc32(raw), rows.shape[0], rows.shape[1]) + raw


class ResultReader:
    """Reads a stored result piece by piece and writes its last rows, as float16, into an array of the caller.

    Only one piece is in memory at a time.
    """

    def __init__(self, into: NDArray[np.float16]) -> None:
        """`into` is contiguous, [rows, columns]; `begin` refuses results with fewer rows or other columns.

        Call `begin` once, then `push` for each piece in order, then `end`. The array counts only when `end` has passed.
        """
        self._into, self._wanted = into.reshape(-1), into.shape
        self._checksum = self._computed = 0
        self._left = 0  # values still to come

    def begin(self, header: bytes) -> int:
        """Takes the first HEADER_BYTES of a result and returns how many bytes follow.

        Raises WireError for a header that is too short or of another version, for fewer rows, and for other columns.
        """
        if len(header) < _HEADER.size:
            raise WireError(f"a result of {len(header)} bytes has no header")
        magic, version, self._checksum, rows, columns = cast(tuple[bytes, int, int, int, int], _HEADER.unpack(header))
        if magic != _MAGIC or version != _VERSION:
            raise WireError("a result has an unknown magic or version")
        wanted, vocab = self._wanted
        if rows < wanted or columns != vocab:
            raise WireError(f"a result has shape {[rows, columns]}, expected {wanted} rows of {vocab}")
        self._left = rows * columns
        return 4 * self._left

    def push(self, piece: bytes) -> None:
        """Takes the next bytes: whole float32 values, and together no more bytes than `begin` returned.

        Releases the GIL for most of its time.
        """
        self._computed = zlib.crc32(piece, self._computed)
        values = np.frombuffer(piece, dtype="<f4")
        place = self._into.size - self._left  # negative in leading rows, which are not wanted
        self._left -= values.size
        skipped = max(0, min(values.size, -place))
        values, place = values[skipped:], place + skipped
        self._into[place : place + values.size] = to_float16(values)

    def end(self) -> None:
        """Raises WireError if bytes are missing or the checksum is wrong."""
        if self._left or self._computed != self._checksum:
            raise WireError("a result has another checksum than its header says")


def _dtype(name: object, param: str) -> np.dtype[Any]:
    if not isinstance(name, str) or name not in DTYPES:
        raise BadRequest(f"{param}: dtype must be one of {', '.join(DTYPES)}, not {name!r}", param=param)
    return np.dtype(name)


def _shape(value: object, param: str, max_elements: int) -> tuple[int, ...]:
    axes = cast(list[object], value) if isinstance(value, list) else []
    if not 1 <= len(axes) <= MAX_AXES or not all(type(axis) is int and axis >= 0 for axis in axes):
        raise BadRequest(f"{param}: shape must be a list of 1 to {MAX_AXES} sizes", param=param)
    shape = tuple(cast(list[int], axes))
    if math.prod(max(axis, 1) for axis in shape) > max_elements:
        raise BadRequest(f"{param}: shape {list(shape)} has more than {max_elements} elements", param=param)
    return shape


def _from_base64(text: object, dtype: np.dtype[Any], shape: tuple[int, ...], param: str) -> NDArray[Any]:
    if not isinstance(text, str):
        raise BadRequest(f"{param}: data_b64 must be a string", param=param)
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"{param}: data_b64 is not base64", param=param) from error
    expected = math.prod(shape) * dtype.itemsize
    if len(raw) != expected:
        raise BadRequest(
            f"{param}: data_b64 has {len(raw)} bytes; shape {list(shape)} of {dtype.name} needs {expected}", param=param
        )
    if dtype == np.bool_:  # only 0 and 1 are booleans; other bytes would be undefined
        return (np.frombuffer(raw, dtype=np.uint8) != 0).reshape(shape)
    return np.frombuffer(raw, dtype=dtype.newbyteorder("<")).astype(dtype).reshape(shape)


def _from_list(
    data: object, dtype: np.dtype[Any], shape: tuple[int, ...] | None, param: str, max_elements: int
) -> NDArray[Any]:
    flat: list[object] = []
    own_shape = _flatten(data, param, flat, max_elements, 0)
    if shape is not None and math.prod(shape) != len(flat):
        raise BadRequest(
            f"{param}: data has {len(flat)} elements, shape {list(shape)} needs another number", param=param
        )
    for element in flat:
        whole = type(element) is int or (dtype.kind == "b" and type(element) is bool)
        if not whole and not (dtype.kind == "f" and type(element) is float):
            raise BadRequest(f"{param}: data holds {element!r}, which is not {dtype.name}", param=param)
    try:
        array = np.array(flat, dtype=dtype)
    except OverflowError as error:
        raise BadRequest(f"{param}: data holds a number beyond {dtype.name}", param=param) from error
    if shape is None:
        shape = own_shape if len(own_shape) > 1 else (1, *own_shape)
    return array.reshape(shape)


def _flatten(data: object, param: str, flat: list[object], max_elements: int, depth: int) -> tuple[int, ...]:
    """Appends the elements of a nested list to `flat` and returns its shape.

    Raises BadRequest unless all lists of one depth are equally long.
    """
    if not isinstance(data, list) or depth == MAX_AXES:
        raise BadRequest(f"{param}: data must be a nested list of at most {MAX_AXES} axes", param=param)
    items = cast(list[object], data)
    if not any(isinstance(item, list) for item in items):
        if len(flat) + len(items) > max_elements:
            raise BadRequest(f"{param}: data has more than {max_elements} elements", param=param)
        flat.extend(items)
        return (len(items),)
    shapes = {_flatten(item, param, flat, max_elements, depth + 1) for item in items}
    if len(shapes) != 1:
        raise BadRequest(f"{param}: data is ragged", param=param)
    return (len(items), *shapes.pop())
