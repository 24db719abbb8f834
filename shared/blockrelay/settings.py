"""All settings of all services; the only module that takes settings from the environment.

Each field is the environment variable `BLOCKRELAY_<FIELD>` (upper case), or the option `--<field>` of the service's
process, which wins. A service reads its settings in `__main__` and passes them down. A wrong value or an unknown name
is an error that has that name. Names of other services' settings are allowed, since services share environments.
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

#: Longest retention: a year, in seconds.
MAX_RETENTION_S = 366 * 24 * 3600


class Settings(RedisSettings):
    """The settings that all services have."""

    model: Path = Field(default=BUNDLED_MODEL, description="block folder")
    model_name: str | None = Field(default=None, description="name clients use; default: the manifest's")
    cell: str = Field(default="c0", pattern=rf"^{CELL}$", description="name of the cell")
    node_id: str | None = Field(default=None, description="node_id of log lines; default: role, host and pid")
    host: str = Field(default="127.0.0.1", description="address the service listens on")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="lowest level of log lines that are written"
    )
    log_prompts: bool = Field(default=False, description="write prompts and texts into the log (never by default)")
    failpoint: str = Field(default="", description="fail, sleep or stop at a named point (docs/states.md); tests")

    def served_name(self, own: str) -> str:
        """Returns the model's name for clients and metrics; `own` is its name in the manifest."""
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
        description="separate port of /metrics; 0: a free one; default: the port of the API",
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
        description="prefix under which a proxy publishes the API, /llm for example; the proxy may remove or keep it",
    )
    allowed_hosts: str = Field(
        default="", description="names, by commas, that Host may have; *: any; default: on loopback localhost, else any"
    )
    max_body_bytes: int = Field(default=8 << 20, ge=1024, description="most bytes of one body or message")
    max_bodies_bytes: int | None = Field(
        default=None,
        ge=1024,
        description="most bytes of memory for bodies, their parsed content and tensor answers at once; default: a "
        "quarter of what the container still has, at most 320 MiB",
    )
    body_helpers: int = Field(
        default=2, ge=1, le=64, description="most processes that read large bodies; each starts when it is needed"
    )
    max_connections: int = Field(default=2048, ge=1, description="most requests and sockets at this gateway at once")
    arrival_timeout_s: float = Field(
        default=60.0, gt=0, description="seconds that the head, or the body, of a request may take to arrive"
    )
    idempotency_secret: str = Field(
        default="", repr=False, description="makes ids of keyed requests unguessable; the same on all gateways"
    )
    keyed_retention_s: int = Field(
        default=3600, ge=1, le=MAX_RETENTION_S, description="retention_s of requests with an Idempotency-Key"
    )
    max_in_flight: int = Field(default=1024, ge=1, description="most unfinished requests of the whole cell")
    cells: Path | None = Field(
        default=None, description="file of cells, if there are several (docs/cells.md); default: the one cell `cell`"
    )
    accept_replicas: int = Field(
        default=0,
        ge=0,
        le=16,
        description="replicas of the control Redis that must have a request, or its cancellation, before the answer",
    )
    max_wait_s: float = Field(
        default=300.0, ge=0, description="refuse requests that would wait longer for a first token (s); 0: none"
    )
    kv_overcommit: float = Field(default=64.0, ge=0, description="KV pages promised for each that exists; 0: no limit")
    default_max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="max_tokens if neither request nor model name one; default: 128, and for chats the rest of the "
        "context as far as pools and budgets allow (docs/admission.md)",
    )
    max_tokens_limit: int | None = Field(
        default=None, ge=1, description="a larger max_tokens counts as this; default: the room in the model's context"
    )
    grace_s: float = Field(default=30.0, ge=0, description="seconds until a request without a client is cancelled")
    keep_alive_s: float = Field(
        default=10.0, gt=0, description="seconds without output after which a stream sends a sign of life"
    )
    request_timeout_s: float | None = Field(default=None, gt=0, description="timeout of requests that name none")
    gateway_drain_s: float = Field(
        default=60.0,
        ge=0,
        description="seconds after SIGTERM in which requests may end; then clients are told where to continue",
    )
    gateway_linger_s: float = Field(
        default=0.0,
        ge=0,
        description="seconds, part of the drain, in which the gateway is not ready but still listens, because load "
        "balancers may still send it requests",
    )

    @field_validator("gateway_linger_s")
    @classmethod
    def _is_part_of_the_drain(cls, value: float, info: ValidationInfo) -> float:
        drain_s = info.data.get("gateway_drain_s", value)
        if value > drain_s:
            raise ValueError(f"{value:g} s are longer than BLOCKRELAY_GATEWAY_DRAIN_S ({drain_s:g})")
        return value


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


