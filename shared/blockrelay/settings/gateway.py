"""The settings of a gateway."""

from pathlib import Path

from pydantic import Field, ValidationInfo, field_validator

from blockrelay.settings.common import MAX_RETENTION_S, Settings


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
