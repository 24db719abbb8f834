"""One block's page as bytes: a header that says what it is, and the keys and values.

    magic, version   "BRPG", 1
    block, name      what it holds (page_names)
    dtype, kv_heads, head_dim, tokens, bytes   of the keys, and again of the values
    checksum         CRC-32 of all header fields before it and of the keys and values

A record that differs in anything from what the reader expects is a miss, never data.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.protocol.encoding.kv_pages import KvShape
from blockrelay_worker.kernels.specification import PAGE
from blockrelay_worker.kv.page_names import NAME_BYTES

MAGIC = b"BRPG"
VERSION = 1
_FIELDS = struct.Struct(f"<4sHH{NAME_BYTES}s4sIIIQ")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class PageShape(KvShape):
    """Of one page of one block."""

    @property
    def record_bytes(self) -> int:
        return HEADER_BYTES + 2 * self.half_bytes


def encode_record(
    name: bytes,
    block: int,
    shape: PageShape,
    keys: NDArray[Any],
    values: NDArray[Any],
    into: memoryview | None = None,
) -> memoryview:
    """The record of a page; `keys` and `values` are the block's arrays of this page.

    Written to `into`, `shape.record_bytes` of writable memory, or to fresh memory.
    """
    record = memoryview(bytearray(shape.record_bytes)) if into is None else into
    middle = HEADER_BYTES + shape.half_bytes
    for half, array in ((record[HEADER_BYTES:middle], keys), (record[middle:], values)):
        np.frombuffer(half, array.dtype).reshape(array.shape)[...] = array
    head = _head(name, block, shape)
    record[:HEADER_BYTES] = head + _CHECKSUM.pack(zlib.crc32(record[HEADER_BYTES:], zlib.crc32(head)))
    return record


def decode_record(data: bytes, name: bytes, block: int, shape: PageShape) -> tuple[memoryview, memoryview] | None:
    """Keys and values as bytes, if `data` is exactly the record of this page of this block; else None."""
    head = _head(name, block, shape)
    if len(data) != shape.record_bytes or not data.startswith(head):
        return None
    view = memoryview(data)
    (checksum,) = _CHECKSUM.unpack_from(data, len(head))
    payload = view[HEADER_BYTES:]
    if zlib.crc32(payload, zlib.crc32(head)) != checksum:
        return None
    return payload[: shape.half_bytes], payload[shape.half_bytes :]


def _head(name: bytes, block: int, shape: PageShape) -> bytes:
    dtype = np.dtype(shape.dtype).newbyteorder("<").str.encode()
    return _FIELDS.pack(MAGIC, VERSION, block, name, dtype, shape.kv_heads, shape.head_dim, PAGE, shape.half_bytes)
