"""Computes the needs of a load from the model and the workers' pace. Pure arithmetic; docs/sizing.md has its rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from blockrelay.block_folder.analysis import ModelAnalysis
from blockrelay.block_folder.model import FLOATS, Precision
from blockrelay.block_folder.precisions import kv_item_bytes
from blockrelay.errors import UsageError
from blockrelay.protocol.constants import PAGE_TOKENS, RETENTION_S, YIELD_SHARE
from blockrelay.protocol.planned_split import equal_parts
from blockrelay_converter.policy import (
    FIRST_TOKEN_DISK_S,
    LEAST_GATEWAYS,
    LEAST_SCHEDULERS,
    PLANNED_SHARE,
)
from blockrelay_converter.sizing import measured
from blockrelay_converter.sizing.measured import Cost

#: Tolerance for float rounding, so that 2.0000000001 processes are two.
_ROUNDING = 1e-9
#: Writes that a first token waits for in sequence: ACCEPT, CLAIM, COMMIT. Each may find a sync under way, and then
#: waits for that one and its own.
FIRST_TOKEN_SYNCS, SYNCS_A_WRITE = 3, 2
#: Bytes of the rotary tables per position and dimension of a head: cos and sin, float32, for each pair.
_ROTARY_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLoad:
    """A load: requests per second and their tokens, and the settings of the workers that serve it.

    Raises UsageError for a number out of range, and for requests that are longer than the context.
    """

    requests_per_second: float
    prompt: int
    """Tokens of each prompt."""
    new: int
    """New tokens of each request."""
    context: int
    """Most tokens of a request, prompt included."""
    stages: int = 1
    """Number of equal stages that the model is cut into."""
    at_once: int = 64
    """Most requests at once on each route of workers (BLOCKRELAY_MAX_REQUESTS)."""

    def __post_init__(self) -> None:
        for option, value in {
            "--requests-per-second": self.requests_per_second, "--prompt": self.prompt, "--new": self.new,
            "--context": self.context, "--stages": self.stages, "--requests-at-once": self.at_once,
        }.items():  # fmt: skip
            if not 0 < value <= 1e9:
                raise UsageError(f"{option} must be above 0, and a number that a system can have")
        if self.prompt + self.new > self.context:
            raise UsageError(
                f"a prompt of {self.prompt} and {self.new} new tokens are beyond the context of {self.context}: "
                "lower --prompt or --new, or raise --context"
            )

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of all requests."""
        return self.requests_per_second * self.new

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prompt tokens per second of all requests."""
        return self.requests_per_second * self.prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeed:
    """The memory that one worker of a stage needs, in bytes."""

    first: int
    last: int
    """Indexes of the first and the last block of the stage."""
    weight_bytes: int
    """Weights in the block files, as a GPU holds them."""
    cpu_weight_bytes: int
    """Weights on a CPU, which widens fp16 to float32."""
    kv_bytes_per_token: int
    kv_bytes: int
    """KV pages of all requests that the worker has at once, each with its prompt and new tokens."""

    @property
    def cpu_memory(self) -> float:
        """Bytes of host memory of a CPU worker: weights, KV pages and its process, without the rotary tables."""
        return self.cpu_weight_bytes + self.kv_bytes + measured.WORKER_ALONE_BYTES.value

    @property
    def gpu_memory(self) -> int:
        """Bytes of device memory of a worker that computes on a GPU: weights and KV pages."""
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeed:
    """The bytes of a model and its requests that do not depend on the rate of the load."""

    weight_bytes: int
    rotary_bytes: int
    """The tables of cos and sin, which each worker has."""
    stages: tuple[StageNeed, ...]
    kv_bytes_per_token: int
    kv_bytes_per_request: int
    """KV pages of a request with the load's prompt and new tokens."""
    kv_bytes_per_context: int
    """KV pages of a request that fills the load's context."""
    hop_bytes_per_row: int
    """Bytes that all stages together send to their next stages for one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskNeed:
    """The needs of the append-only file with `appendfsync always`: bytes, syncs, and how long a sync may take."""

    file_bytes_per_second: float
    """Bytes appended to the file."""
    device_bytes_per_second: float
    """Bytes written to the device, where each sync writes whole pages."""
    syncs_per_second: float
    """Syncs if no two writes share one."""
    fsync_own_s: float
    """Longest sync (seconds) with which every write may have its own; with a longer one, writes share."""
    fsync_step_s: float
    """Longest sync (seconds) with which the tokens of each step are on disk before those of the next step."""
    fsync_first_token_s: float
    """Longest sync (seconds) with which the disk adds at most FIRST_TOKEN_DISK_S to a first token."""

    @property
    def fsync_needed_s(self) -> float:
        """Longest sync (seconds) that neither delays steps nor a first token too long."""
        return min(self.fsync_step_s, self.fsync_first_token_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskEffect:
    """The effect of a disk with a given duration of a sync on one cell."""

    syncs_per_second: float
    """Most syncs per second; each covers all writes that have waited for it."""
    writes_a_sync: float
    """Acceptances and COMMITs that share one sync, at this load."""
    first_token_s: float
    """Longest wait of a first token for the disk, in seconds."""
    commits_per_second_a_worker: float
    """Most COMMITs per second of a worker: one is under way at a time, and the next one has all tokens since."""
    steps_a_commit: float
    """Steps whose tokens share a COMMIT because the disk is slower than a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """All that a load needs at one pace of its workers. CPU is in cores.

    Counts, rates, CPU and memory are sums over all cells, except `gateway_bytes` (of each gateway) and `schedulers`
    (of each cell). Durations are those of one route or one sync.
    """

    routes: int
    workers: int
    requests_at_once: float
    step_s: float
    """Seconds of a step of a full route."""
    cells: int
    redis_commands_per_second: float
    redis_cpu: float
    redis_bytes: float
    """Memory in use by the control Redis."""
    redis_maxmemory: float
    """The setting `maxmemory` of the control Redis servers of all cells together, in bytes."""
    redis_wire_bytes_per_second: float
    """Bytes of the control Redis on the network, in both directions."""
    disk: DiskNeed
    payload_bytes_per_second: float
    """Hidden states of new tokens that stages send on."""
    payload_prompt_bytes_per_second: float
    """Hidden states of prompt tokens that stages send on."""
    gateways: int
    gateway_cpu: float
    gateway_bytes: float
    """Memory of a gateway, with its helpers and its streams."""
    client_bytes_per_second: float
    """Bytes from gateways to clients."""
    schedulers: int = LEAST_SCHEDULERS


