"""The settings of a scheduler."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from blockrelay.protocol.constants import DEAD_AFTER_MS, RETENTION_S
from blockrelay.settings.common import MAX_RETENTION_S, Settings


class SchedulerSettings(Settings):
    port: int = Field(default=9101, ge=0, le=65535, description="port of metrics and health")
    stages: int = Field(default=1, ge=1, description="number of equal stages that the model is split into")
    stage_devices: str = Field(default="", description="gpu or cpu for each of these stages, gpu,cpu,gpu for example")
    plan: Path | None = Field(default=None, description="`blockrelay plan --json` file with stages, not equal ones")
    strategy: str | None = Field(default=None, description="strategy that plans the stages, instead of equal ones")
    objective: Literal["latency", "throughput"] = Field(default="throughput", description="objective of the strategy")
    profile: Path | None = Field(default=None, description="file of `blockrelay profile`, for the strategy")
    devices: Path | None = Field(default=None, description="file of devices and links, for the strategy")
    tick_s: float = Field(default=0.2, gt=0, description="seconds between two checks of the cell")
    #: These two hold for the whole cell: schedulers publish them, other services read them.
    dead_after_s: float = Field(
        default=DEAD_AFTER_MS / 1000, ge=0.1, le=3600, description="seconds without heartbeat until a worker is dead"
    )
    retention_s: int = Field(
        default=RETENTION_S, ge=1, le=MAX_RETENTION_S, description="seconds that a finished request can be read"
    )
    dead_letters_s: int = Field(
        default=7 * 86400, ge=1, description="seconds that a dead letter, with its prompt, is kept"
    )
    vacancy_s: float = Field(default=15.0, gt=0, description="seconds that an empty stage waits for a replacement")
    stalled_after_s: float = Field(default=30.0, gt=0, description="seconds without progress until a run is repeated")
    replan: Literal["on", "off"] = Field(
        default="on", description="move blocks between stages when measured times say that steps would be shorter"
    )
    replan_gain: float = Field(
        default=0.15, gt=0, description="share by which the steps of a plan must be longer than those of a better one"
    )
    replan_after_s: float = Field(
        default=120.0, gt=0, description="seconds that a plan must be better before it counts"
    )
    replan_every_s: float = Field(default=300.0, gt=0, description="least seconds between two such plans")
    restore_after_s: float = Field(
        default=300.0, gt=0, description="seconds before a larger precision is tried again where there is memory for it"
    )
    prompt_tokens_per_s: float = Field(default=100.0, gt=0, description="slowest prompt speed that is not a stall")
    fallback_wait_s: float = Field(
        default=60.0, gt=0, description="seconds that a request with fallback: deny waits for a GPU before it fails"
    )
    target_backlog_s: float = Field(
        default=30.0, gt=0, description="seconds within which workers_wanted workers would finish all requests"
    )
    spare_workers: int = Field(
        default=1, ge=0, description="workers that workers_wanted counts beyond one for each stage, in case one dies"
    )
    numerics_wait_s: float = Field(
        default=30.0,
        ge=0,
        description="seconds without a worker of its numerics id after which a request continues under another",
    )
    raise_protocol: bool = Field(
        default=True, description="raise the cell's protocol number once all services speak a higher one; no way back"
    )
