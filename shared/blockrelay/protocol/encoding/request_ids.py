"""Converts request ids between the form that clients see and the form inside a cell. Pure.

Inside a cell a request is `req-<24 hex digits>`: in keys, messages and logs of services. Clients see
`req-<cell>-<24 hex digits>`, or the prefixes that OpenAI's clients expect (`cmpl-`, `chatcmpl-`), so that any gateway
knows the cell. An id without a cell means the cell of the gateway that gets it.
"""

import hashlib
import re
from typing import Literal, NamedTuple

Prefix = Literal["req", "cmpl", "chatcmpl"]
#: Hex digits of a request id: 96 bits.
DIGITS = 24
_OWN = "req-"
#: Pattern of the name of a cell.
CELL = r"[a-z0-9-]{1,32}"
PUBLIC_ID = re.compile(rf"(req|cmpl|chatcmpl)-(?:({CELL})-)?([0-9a-f]{{{DIGITS}}})")


class RequestId(NamedTuple):
    """The parts of a request id that a client sent."""

    request_id: str  # the id inside the cell
    cell: str  # empty where the id names none
    prefix: Prefix


def parse_id(text: str) -> RequestId | None:
    """Returns the parts of a request id; None if `text` cannot be one."""
    match = PUBLIC_ID.fullmatch(text)
    if not match:
        return None
    return RequestId(_OWN + match[3], match[2] or "", match[1])  # pyright: ignore[reportArgumentType]


def public_id(request_id: str, cell: str, prefix: Prefix = "req") -> str:
    """Returns the id that clients see for the `request_id` of `cell`; without a cell in it if `cell` is empty."""
    digits = request_id.removeprefix(_OWN)
    return f"{prefix}-{cell}-{digits}" if cell else f"{prefix}-{digits}"


def sibling(base: str, index: int) -> str:
    """Returns the id, inside the cell, of choice `index` of the body whose first choice is the request `base`."""
    if index == 0:
        return base
    return _OWN + hashlib.sha256(f"{base}/{index}".encode()).hexdigest()[:DIGITS]


def own_id(text: str) -> str:
    """Returns the id inside the cell for an id that a client sent; `text` itself if it cannot be an id."""
    parsed = parse_id(text)
    return parsed.request_id if parsed else text
