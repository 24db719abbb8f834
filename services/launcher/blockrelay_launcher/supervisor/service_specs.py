"""What `up` starts: one `Child` per process, with its settings."""

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockrelay.host.cpu import cores
from blockrelay.host.memory import available_bytes
from blockrelay.settings import GatewaySettings, WorkerSettings, environment_for
from blockrelay_launcher.supervisor.child_process import Child
from blockrelay_launcher.supervisor.embedded_redis import EmbeddedRedis, Fsync
from blockrelay_launcher.supervisor.shared_page_folder import default_limit

#: Share of the memory that is free at start which all workers together may fill with KV pages.
KV_SHARE = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """The options of `blockrelay up`. `plan`: a file with `stages` stages, not equal parts, whose `devices` each stage
    names. `port` 0 picks a free one; `threads` None shares the cores between the workers of one stage.

    Several `gateways` listen on as many consecutive ports from `port` on. `redis_url` None starts an embedded control
    and payload Redis; `fsync` is the control one's. `inject_fault`: every GPU worker fails after as many jobs. `data`
    None keeps everything in a temporary folder that is removed at the end. `cors_origins` and `allowed_hosts` are the
    gateways' settings of these names.
    """

    model: Path
    stages: int = 1
    plan: Path | None = None
    devices: tuple[tuple[str, ...], ...] = ()
    replicas: int = 1
    gpu_workers: int = 0
    gateways: int = 1
    schedulers: int = 1
    inject_fault: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    redis_url: str | None = None
    payload_redis_url: str | None = None
    fsync: Fsync = "always"
    data: Path | None = None
    threads: int | None = None
    speculation: bool = True
    prefix_cache: bool = True
    page_store_bytes: int | None = None
    api_keys: Path | None = None
    cors_origins: str | None = None
    allowed_hosts: str | None = None
    verbose: bool = False

    @property
    def device_ids(self) -> list[str]:
        """The device of each CPU worker, "" where no plan names one: `replicas` workers for each stage, or one for each
        device that the stage names if these are more."""
        named = self.devices or ((),) * self.stages
        return [ids[n % len(ids)] if ids else "" for ids in named for n in range(max(self.replicas, len(ids)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What the services of one `up` have in common: `ports` the gateways', `pages` the folder of shared KV pages,
    `settings` the folder with those of single services."""

    options: UpOptions
    control_url: str
    payload_url: str | None
    logs: Path
    ports: tuple[int, ...]
    pages: Path | None = None
    settings: Path | None = None

    def service(self, name: str, module: str, **settings: object) -> Child:
        env = environment_for(
            model=self.options.model,
            redis_url=self.control_url,
            payload_redis_url=self.payload_url,
            host=self.options.host,
            node_id=name,
            **settings,
        )
        argv = [sys.executable, "-P", "-m", module]  # -P: nothing in the current folder shadows a module
        own = self.settings and self.settings / name
        return Child(name=name, argv=argv, env=env, log=self.logs / f"{name}.log", settings=own)


def redis_server(name: str, server: EmbeddedRedis, logs: Path, lock: int) -> Child:
    """It keeps the lock of the data folder for as long as it has the data open, and ends by itself without us."""
    return Child(
        name=name,
        argv=server.command(),
        env=environment_for(),
        log=logs / f"{name}.log",
        last_signal=signal.SIGTERM,
        held=(lock,),
        plain_log=True,
    )


def schedulers(layout: Layout) -> list[Child]:
    options = layout.options
    names = names_of("scheduler", options.schedulers)
    planned: dict[str, object] = {"plan": options.plan} if options.plan else {"stages": options.stages}
    return [layout.service(name, "blockrelay_scheduler", port=0, **planned) for name in names]


def workers(layout: Layout) -> list[Child]:
    """Those on the CPU, and those for the GPU."""
    options = layout.options
    cpu, gpu = options.device_ids, options.gpu_workers
    # The stages of one route take turns with one whole batch, measured faster than each on a share of the cores.
    routes = options.replicas + -(-gpu // options.stages)
    threads = options.threads or max(1, cores() // routes)
    kv_bytes = WorkerSettings().kv_bytes or int(available_bytes() * KV_SHARE) // (len(cpu) + gpu)
    common: dict[str, object] = {"port": 0, "threads": threads, "kv_bytes": kv_bytes}
    common.update(_page_settings(layout))
    if not options.speculation:
        common["speculation"] = "off"
    children = [
        layout.service(f"worker-{n}", "blockrelay_worker", device="cpu", device_id=device, **common)
        for n, device in enumerate(cpu, 1)
    ]
    for n in range(1, gpu + 1):
        fault = {"inject_fault": options.inject_fault}
        children.append(layout.service(f"gpu-worker-{n}", "blockrelay_worker", device="gpu", **common, **fault))
    return children


def gateways(layout: Layout) -> list[Child]:
    given = given_to_gateways(layout.options, layout.ports)
    names = names_of("gateway", len(layout.ports))
    return [
        layout.service(name, "blockrelay_gateway", port=port, **given)
        for name, port in zip(names, layout.ports, strict=True)
    ]


def given_to_gateways(options: UpOptions, ports: Sequence[int]) -> dict[str, object]:
    """The settings that all gateways get, beside their port and those of every service."""
    named = {"api_keys": options.api_keys, "allowed_hosts": options.allowed_hosts}
    given: dict[str, object] = {name: value for name, value in named.items() if value is not None}
    origins = [GatewaySettings().cors_origins if options.cors_origins is None else options.cors_origins]
    if len(ports) > 1:  # pages of one use the others
        origins += [f"http://{host}:{port}" for port in ports for host in ("localhost", url_host(options.host))]
    given["cors_origins"] = ",".join(filter(None, origins))
    return given


def local_host(host: str) -> str:
    """Where this machine reaches who listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def url_host(host: str) -> str:
    """The same as it stands in a URL."""
    local = local_host(host)
    return f"[{local}]" if ":" in local else local


def service_names(options: UpOptions) -> list[str]:
    """Of all services, as `up` shows them and DATA/settings and DATA/logs name their files."""
    cpu, gpu = len(options.device_ids), options.gpu_workers
    return [
        *names_of("scheduler", options.schedulers),
        *(f"worker-{n}" for n in range(1, cpu + 1)),
        *(f"gpu-worker-{n}" for n in range(1, gpu + 1)),
        *names_of("gateway", options.gateways),
    ]


def names_of(role: str, count: int) -> list[str]:
    """The names of `count` gateways or schedulers."""
    return [role] if count == 1 else [f"{role}-{n}" for n in range(1, count + 1)]


def _page_settings(layout: Layout) -> dict[str, object]:
    """What workers keep of KV pages, and where they share them. A folder in the environment goes before ours."""
    if not layout.options.prefix_cache:
        return {"prefix_cache": "false"}
    if layout.pages is None or WorkerSettings().page_store_folder is not None:
        return {}
    wanted = layout.options.page_store_bytes
    limit = default_limit() if wanted is None else wanted
    return {"page_store_folder": layout.pages, "page_store_bytes": limit} if limit else {}
