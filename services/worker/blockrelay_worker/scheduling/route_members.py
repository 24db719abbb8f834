"""The workers of a route, from the registry, and the limits of batches that go through all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockrelay.protocol.capabilities import Capabilities
from blockrelay.protocol.constants import MAX_WORKERS
from blockrelay_worker.scheduling.limits import BatchLimits
from blockrelay_worker.scheduling.micro_batches import WorkerCores, groups_of

#: Fields of a worker's registry record that are read here.
FIELDS = ("node", "cores", "threads", "capabilities")
#: Reads fields of a worker's record, by worker id; None for each field that is missing.
ReadFields = Callable[[str, tuple[str, ...]], Sequence[bytes | None]]
#: Remembered workers, and remembered sets of them; with more, all are forgotten: a restarted worker has a new id.
MAX_MEMBERS, MAX_SHAPES = MAX_WORKERS, 64


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
        self._members: dict[str, tuple[WorkerCores, Capabilities | None]] = {}
        self._shapes: dict[frozenset[str], RouteShape] = {}

    def shape(self, workers: frozenset[str]) -> RouteShape:
        """Returns the shape of routes over the workers with these ids: their groups, and the tightest of all limits.

        Reads the records of workers that it does not remember. Raises what `read_fields` raises.
        """
        if (shape := self._shapes.get(workers)) is not None:
            return shape
        members = [self._member(worker_id) for worker_id in workers]
        capabilities = [able for _, able in members if able is not None]
        shape = RouteShape(groups_of([cores for cores, _ in members]), self._own.obeying(capabilities))
        if len(self._shapes) >= MAX_SHAPES:
            self._shapes.clear()
        self._shapes[workers] = shape
        return shape

    def _member(self, worker_id: str) -> tuple[WorkerCores, Capabilities | None]:
        """Returns what a worker's record says. A worker without one, which is gone, counts as alone on a host."""
        if worker_id not in self._members:
            node, cores, threads, capabilities = self._read_fields(worker_id, FIELDS)
            cores_of_worker = WorkerCores((node or worker_id.encode()).decode(), int(cores or 1), int(threads or 1))
            if len(self._members) >= MAX_MEMBERS:
                self._members.clear()
            self._members[worker_id] = (cores_of_worker, Capabilities.from_json(capabilities))
        return self._members[worker_id]
