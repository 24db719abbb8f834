"""What this stage does, published for whoever follows it."""

import threading
from collections import deque
from collections.abc import Iterable

from blockrelay.errors import RedisTrouble
from blockrelay.protocol.status_events import NodeStatus, encode_events
from blockrelay_worker.transport.redis_links import Links

#: How often a worker asks whether somebody follows, and how often it publishes while somebody does. Seconds.
ASK_S, PUBLISH_S = 0.5, 0.02
#: How long it leaves a Redis alone that refused, or did not answer. Seconds.
REFUSED_S = 5.0
#: Events that wait at most; the oldest go first. Nobody waits for a follower.
KEPT = 4096
#: Events of one message.
PER_MESSAGE = 256


class StatusEvents(threading.Thread):
    """`put` from one thread while `followed`. What cannot be published is lost."""

    def __init__(self, links: Links) -> None:
        super().__init__(name="status events", daemon=True)
        self.followed = False
        self._pause_s = ASK_S
        self._links, self._closed = links, threading.Event()
        self._waiting: deque[NodeStatus] = deque(maxlen=KEPT)

    def put(self, events: Iterable[NodeStatus]) -> None:
        self._waiting.extend(events)

    def run(self) -> None:
        while not self._closed.wait(self._pause_s):
            self._publish()

    def close(self) -> None:
        """Publish what waits and end; who stands before a Redis that does not answer is not waited for."""
        self._closed.set()
        self.join(1.0)
        if self.followed and not self.is_alive():
            self._publish()

    def _publish(self) -> None:
        """Everything that waits; without anything only whether somebody listens."""
        while True:
            batch = [self._waiting.popleft() for _ in range(min(PER_MESSAGE, len(self._waiting)))]
            try:
                listeners = self._links.control.publish(self._links.keys.status_channel, encode_events(batch))
                self._pause_s = PUBLISH_S if listeners else ASK_S
            except RedisTrouble as error:
                self._links.watch.met(error)
                listeners, self._pause_s = 0, REFUSED_S
            self.followed = bool(listeners)
            if not self.followed:
                self._waiting.clear()
            if not self._waiting:
                return
