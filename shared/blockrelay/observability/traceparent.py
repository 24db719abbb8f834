"""W3C's traceparent header: the trace and the span of a client that a request belongs to."""

import re

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}")


def clean_traceparent(header: str | None) -> str:
    """The header, or "" when it is absent or malformed (the specification says: ignore it)."""
    return header if header and _TRACEPARENT.fullmatch(header) else ""


def trace_and_parent(header: str) -> tuple[str, str]:
    """Its trace id of 32 and its span id of 16 hex digits; "" and "" of a header that is none."""
    found = _TRACEPARENT.fullmatch(header)
    return (found[1], found[2]) if found else ("", "")
