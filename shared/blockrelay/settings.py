"""Every setting of every service: the only module that reads the environment.

Each field is the environment variable `BLOCKRELAY_<FIELD>` (upper case), or the option `--<field>` of the service's
process, which wins. A service reads its one settings object in `__main__` and passes it down. An unusable value and an
unknown name fail loudly with that name; names that another service knows are fine, since environments are shared.
"""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import SettingsError

from blockrelay import failpoints
from blockrelay.auth.redis_settings import RedisSettings
from blockrelay.errors import UsageError
from blockrelay.host.cpu import check_threads
from blockrelay.protocol.constants import DEAD_AFTER_MS, RETENTION_S
from blockrelay.protocol.encoding.request_ids import CELL
from blockrelay.protocol.plan import GPU, Device

BUNDLED_MODEL = Path(__file__).parent / "models" / "storyteller"

GraphMode = Literal["max-autotune", "use-graph-cache", "reduce-overhead", "enforce-eager"]

#: Seconds: a year.
MAX_RETENTION_S = 366 * 24 * 3600


class Settings(RedisSettings):
    """What all services share."""

    model: Path = Field(default=BUNDLED_MODEL, description="block folder")
    model_name: str | None = Field(default=None, description="name clients use; default: the manifest's")
    cell: str = Field(default="c0", pattern=rf"^{CELL}$", description="name of the partition")
    node_id: str | None = Field(default=None, description="node_id of log lines; default: role, host and pid")
    host: str = Field(default="127.0.0.1", description="address the service listens on")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="least level of log lines"
    )
    log_prompts: bool = Field(default=False, description="write prompts and texts into the log (never by default)")
    failpoint: str = Field(default="", description="die, sleep, fail or wait at a named point (docs/states.md)")

    def served_name(self, own: str) -> str:
        """What clients and metrics call the model whose manifest calls it `own`."""
        return self.model_name or own

    @field_validator("failpoint")
    @classmethod
    def _is_failpoint(cls, value: str) -> str:
        failpoints.parse(value)
        return value


class GatewaySettings(Settings):
    port: int = Field(default=8000, ge=0, le=65535, description="port of the API, metrics and health")
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="port of /metrics alone, which are not at the API's then; 0: a free one",
    )
    api_keys: Path | None = Field(
        default=None, description="file of API keys (blockrelay keys); default: no key needed"
    )
    cors_origins: str = Field(
        default="", description="origins, by commas, whose web pages may use this gateway; * (with API keys): all"
    )
    root_path: str = Field(
        default="",
        pattern=r"^(/[^\s?#]*[^\s?#/])?$",
        description="prefix under which a proxy publishes the API, as /llm; the proxy may cut it off or leave it",
    )
    allowed_hosts: str = Field(
        default="", description="names, by commas, that Host may say; default: on loopback localhost, else any; *: any"
    )
    max_body_bytes: int = Field(default=8 << 20, ge=1024, description="bytes of one body or message")
    max_bodies_bytes: int | None = Field(
        default=None,
        ge=1024,
        description="bytes of memory that bodies, what is parsed of them, and tensor answers take at once; default: a "
        "quarter of what the container still has, at most 320 MiB",
    )
    body_helpers: int = Field(
        default=2, ge=1, le=64, description="processes that read large bodies; each is started when it is needed"
    )
    max_connections: int = Field(default=2048, ge=1, description="requests and sockets under way at this gateway")
    arrival_timeout_s: float = Field(
        default=60.0, gt=0, description="longest time that a head, or a body, may take to arrive"
    )
    idempotency_secret: str = Field(
        default="", repr=False, description="makes ids of keyed requests unguessable; equal on all"
    )
    keyed_retention_s: int = Field(
        default=3600, ge=1, le=MAX_RETENTION_S, description="retention_s of requests with an Idempotency-Key"
    )
    max_in_flight: int = Field(default=1024, ge=1, description="accepted and unfinished requests of the whole cell")
    cells: Path | None = Field(
        default=None, description="file of cells, where there are several (docs/cells.md); default: the one above"
    )
    accept_replicas: int = Field(
        default=0,
        ge=0,
        le=16,
        description="replicas of the control Redis that must have it before a request is accepted, or cancelled",
    )
    max_wait_s: float = Field(
        default=300.0, ge=0, description="refuse what would wait longer for its first token; 0: never"
    )
    kv_overcommit: float = Field(default=64.0, ge=0, description="KV pages promised for each that exists; 0: no limit")
    default_max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="max_tokens where request and model name none; default: 128, and for chats the rest of the context "
        "as far as pools and budgets allow (docs/admission.md)",
    )
    max_tokens_limit: int | None = Field(
        default=None, ge=1, description="no max_tokens counts for more; default: the room in the model's context"
    )
    grace_s: float = Field(default=30.0, ge=0, description="a request whose client went away is cancelled after this")
    keep_alive_s: float = Field(
        default=10.0, gt=0, description="seconds of silence after which a stream shows that it is alive"
    )
    request_timeout_s: float | None = Field(default=None, gt=0, description="deadline of a request that names none")
    gateway_drain_s: float = Field(
        default=60.0,
        ge=0,
        description="seconds from SIGTERM on that requests have to end; then clients are told where they go on",
    )
    gateway_linger_s: float = Field(
        default=0.0,
        ge=0,
        description="seconds of these in which the gateway still listens and is not ready any more: as long as load "
        "balancers may send it requests",
    )

    @field_validator("gateway_linger_s")
    @classmethod
    def _is_part_of_the_drain(cls, value: float, info: ValidationInfo) -> float:
        drain_s = info.data.get("gateway_drain_s", value)
        if value > drain_s:
            raise ValueError(f"{value:g} s are longer than BLOCKRELAY_GATEWAY_DRAIN_S ({drain_s:g})")
        return value


