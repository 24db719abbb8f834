"""The active requests of a gateway by id: their readers, and the entries that come from their logs."""

import time
from collections.abc import Iterator, Sequence

from blockrelay.protocol.messages import EndEntry, LogEntry
from blockrelay_gateway.streaming.active_requests.abandonment import Abandonment
from blockrelay_gateway.streaming.active_requests.accounting import RequestAccounting
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
from blockrelay_gateway.streaming.deltas import failure
from blockrelay_gateway.streaming.log_tailer import Tailer


class RequestRegistry:
    """All active requests of one gateway in one cell. No method waits or talks to Redis.

    It is a container of their request ids. `closing` is True once the gateway ends.
    """

    def __init__(self, tailer: Tailer, accounting: RequestAccounting, abandonment: Abandonment) -> None:
        self._tailer, self._accounting, self._abandonment = tailer, accounting, abandonment
        self._by_id: dict[str, ActiveRequest] = {}
        self.closing = False

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __contains__(self, request: object) -> bool:
        return request in self._by_id

    def unfinished(self) -> list[ActiveRequest]:
        """Returns the requests whose end has not come yet."""
        return [active for active in self._by_id.values() if active.end is None]

    def get(self, request_id: str) -> ActiveRequest | None:
        """Returns the active request of this id; None if there is none, or if it failed.

        A request that was cancelled here may have begun again at another gateway.
        """
        active = self._by_id.get(request_id)
        ended_badly = active is not None and active.end is not None and failure(active.end) is not None
        return None if ended_badly else active

    def start(self, active: ActiveRequest) -> None:
        """Makes a request active and begins to read its log, which need not exist yet.

        For a request with a new id it is called before ACCEPT, so that no entry waits for a second read.
        """
        self._by_id[active.id] = active
        self._accounting.started()
        self._tailer.subscribe(active.id, lambda entry: self.receive(active, entry))

    def join(self, active: ActiveRequest) -> ActiveRequest:
        """Returns the active request of this id: `active`, which it starts, or another object that was active already.

        A keyed request can be active before its ACCEPT returns. One that has ended, or is being cancelled because it
        has no reader, is replaced.
        """
        known = self._by_id.get(active.id)
        if known is not None and known.end is None:
            if known.readers or not known.leaving:
                return known
            self.drop(known)
        self.start(active)
        return active

    def drop(self, active: ActiveRequest) -> None:
        """Forgets a request that was refused, unless it has a reader or another object has taken its place."""
        if self._by_id.get(active.id) is not active or active.readers:
            return
        self._tailer.unsubscribe(active.id)
        del self._by_id[active.id]
        self._accounting.dropped(active)

    def seek(self, request_id: str) -> None:
        """Delays the cancellation of a request without readers (by SOUGHT_S), because a client is about to attach."""
        if known := self._by_id.get(request_id):
            known.sought = time.monotonic()

    def attach(self, active: ActiveRequest) -> None:
        """Adds a reader and ends a grace period."""
        active.readers += 1
        self._abandonment.stop(active)

    def detach(self, active: ActiveRequest) -> None:
        """Removes a reader; the last one of an unfinished request starts its grace period, after which it is cancelled.

        Background requests, and requests of a gateway that is `closing`, get no grace period and go on.
        """
        active.readers -= 1
        if active.end is not None:
            self._retire(active)
        elif active.readers == 0 and not self.closing and not active.body.background:
            self._accounting.disconnected(active)
            self._abandonment.begin(active)

    def receive(self, active: ActiveRequest, entry: LogEntry) -> None:
        """Adds the next entry of a request's log and wakes its readers."""
        now = time.monotonic()
        self._accounting.received(active, entry, now)
        active.numerics = entry.numerics or active.numerics
        if isinstance(entry, EndEntry):
            active.end = entry
        active.entries.append(entry)
        active.last_entry_at = now
        for event in active.events:
            event.set()
        if active.end is not None:
            self._retire(active)

    def receive_all(self, active: ActiveRequest, entries: Sequence[LogEntry]) -> None:
        """Adds the new entries of the whole log of an ended request, and reads that log no longer.

        The tailer may not find the log any more.
        """
        self._tailer.unsubscribe(active.id)
        for entry in entries:
            if entry.position > active.tokens and active.end is None:
                self.receive(active, entry)

    def receive_end(self, active: ActiveRequest, end: EndEntry) -> None:
        """Adds an end that the tailer will not bring."""
        self._tailer.unsubscribe(active.id)
        self.receive(active, end)

    def close(self) -> None:
        """Wakes all readers with an error that says where to continue; the requests themselves go on."""
        self.closing = True
        for active in self._by_id.values():
            self._abandonment.stop(active)
            for event in active.events:
                event.set()
        self._abandonment.close()

    def _retire(self, active: ActiveRequest) -> None:
        self._abandonment.stop(active)
        if active.readers == 0 and self._by_id.get(active.id) is active:
            del self._by_id[active.id]
