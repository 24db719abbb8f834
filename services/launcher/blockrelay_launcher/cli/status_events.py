"""The command `blockrelay status --follow`: prints the events of all stages as they happen, from the cell's Redis."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from blockrelay.errors import WireError
from blockrelay.protocol.status_events import decode_events
from blockrelay.redis.cell_address import CellAddress, connected
from blockrelay.redis.subscription import subscribed


def follow(cell: CellAddress, tell: Callable[[str], None], *, as_json: bool) -> None:
    """Calls `tell` with a line for each event (JSON if `as_json`), until the process is interrupted.

    Raises ServiceUnavailable when the connection to Redis is lost, UsageError if the cell speaks another protocol.
    """
    with connected(cell) as client:
        for message in subscribed(client, cell.keys.status_channel):
            for event in [] if message is None else _events(message):
                tell(json.dumps(event) if as_json else line(event, datetime.now(UTC)))


def line(event: dict[str, Any], now: datetime) -> str:
    """Returns an event as a line for people; `now` is its time.

    `event` is the JSON object that a worker publishes, as `decode_events` reads it.
    """
    shard, state = event["shard"], event["inference_state"]
    parts = [
        now.strftime("%H:%M:%S.%f")[:-3],
        event["node_id"],
        f"layers {shard['start_layer']}-{shard['end_layer']}",
        event["status"],
        event["request_id"] or "-",
        f"{state['rows']} rows from {state['position']}",
    ]
    if "elapsed_time_ns" in event:
        parts.append(f"{event['elapsed_time_ns'] / 1e6:.2f} ms")
    return "  ".join(parts)


def _events(message: bytes) -> list[dict[str, Any]]:
    try:
        return decode_events(message)
    except WireError:  # from a worker of another release
        return []
