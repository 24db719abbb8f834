"""What happened to a request and when, from its record. Pure. The scripts write it: times are Redis' clock."""

import re
from collections.abc import Mapping
from typing import Any

_NOTE = re.compile(r"(\d+)([crf])([^;]*);")


def timeline(record: Mapping[bytes, bytes]) -> list[dict[str, Any]]:
    """Events {"event", "at_ms" (Unix), ...} in the order they happened.

    accepted, queued, claimed (route_class), first_token, rerun (reason, tokens committed by then), fallback (block_id),
    end (reason). The record keeps a kilobyte of claims, re-runs and fallbacks: of very many, the oldest are missing.
    """
    accepted = int(record[b"accepted"])
    events = [_event("accepted", accepted), _event("queued", accepted)]
    notes = [_read(*found) for found in _NOTE.findall(record.get(b"notes", b"").decode())]
    if b"claimed" in record and not any(event["event"] == "claimed" for event in notes):
        events.append(_event("claimed", int(record[b"claimed"])))
    events += notes
    if b"first" in record:
        events.append(_event("first_token", int(record[b"first"])))
    events.sort(key=lambda event: event["at_ms"])  # stable: of one moment, in the order above
    if b"end" in record:
        events.append(_event("end", int(record[b"moved"]), reason=record[b"end"].decode()))
    return events


def _event(name: str, at_ms: int, **more: Any) -> dict[str, Any]:
    return {"event": name, "at_ms": at_ms, **more}


def _read(at: str, kind: str, detail: str) -> dict[str, Any]:
    if kind == "c":
        return _event("claimed", int(at), route_class=detail)
    if kind == "f":
        return _event("fallback", int(at), block_id=detail)
    reason, _, tokens = detail.partition("@")
    return _event("rerun", int(at), reason=reason, tokens=int(tokens))
