"""The protocol between two workers of one host, and the address of a worker. Pure.

A connection is a Unix socket of type SOCK_SEQPACKET. Its first packet is a Hello, with the descriptor of the ring:
memory that the sender writes and the receiver reads. A packet for each message follows, which says where in the ring
the message's fields are, one after the other. The receiver answers each with the number of messages copied so far. The
fields are those of an inbox entry on the payload Redis, and the same function decodes them.
"""

import re
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from blockrelay.errors import WireError
from blockrelay.protocol.encoding import codec
from blockrelay.protocol.encoding.checks import reading, text

#: The receiver's answer to a valid Hello.
WELCOME = b"welcome"
#: Maximum number of bytes in a packet.
MAX_PACKET = 1024
#: Fields of each kind of message, in their order. A release that does not know kind 3 never receives it: it serves no
#: stage of models with named tensors.
KINDS: dict[int, tuple[str, ...]] = {1: ("head", "rows"), 2: ("next_job",), 3: ("head", "tensors")}
_KIND_OF = {names: kind for kind, names in KINDS.items()}
_DESCRIPTOR = struct.Struct("<BQQQ")  # kind, offset of the first field, length of the first and of the second
_COUNT = struct.Struct("<Q")
_RECORD = re.compile(rb"([0-9a-f]{32})/([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class Address:
    """The address where a worker listens, from its registry record.

    All processes of the host can see the name; only readers of the registry know the secret.
    """

    name: str
    secret: str

    @classmethod
    def new(cls) -> "Address":
        """A random address."""
        return cls(secrets.token_hex(16), secrets.token_hex(16))

    @classmethod
    def from_record(cls, field: bytes | None) -> "Address | None":
        """Parses the record's field; None if the worker does not listen, or is of a release with another format."""
        match = _RECORD.fullmatch(field or b"")
        return cls(match[1].decode(), match[2].decode()) if match else None

    def to_record(self) -> str:
        """The address as a field of the registry record."""
        return f"{self.name}/{self.secret}"

    @property
    def socket_name(self) -> str:
        """The socket's name in Linux's abstract namespace: there is no file, and it vanishes with the listener."""
        return f"\0blockrelay/{self.name}"


@dataclass(frozen=True, slots=True)
class Hello:
    """The first packet of a connection: the id of the connecting worker, and the secret of the listening one."""

    worker_id: str
    secret: str

    def encode(self) -> bytes:
        """Encodes the packet; `decode` is its inverse."""
        return codec.pack({"from": self.worker_id, "secret": self.secret})

    @classmethod
    def decode(cls, data: bytes) -> "Hello":
        """Decodes a packet. Raises WireError if it is malformed."""
        with reading("a worker's hello"):
            message = codec.unpack(data)
            return cls(text(message["from"]), text(message["secret"]))


def describe(fields: Mapping[str, bytes], offset: int) -> bytes:
    """The packet for a message whose fields are in the ring, one after the other, from `offset` (bytes) on.

    The names of `fields` must be those of a kind in KINDS, in that order.
    """
    names = tuple(fields)
    lengths = [len(fields[name]) for name in names]
    return _DESCRIPTOR.pack(_KIND_OF[names], offset, lengths[0], sum(lengths[1:]))


def read_descriptor(data: bytes, ring_bytes: int) -> list[tuple[str, int, int]]:
    """Decodes a message's packet: the name, begin and end of each field in the ring.

    Raises WireError if it is malformed, or points outside a ring of `ring_bytes` bytes.
    """
    if len(data) != _DESCRIPTOR.size:
        raise WireError(f"a descriptor has {_DESCRIPTOR.size} bytes, not {len(data)}")
    kind, at, *lengths = _DESCRIPTOR.unpack(data)
    names = KINDS.get(kind)
    if names is None:
        raise WireError(f"there is no message of kind {kind}")
    if any(lengths[len(names) :]) or at + sum(lengths) > ring_bytes:
        raise WireError(f"a message at {at} of {lengths} bytes is not in a ring of {ring_bytes}")
    fields: list[tuple[str, int, int]] = []
    for name, length in zip(names, lengths, strict=False):
        fields.append((name, at, at + length))
        at += length
    return fields


def tell_count(count: int) -> bytes:
    """The receiver's packet: the number of messages that it has copied since the connection began."""
    return _COUNT.pack(count)


def read_count(data: bytes) -> int:
    """Decodes the receiver's packet: the number of messages copied. Raises WireError if it is malformed."""
    if len(data) != _COUNT.size:
        raise WireError(f"a count has {_COUNT.size} bytes, not {len(data)}")
    return _COUNT.unpack(data)[0]
