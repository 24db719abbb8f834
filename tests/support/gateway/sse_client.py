"""Reads server-sent events as the standard says."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Event:
    """`data` parsed, or the word DONE. `id` is None where the event had none."""

    id: str | None
    data: Any


def read_events(response: httpx.Response, *, comments: list[str] | None = None) -> Iterator[Event]:
    """The events of a stream, up to and including [DONE]. Comments go into `comments`."""
    event_id: str | None = None
    data: list[str] = []
    for line in response.iter_lines():
        if line.startswith(":"):
            if comments is not None:
                comments.append(line[1:].strip())
        elif line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            data.append(line[6:])
        elif not line and data:
            text = "\n".join(data)
            yield Event(event_id, "DONE" if text == "[DONE]" else json.loads(text))
            if text == "[DONE]":
                return
            event_id, data = None, []
    raise AssertionError("the stream was closed without [DONE]")