class SchedulerSettings(Settings):
    port: int = Field(default=9101, ge=0, le=65535, description="metrics and health")
    stages: int = Field(default=1, ge=1, description="equal parts that the model is cut into")
    stage_devices: str = Field(default="", description="gpu or cpu for each of these parts, such as gpu,cpu,gpu")
    plan: Path | None = Field(default=None, description="file of `blockrelay plan --json`: its stages, not equal parts")
    strategy: str | None = Field(default=None, description="stages of what this strategy plans, not equal parts")
    objective: Literal["latency", "throughput"] = Field(default="throughput", description="what the strategy aims at")
    profile: Path | None = Field(default=None, description="file of `blockrelay profile`, for the strategy")
    devices: Path | None = Field(default=None, description="file of devices and links, for the strategy")
    tick_s: float = Field(default=0.2, gt=0, description="seconds between two looks at the cell")
    #: These two hold for the whole cell: schedulers put them there, other services take them from it.
    dead_after_s: float = Field(
        default=DEAD_AFTER_MS / 1000, ge=0.1, le=3600, description="a worker without a beat for this long is dead"
    )
    retention_s: int = Field(
        default=RETENTION_S, ge=1, le=MAX_RETENTION_S, description="how long a finished request can still be read"
    )
    dead_letters_s: int = Field(
        default=7 * 86400, ge=1, description="how long a dead letter, its prompt with it, is kept"
    )
    vacancy_s: float = Field(default=15.0, gt=0, description="an empty stage waits this long for a replacement")
    stalled_after_s: float = Field(default=30.0, gt=0, description="a running request without progress is run again")
    prompt_tokens_per_s: float = Field(default=100.0, gt=0, description="slowest prompt speed that is not a stall")
    fallback_wait_s: float = Field(
        default=60.0, gt=0, description="a request with fallback: deny waits this long for another GPU, then it ends"
    )
    target_backlog_s: float = Field(
        default=30.0, gt=0, description="workers_wanted: as many as do all that is unfinished within this (seconds)"
    )
    spare_workers: int = Field(
        default=1, ge=0, description="workers_wanted: so many beyond one for each stage, against the death of one"
    )
    numerics_wait_s: float = Field(
        default=30.0,
        ge=0,
        description="a request whose numerics id has had no worker for this long continues under another",
    )
    raise_protocol: bool = Field(
        default=True, description="raise the cell's protocol number when every service speaks a higher one; no way back"
    )


