"""Computes the machines that a number of streams needs, and what runs out first. Pure: from measured costs."""

from dataclasses import asdict, dataclass
from math import ceil, floor

from bench.simulate.costs import Costs

#: The share of a core, of a worker's time, and of the memory that Redis may fill, that is planned for; the rest is for
#: bursts.
SHARE = 0.7
#: Seconds between two syncs of a busy control Redis, and between two reads of logs by a busy gateway.
ROUND_S = 0.020
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Measured bytes of requests, streams and tokens."""

    redis_request: float
    """Memory of the control Redis for a request in flight."""
    redis_ended: float
    """Memory of the control Redis for a request that has ended."""
    redis_token: float
    """Bytes to and from the control Redis for a token."""
    redis_read_stream: float
    """Bytes to and from the control Redis for each log in a read."""
    gateway_stream: float
    """Memory of a gateway for a stream."""
    client_token: float
    """Bytes to the client for a token."""
    retention_s: float = 900.0
    """Seconds for which ended requests stay in the control Redis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The load to size for: `streams` streams at once, in each of which one request follows the other."""

    streams: int
    tokens_per_s: float
    """Tokens per second of each stream."""
    prompt: int
    """Tokens of each prompt."""
    new: int
    """Tokens of each answer."""

    @property
    def requests_per_s(self) -> float:
        """Requests per second of one stream."""
        return self.tokens_per_s / self.new


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine of a worker."""

    name: str
    bytes_per_s: float
    """Bytes that it reads from memory in a second."""
    operations_per_s: float
    memory: float
    """Its memory in bytes."""
    slots: int
    """Requests that the worker is set to run at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The size of a model."""

    parameters: float
    weight_bytes: float
    """Bytes of all parameters."""
    kv_bytes: float
    """Bytes of keys and values of one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The workers that a target needs."""

    streams: int
    """Streams of one worker."""
    step_s: float
    """Seconds of a step with all of them."""
    bound: str
    """The limit that keeps it from more streams: memory, reading, computing or slots."""
    count: int
    """The number of workers."""


def _whole(streams: float) -> int:
    return floor(streams + _ROUNDING)


def workers(target: Target, model: Model, machine: Machine) -> Workers:
    """Returns the workers for a target: each has as many streams as get their tokens in time at SHARE of its speed.

    A step reads all weights and the KV pages of all its streams, and computes a token and a share of a prompt for each.
    Raises ValueError where a worker is too slow or too small for one stream.
    """
    context = target.prompt + target.new / 2
    rows = 1 + target.prompt / target.new  # computed tokens for each generated one
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
    """The use of a cell's control Redis: the share of its thread for each kind of work, and the share of its memory."""

    tokens: float
    commits: float
    requests: float
    reads: float
    syncs: float
    memory: float

    @property
    def thread(self) -> float:
        """The share of the thread that is used."""
        return self.tokens + self.commits + self.requests + self.reads + self.syncs

    @property
    def largest(self) -> str:
        """The name of the limit: `memory`, or the kind of work that takes most of the thread."""
        shares = {name: share for name, share in asdict(self).items() if name != "memory"}
        return "memory" if self.memory > self.thread else max(shares, key=lambda name: shares[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """The sizes of a whole system for a target. A gateway is one thread."""

    workers: Workers
    cells: int
    cell_streams: int
    """Streams of one cell."""
    cell_use: CellUse
    """The use of the control Redis of a full cell."""
    gateways: int
    gateway_streams: int
    """Streams of one gateway."""
    gateway_bound: str
    """The kind of work that takes most of a gateway."""
    gateway_cells: int
    """Cells whose logs a gateway without streams could read."""
    gateway_bytes: float
    """Memory of all gateways."""
    redis_bytes: float
    """Memory of all control Redis servers."""
    client_bytes_per_s: float
    redis_bytes_per_s: float


def kept_bytes(footprint: Footprint, target: Target) -> float:
    """Bytes of a control Redis for each stream: its request, and the ended ones before it that are retained."""
    return footprint.redis_request + target.requests_per_s * footprint.retention_s * footprint.redis_ended


def gateway_use(costs: Costs, target: Target) -> dict[str, float]:
    """Returns the share of a gateway's thread for one stream, by kind of work. The gateway reads every ROUND_S."""
    return {
        "tokens": target.tokens_per_s * costs.gateway_token,
        "requests": target.requests_per_s * costs.gateway_request,
        "reads": costs.gateway_read_stream / ROUND_S,
    }


def cell_use(
    costs: Costs, footprint: Footprint, target: Target, some: Workers, *, streams: int, gateways: int, memory: float
) -> CellUse:
    """Returns the use of a cell with `streams` streams, whose logs `gateways` gateways read.

    Its Redis may fill `memory` bytes. Workers (`some`) commit once for each token of a stream.
    """
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
    """Returns the sizes of a whole system, in which each part is filled to SHARE.

    Each gateway reads the logs of one cell only; a gateway that reads several would pay `gateway_read` for each.
    `redis_memory` is the bytes that a control Redis may fill.
    """
    some = workers(target, model, machine)
    shares = gateway_use(costs, target)
    gateway_streams = max(1, _whole((SHARE - costs.gateway_read / ROUND_S) / sum(shares.values())))

    def use(streams: int) -> CellUse:
        gateways = ceil(streams / gateway_streams)
        return cell_use(costs, footprint, target, some, streams=streams, gateways=gateways, memory=redis_memory)

    low, high = 1, target.streams
    while low < high:  # bisection: the most streams that fit into a cell
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
