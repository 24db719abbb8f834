"""How many stages of a route compute at the same time: into so many groups its decode rows are split.

Stages with cores of their own work on different groups at once. Stages that share their cores would only read their
weights more often: there the whole batch goes from one to the next.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: What a worker's record says of its seat.
FIELDS = ("node", "cores", "threads")
ReadFields = Callable[[str, tuple[str, ...]], Sequence[bytes | None]]


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a worker computes: the host by name, its cores, and how many of them the worker's threads use."""

    node: str
    cores: int
    threads: int

    @classmethod
    def from_record(cls, worker: str, fields: Sequence[bytes | None]) -> "Seat":
        """From the FIELDS of a worker's record; a worker that is gone sits on a host of its own."""
        node, cores, threads = fields
        return cls((node or worker.encode()).decode(), int(cores or 1), int(threads or 1))


def groups_of(seats: Sequence[Seat]) -> int:
    """Micro-batches for a route over these workers: as many as its stages can compute at once; at least 1."""
    hosts: dict[str, list[Seat]] = defaultdict(list)
    for seat in seats:
        hosts[seat.node].append(seat)
    return sum(_at_once(on_host) for on_host in hosts.values()) or 1


def _at_once(seats: list[Seat]) -> int:
    cores, threads = max(s.cores for s in seats), sum(s.threads for s in seats)
    return max(1, min(len(seats), cores * len(seats) // max(1, threads)))


def decode_share(flights: Sequence[int | None], groups: int) -> int:
    """How many decode rows the first stage may take now, so that `groups` batches circulate, equal in size.

    `flights`: for each request that decodes the batch that carries it through the other stages, None if its token is
    back. While `groups` batches are under way nothing leaves: what is back waits for its group. Without that, batches
    that began apart stay apart, and every one of them reads all weights for its few rows.
    """
    if len({batch for batch in flights if batch is not None}) >= groups:
        return 0
    return max(1, -(-len(flights) // groups))


#: Workers whose seats are remembered, beside those that routes have now.
MAX_SEATS = 64


class Groups:
    """`groups_of` by worker ids; what a worker said of itself at registration never changes, so it is read once."""

    def __init__(self, read_fields: ReadFields) -> None:
        self._read_fields = read_fields
        self._seats: dict[str, Seat] = {}

    def of(self, workers: frozenset[str]) -> int:
        """Micro-batches for routes over these workers."""
        if len(self._seats) > MAX_SEATS:  # most of them are gone: every life of a worker has its own id
            self._seats = {worker: seat for worker, seat in self._seats.items() if worker in workers}
        return groups_of([self._seat(worker) for worker in workers])

    def __len__(self) -> int:
        """Workers that are remembered."""
        return len(self._seats)

    def _seat(self, worker: str) -> Seat:
        if worker not in self._seats:
            self._seats[worker] = Seat.from_record(worker, self._read_fields(worker, FIELDS))
        return self._seats[worker]