class WorkerSettings(Settings):
    device: Device = Field(
        default="cpu", description="device class; gpu workers come first, and have a `gpu` (default: gpu with one)"
    )
    gpu: str = Field(default="", description="compute on this GPU, such as webgpu:0 (`blockrelay devices` has them)")
    gpu_fallbacks: str = Field(
        default="auto",
        pattern=r"^([\w.:-]+(, *[\w.:-]+)*)?$",
        description="devices, by commas, that stand in for that GPU where its sessions cannot be made or run; auto: "
        "those of the host that no other worker has; empty: none",
    )
    gpu_stages: int = Field(
        default=1,
        ge=1,
        le=64,
        description="workers on that GPU in this process, each with a stage of its own; on a CPU too where ONNX blocks "
        "are run as they are",
    )
    gpu_python: str = Field(default="", description="Python that has the packages of that GPU; default: this one")
    per_block: bool = Field(default=False, description="run a GPU's blocks one by one, to measure each in every step")
    cache_dir: Path | None = Field(
        default=None,
        description="folder for optimised graphs and shaders of GPUs; default: blockrelay in the user's cache folder",
    )
    graph_mode: GraphMode | None = Field(
        default=None,
        description="what is compiled of a GPU's graphs, by the names of others (docs/gpu.md); default: all of it",
    )
    use_graph_cache: bool | None = Field(
        default=None,
        description="keep optimised graphs of GPUs for the next start; default: as graph_mode says",
    )
    enforce_eager: bool = Field(
        default=False, description="neither keep optimised graphs of GPUs nor record decode steps on them"
    )
    canary_s: float = Field(default=600.0, gt=0, description="seconds between two known answers that a GPU must give")
    gpu_memory: int | None = Field(
        default=None,
        ge=1,
        description="bytes on that GPU for weights and KV pages of all its stages; default: most of what it says is "
        "free, else kv_bytes for the pages",
    )
    sequential: bool = Field(
        default=False, description="run ONNX blocks as they are one by one, with few of them in memory"
    )
    max_warm_sessions: int | None = Field(
        default=None,
        ge=1,
        description="blocks that a sequential worker has in memory at once; default: by bytes, else 5 on a GPU, 3 on a "
        "CPU, and fewer where memory has no room for them",
    )
    warm_session_bytes: int | None = Field(
        default=None, ge=1, description="bytes that these may take; one block always has room"
    )
    imported_model: Path | None = Field(
        default=None,
        description="block folder that was imported from the ONNX blocks of `model`: CPU workers compute with it",
    )
    device_id: str = Field(
        default="",
        pattern="^[A-Za-z0-9_.:-]{0,64}$",
        description="name of the device in plans, such as gpu:0; stages that name it are for this worker; default: gpu",
    )
    port: int = Field(default=0, ge=0, le=65535, description="metrics and health; 0 picks a free port")
    threads: int = Field(default=1, ge=1, description="threads of the kernels, at most 4 for each core of the machine")
    local_rows: Literal["on", "off"] = Field(
        default="on", description="rows to workers of this host through shared memory (Linux); else all through Redis"
    )
    max_rows: int = Field(default=512, ge=1, description="rows of one batch: decode steps plus prompt chunks")
    step_target_s: float = Field(default=0.5, gt=0, description="prompts lengthen the time between tokens up to this")
    speculation: Literal["on", "off"] = Field(default="on", description="guess repeated tokens (exact precisions)")
    inexact_sharing: Literal["off", "on"] = Field(
        default="off",
        description="a GPU that has the whole model shares KV pages between requests of a tenant and guesses repeated "
        "tokens, as vLLM's prefix caching and speculative decoding do: other requests then change the last digits",
    )
    max_requests: int = Field(default=64, ge=1, description="requests this worker runs at once")
    kv_bytes: int | None = Field(default=None, ge=1, description="bytes of KV pages; default: a share of free memory")
    prefix_cache: bool = Field(default=True, description="share the KV pages of equal beginnings (exact precisions)")
    page_store_folder: Path | None = Field(default=None, description="shared KV pages of this host, under /dev/shm")
    page_store_bytes: int = Field(default=1 << 30, ge=0, description="bytes of KV pages in that folder")
    page_store_redis_bytes: int = Field(default=0, ge=0, description="bytes of KV pages on the payload Redis; 0: none")
    page_store_ttl_s: int = Field(default=900, ge=1, description="unused KV pages leave the payload Redis after this")
    beat_s: float = Field(default=0.5, gt=0, description="seconds between two signs of life")
    session_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="a step (of ONNX blocks: a block) that is longer ends the process, unless its rows should take "
        "longer by what was measured",
    )
    max_retry_attempts: int = Field(
        default=3,
        ge=1,
        description="tries of making a session of ONNX Runtime and running it, if its failure may pass; all of them "
        "begin within session_timeout_s",
    )
    drain_s: float = Field(
        default=5.0,
        ge=0,
        description="seconds that requests have to end when the worker is told to; the rest continues elsewhere",
    )
    inject_speed: float = Field(
        default=1.0, gt=0, le=1, description="compute at this share of the own speed, as a slower device (simulations)"
    )
    inject_numerics: str = Field(
        default="",
        pattern="^[a-z0-9]{0,16}$",
        description="compute other bits, under a numerics id that ends in this (tests)",
    )

    @property
    def named_device(self) -> str:
        """The name under which plans know the device; "": none does."""
        return self.device_id or self.gpu

    @model_validator(mode="before")
    @classmethod
    def _with_class(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Whoever names a GPU need not say its class too."""
        return given | {"device": GPU} if given.get("gpu") and "device" not in given else given

    @field_validator("threads")
    @classmethod
    def _are_of_use(cls, value: int) -> int:
        try:
            check_threads(value)
        except UsageError as error:
            raise ValueError(str(error)) from None
        return value

    @field_validator("graph_mode", mode="before")
    @classmethod
    def _is_mode(cls, value: object) -> object:
        """`MAX_AUTOTUNE` is how programs spell max-autotune."""
        return value.lower().replace("_", "-") if isinstance(value, str) else value


S = TypeVar("S", bound=Settings)
_PREFIX = "BLOCKRELAY_"
#: Read by others than services: compose.yaml.
_OTHERS = ("BLOCKRELAY_WORKERS",)
_KNOWN = frozenset(
    f"{_PREFIX}{field.upper()}"
    for kind in (Settings, GatewaySettings, SchedulerSettings, WorkerSettings)
    for field in kind.model_fields
).union(_OTHERS)
#: What Kubernetes tells every pod of a Service called blockrelay or blockrelay-...: not ours, and not a slip.
_OF_KUBERNETES = re.compile(
    r"BLOCKRELAY_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_LINK = re.compile(r"(tcp|udp|sctp)://")


def check_names(environment: Mapping[str, str], *, strict: bool = False, links: bool = False) -> None:
    """Raise UsageError, one line, for a variable BLOCKRELAY_... that no service knows, or that Kubernetes has set in
    place of a setting; `strict`: for unknown names of any beginning, `links`: not for what Kubernetes has set."""
    for variable, value in sorted(environment.items()):
        name = variable.upper()  # as the settings themselves are read
        ours = strict or name.startswith(_PREFIX)
        if name in _KNOWN and not links and is_link(name, value):
            service = name.lower().removesuffix("_port").replace("_", "-")
            raise UsageError(
                f"{variable} is {value}: Kubernetes tells a pod so of a Service called {service}; the pod needs "
                "`enableServiceLinks: false`, or the Service another name"
            )
        if not ours or name in _KNOWN or _OF_KUBERNETES.fullmatch(name):
            continue
        if is_link(name, value):
            continue
        nearest = difflib.get_close_matches(name, sorted(_KNOWN), n=1, cutoff=0.0)
        raise UsageError(f"{variable} is not a setting; the nearest name is {nearest[0]}")


def is_link(name: str, value: str) -> bool:
    """Whether Kubernetes tells a pod so of a Service: one called blockrelay looks like our setting."""
    return name.upper().endswith("_PORT") and _LINK.match(value) is not None


def read_settings(kind: type[S], arguments: Sequence[str], *, program: str) -> S:
    """Settings from the command line and the environment. Raises UsageError, one line naming the setting."""
    check_names(os.environ, links=any(one == "--port" or one.startswith("--port=") for one in arguments))
    how: dict[str, Any] = {
        "_cli_parse_args": list(arguments),
        "_cli_prog_name": program,
        "_cli_kebab_case": True,
        "_cli_exit_on_error": False,
        "_cli_avoid_json": True,
    }
    try:
        return kind(**how)
    except ValidationError as error:
        raise UsageError(problems_of(error)) from None
    except SettingsError as error:
        raise UsageError(str(error)) from None


def problems_of(error: ValidationError) -> str:
    """What is wrong with which settings, in one line."""
    return "; ".join(f"{_PREFIX}{'_'.join(map(str, one['loc'])).upper()}: {one['msg']}" for one in error.errors())


def environment_for(**fields: object) -> dict[str, str]:
    """The environment of a service to be started: that of this process, with these settings; None leaves a default."""
    names = {f"BLOCKRELAY_{name.upper()}": value for name, value in fields.items()}
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {name: str(value) for name, value in names.items() if value is not None}
