"""Publishes status events of this stage (beginnings and ends of computed parts) to subscribers on Redis."""

import threading
from collections import deque
from collections.abc import Iterable

from blockrelay.errors import RedisTrouble
from blockrelay.protocol.status_events import NodeStatus, encode_events
from blockrelay_worker.policy import (
    STATUS_EVENTS_A_MESSAGE,
    STATUS_EVENTS_KEPT,
    STATUS_PAUSE_S,
    STATUS_PUBLISH_S,
    SUBSCRIBER_POLL_S,
)
from blockrelay_worker.transport.redis_links import Links


class StatusEventPublisher(threading.Thread):
    """Publishes events in a thread; one other thread calls `put` while `has_subscribers` is true.

    Events that cannot be published are lost. `has_subscribers` is false until Redis was first asked.
    """

    def __init__(self, links: Links) -> None:
        super().__init__(name="status events", daemon=True)
        self.has_subscribers = False
        self._pause_s = SUBSCRIBER_POLL_S
        self._links, self._closed = links, threading.Event()
        self._waiting: deque[NodeStatus] = deque(maxlen=STATUS_EVENTS_KEPT)

    def put(self, events: Iterable[NodeStatus]) -> None:
        """Queues events. Does not wait. If more than STATUS_EVENTS_KEPT wait, the oldest are dropped."""
        self._waiting.extend(events)

    def run(self) -> None:
        while not self._closed.wait(self._pause_s):
            self._publish()

    def close(self) -> None:
        """Ends the thread, and publishes what waits if there are subscribers. Needs `start`.

        Waits up to 1 s for the thread. If that does not end, because Redis does not answer, nothing is published.
        """
        self._closed.set()
        self.join(1.0)
        if self.has_subscribers and not self.is_alive():
            self._publish()

    def _publish(self) -> None:
        """Publishes all waiting events; an empty message if there is none, to learn whether there is a subscriber."""
        while True:
            batch = [self._waiting.popleft() for _ in range(min(STATUS_EVENTS_A_MESSAGE, len(self._waiting)))]
            try:
                listeners = self._links.control.publish(self._links.keys.status_channel, encode_events(batch))
                self._pause_s = STATUS_PUBLISH_S if listeners else SUBSCRIBER_POLL_S
            except RedisTrouble as error:
                self._links.watch.count_error(error)
                listeners, self._pause_s = 0, STATUS_PAUSE_S
            self.has_subscribers = bool(listeners)
            if not self.has_subscribers:
                self._waiting.clear()
            if not self._waiting:
                return
