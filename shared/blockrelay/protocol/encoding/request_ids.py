"""Ids of requests: as clients see them, and as their cell knows them. Pure.

A cell knows a request as `req-<24 hex digits>`: keys, logs of services and messages have it so. Clients of a gateway
see `req-<cell>-<24 hex digits>`, or what OpenAI's clients expect before it (`cmpl-`, `chatcmpl-`), so that any gateway
knows where to look. Ids without a cell, of earlier releases, mean the cell of the gateway that is asked.
"""

import re
from typing import Literal, NamedTuple

Prefix = Literal["req", "cmpl", "chatcmpl"]
#: Hex digits of a request's name: 96 bits.
DIGITS = 24
_OWN = "req-"
#: The name of a cell.
CELL = r"[a-z0-9-]{1,32}"
PUBLIC_ID = re.compile(rf"(req|cmpl|chatcmpl)-(?:({CELL})-)?([0-9a-f]{{{DIGITS}}})")


class RequestId(NamedTuple):
    """`request` is its cell's name for it; `cell` is empty where the id names none."""

    request: str
    cell: str
    prefix: Prefix


def parse_id(text: str) -> RequestId | None:
    """None for what cannot be the id of a request."""
    found = PUBLIC_ID.fullmatch(text)
    if not found:
        return None
    return RequestId(_OWN + found[3], found[2] or "", found[1])  # pyright: ignore[reportArgumentType]


def public_id(request: str, cell: str, prefix: Prefix = "req") -> str:
    """What clients call the `request` of `cell`."""
    digits = request.removeprefix(_OWN)
    return f"{prefix}-{cell}-{digits}" if cell else f"{prefix}-{digits}"


def own_id(text: str) -> str:
    """What its cell calls the request that clients call `text`; `text` itself where it cannot be an id."""
    found = parse_id(text)
    return found.request if found else text