class WorkerSettings(Settings):
    device: Device = Field(
        default="cpu", description="class of the device; gpu needs `gpu`; default: gpu if `gpu` is set, else cpu"
    )
    gpu: str = Field(default="", description="GPU to compute on, such as webgpu:0 (see `blockrelay devices`)")
    gpu_fallbacks: str = Field(
        default="auto",
        pattern=r"^([\w.:-]+(, *[\w.:-]+)*)?$",
        description="devices, by commas, that replace that GPU if its sessions cannot be created or run; auto: those "
        "of the host that no other worker has; empty: none",
    )
    gpu_stages: int = Field(
        default=1,
        ge=1,
        le=64,
        description="workers on that GPU in this process, each with its own stage; also on a CPU that runs ONNX blocks "
        "made by others as they are",
    )
    gpu_python: str = Field(default="", description="Python that has the packages of that GPU; default: this one")
    per_block: bool = Field(default=False, description="run a GPU's blocks one by one, to measure each in every step")
    cache_dir: Path | None = Field(
        default=None,
        description="folder for optimised graphs and shaders of GPUs; default: blockrelay in the user's cache folder",
    )
    graph_mode: GraphMode | None = Field(
        default=None,
        description="how much of a GPU's graphs is compiled, by names of other projects (docs/gpu.md); default: all",
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
        description="bytes on that GPU for weights and KV pages of all its stages; default: most of the memory that "
        "it reports as free; if it reports none, kv_bytes for the pages",
    )
    sequential: bool = Field(
        default=False, description="run ONNX blocks made by others one by one, with only a few of them in memory"
    )
    max_warm_sessions: int | None = Field(
        default=None,
        ge=1,
        description="most blocks that a sequential worker has in memory at once; default: by warm_session_bytes, else "
        "5 on a GPU, 3 on a CPU, and fewer if memory is short",
    )
    warm_session_bytes: int | None = Field(
        default=None, ge=1, description="most bytes of these blocks; one block is always allowed"
    )
    imported_model: Path | None = Field(
        default=None,
        description="block folder that was imported from the ONNX blocks of `model`: CPU workers compute with it",
    )
    device_id: str = Field(
        default="",
        pattern="^[A-Za-z0-9_.:-]{0,64}$",
        description="name of the device in plans, such as gpu:0; the worker takes stages that name it; default: gpu",
    )
    port: int = Field(default=0, ge=0, le=65535, description="port of metrics and health; 0: a free one")
    threads: int = Field(default=1, ge=1, description="threads of the kernels, at most 4 for each core of the machine")
    local_rows: Literal["on", "off"] = Field(
        default="on", description="hidden states to workers of this host by shared memory (Linux); off: all by Redis"
    )
    max_rows: int = Field(default=512, ge=1, description="most tokens of one batch: decode steps plus prompt chunks")
    step_target_s: float = Field(default=0.5, gt=0, description="seconds between tokens that prompts may cause")
    speculation: Literal["on", "off"] = Field(default="on", description="speculative decoding (exact precisions)")
    inexact_sharing: Literal["off", "on"] = Field(
        default="off",
        description="on: a GPU with the whole model shares KV pages between requests of a tenant and decodes "
        "speculatively, as vLLM does; other requests then change the last digits",
    )
    max_requests: int = Field(default=64, ge=1, description="most requests that this worker runs at once")
    kv_bytes: int | None = Field(default=None, ge=1, description="bytes of KV pages; default: a share of free memory")
    prefix_cache: bool = Field(default=True, description="share KV pages of equal beginnings (exact precisions)")
    page_store_folder: Path | None = Field(default=None, description="shared KV pages of this host, under /dev/shm")
    page_store_bytes: int = Field(default=1 << 30, ge=0, description="most bytes of KV pages in that folder")
    page_store_redis_bytes: int = Field(default=0, ge=0, description="bytes of KV pages on the payload Redis; 0: none")
    page_store_ttl_s: int = Field(default=900, ge=1, description="seconds until unused KV pages leave that Redis")
    beat_s: float = Field(default=0.5, gt=0, description="seconds between two heartbeats")
    session_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="seconds after which a step (of ONNX blocks made by others: a block) ends the process, unless its "
        "tokens should take longer by earlier measurements",
    )
    max_retry_attempts: int = Field(
        default=3,
        ge=1,
        description="attempts to create and run a session of ONNX Runtime if the failure may be temporary; all begin "
        "within session_timeout_s",
    )
    drain_s: float = Field(
        default=5.0,
        ge=0,
        description="seconds after SIGTERM in which requests may end; the others continue on other workers",
    )
    inject_speed: float = Field(
        default=1.0, gt=0, le=1, description="share of its speed at which the worker computes (simulations)"
    )
    inject_numerics: str = Field(
        default="",
        pattern="^[a-z0-9]{0,16}$",
        description="compute other bits, under a numerics id that ends in this (tests)",
    )

    @property
    def named_device(self) -> str:
        """The name of the device in plans; "": it has none."""
        return self.device_id or self.gpu

    @model_validator(mode="before")
    @classmethod
    def _with_class(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Sets the class `gpu` where only a GPU is named."""
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
        """Accepts the spelling of programs too: `MAX_AUTOTUNE` for max-autotune."""
        return value.lower().replace("_", "-") if isinstance(value, str) else value


S = TypeVar("S", bound=Settings)
_PREFIX = "BLOCKRELAY_"
#: Variables that no service reads: compose.yaml does.
_OTHERS = ("BLOCKRELAY_WORKERS",)
_KNOWN = frozenset(
    f"{_PREFIX}{field.upper()}"
    for kind in (Settings, GatewaySettings, SchedulerSettings, WorkerSettings)
    for field in kind.model_fields
).union(_OTHERS)
#: Variables that Kubernetes sets in each pod for a Service called blockrelay or blockrelay-...: not settings.
_OF_KUBERNETES = re.compile(
    r"BLOCKRELAY_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_LINK = re.compile(r"(tcp|udp|sctp)://")


def check_names(environment: Mapping[str, str], *, strict: bool = False, links: bool = False) -> None:
    """Raises UsageError, one line, for a variable BLOCKRELAY_... that is no setting.

    `strict`: also for other names. `links`: settings may have the values that Kubernetes sets for a Service
    (`is_link`), which are an error otherwise. Its variables that are no settings are ignored.
    """
    for variable, value in sorted(environment.items()):
        name = variable.upper()  # settings are read without regard to case, too
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
    """Returns whether Kubernetes set this variable for a Service: a name in ..._PORT, and a URL such as tcp://..."""
    return name.upper().endswith("_PORT") and _LINK.match(value) is not None


def read_settings(kind: type[S], arguments: Sequence[str], *, program: str) -> S:
    """Reads settings from options (`arguments`) and environment. Raises UsageError, one line naming the setting."""
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
    """Returns the wrong settings and what is wrong with each, in one line."""
    return "; ".join(f"{_PREFIX}{'_'.join(map(str, one['loc'])).upper()}: {one['msg']}" for one in error.errors())


def environment_for(**fields: object) -> dict[str, str]:
    """Returns this process's environment with these settings, for starting a service; None takes a variable out."""
    names = {f"BLOCKRELAY_{name.upper()}": value for name, value in fields.items()}
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {name: str(value) for name, value in names.items() if value is not None}
