"""How much of everything a number of streams needs, and what runs out first. Pure: from measured costs and a target."""

from dataclasses import asdict, dataclass
from math import ceil, floor

from bench.simulate.cell import MAX_REQUESTS
from bench.simulate.costs import Costs

#: Of a core, or of the memory that Redis may fill before FORGET begins, what is planned for: the rest is for bursts.
SHARE = 0.7
#: A control Redis writes to its disk, and a gateway reads its logs, so often where there is always something to do: what
#: comes meanwhile waits for the next time. Seconds.
ROUND_S = 0.020


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Measured bytes. In the control Redis: of a request under way, and of one that has ended, for `retention_s`; on its
    wires for each token, and for each log that a read asks about. Of a gateway's memory for a stream, and on the wire
    to the client for a token."""

    redis_request: float
    redis_ended: float
    redis_token: float
    redis_read_stream: float
    gateway_stream: float
    client_token: float
    retention_s: float = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """So many streams at once; each has `tokens_per_s` and another one follows when its `new` tokens are there."""

    streams: int
    tokens_per_s: float
    prompt: int
    new: int

    @property
    def requests_per_s(self) -> float:
        """Of one stream."""
        return self.tokens_per_s / self.new


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A worker: what it reads from memory and computes in a second, and its memory in bytes."""

    name: str
    bytes_per_s: float
    operations_per_s: float
    memory: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Numbers that each token is multiplied with, the bytes they lie in, and KV bytes of each token."""

    parameters: float
    weight_bytes: float
    kv_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """`streams` of one worker, its `step_s`, and which of memory, reading, computing and slots keeps it from more."""

    streams: int
    step_s: float
    bound: str
    count: int


def workers(target: Target, model: Model, machine: Machine) -> Workers:
    """As many streams to a worker as have their tokens in time. A step reads all weights and the KV pages of all its
    streams, and computes a token for each and their share of prompts."""
    context = target.prompt + target.new / 2
    rows = 1 + target.prompt / target.new  # of each token that is given

    def step_s(streams: float) -> float:
        reads = (model.weight_bytes + streams * context * model.kv_bytes) / machine.bytes_per_s
        return max(reads, 2 * model.parameters * rows * streams / machine.operations_per_s)

    per_token = 1 / target.tokens_per_s
    bounds = {
        "memory": (machine.memory - model.weight_bytes) / (model.kv_bytes * (target.prompt + target.new)),
        "reading": (per_token * machine.bytes_per_s - model.weight_bytes) / (context * model.kv_bytes),
        "computing": per_token * machine.operations_per_s / (2 * model.parameters * rows),
        "slots": float(MAX_REQUESTS),
    }
    bound = min(bounds, key=lambda name: bounds[name])
    streams = max(1, floor(bounds[bound]))
    return Workers(streams=streams, step_s=step_s(streams), bound=bound, count=ceil(target.streams / streams))


@dataclass(frozen=True, slots=True, kw_only=True)
class CellUse:
    """Shares of what the control Redis of a cell has: of its thread, by what for, and of its memory."""

    tokens: float
    commits: float
    requests: float
    reads: float
    syncs: float
    memory: float

    @property
    def thread(self) -> float:
        return self.tokens + self.commits + self.requests + self.reads + self.syncs

    @property
    def largest(self) -> str:
        """What most of the thread is for."""
        return max(("tokens", "commits", "requests", "reads", "syncs"), key=lambda name: asdict(self)[name])


def cell_use(
    costs: Costs, size: Footprint, target: Target, some: Workers, *, streams: float, memory: float, gateways: int
) -> CellUse:
    """Of a cell with so many streams, whose Redis may fill so much memory; `gateways` read from it."""
    starts = streams * target.requests_per_s
    calls = 4 * costs.call + costs.accept + costs.claim + costs.claim_job + costs.wake + costs.commit_end
    kept = size.redis_request + target.requests_per_s * size.retention_s * size.redis_ended
    return CellUse(
        tokens=streams * target.tokens_per_s * costs.commit_token,
        commits=streams / some.streams / some.step_s * (costs.call + costs.commit),
        requests=starts * calls,
        reads=(gateways * (costs.call + costs.read) + streams * costs.read_stream) / ROUND_S,
        syncs=(costs.sync + costs.fsync) / ROUND_S,
        memory=streams * kept / memory,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """What it takes. `cell_bound` is what keeps a cell from more streams; bytes are those of a second, or of memory."""

    workers: Workers
    cells: int
    cell_streams: int
    cell_use: CellUse
    cell_bound: str
    gateways: int
    gateway_bound: str
    gateway_memory: float
    redis_memory: float
    client_bytes_per_s: float
    redis_bytes_per_s: float
    first: str


def size(
    costs: Costs, size: Footprint, target: Target, model: Model, machine: Machine, *, redis_memory: float
) -> Sized:
    """All of it; `redis_memory` is what one control Redis may fill. Each gateway serves one cell's streams, as a
    deployment would arrange it where a gateway is full before a cell is."""
    some = workers(target, model, machine)
    tokens = target.tokens_per_s
    per_stream = {
        "tokens": tokens * costs.gateway_token,
        "requests": target.requests_per_s * costs.gateway_request,
        "reads": costs.gateway_read_stream / ROUND_S,
    }
    own = (SHARE - costs.gateway_read / ROUND_S) / sum(per_stream.values())
    gateway_streams = max(1, floor(own))

    def use(streams: float) -> CellUse:
        gateways = ceil(streams / gateway_streams)
        return cell_use(costs, size, target, some, streams=streams, memory=redis_memory, gateways=gateways)

    low, high = 0, target.streams
    while low < high:  # the most that fit
        middle = (low + high + 1) // 2
        fits = max(use(middle).thread, use(middle).memory) <= SHARE
        low, high = (middle, high) if fits else (low, middle - 1)
    streams = max(1, low)
    cells = ceil(target.streams / streams)
    there = use(streams)
    rate = target.streams * tokens
    kept = size.redis_request + target.requests_per_s * size.retention_s * size.redis_ended
    # What has to be multiplied at the fewest streams is what is exhausted first.
    first = min([("a worker", some.streams), ("a gateway", gateway_streams), ("a cell", streams)], key=lambda one: one[1])
    return Sized(
        workers=some,
        cells=cells,
        cell_streams=streams,
        cell_use=there,
        cell_bound="memory" if there.memory > there.thread else there.largest,
        gateways=ceil(target.streams / gateway_streams),
        gateway_bound=max(per_stream, key=lambda name: per_stream[name]),
        gateway_memory=target.streams * size.gateway_stream,
        redis_memory=target.streams * kept,
        client_bytes_per_s=rate * size.client_token,
        redis_bytes_per_s=rate * size.redis_token + target.streams / ROUND_S * size.redis_read_stream,
        first=first[0],
    )
