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
from blockrelay_launcher.supervisor.embedded_redis import EmbeddedRedis
from blockrelay_launcher.supervisor.shared_page_folder import default_limit
from blockrelay_launcher.up_options.options import UpOptions, WorkerSpec, names_of, worker_specs

#: Share of the memory that is free at start which all workers together may fill with KV pages.
KV_SHARE = 0.4
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What the services of one `up` have in common: `ports` the gateways', `plan` the file with the plan, `pages` the
    folder of shared KV pages, `settings` the folder with those of single services."""

    options: UpOptions
    control_url: str
    payload_url: str | None
    logs: Path
    ports: tuple[int, ...]
    plan: Path
    pages: Path | None = None
    settings: Path | None = None

    def service(self, name: str, module: str, **settings: object) -> Child:
        """Listens on loopback unless the settings say otherwise: gateways alone speak to other machines."""
        env = environment_for(
            model=self.options.model,
            redis_url=self.control_url,
            payload_redis_url=self.payload_url,
            redis_password_file=None,  # those of the environment are for the Redis servers of the environment
            payload_redis_password_file=None,
            node_id=name,
            **{"host": LOOPBACK, **settings},
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
    names = names_of("scheduler", layout.options.schedulers)
    return [layout.service(name, "blockrelay_scheduler", port=0, plan=layout.plan, stages=None) for name in names]


def workers(layout: Layout) -> list[Child]:
    """Each with its share of the cores and of the free memory."""
    options, specs = layout.options, worker_specs(layout.options)
    share = int(available_bytes() * KV_SHARE) // max(1, sum(spec.stages for spec in specs))
    common: dict[str, object] = {"port": 0}
    common.update(_page_settings(layout))
    if options.blocks is not None:
        common.update(options.blocks.warm)
    if not options.speculation:
        common["speculation"] = "off"
    threads = options.threads or _fair_threads(options, specs)
    children: list[Child] = []
    for spec in specs:
        own: dict[str, object] = {"device": spec.device, "threads": spec.threads or threads}
        own["kv_bytes"] = WorkerSettings().kv_bytes or share * spec.stages
        if spec.device_id:
            own["device_id"] = spec.device_id
        if options.blocks is not None and options.blocks.imported is not None and not spec.gpu:
            own["imported_model"] = options.blocks.imported.folder
        own["gpu"] = spec.gpu or None  # one in the environment is for workers that are started by hand
        if spec.gpu or spec.stages > 1:
            own["gpu_stages"] = spec.stages
        if spec.gpu and options.gpu_memory is not None:
            own["gpu_memory"] = options.gpu_memory
        children.append(layout.service(spec.name, "blockrelay_worker", **common, **own))
    return children


def _fair_threads(options: UpOptions, specs: Sequence[WorkerSpec]) -> int:
    """The stages of one route take turns with one whole batch, measured faster than each on a share of the cores."""
    if options.local is not None:
        routes = len({spec.device_id for spec in specs if not spec.gpu})
    else:
        stages = len(options.planned.stages) if options.planned else options.plan.stages
        routes = -(-sum(spec.stages for spec in specs) // stages)
    return max(1, cores() // max(1, routes))


def gateways(layout: Layout) -> list[Child]:
    given = given_to_gateways(layout.options, layout.ports)
    names = names_of("gateway", len(layout.ports))
    return [
        layout.service(name, "blockrelay_gateway", host=layout.options.host, port=port, **given)
        for name, port in zip(names, layout.ports, strict=True)
    ]


def given_to_gateways(options: UpOptions, ports: Sequence[int]) -> dict[str, object]:
    """The settings that all gateways get, beside their port and those of every service."""
    named = {"api_keys": options.api_keys, "allowed_hosts": options.allowed_hosts}
    named["root_path"] = options.root_path
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


def _page_settings(layout: Layout) -> dict[str, object]:
    """What workers keep of KV pages, and where they share them. A folder in the environment goes before ours."""
    if not layout.options.prefix_cache:
        return {"prefix_cache": "false"}
    if layout.pages is None or WorkerSettings().page_store_folder is not None:
        return {}
    wanted = layout.options.page_store_bytes
    limit = default_limit() if wanted is None else wanted
    return {"page_store_folder": layout.pages, "page_store_bytes": limit} if limit else {}
