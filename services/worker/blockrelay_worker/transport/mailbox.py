"""A queue from which one thread takes all that waits, such as the engine its events."""

from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class Mailbox(SimpleQueue[T]):
    """An unbounded queue. `put` does not wait; any thread may call it. One thread calls `take`.

    The senders of events bound the engine's mailbox: one job or end per run, few Forwards.
    """

    def take(self, wait_s: float | None) -> list[T]:
        """Returns all queued items; waits up to `wait_s` seconds for the first, None: until there is one.

        Empty if none came in time.
        """
        items: list[T] = []
        try:
            items.append(self.get(wait_s is None or wait_s > 0, wait_s))
            while True:
                items.append(self.get_nowait())
        except Empty:
            return items
