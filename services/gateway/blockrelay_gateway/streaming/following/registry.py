"""The requests that this gateway follows: who reads each, and what each hears from its log."""

import time
from collections.abc import Iterator, Sequence

from blockrelay.protocol.messages import EndEntry, LogEntry
from blockrelay_gateway.streaming.deltas import failure
from blockrelay_gateway.streaming.following.abandonment import Abandonment
from blockrelay_gateway.streaming.following.accounting import Accounting
from blockrelay_gateway.streaming.following.followed_request import FollowedRequest
from blockrelay_gateway.streaming.log_tailer import Tailer


class FollowedRequests:
    """All of this gateway, by id. Nothing in here waits or talks to Redis."""

    def __init__(self, tailer: Tailer, accounting: Accounting, abandonment: Abandonment) -> None:
        self._tailer, self._accounting, self._abandonment = tailer, accounting, abandonment
        self._by_id: dict[str, FollowedRequest] = {}
        self.closing = False

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __contains__(self, request: object) -> bool:
        return request in self._by_id

    def unfinished(self) -> list[FollowedRequest]:
        """Those whose end has not been heard."""
        return [followed for followed in self._by_id.values() if followed.end is None]

    def known(self, request: str) -> FollowedRequest | None:
        """The one of this id, unless it ended badly: an abandoned request may have begun anew on another gateway."""
        followed = self._by_id.get(request)
        ended_badly = followed is not None and followed.end is not None and failure(followed.end) is not None
        return None if ended_badly else followed

    def start(self, followed: FollowedRequest) -> None:
        """Follow its log. Before ACCEPT, so that no entry has to wait for a second read."""
        self._by_id[followed.id] = followed
        self._accounting.started()
        self._tailer.follow(followed.id, lambda entry: self.hear(followed, entry))

    def join(self, followed: FollowedRequest) -> FollowedRequest:
        """Follow a request whose id derives from a key, after its ACCEPT: it may be followed already."""
        known = self._by_id.get(followed.id)
        if known is not None and known.end is None:
            if known.readers or not known.leaving:
                return known
            self.drop(known)
        self.start(followed)
        return followed

    def drop(self, followed: FollowedRequest) -> None:
        """Forget a request that was refused, unless it has a reader."""
        if self._by_id.get(followed.id) is not followed or followed.readers:
            return
        self._tailer.forget(followed.id)
        del self._by_id[followed.id]
        self._accounting.dropped(followed)

    def seek(self, request: str) -> None:
        """A client is about to attach: delay cancellation for SOUGHT_S."""
        if known := self._by_id.get(request):
            known.sought = time.monotonic()

    def attach(self, followed: FollowedRequest) -> None:
        """One more reader."""
        followed.readers += 1
        self._abandonment.stop(followed)

    def detach(self, followed: FollowedRequest) -> None:
        """One reader less; the last one of an unfinished request starts its grace period."""
        followed.readers -= 1
        if followed.end is not None:
            self._retire(followed)
        elif followed.readers == 0 and not self.closing and not followed.body.background:
            self._accounting.disconnected(followed)
            self._abandonment.begin(followed)

    def hear(self, followed: FollowedRequest, entry: LogEntry) -> None:
        """The next entry of its log: the readers wake up."""
        now = time.monotonic()
        self._accounting.heard(followed, entry, now)
        followed.numerics = entry.numerics or followed.numerics
        if isinstance(entry, EndEntry):
            followed.end = entry
        followed.entries.append(entry)
        followed.heard = now
        for event in followed.events:
            event.set()
        if followed.end is not None:
            self._retire(followed)

    def hear_all(self, followed: FollowedRequest, entries: Sequence[LogEntry]) -> None:
        """Hear what is new in a whole log, which may no longer be where the tailer reads."""
        self._tailer.forget(followed.id)
        for entry in entries:
            if entry.position > followed.tokens and followed.end is None:
                self.hear(followed, entry)

    def hear_end(self, followed: FollowedRequest, end: EndEntry) -> None:
        """Hear an end that the tailer will not bring."""
        self._tailer.forget(followed.id)
        self.hear(followed, end)

    def close(self) -> None:
        """The gateway ends: readers get an error that tells where to continue; the requests themselves go on."""
        self.closing = True
        for followed in self._by_id.values():
            self._abandonment.stop(followed)
            for event in followed.events:
                event.set()
        self._abandonment.close()

    def _retire(self, followed: FollowedRequest) -> None:
        self._abandonment.stop(followed)
        if followed.readers == 0 and self._by_id.get(followed.id) is followed:
            del self._by_id[followed.id]
