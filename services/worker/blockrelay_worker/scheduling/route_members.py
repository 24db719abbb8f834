"""The workers of a route, from the registry, and the limits of batches that go through all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockrelay.protocol.capabilities import Capabilities
from blockrelay_worker.scheduling.limits import BatchLimits
from blockrelay_worker.scheduling.micro_batches import WorkerCores, groups_of

#: Fields of a worker's registry record that are read here.
FIELDS = ("node", "cores", "threads", "capabilities")
#: Reads fields of a worker's record, by worker id; None for each field that is missing.
ReadFields = Callable[[str, tuple[str, ...]], Sequence[bytes | None]]
#: Above this number of remembered workers, or of sets of them, those not in use are forgotten.
MAX_MEMBERS = 64


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of a route. `capabilities` is None for a worker that is gone."""

    cores: WorkerCores
    capabilities: Capabilities | None

    @classmethod
    def from_record(cls, worker_id: str, fields: Sequence[bytes | None]) -> "Member":
        """A member from the FIELDS of its record. A worker without a record counts as alone on a host."""
        node, cores, threads, capabilities = fields
        cores_of_worker = WorkerCores((node or worker_id.encode()).decode(), int(cores or 1), int(threads or 1))
        return cls(cores_of_worker, Capabilities.from_json(capabilities))


@dataclass(frozen=True, slots=True)
class RouteShape:
    """The batches of a route: `groups` micro-batches circulate, each within `limits`."""

    groups: int
    limits: BatchLimits


class RouteMembers:
    """The members of routes. A worker's registration never changes, so each record is read once.

    `read_fields` may wait for Redis; `own` are the limits of this worker.
    """

    def __init__(self, read_fields: ReadFields, own: BatchLimits) -> None:
        self._read_fields, self._own = read_fields, own
        self._members: dict[str, Member] = {}
        self._shapes: dict[frozenset[str], RouteShape] = {}

    def shape(self, workers: frozenset[str]) -> RouteShape:
        """The shape of routes over the workers with these ids: their groups, and the tightest of all limits."""
        shape = self._shapes.get(workers)
        if shape is None:
            self._forget_others(workers)
            members = [self._member(worker_id) for worker_id in workers]
            capabilities = [member.capabilities for member in members if member.capabilities is not None]
            shape = RouteShape(groups_of([member.cores for member in members]), self._own.obeying(capabilities))
            self._shapes[workers] = shape
        return shape

    def __len__(self) -> int:
        """Number of workers that are remembered."""
        return len(self._members)

    def _forget_others(self, workers: frozenset[str]) -> None:
        """Forgets workers outside `workers` if too many are remembered: a restarted worker has a new id."""
        if len(self._members) > MAX_MEMBERS:
            self._members = {worker_id: member for worker_id, member in self._members.items() if worker_id in workers}
        if len(self._shapes) > MAX_MEMBERS:
            self._shapes.clear()

    def _member(self, worker_id: str) -> Member:
        if worker_id not in self._members:
            self._members[worker_id] = Member.from_record(worker_id, self._read_fields(worker_id, FIELDS))
        return self._members[worker_id]
