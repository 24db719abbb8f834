"""Checks and reads W3C's `traceparent` header, which names the client's trace and span that a request belongs to.

Format: https://www.w3.org/TR/trace-context/#traceparent-header
"""

import re

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}")


def clean_traceparent(header: str | None) -> str:
    """Returns `header`, or "" when it is absent or malformed (the specification says to ignore it then)."""
    return header if header and _TRACEPARENT.fullmatch(header) else ""


def trace_and_parent(header: str) -> tuple[str, str]:
    """Returns the trace id (32 hex digits) and the span id (16) in a `traceparent` header; twice "" if malformed."""
    match = _TRACEPARENT.fullmatch(header)
    return (match[1], match[2]) if match else ("", "")
