"""Streams of a running gateway, as its tests read them."""

from typing import Any

from tests.support.gateway.played import RunningGateway
from tests.support.gateway.sse_client import Event, read_events

TEXT = " has two apples 🙂."
IDS = {"event_ids": True}
WITH_IDS: dict[str, Any] = {"prompt": "x", "stream": True, "stream_options": IDS}


def stream(gateway: RunningGateway, path: str = "/v1/completions", **body: Any) -> list[Event]:
    body["stream_options"] = IDS | body.get("stream_options", {})
    with gateway.http.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(read_events(response))


def wait_for_keep_alives(gateway: RunningGateway) -> None:
    """Three intervals, counted by another stream's comments."""
    comments: list[str] = []
    with gateway.http.stream("POST", "/v1/completions", json={**WITH_IDS, "prompt": "x"}) as response:
        lines = response.iter_lines()
        while len(comments) < 3:
            line = next(lines)
            if line.startswith(":"):
                comments.append(line)
