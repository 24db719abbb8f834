"""Makes the child processes of `up`, each with its command and settings."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockrelay.host.child_command import module_command
from blockrelay.host.cpu import cores
from blockrelay.host.memory import available_bytes
from blockrelay.settings import GatewaySettings, WorkerSettings, environment_for
from blockrelay_launcher.policy import KV_SHARE_OF_ALL_WORKERS
from blockrelay_launcher.supervisor.child_process import ChildProcess
from blockrelay_launcher.supervisor.embedded_redis import EmbeddedRedis
from blockrelay_launcher.supervisor.shared_page_folder import default_limit
from blockrelay_launcher.up_options.groups import LOOPBACK, NetworkOptions
from blockrelay_launcher.up_options.options import UpOptions, WorkerSpec, names_of, worker_specs


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLayout:
    """The configuration that the services of one `up` share."""

    options: UpOptions
    control_url: str
    payload_url: str | None
    data: Path
    """The data folder: the plan, the logs, and the settings of single services."""
    ports: tuple[int, ...]
    """Ports of the gateways."""
    pages: Path | None = None
    """Folder of shared KV pages."""

    def service(self, name: str, module: str, **settings: object) -> ChildProcess:
        """Returns a child, not started yet, that runs `module` with these settings, by default on loopback.

        `settings` are by field of the settings class; None drops one of the environment. Only gateways are reached from
        other machines.
        """
        env = environment_for(
            model=self.options.model,
            redis_url=self.control_url,
            payload_redis_url=self.payload_url,
            redis_password_file=None,  # password files in the environment belong to the servers in the environment
            payload_redis_password_file=None,
            node_id=name,
            **({"degrade": "on"} if self.options.degrade else {}),
            **{"host": LOOPBACK, **settings},
        )
        log, own = self.data / "logs" / f"{name}.log", self.data / "settings" / name
        return ChildProcess(name=name, argv=module_command(module), env=env, log=log, settings=own)


def redis_server(name: str, server: EmbeddedRedis, data: Path, lock: int) -> ChildProcess:
    """Returns the child that runs an embedded Redis, with its log in the data folder.

    It inherits the lock of the data folder, so that the folder stays locked until it has ended. The kernel ends it with
    SIGTERM if this process dies.
    """
    return ChildProcess(
        name=name,
        argv=server.command(),
        env=environment_for(),
        log=data / "logs" / f"{name}.log",
        last_signal=signal.SIGTERM,
        held=(lock,),
        plain_log=True,
    )


def schedulers(layout: ServiceLayout) -> list[ChildProcess]:
    """Returns the children that run schedulers."""
    topology = layout.options.topology
    settings: dict[str, object] = {"port": 0, "plan": layout.data / "plan.json", "stages": None}
    if topology.profile is not None:  # the times that the first plan was made from
        settings["profile"] = topology.profile.absolute()
    names = names_of("scheduler", topology.schedulers)
    return [layout.service(name, "blockrelay_scheduler", **settings) for name in names]


def workers(layout: ServiceLayout) -> list[ChildProcess]:
    """Returns the children that run workers, each with its share of the cores and of the free memory."""
    options, specs = layout.options, worker_specs(layout.options)
    share = int(available_bytes() * KV_SHARE_OF_ALL_WORKERS) // max(1, sum(spec.stages for spec in specs))
    common: dict[str, object] = {"port": 0}
    common.update(_page_settings(layout))
    if options.blocks is not None:
        common.update(options.blocks.warm)
    if options.other_precisions:
        common["other_precisions"] = ",".join(map(str, options.other_precisions))
    if not options.advanced.speculation:
        common["speculation"] = "off"
    threads = options.limits.threads or _fair_threads(options, specs)
    children: list[ChildProcess] = []
    for spec in specs:
        own: dict[str, object] = {"device": spec.device, "threads": spec.threads or threads}
        own["kv_bytes"] = WorkerSettings().kv_bytes or share * spec.stages
        if spec.device_id:
            own["device_id"] = spec.device_id
        if options.blocks is not None and options.blocks.imported is not None and not spec.gpu:
            own["imported_model"] = options.blocks.imported.folder
        # Settings in the environment are for workers that a user starts.
        own["tensor_parallel"] = None if spec.gpu else options.topology.tensor_parallel
        own["gpu"] = spec.gpu or None
        if spec.gpu:
            own["draft_model"] = None  # guesses are for our CPU kernels
        elif options.draft_model is not None:
            own["draft_model"] = options.draft_model
        if spec.gpu or spec.stages > 1:
            own["gpu_stages"] = spec.stages
        if spec.gpu and options.limits.gpu_memory is not None:
            own["gpu_memory"] = options.limits.gpu_memory
        children.append(layout.service(spec.name, "blockrelay_worker", **common, **own))
    return children


def _fair_threads(options: UpOptions, specs: Sequence[WorkerSpec]) -> int:
    """Returns the threads of each worker, or of each of its ranks: the cores divided by the number of routes and ranks.

    The stages of a route take turns with one whole batch on all of its cores, which was measured faster than each stage
    on a share of them.
    """
    if options.local is not None:
        routes = len({spec.device_id for spec in specs if not spec.gpu})
    else:
        stages = len(options.planned.stages) if options.planned else options.topology.stages
        routes = -(-sum(spec.stages for spec in specs) // stages)
    return max(1, cores() // max(1, routes * options.topology.tensor_parallel))


def gateways(layout: ServiceLayout) -> list[ChildProcess]:
    """Returns the children that run gateways, one for each port."""
    network = layout.options.network
    given = given_to_gateways(network, layout.ports)
    names = names_of("gateway", len(layout.ports))
    return [
        layout.service(name, "blockrelay_gateway", host=network.address, port=port, **given)
        for name, port in zip(names, layout.ports, strict=True)
    ]


def given_to_gateways(network: NetworkOptions, ports: Sequence[int]) -> dict[str, object]:
    """Returns the settings that all gateways share, besides those of every service; `ports` are all their ports."""
    named = {"api_keys": network.api_keys, "allowed_hosts": network.allowed_hosts, "root_path": network.root_path}
    given: dict[str, object] = {name: value for name, value in named.items() if value is not None}
    origins = [GatewaySettings().cors_origins if network.cors_origins is None else network.cors_origins]
    if len(ports) > 1:  # a web page from one gateway may use the others
        origins += [f"http://{host}:{port}" for port in ports for host in ("localhost", url_host(network.address))]
    given["cors_origins"] = ",".join(filter(None, origins))
    return given


def local_host(host: str) -> str:
    """Returns the address by which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def url_host(host: str) -> str:
    """Returns the result of `local_host` in the form for a URL: IPv6 in brackets."""
    local = local_host(host)
    return f"[{local}]" if ":" in local else local


def _page_settings(layout: ServiceLayout) -> dict[str, object]:
    """Returns the workers' settings of the prefix cache and the shared KV pages.

    A folder in the environment overrides the one of `up`.
    """
    if not layout.options.advanced.prefix_cache:
        return {"prefix_cache": "false"}
    if layout.pages is None or WorkerSettings().page_store_folder is not None:
        return {}
    wanted = layout.options.limits.page_store_bytes
    limit = default_limit() if wanted is None else wanted
    return {"page_store_folder": layout.pages, "page_store_bytes": limit} if limit else {}