def model_need(
    analysis: ModelAnalysis, precisions: Sequence[Precision], load: ExpectedLoad, *, head_dim: int
) -> ModelNeed:
    """Returns the bytes of the model and of its requests, which do not depend on the rate of the load.

    Raises UsageError for more stages than blocks, and for a precision that the model's widths do not allow.
    """
    if missing := sorted(set(precisions) - set(analysis.precisions)):
        raise UsageError(f"{analysis.model} cannot be {missing[0]}: it has layers that no groups of 32 inputs fit")
    item = kv_item_bytes(precisions)
    tokens = _in_pages(load.prompt + load.new)
    blocks = list(zip(analysis.blocks, precisions, strict=True))
    stages: list[StageNeed] = []
    for part in equal_parts(len(blocks), load.stages).stages:
        own = blocks[part.first - 1 : part.last]
        kv = item * sum(block.kv_values_per_token for block, _ in own)
        stages.append(
            StageNeed(
                first=part.first,
                last=part.last,
                weight_bytes=sum(block.bytes[precision] for block, precision in own),
                cpu_weight_bytes=sum(block.bytes["fp32" if p in FLOATS else p] for block, p in own),
                kv_bytes_per_token=kv,
                kv_bytes=load.at_once * tokens * kv,
            )
        )
    kv = sum(stage.kv_bytes_per_token for stage in stages)
    return ModelNeed(
        weight_bytes=sum(stage.weight_bytes for stage in stages),
        rotary_bytes=_ROTARY_BYTES * load.context * head_dim,
        stages=tuple(stages),
        kv_bytes_per_token=kv,
        kv_bytes_per_request=kv * tokens,
        kv_bytes_per_context=kv * _in_pages(load.context),
        hop_bytes_per_row=sum(analysis.blocks[stage.last - 1].hop_bytes_per_row for stage in stages[:-1]),
    )


def _whole(number: float) -> int:
    """Returns `number` rounded up, at least 1."""
    return max(1, ceil(number - _ROUNDING))


def _in_pages(tokens: int) -> int:
    """Returns `tokens` rounded up to whole KV pages."""
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


