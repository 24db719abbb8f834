"""What the workers of a route have said of themselves, and what follows for batches that go through all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockrelay.protocol.capabilities import Capabilities
from blockrelay_worker.scheduling.limits import BatchLimits
from blockrelay_worker.scheduling.micro_batches import Seat, groups_of

#: Fields of a worker's record.
FIELDS = ("node", "cores", "threads", "capabilities")
ReadFields = Callable[[str, tuple[str, ...]], Sequence[bytes | None]]
#: Workers, and sets of them, that are remembered beside those that routes have now.
MAX_MEMBERS = 64


@dataclass(frozen=True, slots=True)
class Member:
    """`capabilities` None: a worker that is gone."""

    seat: Seat
    capabilities: Capabilities | None

    @classmethod
    def from_record(cls, worker: str, fields: Sequence[bytes | None]) -> "Member":
        """From the FIELDS of a worker's record; a worker that is gone sits on a host of its own."""
        node, cores, threads, capabilities = fields
        seat = Seat((node or worker.encode()).decode(), int(cores or 1), int(threads or 1))
        return cls(seat, Capabilities.from_json(capabilities))


@dataclass(frozen=True, slots=True)
class RouteShape:
    """`groups` micro-batches circulate, each within `limits`."""

    groups: int
    limits: BatchLimits


class RouteMembers:
    """What a worker said of itself when it announced itself never changes, so it is read once."""

    def __init__(self, read_fields: ReadFields, own: BatchLimits) -> None:
        self._read_fields, self._own = read_fields, own
        self._members: dict[str, Member] = {}
        self._shapes: dict[frozenset[str], RouteShape] = {}

    def shape(self, workers: frozenset[str]) -> RouteShape:
        """For routes over these workers: groups that can compute at once, the least of all limits."""
        shape = self._shapes.get(workers)
        if shape is None:
            self._forget_others(workers)
            members = [self._member(worker) for worker in workers]
            said = [member.capabilities for member in members if member.capabilities is not None]
            shape = RouteShape(groups_of([member.seat for member in members]), self._own.obeying(said))
            self._shapes[workers] = shape
        return shape

    def __len__(self) -> int:
        """Workers that are remembered."""
        return len(self._members)

    def _forget_others(self, workers: frozenset[str]) -> None:
        """Where too much is remembered: every life of a worker has its own id, so that most of them are gone."""
        if len(self._members) > MAX_MEMBERS:
            self._members = {worker: member for worker, member in self._members.items() if worker in workers}
        if len(self._shapes) > MAX_MEMBERS:
            self._shapes.clear()

    def _member(self, worker: str) -> Member:
        if worker not in self._members:
            self._members[worker] = Member.from_record(worker, self._read_fields(worker, FIELDS))
        return self._members[worker]
