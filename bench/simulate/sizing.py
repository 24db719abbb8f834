"""How much of everything a number of streams needs, and what runs out first. Pure: from measured costs and a target."""

from dataclasses import asdict, dataclass
from math import ceil, floor

from bench.simulate.costs import Costs

#: Of a core, of a worker's second, or of the memory that Redis may fill, what is planned for: the rest is for bursts.
SHARE = 0.7
#: Where there is always something to do, a control Redis writes to its disk and a gateway reads its logs so often; what
#: comes meanwhile waits for the next time. Seconds.
ROUND_S = 0.020
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Measured bytes. In the control Redis: of a request under way, and of one that has ended, for `retention_s`. On
    its wires: for each token, and for each log that a read asks about. Of a gateway's memory for a stream, and on the
    wire to the client for a token."""

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
    """A worker: what it reads from memory and computes in a second, its memory in bytes, and the requests that it is
    set to run at once."""

    name: str
    bytes_per_s: float
    operations_per_s: float
    memory: float
    slots: int


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


def _whole(streams: float) -> int:
    return floor(streams + _ROUNDING)


def workers(target: Target, model: Model, machine: Machine) -> Workers:
    """As many streams to a worker as have their tokens in time, with SHARE of its speed. A step reads all weights and
    the KV pages of all its streams, and computes a token for each and their share of prompts."""
    context = target.prompt + target.new / 2
    rows = 1 + target.prompt / target.new  # of each token that is given
    per_token = SHARE / target.tokens_per_s
    bounds = {
        "memory": (machine.memory - model.weight_bytes) / (model.kv_bytes * (target.prompt + target.new)),
        "reading": (per_token * machine.bytes_per_s - model.weight_bytes) / (context * model.kv_bytes),
        "computing": per_token * machine.operations_per_s / (2 * model.parameters * rows),
        "slots": float(machine.slots),
    }
    bound = min(bounds, key=lambda name: bounds[name])
    streams = _whole(bounds[bound])
    if streams < 1:
        raise ValueError(f"{machine.name} is too slow or too small for one stream: {bound}")
    reading_s = (model.weight_bytes + streams * context * model.kv_bytes) / machine.bytes_per_s
    computing_s = 2 * model.parameters * rows * streams / machine.operations_per_s
    count = ceil(target.streams / streams)
    return Workers(streams=streams, step_s=max(reading_s, computing_s), bound=bound, count=count)


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
        """What fills it first: memory, or what most of the thread is for."""
        shares = {name: share for name, share in asdict(self).items() if name != "memory"}
        return "memory" if self.memory > self.thread else max(shares, key=lambda name: shares[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """What it takes. Of a cell and of a gateway (one thread) its streams, and what keeps it from more.
    `gateway_cells`: those that a gateway could read if it had no streams. Bytes in all, and of a second."""

    workers: Workers
    cells: int
    cell_streams: int
    cell_use: CellUse
    gateways: int
    gateway_streams: int
    gateway_bound: str
    gateway_cells: int
    gateway_bytes: float
    redis_bytes: float
    client_bytes_per_s: float
    redis_bytes_per_s: float


def kept_bytes(footprint: Footprint, target: Target) -> float:
    """Of a control Redis for each stream: its request, and those before it that are retained."""
    return footprint.redis_request + target.requests_per_s * footprint.retention_s * footprint.redis_ended


def gateway_use(costs: Costs, target: Target) -> dict[str, float]:
    """Shares of a gateway's thread for each stream, by what for; it reads every ROUND_S."""
    return {
        "tokens": target.tokens_per_s * costs.gateway_token,
        "requests": target.requests_per_s * costs.gateway_request,
        "reads": costs.gateway_read_stream / ROUND_S,
    }


def cell_use(
    costs: Costs, footprint: Footprint, target: Target, some: Workers, *, streams: int, gateways: int, memory: float
) -> CellUse:
    """Of a cell with so many streams that so many gateways read, and whose Redis may fill so many bytes. Workers commit
    as often as the streams have tokens."""
    starts = streams * target.requests_per_s
    request = costs.accept + costs.claim + costs.claim_job + costs.wake + costs.commit_end + 4 * costs.call
    return CellUse(
        tokens=streams * target.tokens_per_s * costs.commit_token,
        commits=streams / some.streams * target.tokens_per_s * (costs.call + costs.commit),
        requests=starts * request,
        reads=(gateways * (costs.call + costs.read) + streams * costs.read_stream) / ROUND_S,
        syncs=(costs.sync + costs.fsync[0]) / ROUND_S,
        memory=streams * kept_bytes(footprint, target) / memory,
    )


def size(
    costs: Costs, footprint: Footprint, target: Target, model: Model, machine: Machine, *, redis_memory: float
) -> Sized:
    """All of it, each filled to SHARE. The streams of a gateway are those of one cell, as two lists of cells would have
    it; a gateway that reads several cells pays `gateway_read` for each."""
    some = workers(target, model, machine)
    shares = gateway_use(costs, target)
    gateway_streams = max(1, _whole((SHARE - costs.gateway_read / ROUND_S) / sum(shares.values())))

    def use(streams: int) -> CellUse:
        gateways = ceil(streams / gateway_streams)
        return cell_use(costs, footprint, target, some, streams=streams, gateways=gateways, memory=redis_memory)

    low, high = 1, target.streams
    while low < high:  # the most that fit
        middle = (low + high + 1) // 2
        fits = max(use(middle).thread, use(middle).memory) <= SHARE + _ROUNDING
        low, high = (middle, high) if fits else (low, middle - 1)
    rate = target.streams * target.tokens_per_s
    return Sized(
        workers=some,
        cells=ceil(target.streams / low),
        cell_streams=low,
        cell_use=use(low),
        gateways=ceil(target.streams / gateway_streams),
        gateway_streams=gateway_streams,
        gateway_bound=max(shares, key=lambda name: shares[name]),
        gateway_cells=_whole(SHARE * ROUND_S / max(costs.gateway_read, 1e-9)),
        gateway_bytes=target.streams * footprint.gateway_stream,
        redis_bytes=target.streams * kept_bytes(footprint, target),
        client_bytes_per_s=rate * footprint.client_token,
        redis_bytes_per_s=rate * footprint.redis_token + target.streams / ROUND_S * footprint.redis_read_stream,
    )
