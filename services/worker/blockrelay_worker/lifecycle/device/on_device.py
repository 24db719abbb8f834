"""A worker's use of its device, which it shares with the other workers of its process."""

from collections.abc import Generator
from contextlib import contextmanager

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import DeviceLost, UsageError
from blockrelay.host.gpu_sensors import read_gpus
from blockrelay.observability.logs import get, node_name
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.observability.sensors import Sensors
from blockrelay.protocol.plan import Stage
from blockrelay.settings import WorkerSettings
from blockrelay_worker.execution.device_memory import pages_of_host, pages_within
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.process.care import DeviceCare
from blockrelay_worker.execution.process.executors import DeviceExecutors
from blockrelay_worker.execution.process.stage import DeviceStage
from blockrelay_worker.lifecycle.device.next_device import OtherDevices
from blockrelay_worker.lifecycle.device.wait import wait_for_device
from blockrelay_worker.policy import RENEWAL_S
from blockrelay_worker.transport.events import DeviceEnded, Event
from blockrelay_worker.transport.mailbox import Mailbox
from blockrelay_worker.transport.redis_links import Links

#: Reason of the DeviceLost of a stage that was loaded on another device than its worker had registered.
MOVED = "moved"


class OnDevice:
    """The device of the worker `number` of this process. Only this worker's thread uses it.

    `number` counts the workers that share `executors`, from 0. `model` is the model's key in Redis. `others` are the
    devices that may replace this one. Order of calls: `wait`, `takes`, `join`, `pages`, `has_loaded`, `care`,
    `is_ready`, `leave`. Whenever the stage is closed, also later, call `has_closed`. Methods that wait for Redis raise
    Stopping when the process should end meanwhile. Waits for other workers end early then, without an exception.
    """

    def __init__(
        self,
        executors: DeviceExecutors,
        number: int,
        settings: WorkerSettings,
        links: Links,
        metrics: WorkerMetrics,
        model: str,
        others: OtherDevices,
    ) -> None:
        self._executors, self._number, self._settings = executors, number, settings
        self._sharing = executors.sharing
        self._links, self._metrics, self._model, self._others = links, metrics, model, others
        self._stage: DeviceStage | None = None
        self._renewing = False
        #: Name of the device with which the worker registers.
        self._registers = executors.name
        Sensors(metrics.registry, read_gpus)

    def wait(self) -> bool:
        """Waits until the device, or another one in its place, may be used. Returns False if the worker should end."""
        self._sharing.waits_for_stage(self._number)
        worker_id = self._settings.node_id or node_name(self._settings.device)
        with self._sharing.one_waits:
            before = self._executors.name
            has_moved = self._others.take_next(self._executors, self._should_end)
            if self._executors.name != before:
                self._metrics.device.changes.inc()
            self._registers = self._executors.name
            if has_moved:
                return True
            return wait_for_device(
                self._executors, self._links, self._metrics.device, self._links.stop, worker_id=worker_id
            )

    def serves(self, folder: BlockFolder) -> bool:
        """Returns whether the device can run stages of this block folder."""
        return self._executors.serves(folder)

    def takes(self, folder: BlockFolder) -> bool:
        """Returns whether a stage of this folder may be loaded: no other worker of the device has one of another
        folder. The worker itself has closed its own."""
        return self._sharing.takes(self._number, folder.model_key)

    def join(self) -> None:
        """Enters the device before a stage is loaded, until `leave`.

        Waits while all workers have to leave the device for a renewal, or until this worker should end.
        """
        self._sharing.join(self._number, self._should_end)

    def pages(self, folder: BlockFolder, stage: Stage, *, useful: int, kv_bytes: int) -> int:
        """Returns the number of KV pages of the stage that is about to be loaded.

        It is `useful` at most, but not below the device's minimum (2 where the budget is unknown). It is the stage's
        share of the device's budget, or of `kv_bytes` where the budget is unknown. Raises UsageError where the stage
        does not fit into a known budget. Waits up to STAGES_S seconds for the stages of other workers.
        """
        memory, budget = self._executors.memory(folder), self._executors.budget_bytes
        neighbours = self._sharing.neighbours(self._number, stage, self._should_end)
        if budget is None:
            return pages_of_host(memory, stage, kv_bytes=kv_bytes, useful=useful, neighbours=neighbours)
        return pages_within(memory, stage, budget_bytes=budget, useful=useful, neighbours=neighbours)

    def check_room(self, folder: BlockFolder, stage: Stage) -> None:
        """Raises UsageError if the device's budget, without its present stages, has no room for a stage."""
        if (budget := self._executors.budget_bytes) is not None:
            pages_within(self._executors.memory(folder), stage, budget_bytes=budget, useful=1)

    def stage_bytes(self, folder: BlockFolder, stage: Stage, pages: int) -> int:
        """Returns the device memory of a stage with this number of KV pages, or the least number."""
        memory = self._executors.memory(folder)
        return memory.weight_bytes(stage) + memory.pool_bytes(stage, max(memory.least_pages, pages))

    def free_bytes(self, folder: BlockFolder) -> int | None:
        """Returns what the present stages, which are of this folder, leave of the device's budget; None: unknown."""
        if (budget := self._executors.budget_bytes) is None:
            return None
        loaded = self._sharing.loaded
        weights = self._executors.memory(folder).weight_bytes(*(stage for stage, _ in loaded))
        return max(0, budget - weights - sum(pool for _, pool in loaded))

    def has_loaded(self, stage: Stage, executor: Executor) -> None:
        """Takes over the loaded stage, and connects it with the worker's step clock.

        Raises DeviceLost (MOVED) if another worker has moved the executors to another device meanwhile: this worker
        then has to register again.
        """
        assert isinstance(executor, DeviceStage), "nothing else is loaded on a device"
        executor.waiting = self._links.clock.waiting  # time for other stages does not count as time of our step
        executor.on_progress = self._links.clock.progressed
        executor.allowed_s = lambda: self._links.clock.allowed_s
        self._stage = executor
        pool_bytes = self._executors.memory(executor.folder).pool_bytes(stage, executor.pool.pages)
        self._sharing.has_loaded(self._number, stage, pool_bytes)
        for reason in self._executors.restart_reasons():
            self._metrics.device.renewals.labels(reason).inc()
        if self._executors.name != self._registers:
            raise DeviceLost(f"the device is {self._executors.name} now", reason=MOVED, code="INTERNAL")

    def has_closed(self) -> None:
        """Notes that the stage was closed, so that its memory counts as free."""
        self._stage = None
        self._sharing.has_closed(self._number)

    def care(self, mailbox: Mailbox[Event]) -> DeviceCare:
        """Returns the engine's access to the device, after `has_loaded`.

        When the device is lost, `mailbox` gets a DeviceEnded event.
        """
        assert self._stage is not None, "it was loaded"
        self._stage.when_lost(lambda: mailbox.put(DeviceEnded()))
        return DeviceCare(
            self._stage,
            self._metrics.device,
            canary_every_s=self._settings.canary_s,
            may_renew=self._turn_to_renew,
            drain_s=self._settings.drain_s,
            sharing=self._sharing,
        )

    @contextmanager
    def refusal_is_loss(self) -> Generator[None]:
        """Turns a UsageError raised inside (the device can never hold the stage) into a DeviceLost.

        The worker can then try another device. On the own device, with no other left, the UsageError stays.
        """
        try:
            yield
        except UsageError as error:
            if self._executors.name == self._executors.own and not self._others.are_left(self._should_end):
                raise
            raise self._executors.give_up(str(error)) from error

    def report_loss(self, lost: DeviceLost) -> None:
        """Logs and counts a device that was lost before its stage was loaded."""
        get().warning("STAGE_NOT_LOADED", device=self._executors.name, reason=lost.reason, error=str(lost))
        self._metrics.device_losses.labels(lost.reason).inc()

    def forgive(self) -> None:
        """Counts no losses so far: the device may be tried at once, and is not in quarantine."""
        self._executors.forget_losses()

    def is_ready(self) -> None:
        """Notes that the stage serves. After a renewal, other devices of the model may be renewed."""
        self._others.serves(self._executors)
        if self._renewing:
            self._links.retry_until_reachable(
                lambda: self._links.control.delete(self._links.keys.renewal(self._model)), "renewal"
            )
            self._renewing = False

    def leave(self) -> None:
        """Leaves the device, on which the worker computes nothing any more.

        In a renewal it returns when all workers have left; the next stage is then loaded in a new process. It returns
        earlier if this worker should end.
        """
        self._renewing |= self._sharing.leave(self._number, self._executors.renew, self._should_end)

    def _turn_to_renew(self) -> bool:
        """Returns whether this device may get a new process now: one per model at a time, none twice within an hour."""
        links = self._links
        return (
            self._executors.may_be_renewed
            and links.retry_until_reachable(
                lambda: links.control.set(links.keys.renewal(self._model), self._executors.name, nx=True, ex=RENEWAL_S),
                "renewal",
            )
            is not None
        )

    def _should_end(self) -> bool:
        """Returns whether this worker should end."""
        return self._links.stop.is_set()
