"""Reads the timeline of a request from its record. The scripts write it, so times are Redis' clock."""

import re
from collections.abc import Mapping
from typing import Any

_NOTE = re.compile(r"(\d+)([ctrfnwd])([^;]*);")


def timeline(record: Mapping[bytes, bytes]) -> list[dict[str, Any]]:
    """Returns the events {"event", "at_ms" (Unix), ...} of a request, in the order in which the scripts wrote them.

    `record` must be whole (`blockrelay.protocol.records.ended.whole_record`). The events and their further fields:
    accepted, queued, claimed (route_class), first_token, rerun (reason; tokens committed so far; numerics_id if it
    waits for a worker of that id), numerics_changed (numerics_id; tokens before the change), fallback (block_id,
    blocks, reason, error_code), fallback_denied (block_id that waits for a GPU), end (reason).

    Do not sort by time: several events may have the same millisecond, and times jump when the clock is set back. The
    record keeps 1000 characters of notes, so the oldest events of a long list are missing, but never the first token.
    """
    accepted = int(record[b"accepted_ms"])
    events = [_event("accepted", accepted), _event("queued", accepted)]
    notes: list[dict[str, Any]] = []
    for at, kind, detail in _NOTE.findall(record.get(b"notes", b"").decode()):
        if kind != "w":
            notes.append(_read(at, kind, detail))
        elif notes and notes[-1]["event"] == "fallback":
            notes[-1] |= _why(detail)
    noted = {event["event"] for event in notes}
    # An event whose note was dropped came before all events that still have one.
    if b"claimed_ms" in record and not (notes and notes[0]["event"] == "claimed"):
        events.append(_event("claimed", int(record[b"claimed_ms"])))
    if b"first_token_ms" in record and "first_token" not in noted:
        events.append(_event("first_token", int(record[b"first_token_ms"])))
    events += notes
    if b"end" in record:
        events.append(_event("end", int(record[b"progress_ms"]), reason=record[b"end"].decode()))
    return events


def waits_for(record: Mapping[bytes, bytes]) -> str | None:
    """Returns the numerics id that a queued re-run waits for; None if any worker may take it or it is not queued."""
    if not record.get(b"job", b"").startswith(b"pinned "):
        return None
    return record[b"numerics"].decode().rpartition("+")[2].partition("@")[0]


def _event(name: str, at_ms: int, **more: Any) -> dict[str, Any]:
    return {"event": name, "at_ms": at_ms, **more}


def _why(detail: str) -> dict[str, Any]:
    """Returns the fields of a fallback event from its `w` note: blocks, reason and error code."""
    stage, reason, code = detail.split(",")
    first, _, last = stage.partition("-")
    blocks = [f"block_{number}" for number in range(int(first), int(last) + 1)]
    return {"blocks": blocks, "reason": reason, "error_code": code or None}


def _read(at: str, kind: str, detail: str) -> dict[str, Any]:
    if kind == "c":
        return _event("claimed", int(at), route_class=detail)
    if kind == "t":
        return _event("first_token", int(at))
    if kind in "fd":
        return _event("fallback" if kind == "f" else "fallback_denied", int(at), block_id=detail)
    what, _, rest = detail.partition("@")
    tokens, _, numerics = rest.partition("=")
    if kind == "n":
        return _event("numerics_changed", int(at), numerics_id=what, tokens=int(tokens))
    waits = {"numerics_id": numerics} if numerics else {}
    return _event("rerun", int(at), reason=what, tokens=int(tokens), **waits)
