"""Runs `blockrelay up`: starts and supervises Redis, scheduler, workers and gateway, and drains them at the end."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from blockrelay import failpoints
from blockrelay.auth.api_keys import is_open_to_others
from blockrelay.block_folder.draft_folder import open_draft
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.block_folder.other_precisions import open_precisions
from blockrelay.errors import RedisTrouble, ServiceUnavailable, UsageError
from blockrelay.exit_codes import UNUSABLE
from blockrelay.observability import logs
from blockrelay.planning.cuts import check_stages
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.planned_split import ANY_GPU
from blockrelay.redis import client as redis_link
from blockrelay.settings import GatewaySettings, Settings, WorkerSettings, read_settings
from blockrelay.typed_command import typed, typed_path
from blockrelay.up_file import Running
from blockrelay_launcher.policy import (
    DEATH_REPORTS_S,
    GATEWAYS_END_S,
    LONGEST_DELAY_S,
    LOOK_LOGS_S,
    LOOK_READY_S,
    MAX_EARLY_DEATHS,
    REDIS_END_S,
    SAY_WHY_S,
    SCHEDULERS_END_S,
    WORKERS_END_S,
)
from blockrelay_launcher.supervisor.child_process import ChildProcess, is_worth_showing, plain, stop_all
from blockrelay_launcher.supervisor.data_folder import DataFolder, open_data_folder
from blockrelay_launcher.supervisor.death_reports import DeathReports
from blockrelay_launcher.supervisor.embedded_redis import EmbeddedRedis, find_server_program, place, unplace
from blockrelay_launcher.supervisor.ports import kept_ports
from blockrelay_launcher.supervisor.preflight import check_services, check_settings, look_at_redis, warnings_about
from blockrelay_launcher.supervisor.readiness import why_not_ready, why_workers_are_slow, why_workers_wait
from blockrelay_launcher.supervisor.service_specs import (
    ServiceLayout,
    gateways,
    local_host,
    redis_server,
    schedulers,
    url_host,
    workers,
)
from blockrelay_launcher.supervisor.shared_page_folder import open_page_folder
from blockrelay_launcher.supervisor.signals import Alarm
from blockrelay_launcher.supervisor.unfinished import (
    continuing,
    read_unfinished,
    remember_served,
    why_not_served,
)
from blockrelay_launcher.up_options.device_binding import bind
from blockrelay_launcher.up_options.gpu_choice import gpus_here, known_gpus
from blockrelay_launcher.up_options.options import GPU_WORKER, UpOptions, worker_specs


def up(options: UpOptions) -> int:
    """Runs a system until SIGINT, SIGTERM or SIGHUP, and returns the exit code 0. Only for the main thread.

    Prints `ready URL...` (of each gateway) on stdout, and everything else on stderr. Raises UsageError or
    BlockFolderError for options that cannot work, ValidationError for settings in the environment that a service would
    refuse, ServiceUnavailable if a service cannot be started. All started processes are ended in every case.
    """
    settings = read_settings(Settings, ["--model", str(options.model)], program="blockrelay up")
    if settings.failpoint:
        logs.configure(settings.log_level, node_id="launcher")
    failpoints.arm("launcher", settings.failpoint)
    model = open_block_folder(options.model, blocks=[])
    open_precisions(model, options.other_precisions)
    if options.draft_model is not None:
        open_draft(options.draft_model, model)
    if options.planned is None:
        options = replace(options, planned=options.topology.first_plan.read(options.model, model.model.blocks))
    assert options.planned is not None
    stages = options.planned.stages
    check_stages(model, stages)
    options = _with_devices(options)
    if options.planned and any(ANY_GPU in devices for devices in options.planned.devices) and not options.gpus:
        _say("stages are for GPUs, and --gpu names none: CPUs serve them until workers with GPUs join from elsewhere")
    with kept_ports(options.network.address, options.network.port, options.topology.gateways) as ports:
        check_services(options, ports)
        if options.advanced.data is not None:
            check_settings(options.advanced.data / "settings", options)
        for line in look_at_redis(options, settings.cell):
            _say(line)
        if options.blocks is not None:  # an import takes long: only after all checks
            options = replace(options, blocks=options.blocks.with_import(stages=len(stages)))
        address = options.network.address
        if is_open_to_others(address) and not (options.network.api_keys or GatewaySettings().api_keys):
            _say(f"warning: everybody who reaches {address} may use this gateway; --api-keys FILE demands a key")
        with (
            Alarm() as alarm,
            open_data_folder(options.advanced.data) as folder,
            open_page_folder(data=folder.path) as pages,
        ):
            return _Up(options, settings, folder, alarm, ports, pages, model.model_key).run()


def _with_devices(options: UpOptions) -> UpOptions:
    """Returns the options with the plan bound to this host's GPUs, and prints a line for each unusable one.

    Raises UsageError for a GPU that does not exist.
    """
    assert options.planned is not None
    if options.local is None:
        bound = bind(options.planned, options.gpus, gpus_here)
        options = replace(options, planned=bound.planned, gpus=bound.gpus)
    else:
        options = replace(options, gpus=known_gpus(options.gpus))
    for gpu in options.gpus:
        if gpu.problem:
            _say(f"{gpu.device} cannot be used now: {gpu.problem}; CPUs serve its stages, and it is tried again")
    return options


def _say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


@dataclass(slots=True)
class _Up:
    """A running system: its children and the state of their supervision. Only for the main thread."""

    options: UpOptions
    settings: Settings
    folder: DataFolder
    alarm: Alarm
    ports: tuple[int, ...]
    pages: Path | None
    model_key: str
    embedded: list[EmbeddedRedis] = field(default_factory=list[EmbeddedRedis])
    redis: list[ChildProcess] = field(default_factory=list[ChildProcess])
    schedulers: list[ChildProcess] = field(default_factory=list[ChildProcess])
    workers: list[ChildProcess] = field(default_factory=list[ChildProcess])
    gateways: list[ChildProcess] = field(default_factory=list[ChildProcess])
    death_reports: DeathReports | None = None
    control_url: str = ""
    payload_url: str | None = None
    ready: bool = False
    gpus_ready: bool = False  # all GPU workers have served once, or there are none
    reason_shown_at: float = field(default_factory=time.monotonic)  # when "not ready yet" was last printed
    repeated: set[str] = field(default_factory=set[str])  # log lines that another printed line repeats
    shown: dict[str, str] = field(default_factory=dict[str, str])  # the last printed log line of each child

    @property
    def children(self) -> list[ChildProcess]:
        return [*self.redis, *self.schedulers, *self.workers, *self.gateways]

    @property
    def urls(self) -> list[str]:
        return [f"http://{url_host(self.options.network.address)}:{port}" for port in self.ports]

    def run(self) -> int:
        """Starts the system, supervises it until a stop request, ends it, and returns 0."""
        try:
            self.control_url, self.payload_url = self._start_redis()
            if not self.alarm.stop_requests:
                self._look_for_other_models()
                self._start_services()
            while not self.alarm.stop_requests:
                self._supervise()
        finally:
            self._stop()
        return 0

    def _start_redis(self) -> tuple[str, str | None]:
        """Starts the embedded Redis servers unless the user gave one, and returns the control and payload URLs."""
        if self.options.network.redis:
            return self.options.network.redis, self.options.network.payload_redis
        program = find_server_program()
        if program.warning:
            _say(f"warning: {program.warning}")
        for name, durable in (("control", True), ("payload", False)):
            server = place(program, self.folder.path / name, durable=durable, fsync=self.options.advanced.fsync)
            self.embedded.append(server)
            self.redis.append(redis_server(f"redis-{name}", server, self.folder.path, self.folder.lock))
            self.redis[-1].start()
        for server, child in zip(self.embedded, self.redis, strict=True):
            self._wait_for(server, child)
        return self.embedded[0].url, self.embedded[1].url

    def _wait_for(self, server: EmbeddedRedis, child: ChildProcess) -> None:
        """Waits until a Redis answers, which may take long: it first loads its append-only file.

        Raises ServiceUnavailable if it ends.
        """
        with redis_link.connect(server.url) as client:
            while not self.alarm.stop_requests:
                with contextlib.suppress(RedisTrouble):
                    client.ping()
                    return
                if child.reap() is not None:
                    self._show_logs()
                    raise ServiceUnavailable(f"{child.name} does not start: {child.last_log_line} (see {child.log})")
                self.alarm.wait(0.02)

    def _look_for_other_models(self) -> None:
        """Raises UsageError if the data folder has unfinished requests and this system can finish none of them.

        Only for an embedded Redis: services of other models may work on another one.
        """
        if self.embedded:
            counts = read_unfinished(self.control_url, Keys(self.settings.cell))
            if line := why_not_served(counts, self.model_key, self.options, self.folder.path):
                _say(f"warning: {line}")

    def _start_services(self) -> None:
        self.death_reports = DeathReports(self.settings, self.control_url, _say)
        if self.embedded:
            self.death_reports.forget_workers()
        self.death_reports.start()
        assert self.options.planned is not None
        (self.folder.path / "plan.json").write_text(self.options.planned.to_json())
        layout = ServiceLayout(
            options=self.options,
            control_url=self.control_url,
            payload_url=self.payload_url,
            data=self.folder.path,
            ports=self.ports,
            pages=self.pages,
        )
        self._announce()
        remember_served(self.options, self.folder.path, self.model_key)
        self.schedulers, self.workers, self.gateways = schedulers(layout), workers(layout), gateways(layout)
        for child in (*self.schedulers, *self.workers, *self.gateways):
            child.start()
        _say(f"data and logs: {self.folder.path} ({typed(f'status --data {typed_path(self.folder.path)}')})")

    def _announce(self) -> None:
        """Writes up.json: the addresses of the system, and the services that refuse to serve."""
        self.folder.announce(
            Running(
                pid=os.getpid(),
                url=self.urls[0] if self.urls else "",
                urls=self.urls,
                redis_url=self.control_url,
                payload_redis_url=self.payload_url,
                cell=self.settings.cell,
                model=str(self.options.model),
                refused={child.name: child.refused for child in self.children if child.refused},
            )
        )

    def _supervise(self) -> None:
        """Runs one round: handles ended children, restarts, prints logs, checks readiness; then waits for an event."""
        now = time.monotonic()
        for child in self.children:
            code = child.reap()
            if code is not None:
                self._on_exit(child, code)
        waiting = [c for c in self.children if not c.running]
        for child in waiting:
            if child.start_at <= now:
                child.start()
        self._show_logs()
        if any(child.refusal_is_over() for child in self.children):
            self._announce()
        if not self.ready:
            self._look_ready()
        elif not self.gpus_ready:
            self.gpus_ready = not (self.options.gpus and self._why_wait(GPU_WORKER))
        sleep = LOOK_LOGS_S if self.ready else LOOK_READY_S
        self.alarm.wait(max(0.0, min([sleep, *(c.start_at - now for c in waiting if not c.running)])))

    def _on_exit(self, child: ChildProcess, code: int) -> None:
        """Reports and prints the end of a child. Raises UsageError or ServiceUnavailable if the system cannot start."""
        lines = list(child.new_lines())
        on_gpu = child.name.startswith(GPU_WORKER)
        early = not (self.gpus_ready if on_gpu else self.ready)
        # CPUs stand in for a GPU that fails, at the start or later; an unusable configuration is fatal all the same.
        fatal = early and (code == UNUSABLE or (not on_gpu and not self.ready and child.deaths >= MAX_EARLY_DEATHS))
        if fatal or code == UNUSABLE:
            self.repeated.add(plain(child.last_log_line))
        self._show(child, lines)
        self._show_logs()
        if child in self.workers and self.death_reports:
            self.death_reports.add(child.pid)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if fatal:
            kind = UsageError if code == UNUSABLE else ServiceUnavailable
            raise kind(f"{child.name} {how}: {plain(child.last_log_line) or f'its log {child.log} is empty'}")
        cause = plain(child.last_log_line) if code == UNUSABLE else ""
        if cause and cause == child.refused:
            return  # printed at its last end
        child.refused = cause
        self._announce()
        again = f" every {LONGEST_DELAY_S:g} s" if cause else ""
        # The cause may already be printed, as a line of the log.
        news = f": {cause}" if cause and cause != self.shown.get(child.name) else ""
        _say(f"{child.name} {how}; starting it again{again}{news}")

    def _look_ready(self) -> None:
        """Prints the `ready` line once the system is ready, else from time to time why it is not."""
        network = self.options.network
        why = "; ".join(filter(None, (why_not_ready(local_host(network.address), port) for port in self.ports)))
        if not self.ports:
            why = self._why_wait("")
        if not why:
            self.ready = True
            if network.redis:
                carries_rows = network.payload_redis is None
                for warning in warnings_about(network.redis, self.settings.cell, carries_rows=carries_rows):
                    _say(warning)
            pids = {child.pid for child in self.workers}
            for cause in why_workers_are_slow(self.control_url, self.settings.cell, self.model_key, pids):
                _say(f"slow: {cause}")
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.write(f"{' '.join(['ready', *self.urls])}\n")
                sys.stdout.flush()
            if self.options.gpus and self._why_wait(GPU_WORKER):
                _say(f"GPUs load their stages; CPUs serve until they have them ({typed('status')})")
        elif time.monotonic() - self.reason_shown_at > SAY_WHY_S:
            _say(f"not ready yet: {why}")
            self.reason_shown_at = time.monotonic()

    def _why_wait(self, prefix: str) -> str:
        """Returns why the workers whose names begin with `prefix` do not all serve yet; empty: they do."""
        specs = worker_specs(self.options)
        stages = {
            child.pid: spec.stages
            for child, spec in zip(self.workers, specs, strict=True)
            if spec.name.startswith(prefix)
        }
        return why_workers_wait(self.control_url, self.settings.cell, self.model_key, stages)

    def _show_logs(self) -> None:
        for child in self.children:
            self._show(child, child.new_lines())

    def _show(self, child: ChildProcess, lines: Iterable[str]) -> None:
        for line in lines:
            worth = self.options.advanced.verbose or (not child.plain_log and is_worth_showing(line))
            if worth and plain(line) not in self.repeated:
                self.shown[child.name] = plain(line)
                _say(f"{child.name}: {line if self.options.advanced.verbose else plain(line)}")

    def _stop(self) -> None:
        """Ends all children: workers drain first, while Redis and gateways still take their last tokens; Redis is last.

        Gateways get SIGINT, without a drain: with the workers gone, no answer would end. Before the system is ready
        they get SIGTERM, because SIGINT may give a traceback.
        """
        leave = signal.SIGINT if self.ready else signal.SIGTERM
        for group, patience_s in (
            (self.workers, WorkerSettings().drain_s + WORKERS_END_S),
            (self.gateways, GATEWAYS_END_S),
            (self.schedulers, SCHEDULERS_END_S),
            (self.redis, REDIS_END_S),
        ):
            if group is self.redis and self.embedded and self.ready:
                self._keep_unfinished(self.embedded[0])
            number = leave if group is self.gateways else signal.SIGTERM
            for child in stop_all(group, self.alarm, patience_s=patience_s, number=number):
                _say(f"{child.name} did not end by itself and was killed")
            if group is self.workers and self.death_reports:
                for child in group:
                    self.death_reports.add(child.pid)
                self.death_reports.flush(DEATH_REPORTS_S)
            self._show_logs()
        if self.death_reports:
            self.death_reports.close()
        for child in self.children:
            child.close()
        for server in self.embedded:
            unplace(server)
        self.folder.withdraw()

    def _keep_unfinished(self, control: EmbeddedRedis) -> None:
        """Keeps the data folder, even a temporary one, and prints a line if accepted requests are unfinished."""
        with redis_link.connect(control.url) as client:
            try:
                count: int | str = client.zcard(Keys(self.settings.cell).running)
            except RedisTrouble as error:
                count = f"unknown ({error})"
        if count:
            self.folder.kept = True
            _say(f"unfinished requests: {count}; `{typed(continuing(self.options, self.folder.path))}` continues them")
