"""The queue of all events for the engine. Other threads fill it; only the engine thread empties it."""

import queue

from blockrelay_worker.runs.kv_load import Loaded
from blockrelay_worker.transport.events import TransportEvent

Event = TransportEvent | Loaded


class Mailbox:
    """An unbounded queue of events. Its senders bound it: one job or end per run, few Forwards."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        """Queues an event for the engine. Does not wait; any thread may call it."""
        self._queue.put(event)

    def take(self, wait_s: float) -> list[Event]:
        """Returns all queued events; waits up to `wait_s` seconds for the first."""
        events: list[Event] = []
        try:
            events.append(self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait())
            while True:
                events.append(self._queue.get_nowait())
        except queue.Empty:
            return events
