"""Plan and worker registry as data: what the scheduler publishes and workers tell about themselves.

How a plan is decided: `blockrelay_scheduler.planning`.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

from blockrelay.errors import UsageError
from blockrelay.protocol.capabilities import Capabilities, Pace
from blockrelay.protocol.constants import DEAD_AFTER_MS

#: Kinds of devices: of workers, of the routes of requests, and of queues. The Lua scripts spell these names too.
Device = Literal["cpu", "gpu"]
CPU: Final = "cpu"
GPU: Final = "gpu"
DEVICES: tuple[Device, ...] = (CPU, GPU)
#: Part of the numerics ids of workers that compute with an import of ONNX blocks that others made.
IMPORTED = "imported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive blocks [first, last], 1-based and inclusive."""

    first: int
    last: int


def uniform_split(blocks: int, stages: int) -> tuple[Stage, ...]:
    """Blocks 1 to `blocks` as `stages` runs of consecutive blocks; sizes differ by one at most, the larger ones first.

    Raises:
        UsageError: more stages than blocks, or none.
    """
    if not 1 <= stages <= blocks:
        raise UsageError(f"stages is {stages}, but the model has {blocks} blocks: choose 1 to {blocks}")
    size, larger = divmod(blocks, stages)
    split: list[Stage] = []
    for index in range(stages):
        first = split[-1].last + 1 if split else 1
        split.append(Stage(first=first, last=first + size - 1 + (index < larger)))
    return tuple(split)


def split_text(stages: tuple[Stage, ...]) -> str:
    """The split as text, `1-3,4-6,7-9`: workers of one route carry the same."""
    return ",".join(f"{s.first}-{s.last}" for s in stages)


def parse_split(text: str) -> tuple[Stage, ...]:
    """The inverse of `split_text`."""
    pairs = (part.split("-") for part in text.split(","))
    return tuple(Stage(first=int(a), last=int(b)) for a, b in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which blocks form which stage, which worker runs which stage, and why.

    `assignments` worker id -> stage index, of workers that still load theirs too. `blocks` block name -> "CPU" | "GPU",
    in the order of their numbers: GPU where a worker with one is ready. `route_class` gpu when some block is.
    `reasons` one sentence per stage, `devices` the ids of those that are to run it (none: any). `source` says where the
    split comes from.
    """

    epoch: int
    split: str
    route_class: str
    assignments: Mapping[str, int]
    blocks: Mapping[str, str]
    reasons: tuple[str, ...]
    devices: tuple[tuple[str, ...], ...] = ()
    source: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_redis(cls, fields: Mapping[bytes, bytes]) -> "Plan | None":
        """From `HGETALL plan:<model>`; None when there is no plan yet."""
        if b"plan" not in fields:
            return None
        data: dict[str, Any] = json.loads(fields[b"plan"])
        data["epoch"] = int(fields[b"epoch"])
        data["reasons"] = tuple(data["reasons"])
        data["devices"] = tuple(map(tuple, data.get("devices", ())))
        data["blocks"] = dict(sorted(data["blocks"].items(), key=lambda block: int(block[0].removeprefix("block_"))))
        return cls(**data)


#: What people are told of a worker. `loading`: not ready yet, whether it has a stage or waits for one.
WorkerState = Literal["loading", "ready", "draining", "silent"]
WORKER_STATES: tuple[WorkerState, ...] = get_args(WorkerState)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """One worker as `worker:<id>` tells it. `stage` None: registered, blocks not loaded yet.

    `pages` KV pages of its pool, `pages_used` of them in use; `reserved` pages promised to runs; `running` requests on
    it; `silent_ms` since its last beat; `dead_after_ms` of the cell. `capabilities` once its blocks are loaded.
    `pace` of a first stage, once it has measured itself. `device_id` is the name under which plans
    know its device; "": none does. One that `varies` does not compute the same bits twice. `slow` is why it computes
    more slowly than its CPU can, with the remedy; "": it does not.
    """

    id: str
    model: str
    device: Device
    numerics: str
    host: str
    pid: int
    port: int
    registered_ms: int
    device_id: str = ""
    split: str = ""
    stage: int | None = None
    first: int = 0
    last: int = 0
    epoch: int = 0
    pages: int = 0
    pages_used: int = 0
    reserved: int = 0
    draining: bool = False
    ready: bool = False
    running: int = 0
    silent_ms: int = 0
    dead_after_ms: int = DEAD_AFTER_MS
    capabilities: Capabilities | None = None
    pace: Pace | None = None
    varies: bool = False
    slow: str = ""

    @property
    def whole_model_only(self) -> bool:
        """It computes with an import of ONNX blocks that others made, which gives the blocks of other stages nothing by
        name: it can only have all blocks as one stage."""
        return f"-{IMPORTED}-" in self.numerics

    @property
    def is_alive(self) -> bool:
        """Whether it counts: the one definition, which scripts share. Who is not will be declared dead."""
        return self.silent_ms < self.dead_after_ms

    @property
    def is_late(self) -> bool:
        """Whether it has missed beats. It still counts, but who comes now may be its replacement."""
        return self.silent_ms > self.dead_after_ms / 3

    @property
    def state(self) -> WorkerState:
        """What metrics and `blockrelay status` say of it."""
        if not self.is_alive:
            return "silent"
        if self.draining:
            return "draining"
        return "ready" if self.ready else "loading"

    @classmethod
    def from_redis(
        cls, worker: str, f: Mapping[bytes, bytes], *, ready: bool, running: int, silent_ms: int, dead_after_ms: int
    ) -> "WorkerInfo":
        def integer(name: bytes) -> int:
            return int(f.get(name, b"0"))

        return cls(
            id=worker,
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
        )


def missing_stages(plan: Plan | None, workers: list[WorkerInfo]) -> list[str]:
    """Why no token can be produced right now, one sentence per gap; empty = ready."""
    if plan is None:
        return ["no plan yet: the scheduler has not seen a worker of this model"]
    gaps: list[str] = []
    for index, stage in enumerate(parse_split(plan.split)):
        serving = [
            w
            for w in workers
            if w.ready and not w.draining and w.split == plan.split and w.stage == index and w.is_alive
        ]
        if not serving:
            gaps.append(f"stage {index} (block_{stage.first} to block_{stage.last}) has no live worker")
    return gaps


def slow_workers(workers: Sequence[WorkerInfo]) -> dict[str, list[str]]:
    """The ids of those that compute more slowly than their CPU can, by the cause they tell."""
    found: dict[str, list[str]] = {}
    for worker in workers:
        if worker.slow and worker.is_alive:
            found.setdefault(worker.slow, []).append(worker.id)
    return found


@dataclass(frozen=True, slots=True)
class CellLoad:
    """What the unfinished requests of a cell do: so many are on workers, so many wait for one.

    `kv_usage`: share of the KV pages in use, in the stage that has least left; 0 without workers.
    """

    running: int
    waiting: int
    kv_usage: float


def cell_load(workers: Sequence[WorkerInfo], unfinished: int) -> CellLoad:
    """`unfinished` requests there are. Each that runs is on one worker of the first stage."""
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
