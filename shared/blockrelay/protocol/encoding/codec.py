"""Encodes messages as msgpack and decodes them safely; the only module that uses msgpack and msgpack_numpy.

Control messages are msgpack maps with small arrays; hidden states travel beside them as raw bytes.
`msgpack_numpy.decode` would unpickle object arrays. A hook therefore refuses every dtype outside a closed list before
the library sees the array, so that no message can reach pickle.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

import msgpack
import msgpack_numpy
import numpy as np
import numpy.typing as npt

from blockrelay.errors import WireError

#: The field `v` of every message of `pack`; `unpack` refuses other versions.
WIRE_VERSION = 1
#: Most bytes of a message without hidden states or named tensors.
MAX_CONTROL_BYTES = 16 << 20
#: Array dtypes allowed in a message: little-endian numbers and booleans; no objects, text or records.
ALLOWED_DTYPES = frozenset({"|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"})

FloatRows = npt.NDArray[np.float32]


#: Keys of the maps by which `msgpack_numpy` encodes an array and a NumPy scalar.
_ARRAY, _NUMBER = {b"nd", b"type", b"kind", b"shape", b"data"}, {b"nd", b"type", b"data"}
_CLAIMS = (b"nd", "nd", b"complex", "complex")


def _refuse_objects(value: dict[Any, Any]) -> Any:
    """Decode hook that turns encoded arrays of allowed dtypes into arrays, and leaves other maps as they are.

    Raises WireError for an array of another dtype, a size that its bytes do not have, or keys beside those that
    `msgpack_numpy` reads.
    """
    if not any(claim in value for claim in _CLAIMS):
        return value
    is_array = value.get(b"nd") is True
    dtype, data = value.get(b"type"), value.get(b"data")
    if set(value) != (_ARRAY if is_array else _NUMBER) or value.get(b"kind", b"") != b"" or type(data) is not bytes:
        raise WireError("an array of that form is not allowed in a message")
    if dtype not in ALLOWED_DTYPES:
        raise WireError(f"array dtype {dtype!r:.40} is not allowed in a message")
    shape = value[b"shape"] if is_array else []
    if type(shape) is not list or not all(type(size) is int and size >= 0 for size in cast(list[Any], shape)):
        raise WireError("an array whose shape is not a list of sizes")
    if len(data) != math.prod(cast(list[int], shape)) * np.dtype(dtype).itemsize:
        raise WireError(f"{len(data)} bytes are not an array {shape!r:.60} of {dtype}")
    return msgpack_numpy.decode(value)


def pack(message: dict[str, Any]) -> bytes:
    """Returns a message as bytes. Values: None, bool, int, float, str, bytes, list, map, arrays of ALLOWED_DTYPES."""
    return cast(bytes, msgpack.packb({"v": WIRE_VERSION, **message}, default=msgpack_numpy.encode, use_bin_type=True))


def unpack(data: bytes, *, max_bytes: int = MAX_CONTROL_BYTES, longest: int | None = None) -> dict[str, Any]:
    """Returns the message in `data`; its arrays are read-only.

    Raises:
        WireError: not msgpack, not a map, another version, more than `max_bytes` bytes, a list of more than `longest`
            values, or an array dtype outside ALLOWED_DTYPES.
    """
    if len(data) > max_bytes:
        raise WireError(f"message of {len(data)} bytes is over the limit of {max_bytes}")
    longest = len(data) if longest is None else longest
    try:
        message = msgpack.unpackb(
            data, object_hook=_refuse_objects, raw=False, strict_map_key=False, max_array_len=longest
        )
    except WireError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"message does not decode: {error}") from error
    if not isinstance(message, dict) or cast(dict[str, Any], message).get("v") != WIRE_VERSION:
        raise WireError(f"message is not a map of wire version {WIRE_VERSION}")
    return cast(dict[str, Any], message)


def pack_for_script(values: Mapping[str, Any] | list[Any]) -> bytes:
    """Returns values as msgpack for a script, which reads them with cmsgpack: no arrays, no version, text as bytes."""
    return cast(bytes, msgpack.packb(values, use_bin_type=False))


def unpack_list(data: bytes, *, raw: bool = False) -> list[Any]:
    """Returns the msgpack list that a script wrote; `raw`: with bytes for text. Raises WireError for anything else."""
    try:
        values = msgpack.unpackb(data, raw=raw)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"list does not decode: {error}") from error
    if not isinstance(values, list):
        raise WireError("expected a list")
    return cast(list[Any], values)


def unpack_fields(data: bytes) -> dict[bytes, bytes]:
    """Returns the fields in a msgpack list of alternating names and values that a script wrote.

    Raises WireError for anything else, and for an empty list.
    """
    listed = unpack_list(data, raw=True)
    if not listed or len(listed) % 2 or not all(isinstance(value, bytes) for value in listed):
        raise WireError("expected names and values")
    return dict(zip(listed[::2], listed[1::2], strict=True))


def rows_from_bytes(data: bytes, rows: int, hidden: int) -> FloatRows:
    """Returns a read-only float32 view [rows, hidden] of little-endian bytes. Raises WireError for another size."""
    if rows < 1 or hidden < 1 or len(data) != rows * hidden * 4:
        raise WireError(f"{len(data)} bytes are not {rows} rows of {hidden} float32 values")
    return np.frombuffer(data, dtype="<f4").reshape(rows, hidden)
