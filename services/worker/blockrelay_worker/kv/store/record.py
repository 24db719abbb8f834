"""The record of one block's KV page as bytes: a header that says what it holds, then keys and values.

    magic, version   "BRPG", 1
    block, name      the block number, and the block hash (`kv.block_hashes`)
    dtype, kv_heads, head_dim, tokens, bytes   once, for keys and values alike: `bytes` is the size of either
    checksum         CRC-32 of all header fields before it and of the keys and values

A record whose header, length or checksum is not what the reader expects counts as corrupt, and is never used.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.protocol.encoding.kv_pages import KvShape
from blockrelay_worker.kernels.specification import PAGE
from blockrelay_worker.kv.block_hashes import HASH_BYTES

MAGIC = b"BRPG"
VERSION = 1
_FIELDS = struct.Struct(f"<4sHH{HASH_BYTES}s4sIIIQ")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class PageShape(KvShape):
    """Shape and dtype of one KV page of one block, and the size of its record."""

    @property
    def record_bytes(self) -> int:
        """Bytes of a record, header included."""
        return HEADER_BYTES + 2 * self.half_bytes


def encode_record(
    block_hash: bytes,
    block: int,
    shape: PageShape,
    keys: NDArray[Any],
    values: NDArray[Any],
    into: memoryview | None = None,
) -> memoryview:
    """Encodes the record of a page from the block's `keys` and `values`, in the dtype of `shape`.

    They are [kv_heads, head_dim, 16] and [kv_heads, 16, head_dim].
    Writes to `into` (`shape.record_bytes` bytes of writable memory), or to new memory, and returns it.
    """
    record = memoryview(bytearray(shape.record_bytes)) if into is None else into
    middle = HEADER_BYTES + shape.half_bytes
    for half, array in ((record[HEADER_BYTES:middle], keys), (record[middle:], values)):
        np.frombuffer(half, array.dtype).reshape(array.shape)[...] = array
    head = _head(block_hash, block, shape)
    record[:HEADER_BYTES] = head + _CHECKSUM.pack(zlib.crc32(record[HEADER_BYTES:], zlib.crc32(head)))
    return record


def decode_record(data: bytes, block_hash: bytes, block: int, shape: PageShape) -> tuple[memoryview, memoryview] | None:
    """Returns keys and values as bytes (views); None unless `data` is an intact record of this page and block."""
    head = _head(block_hash, block, shape)
    if len(data) != shape.record_bytes or not data.startswith(head):
        return None
    view = memoryview(data)
    (checksum,) = _CHECKSUM.unpack_from(data, len(head))
    payload = view[HEADER_BYTES:]
    if zlib.crc32(payload, zlib.crc32(head)) != checksum:
        return None
    return payload[: shape.half_bytes], payload[shape.half_bytes :]


def _head(block_hash: bytes, block: int, shape: PageShape) -> bytes:
    dtype = np.dtype(shape.dtype).newbyteorder("<").str.encode()
    return _FIELDS.pack(
        MAGIC, VERSION, block, block_hash, dtype, shape.kv_heads, shape.head_dim, PAGE, shape.half_bytes
    )
