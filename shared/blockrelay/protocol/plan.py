"""The plan that the scheduler publishes and the records that workers publish, as data.

The scheduler computes plans in `blockrelay_scheduler.planning`.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any, Final, Literal, get_args

from blockrelay.errors import UsageError
from blockrelay.protocol.block_times import BlockTimes
from blockrelay.protocol.capabilities import Capabilities, Pace
from blockrelay.protocol.constants import DEAD_AFTER_MS
from blockrelay.protocol.encoding.checks import reading
from blockrelay.protocol.served_folder import ServedFolder, folders_from_json

#: Kinds of devices: of workers, of the routes of requests, and of queues. The Lua scripts spell these names too.
Device = Literal["cpu", "gpu"]
CPU: Final = "cpu"
GPU: Final = "gpu"
DEVICES: tuple[Device, ...] = (CPU, GPU)
#: Part of the numerics id of a worker that computes with a block folder imported from ONNX blocks made by others.
IMPORTED = "imported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive blocks of a model, `first` to `last`, counted from 1, both included."""

    first: int
    last: int


def uniform_split(blocks: int, stages: int) -> tuple[Stage, ...]:
    """Splits blocks 1 to `blocks` into `stages` stages whose sizes differ by one at most, the larger ones first.

    Raises:
        UsageError: more stages than blocks, or none.
    """
    if not 1 <= stages <= blocks:
        raise UsageError(f"stages is {stages}, but the model has {blocks} blocks: choose 1 to {blocks}")
    size, larger = divmod(blocks, stages)
    return stages_of([size + (index < larger) for index in range(stages)])


def stages_of(sizes: Sequence[int]) -> tuple[Stage, ...]:
    """Returns consecutive stages with these numbers of blocks, each at least 1, from block 1 on."""
    return tuple(Stage(first=end - size + 1, last=end) for size, end in zip(sizes, accumulate(sizes), strict=True))


def split_text(stages: tuple[Stage, ...]) -> str:
    """Returns the split as text, `1-3,4-6,7-9`. Workers of one route have the same text in their records."""
    return ",".join(f"{s.first}-{s.last}" for s in stages)


