"""A worker: it serves one stage after the other, under a new registration each, until it is stopped or drained."""

import threading
from collections.abc import Callable

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import RedisTrouble
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.observability.registry import service_registry
from blockrelay.observability.status_server import StatusServer
from blockrelay.redis.client import check_redis, wait_for_redis
from blockrelay.settings import WorkerSettings
from blockrelay_worker.execution.loader import Executors
from blockrelay_worker.execution.process.executors import DeviceExecutors
from blockrelay_worker.lifecycle.device.next_device import OtherDevices
from blockrelay_worker.lifecycle.device.on_device import OnDevice
from blockrelay_worker.lifecycle.parts import WorkerParts
from blockrelay_worker.lifecycle.service import StageService
from blockrelay_worker.transport.redis_links import Links, Stopping, WorkerDrain


class Worker:
    """One worker. `run` returns when `stop` is set, or after a drain that was requested. It is called once.

    Until `has_served`, `run` and making a worker raise UsageError or BlockFolderError where these settings, this model
    or these Redis servers can never work. Another BlockrelayError may be gone at the next start, and `run` can raise it
    at any time.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        folders: tuple[BlockFolder, ...],
        executors: Executors,
        stop: threading.Event,
        drain: WorkerDrain,
        *,
        number: int = 0,
        others: OtherDevices | None = None,
        draft: BlockFolder | None = None,
    ) -> None:
        """`folders` are the block folder to start with, then the same model in other precisions.

        `number` counts the workers that share `executors`, from 0; `others` may replace the device of these. `draft` is
        the block folder of the draft model.
        """
        self._stop, folder = stop, folders[0]
        model = settings.served_name(folder.model.name)
        registry = service_registry("worker", cell=settings.cell, model=model)
        metrics = WorkerMetrics(registry)
        self._links = links = Links.open(settings, metrics.redis_errors, stop, drain)
        shared = executors if isinstance(executors, DeviceExecutors) else None
        others = others or OtherDevices(settings.gpu, "", python="")
        self._status = StatusServer(settings.host, settings.port, metrics.registry, self._gaps)
        self._parts = WorkerParts(
            settings=settings,
            folders=folders,
            executors=executors,
            links=links,
            registry=registry,
            metrics=metrics,
            device=shared and OnDevice(shared, number, settings, links, metrics, folder.model_key, others),
            port=self._status.port,
            draft=draft,
        )
        registry.tell_build(numerics=self._parts.numerics(folder))

    def run(self) -> None:
        """Registers and serves, again after every loss of the registration or the device, until stopped or drained."""
        service = StageService(self._parts)
        try:
            self._find_redis()
            while not self._stop.is_set() and not self._links.drain.is_requested:
                service.run()
                service = service.next()
        except Stopping:
            pass
        finally:
            self._status.close()
            self._links.close()

    @property
    def has_served(self) -> bool:
        """Whether the worker has announced a stage, now or before."""
        return self._links.drain.has_served

    def _find_redis(self) -> None:
        """Waits for the control Redis. Raises UsageError if a Redis server, as configured, can never serve us."""
        self._wait_for(lambda: check_redis(self._links.control, "control Redis", cell=self._links.keys))
        self._wait_for(self._look_at_payload)

    def _wait_for(self, look: Callable[[], None]) -> None:
        watch, stop = self._links.watch, self._stop
        if not wait_for_redis(look, lambda e: watch.failed("start", e), give_up=stop.is_set, pause=stop.wait):
            raise Stopping
        watch.worked("start")

    def _look_at_payload(self) -> None:
        try:
            check_redis(self._links.payload, "payload Redis")
        except RedisTrouble as error:
            self._links.watch.count_error(error)  # code that needs the payload Redis waits for it later

    def _gaps(self) -> list[str]:
        if self._links.drain.is_requested or self._stop.is_set():
            return ["this worker is draining: it takes nothing new"]
        return [] if self._links.drain.is_possible else [self._links.watch.trouble or "this worker has no stage yet"]