def capacity(model: ModelNeed, load: ExpectedLoad, pace: float) -> Capacity:
    """Returns the needs of the load if each route (one worker per stage) has this pace.

    The pace is the new tokens per second of a route while it also computes the load's prompts.
    """
    routes = _whole(load.tokens_per_second / (PLANNED_SHARE * pace))
    step_s = load.at_once / pace
    # A request lasts as many steps as it has new tokens; the routes limit how many run at once.
    at_once = min(load.tokens_per_second * step_s, float(routes * load.at_once))
    # One COMMIT holds the tokens of one step, for all requests of a route.
    commits = routes / step_s
    commits = min(commits, load.tokens_per_second)
    redis_cpu = a_second(measured.REDIS_CPU, load, commits)
    cells = _whole(redis_cpu / PLANNED_SHARE)
    free = 1 - redis_cpu / cells  # share of time left for syncs: while Redis computes, it does not sync
    syncs = a_second(measured.SYNCS, load, commits)
    whole = at_once + load.requests_per_second * measured.LINGERS_S
    redis_bytes = cells * measured.REDIS_ALONE_BYTES.value + whole * _each(measured.UNDER_WAY_BYTES, load)
    kept = load.requests_per_second * RETENTION_S * _each(measured.ENDED_BYTES, load)
    gateway_cpu = a_second(measured.GATEWAY_CPU, load, commits)
    # A gateway reads every cell; with very many cells it reads only those of its group, so the cost is limited.
    reading = min(PLANNED_SHARE / 2, measured.GATEWAY_READ_S.value * measured.GATEWAY_READS_A_SECOND * cells)
    gateways = max(LEAST_GATEWAYS, _whole(gateway_cpu / (PLANNED_SHARE - reading)))
    return Capacity(
        routes=routes,
        workers=routes * load.stages,
        requests_at_once=at_once,
        step_s=step_s,
        cells=cells,
        redis_commands_per_second=a_second(measured.REDIS_COMMANDS, load, commits),
        redis_cpu=redis_cpu,
        redis_bytes=redis_bytes + kept,
        redis_maxmemory=(redis_bytes + kept) / YIELD_SHARE,
        redis_wire_bytes_per_second=a_second(measured.REDIS_WIRE, load, commits),
        disk=DiskNeed(
            file_bytes_per_second=a_second(measured.FILE_BYTES, load, commits),
            device_bytes_per_second=a_second(measured.DEVICE_BYTES, load, commits),
            syncs_per_second=syncs,
            fsync_own_s=free / (syncs / cells),
            fsync_step_s=free * step_s / SYNCS_A_WRITE,
            fsync_first_token_s=free * FIRST_TOKEN_DISK_S / (FIRST_TOKEN_SYNCS * SYNCS_A_WRITE),
        ),
        payload_bytes_per_second=model.hop_bytes_per_row * load.tokens_per_second,
        payload_prompt_bytes_per_second=model.hop_bytes_per_row * load.prompt_tokens_per_second,
        gateways=gateways,
        gateway_cpu=gateway_cpu + gateways * reading,
        gateway_bytes=measured.GATEWAY_ALONE_BYTES.value
        + measured.GATEWAY_HELPERS_BYTES.value
        + measured.GATEWAY_STREAM_BYTES.value * ceil(at_once / gateways),
        client_bytes_per_second=measured.CLIENT_TOKEN_BYTES.value * load.tokens_per_second,
    )


def disk_effect(need: Capacity, fsync_s: float) -> DiskEffect:
    """Returns the effect of syncs of `fsync_s` seconds on a cell. Redis computes only between syncs."""
    free = 1 - need.redis_cpu / need.cells
    round_s = fsync_s / free
    writes = need.disk.syncs_per_second / need.cells
    waits_s = SYNCS_A_WRITE * round_s
    return DiskEffect(
        syncs_per_second=1 / round_s,
        writes_a_sync=max(1.0, writes * round_s),
        first_token_s=FIRST_TOKEN_SYNCS * waits_s,
        commits_per_second_a_worker=1 / waits_s,
        steps_a_commit=max(1.0, waits_s / need.step_s),
    )


def a_second(cost: Cost, load: ExpectedLoad, commits: float) -> float:
    """Returns one cost per second under this load, with `commits` calls of COMMIT per second."""
    return load.requests_per_second * _each(cost, load) + commits * cost.commit + cost.second


def _each(cost: Cost, load: ExpectedLoad) -> float:
    """Returns the cost of one request with its tokens, without COMMITs."""
    return cost.request + load.prompt * cost.prompt_token + load.new * cost.token