def parse_split(text: str) -> tuple[Stage, ...]:
    """Returns the stages in the text of `split_text`. Raises ValueError for other text.

    Does not check that the blocks are consecutive.
    """
    pairs = (part.split("-") for part in text.split(","))
    return tuple(Stage(first=int(a), last=int(b)) for a, b in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The assignment of blocks to stages and of stages to workers, with the reasons."""

    epoch: int  # number of the plan; a newer one has a larger number
    split: str  # as `split_text` writes it
    route_class: str  # "gpu" when a GPU has a block, else "cpu"
    assignments: Mapping[str, int]  # worker id -> stage index, also of workers that still load their blocks
    blocks: Mapping[str, str]  # block name -> "GPU" where a worker with a GPU is ready, else "CPU"; by block number
    reasons: tuple[str, ...]  # one sentence per stage
    devices: tuple[tuple[str, ...], ...] = ()  # per stage, ids of the devices that are to run it; none: any
    source: str = ""  # the origin of the split
    folder: str = ""  # key of the block folder that workers are to serve; "": that with which they started
    #: Keys of block folders by worker id, of those workers that serve another one for now.
    other_folders: Mapping[str, str] = field(default_factory=dict[str, str])

    def folder_of(self, worker_id: str) -> str:
        """Returns the key of the block folder that a worker is to serve; "": that with which it started."""
        return self.other_folders.get(worker_id, self.folder)

    def to_json(self) -> str:
        """Returns the plan as the JSON that `plan:<model>` holds; `from_redis` is the inverse.

        Fields of block folders are left out where all workers serve that with which they started, so that services of a
        release that did not know them read the plan.
        """
        fields = asdict(self)
        if not self.folder and not self.other_folders:
            del fields["folder"], fields["other_folders"]
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_redis(cls, fields: Mapping[bytes, bytes]) -> "Plan | None":
        """Reads the fields of `plan:<model>`, without what a later release may add; None when there is no plan yet.

        Raises WireError if they are damaged.
        """
        if b"plan" not in fields:
            return None
        with reading("the plan"):
            data: dict[str, Any] = json.loads(fields[b"plan"])
            data["epoch"] = int(fields[b"epoch"])
            data["reasons"] = tuple(data["reasons"])
            data["devices"] = tuple(map(tuple, data.get("devices", ())))
            blocks = data["blocks"].items()
            data["blocks"] = dict(sorted(blocks, key=lambda block: int(block[0].removeprefix("block_"))))
            return cls(**{name: value for name, value in data.items() if name in cls.__dataclass_fields__})


#: A worker's state, as people see it. `loading`: not ready yet, with a stage or without. `short`: it waits for memory
#: for its stage, or for a smaller precision. `retiring`: it takes no new requests, because the plan gives it another
#: block folder, and goes on with those that it has begun.
WorkerState = Literal["loading", "short", "ready", "retiring", "draining", "silent"]
WORKER_STATES: tuple[WorkerState, ...] = get_args(WorkerState)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """One worker, as its record `worker:<id>` and its heartbeat describe it."""

    id: str
    model: str
    device: Device
    numerics: str  # its numerics id
    host: str
    pid: int
    port: int
    registered_ms: int  # Unix time
    device_id: str = ""  # the name of its device in plans; "": it has none
    split: str = ""
    stage: int | None = None  # None until its blocks are loaded
    first: int = 0  # first and last block of its stage, from 1
    last: int = 0
    epoch: int = 0  # of the plan that it follows
    pages: int = 0  # KV pages of its pool
    pages_used: int = 0  # KV pages in use
    reserved: int = 0  # KV pages promised to runs
    draining: bool = False
    ready: bool = False  # it has an inbox, so runs can be sent to it
    running: int = 0  # requests on it
    silent_ms: int = 0  # since its last heartbeat
    dead_after_ms: int = DEAD_AFTER_MS  # setting of the cell
    capabilities: Capabilities | None = None  # None until its blocks are loaded
    pace: Pace | None = None  # of a worker of the first stage, once it has measured itself
    varies: bool = False  # nondeterministic: it does not compute the same bits twice
    slow: str = ""  # why it is slower than its CPU allows, with the remedy; "": it is not
    block_times: BlockTimes | None = None  # of its blocks, once it has measured them
    node: str = ""  # the machine's name
    cores: int = 1  # CPU cores that it may use
    threads: int = 1  # of its kernels
    loads_beside: bool = False  # it can load another stage beside the one that it serves
    succeeds: str = ""  # id of the worker in the same process that serves until this one does; "": none
    folder: str = ""  # key of the block folder that it serves, or will serve when it is ready
    folders: tuple[ServedFolder, ...] = ()  # those that it can serve
    retires: bool = False  # it takes only requests that have tokens of its numerics id
    held_bytes: int = 0  # weights of its stage, and KV pages that were used before
    free_bytes: int = 0  # memory of its machine that is free beside them
    short_of: str = ""  # key of a block folder for whose part of the plan it lacks memory; "": it lacks none

    @property
    def whole_model_only(self) -> bool:
        """True if the worker can only run all blocks as one stage.

        It then computes with an import of ONNX blocks made by others, which cannot give their stages named tensors.
        """
        return f"-{IMPORTED}-" in self.numerics

    def folder_with(self, key: str) -> ServedFolder | None:
        """Returns its block folder with a key, "" for that with which it started; None if its record has none such."""
        return next((folder for folder in self.folders if folder.key == (key or self.model)), None)

    @property
    def served(self) -> ServedFolder | None:
        """The block folder that it serves; None where its record does not say."""
        return self.folder_with(self.folder) if self.folder else None

    @property
    def is_alive(self) -> bool:
        """True if the worker counts as alive, by the definition that scripts share. Else it will be declared dead."""
        return self.silent_ms < self.dead_after_ms

    @property
    def is_late(self) -> bool:
        """True if the worker has missed heartbeats. It still counts, but a new worker may be its replacement."""
        return self.silent_ms > self.dead_after_ms / 3

    @property
    def state(self) -> WorkerState:
        """The worker's state, as metrics and `blockrelay status` show it."""
        if not self.is_alive:
            return "silent"
        if self.draining:
            return "draining"
        if self.retires:
            return "retiring"
        if self.ready:
            return "ready"
        return "short" if self.short_of else "loading"

    @classmethod
    def from_redis(
        cls, worker_id: str, f: Mapping[bytes, bytes], *, ready: bool, running: int, silent_ms: int, dead_after_ms: int
    ) -> "WorkerInfo":
        """Builds the info of a worker from `f`, the fields of `worker:<id>`.

        The other arguments are fields of the info that the hash does not have. Raises KeyError if a required field is
        missing (model, device, numerics, host, or one of a pace), and ValueError for one that is no number.
        """

        def integer(name: bytes) -> int:
            return int(f.get(name, b"0"))

        return cls(
            id=worker_id,
            model=f[b"model"].decode(),
            device=GPU if f[b"device"] == GPU.encode() else CPU,
            numerics=f[b"numerics"].decode(),
            host=f[b"host"].decode(),
            pid=integer(b"pid"),
            port=integer(b"port"),
            registered_ms=integer(b"registered_ms"),
            device_id=f.get(b"device_id", b"").decode(),
            split=f.get(b"split", b"").decode(),
            stage=int(f[b"stage"]) if b"stage" in f else None,
            first=integer(b"first_block"),
            last=integer(b"last_block"),
            epoch=integer(b"epoch"),
            pages=integer(b"pages"),
            pages_used=integer(b"pages_used"),
            reserved=integer(b"pages_reserved"),
            draining=b"draining" in f,
            ready=ready,
            running=running,
            silent_ms=silent_ms,
            dead_after_ms=dead_after_ms,
            capabilities=Capabilities.from_json(f.get(b"capabilities")),
            pace=Pace.from_redis(f),
            varies=f.get(b"varies") == b"1",
            slow=f.get(b"slow", b"").decode(),
            block_times=BlockTimes.from_json(f.get(b"block_times")),
            node=f.get(b"node", b"").decode(),
            cores=max(1, integer(b"cores")),
            threads=max(1, integer(b"threads")),
            loads_beside=b"loads_beside" in f,
            succeeds=f.get(b"succeeds", b"").decode(),
            folder=f.get(b"folder", b"").decode(),
            folders=folders_from_json(f.get(b"folders")),
            retires=b"retires" in f,
            held_bytes=integer(b"held_bytes"),
            free_bytes=integer(b"free_bytes"),
            short_of=f.get(b"short_of", b"").decode(),
        )


def missing_stages(plan: Plan | None, workers: Sequence[WorkerInfo]) -> list[str]:
    """Returns why no token can be produced right now, one sentence per missing stage of the plan.

    It is empty if all stages have a worker that is ready, those of the plan or, while workers move to its stages, those
    of a plan before it.
    """
    if plan is None:
        return ["no plan yet: the scheduler has not seen a worker of this model"]
    if any(is_served(split, workers) for split in {w.split for w in workers if w.state == "ready"}):
        return []
    return [
        f"stage {index} (block_{stage.first} to block_{stage.last}) {_why_unserved(plan, workers, index)}"
        for index in _unserved(plan.split, workers)
        if (stage := parse_split(plan.split)[index])
    ]


def _why_unserved(plan: Plan, workers: Sequence[WorkerInfo], stage: int) -> str:
    """Returns why no worker of a stage of the plan takes new requests, in words."""
    states = {one.state for one in workers if plan.assignments.get(one.id) == stage}
    states |= {one.state for one in workers if (one.split, one.stage) == (plan.split, stage)}
    if "short" in states:
        return "has a worker that lacks memory for it"
    if "retiring" in states:
        return "changes to another precision"
    alive = [one for one in workers if one.is_alive]
    # Records of releases that did not know folders have none: such a worker may have it.
    if alive and all(one.folders and one.folder_with(plan.folder) is None for one in alive):
        others = " or ".join(sorted({folder.precision for one in alive for folder in one.folders}))
        return (
            f"has no live worker: the plan asks for block folder {plan.folder or alive[0].model}, which no worker has; "
            f"start workers with --other-precision DIR, or change to {others} with `blockrelay precision set`"
        )
    return "has no live worker"


def folder_in_force(plan: Plan, workers: Sequence[WorkerInfo]) -> ServedFolder | None:
    """Returns the block folder that the plan gives all workers of its model; None where no worker has it."""
    return next((folder for one in workers if (folder := one.folder_with(plan.folder))), None)


def is_served(split: str, workers: Sequence[WorkerInfo], *, numerics: str | None = None) -> bool:
    """Returns whether each stage of `split` has one of `workers` that is ready, so that they could form a route.

    All workers of a route serve one block folder. Its deterministic workers have one numerics id: `numerics`, or any if
    that is None.
    """
    by_folder: dict[str, list[WorkerInfo]] = defaultdict(list)
    for worker in workers:
        by_folder[worker.folder or worker.model].append(worker)
    steady = {w.numerics for w in workers if not w.varies} or {""}
    return any(
        not _unserved(split, [w for w in these if w.varies or w.numerics == one])
        for these in by_folder.values()
        for one in (steady if numerics is None else {numerics})
    )


def _unserved(split: str, workers: Sequence[WorkerInfo]) -> dict[int, Stage]:
    """Returns the stages of `split`, by index, that none of `workers` has loaded and is ready for."""
    served = {w.stage for w in workers if w.split == split and w.state == "ready"}
    return {index: stage for index, stage in enumerate(parse_split(split)) if index not in served}


def succeeded(workers: Sequence[WorkerInfo]) -> frozenset[str]:
    """Returns the ids of those `workers` that another one of them succeeds, which has their place in plans."""
    return frozenset(worker.succeeds for worker in workers) & {worker.id for worker in workers}


def slow_workers(workers: Sequence[WorkerInfo]) -> dict[str, list[str]]:
    """Returns the ids of live workers that are slower than their CPU allows, by the cause that they publish."""
    by_cause: dict[str, list[str]] = {}
    for worker in workers:
        if worker.slow and worker.is_alive:
            by_cause.setdefault(worker.slow, []).append(worker.id)
    return by_cause


@dataclass(frozen=True, slots=True)
class CellLoad:
    """The load of a cell by its unfinished requests."""

    running: int  # requests on workers
    waiting: int  # requests that wait for a worker
    kv_usage: float  # share of KV pages in use, 0 to 1, in the stage with the least left; 0 without workers


def cell_load(workers: Sequence[WorkerInfo], unfinished: int) -> CellLoad:
    """Returns the load of a cell that has these workers and `unfinished` requests.

    Counts the requests on workers of the first stage: each running request is on exactly one of them.
    """
    running = min(unfinished, sum(worker.running for worker in workers if worker.stage == 0))
    used: Counter[tuple[str, int]] = Counter()
    pages: Counter[tuple[str, int]] = Counter()
    for worker in workers:
        if worker.stage is not None and worker.ready:
            used[worker.split, worker.stage] += worker.pages_used
            pages[worker.split, worker.stage] += worker.pages
    return CellLoad(
        running, unfinished - running, max((used[at] / pages[at] for at in pages if pages[at]), default=0.0)
    )
