"""Which workers are reached without Redis, and how a message goes to one of them. Used by the engine thread only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from blockrelay.observability.logs import get
from blockrelay_worker.transport.local_rows.deaths import Deaths
from blockrelay_worker.transport.local_rows.frames import Address
from blockrelay_worker.transport.local_rows.link import LinkLost, LocalLink

#: How long a process may take to end that has closed its connection. Seconds.
ENDING_S = 0.2
#: Workers that are remembered beside those that live.
MAX_REMEMBERED = 64

Way = LocalLink | Literal["redis", "gone"]


class LocalLinks:
    """The way to a worker is chosen when something is sent there first, and kept while it lives and its connection
    does. Every life of a worker has an id of its own. A connection that is lost takes messages along; what is sent of
    the same runs afterwards shows the gap by its sequence, whichever way it takes.
    """

    def __init__(
        self,
        worker: str,
        ring_bytes: int,
        read_address: Callable[[str, tuple[str, ...]], Sequence[bytes | None]],
        deaths: Deaths,
    ) -> None:
        """`read_address` gives fields of a worker's record."""
        self._worker, self._ring_bytes = worker, ring_bytes
        self._read, self._deaths = read_address, deaths
        self._ways: dict[str, Way] = {}

    def takes(self, target: str, fields: Mapping[str, bytes]) -> bool:
        """Whether this is the way of that message. Waits for Redis; raises Stopping when the process should end."""
        way = self._way(target)
        if isinstance(way, LocalLink) and not way.fits(fields):
            self._forget(target, way)
            way = self._ways[target] = "redis"
        return way != "redis"

    def send(self, target: str, fields: Mapping[str, bytes], wait_s: float) -> bool:
        """For what it `takes`. False: that worker is gone, or has had no room for it within `wait_s` seconds."""
        way = self._ways.get(target)
        if not isinstance(way, LocalLink):
            return False
        try:
            return way.send(fields, wait_s)
        except LinkLost as lost:
            self._lose(target, way, str(lost))
            return False

    def unread(self, target: str) -> int | None:
        """Messages that the worker has not taken yet; None: the way is not this one, or not any more."""
        way = self._ways.get(target)
        if not isinstance(way, LocalLink):
            return None
        try:
            way.look()
        except LinkLost as lost:
            self._lose(target, way, str(lost))
            return None
        return way.unread

    def close(self) -> None:
        for target, way in list(self._ways.items()):
            if isinstance(way, LocalLink):
                self._forget(target, way)
        self._deaths.close()

    def _way(self, target: str) -> Way:
        way = self._ways.get(target)
        if way is None:
            self._forget_others()
            way = self._ways[target] = self._connect(target)
        return way

    def _connect(self, target: str) -> Way:
        address = Address.from_record(self._read(target, ("local_rows",))[0])
        if address is None:
            return "redis"
        try:
            link = LocalLink(address, worker=self._worker, ring_bytes=self._ring_bytes)
        except (OSError, LinkLost) as error:  # another host, or another user, or it is not to be had now
            get().info("LOCAL_ROWS_NOT_POSSIBLE", worker=target, error=str(error))
            return "redis"
        if link.pidfd is not None:
            self._deaths.watch(link.pidfd, target)
        return link

    def _lose(self, target: str, link: LocalLink, why: str) -> None:
        """If its process has ended the cell hears that first: the runs are then those of a worker that died, which
        says more than that rows did not reach it. Else the way is chosen anew."""
        get().warning("LOCAL_ROWS_LOST", worker=target, error=why)
        ended = link.process_ended(ENDING_S)
        if ended:
            self._deaths.tell(target)
        self._forget(target, link)
        if ended:
            self._ways[target] = "gone"

    def _forget(self, target: str, link: LocalLink) -> None:
        if link.pidfd is not None:
            self._deaths.leave(link.pidfd)
        link.close()
        self._ways.pop(target, None)

    def _forget_others(self) -> None:
        """Of lives that are over, when there are many."""
        if len(self._ways) < MAX_REMEMBERED:
            return
        for target in list(self._ways):
            self.unread(target)
        self._ways = {target: way for target, way in self._ways.items() if isinstance(way, LocalLink)}
