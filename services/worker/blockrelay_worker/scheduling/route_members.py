"""The workers of a route, from the registry, and the limits of batches that go through all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from blockrelay.protocol.capabilities import Capabilities
from blockrelay.protocol.constants import MAX_WORKERS
from blockrelay_worker.scheduling.limits import BatchLimits
from blockrelay_worker.scheduling.micro_batches import WorkerCores, groups_of

#: Fields of a worker's registry record that are read here.
FIELDS = ("node", "cores", "threads", "capabilities")
#: Reads fields of a worker's record, by worker id; None for each field that is missing.
ReadFields = Callable[[str, tuple[str, ...]], Sequence[bytes | None]]
#: Remembered workers, and remembered sets of them, at most; the least recently used ones are forgotten.
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
        self._member = lru_cache(MAX_MEMBERS)(self._read_member)
        #: Returns the shape of routes over the workers with these ids: their groups, and the tightest of all limits.
        self.shape = lru_cache(MAX_SHAPES)(self._shape)

    def _shape(self, workers: frozenset[str]) -> RouteShape:
        members = [self._member(worker_id) for worker_id in workers]
        capabilities = [able for _, able in members if able is not None]
        return RouteShape(groups_of([cores for cores, _ in members]), self._own.obeying(capabilities))

    def _read_member(self, worker_id: str) -> tuple[WorkerCores, Capabilities | None]:
        """Reads a worker's record. A worker without one, which is gone, counts as alone on a host."""
        node, cores, threads, capabilities = self._read_fields(worker_id, FIELDS)
        cores_of_worker = WorkerCores((node or worker_id.encode()).decode(), int(cores or 1), int(threads or 1))
        return cores_of_worker, Capabilities.from_json(capabilities)
