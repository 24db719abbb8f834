"""What two workers of one host say to each other, and how one is found. Pure.

A connection is a Unix socket that keeps packets apart. Its first packet is a Hello, and with it comes the ring: memory
that the sender writes and the receiver reads. Then a descriptor for each message, which says where in the ring its
fields are, one after the other; back comes, each time, how many messages have been copied out of it. The fields are
those of an entry of the inbox on the payload Redis, and are decoded by the same function.
"""

import re
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from blockrelay.errors import WireError
from blockrelay.protocol.encoding import codec
from blockrelay.protocol.encoding.checks import reading, text

WELCOME = b"welcome"
#: Bytes of a packet that is read whole.
MAX_PACKET = 1024
#: Fields of each kind of message, in their order. Tensors go to no worker of a release that does not know them: such a
#: release serves no part of the blocks that hand them on.
KINDS: dict[int, tuple[str, ...]] = {1: ("head", "rows"), 2: ("next_job",), 3: ("head", "tensors")}
_KIND_OF = {names: kind for kind, names in KINDS.items()}
_DESCRIPTOR = struct.Struct("<BQQQ")  # kind, where its first field begins, length of the first and of the second
_COUNT = struct.Struct("<Q")
_RECORD = re.compile(rb"([0-9a-f]{32})/([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker listens, as its record in the registry says. Names can be seen by everybody on the host, the
    secret only by those who may read the registry."""

    name: str
    secret: str

    @classmethod
    def new(cls) -> "Address":
        return cls(secrets.token_hex(16), secrets.token_hex(16))

    @classmethod
    def from_record(cls, field: bytes | None) -> "Address | None":
        """None: it does not listen, or it is of another release."""
        found = _RECORD.fullmatch(field or b"")
        return cls(found[1].decode(), found[2].decode()) if found else None

    def to_record(self) -> str:
        return f"{self.name}/{self.secret}"

    @property
    def socket_name(self) -> str:
        """In Linux's abstract namespace: no file, and gone with whoever listens."""
        return f"\0blockrelay/{self.name}"


@dataclass(frozen=True, slots=True)
class Hello:
    """Who connects, and that it may."""

    worker: str
    secret: str

    def encode(self) -> bytes:
        return codec.pack({"from": self.worker, "secret": self.secret})

    @classmethod
    def decode(cls, data: bytes) -> "Hello":
        with reading("a worker's hello"):
            message = codec.unpack(data)
            return cls(text(message["from"]), text(message["secret"]))


def describe(fields: Mapping[str, bytes], offset: int) -> bytes:
    """The descriptor of a message whose fields lie one after the other from `offset` on."""
    names = tuple(fields)
    lengths = [len(fields[name]) for name in names]
    return _DESCRIPTOR.pack(_KIND_OF[names], offset, lengths[0], sum(lengths[1:]))


def read_descriptor(data: bytes, ring_bytes: int) -> list[tuple[str, int, int]]:
    """Each field's name, and where in the ring it begins and ends.

    Raises WireError when that is no descriptor, or names what is not in a ring of that size.
    """
    if len(data) != _DESCRIPTOR.size:
        raise WireError(f"a descriptor has {_DESCRIPTOR.size} bytes, not {len(data)}")
    kind, at, *lengths = _DESCRIPTOR.unpack(data)
    names = KINDS.get(kind)
    if names is None:
        raise WireError(f"there is no message of kind {kind}")
    if any(lengths[len(names) :]) or at + sum(lengths) > ring_bytes:
        raise WireError(f"a message at {at} of {lengths} bytes is not in a ring of {ring_bytes}")
    found: list[tuple[str, int, int]] = []
    for name, length in zip(names, lengths, strict=False):
        found.append((name, at, at + length))
        at += length
    return found


def tell_count(count: int) -> bytes:
    return _COUNT.pack(count)


def read_count(data: bytes) -> int:
    """Raises WireError when it is none."""
    if len(data) != _COUNT.size:
        raise WireError(f"a count has {_COUNT.size} bytes, not {len(data)}")
    return _COUNT.unpack(data)[0]
