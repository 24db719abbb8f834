"""The only module that touches msgpack and msgpack_numpy.

Control messages are msgpack maps with small arrays; rows travel as raw bytes beside them. `msgpack_numpy.decode`
unpickles object arrays, so our hook refuses every dtype outside a closed list before the library sees the array
(no pickle is reachable from a queue).
"""

from collections.abc import Mapping
from typing import Any, cast

import msgpack
import msgpack_numpy
import numpy as np
import numpy.typing as npt

from blockrelay.errors import WireError

WIRE_VERSION = 1
MAX_CONTROL_BYTES = 16 << 20
ALLOWED_DTYPES = frozenset({"<i4", "<i8", "<f4", "<f2", "|u1", "|i1", "<u4", "|b1"})

FloatRows = npt.NDArray[np.float32]


def _refuse_objects(value: dict[Any, Any]) -> Any:
    """Decode hook: arrays of allowed dtypes only; everything else that claims to be an array is an error."""
    if b"nd" in value or "nd" in value or b"complex" in value or "complex" in value:
        dtype = value.get("type", value.get(b"type"))
        kind = value.get("kind", value.get(b"kind"))
        if kind or not isinstance(dtype, str | bytes):
            raise WireError(f"array of kind {kind!r} and dtype {dtype!r} is not allowed in a message")
        name = dtype.decode("ascii", "replace") if isinstance(dtype, bytes) else dtype
        if name not in ALLOWED_DTYPES:
            raise WireError(f"array dtype {name!r} is not allowed in a message")
        return msgpack_numpy.decode(value)
    return value


def pack(message: dict[str, Any]) -> bytes:
    """A message as bytes. Values: None, bool, int, float, str, bytes, lists, maps, NumPy arrays of allowed dtypes."""
    return cast(bytes, msgpack.packb({"v": WIRE_VERSION, **message}, default=msgpack_numpy.encode, use_bin_type=True))


def unpack(data: bytes) -> dict[str, Any]:
    """The message in `data`.

    Raises:
        WireError: not msgpack, not a map, another version, too large, or an array dtype outside the closed list.
    """
    if len(data) > MAX_CONTROL_BYTES:
        raise WireError(f"message of {len(data)} bytes is over the limit of {MAX_CONTROL_BYTES}")
    try:
        message = msgpack.unpackb(data, object_hook=_refuse_objects, raw=False, strict_map_key=False)
    except WireError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"message does not decode: {error}") from error
    if not isinstance(message, dict) or cast(dict[str, Any], message).get("v") != WIRE_VERSION:
        raise WireError(f"message is not a map of wire version {WIRE_VERSION}")
    return cast(dict[str, Any], message)


def pack_arguments(values: Mapping[str, Any]) -> bytes:
    """A msgpack map for a script, which reads it with cmsgpack (text and bytes alike, no arrays, no version)."""
    return cast(bytes, msgpack.packb(values, use_bin_type=False))


def pack_list(values: list[Any]) -> bytes:
    """A msgpack array for the scripts, which read it with cmsgpack (no arrays, no version)."""
    return cast(bytes, msgpack.packb(values, use_bin_type=False))


def unpack_list(data: bytes) -> list[Any]:
    """A msgpack array written by a script. Raises WireError when it is anything else."""
    try:
        values = msgpack.unpackb(data, raw=False)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"list does not decode: {error}") from error
    if not isinstance(values, list):
        raise WireError("expected a list")
    return cast(list[Any], values)


def unpack_fields(data: bytes) -> dict[bytes, bytes]:
    """A msgpack array of names and values written by a script. Raises WireError when it is anything else."""
    try:
        values = msgpack.unpackb(data, raw=True)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"fields do not decode: {error}") from error
    known = cast(list[Any], values) if isinstance(values, list) else []
    if not known or len(known) % 2 or not all(isinstance(value, bytes) for value in known):
        raise WireError("expected names and values")
    return dict(zip(known[::2], known[1::2], strict=True))


def rows_from_bytes(data: bytes, rows: int, hidden: int) -> FloatRows:
    """Rows [rows, hidden] float32 from raw little-endian bytes (read-only view). Raises WireError on another size."""
    if rows < 1 or hidden < 1 or len(data) != rows * hidden * 4:
        raise WireError(f"{len(data)} bytes are not {rows} rows of {hidden} float32 values")
    return np.frombuffer(data, dtype="<f4").reshape(rows, hidden)
