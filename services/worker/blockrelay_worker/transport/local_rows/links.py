"""Chooses how each worker is reached, through shared memory or Redis, and sends to those of this host.

Used by the engine thread only.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from blockrelay.observability.logs import get
from blockrelay_worker.policy import ENDING_S
from blockrelay_worker.transport.local_rows.deaths import Deaths
from blockrelay_worker.transport.local_rows.frames import Address
from blockrelay_worker.transport.local_rows.link import LinkLost, LocalLink

#: Number of remembered workers from which on all but those with an open local connection are forgotten.
MAX_REMEMBERED = 64

#: How a worker is reached: by a local connection or through Redis; "gone": its process has ended.
Way = LocalLink | Literal["redis", "gone"]


class LocalLinks:
    """The ways to other workers.

    The way to a worker is chosen at the first message, and kept while worker and connection live; a restarted worker
    has a new id. Messages of a lost connection may be lost: later messages of the same runs, by any way, show the gap
    by their sequence numbers.
    """

    def __init__(
        self,
        worker_id: str,
        ring_bytes: int,
        read_address: Callable[[str, tuple[str, ...]], Sequence[bytes | None]],
        deaths: Deaths,
    ) -> None:
        """`worker_id` is this worker's id. `read_address` returns fields of a worker's registry record, by its id."""
        self._worker, self._ring_bytes = worker_id, ring_bytes
        self._read, self._deaths = read_address, deaths
        self._ways: dict[str, Way] = {}

    def takes(self, target: str, fields: Mapping[str, bytes]) -> bool:
        """True if the message must be sent with `send`, False if through Redis. True also for a worker that is gone.

        A message that does not fit into the ring closes the connection: that worker is then reached through Redis. May
        wait for Redis, and CONNECT_S seconds for a new connection; raises Stopping when the process should end
        meanwhile.
        """
        way = self._way(target)
        if isinstance(way, LocalLink) and not way.fits(fields):
            self._forget(target, way)
            way = self._ways[target] = "redis"
        return way != "redis"

    def send(self, target: str, fields: Mapping[str, bytes], wait_s: float) -> bool:
        """Sends a message for which `takes` was true. False if the worker is gone, or had no room in `wait_s` seconds.

        A lost connection may wait for Redis, for DEAD; raises Stopping when the process should end meanwhile.
        """
        way = self._ways.get(target)
        if not isinstance(way, LocalLink):
            return False
        try:
            return way.send(fields, wait_s)
        except LinkLost as lost:
            self._lose(target, way, str(lost))
            return False

    def unread(self, target: str) -> int | None:
        """Number of messages that the worker has not read yet; None if it is not reached by a local connection.

        A lost connection may wait for Redis, for DEAD; raises Stopping when the process should end meanwhile.
        """
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
        """Closes all connections and ends the watch for dead processes (see `Deaths.close` for how long it takes)."""
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
        """Connects to a worker by the address in its record; "redis" if it has none or does not accept."""
        address = Address.from_record(self._read(target, ("local_rows",))[0])
        if address is None:
            return "redis"
        try:
            link = LocalLink(address, worker_id=self._worker, ring_bytes=self._ring_bytes)
        except (OSError, LinkLost) as error:  # it is on another host, or of another user, or does not accept now
            get().info("LOCAL_ROWS_NOT_POSSIBLE", worker=target, error=str(error))
            return "redis"
        if link.pidfd is not None:
            self._deaths.watch(link.pidfd, target)
        return link

    def _lose(self, target: str, link: LocalLink, why: str) -> None:
        """Drops a lost connection. If the worker's process has ended, DEAD comes first, then the way is "gone".

        DEAD comes before any RERUN, since the death is a better reason than undelivered rows. If the process lives, the
        way is chosen again at the next message.
        """
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
        """Forgets all ways but open local connections, if many are remembered."""
        if len(self._ways) < MAX_REMEMBERED:
            return
        for target in list(self._ways):
            self.unread(target)
        self._ways = {target: way for target, way in self._ways.items() if isinstance(way, LocalLink)}
