"""A worker's part in the device that it shares with the other workers of its process."""

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
from blockrelay_worker.engine.mailbox import Mailbox
from blockrelay_worker.execution.device_memory import pages_of_host, pages_within
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.process.care import DeviceCare
from blockrelay_worker.execution.process.executors import LOAD_LIMIT_S, DeviceExecutors
from blockrelay_worker.execution.process.stage import DeviceStage
from blockrelay_worker.lifecycle.device_wait import wait_for_device
from blockrelay_worker.lifecycle.next_device import OtherDevices
from blockrelay_worker.transport.events import DeviceEnded
from blockrelay_worker.transport.redis_links import Links

#: Why a stage counts for nothing whose device became another one before it was loaded.
MOVED = "moved"
#: How long other devices wait at most for one that is renewed. Seconds.
RENEWAL_S = int(LOAD_LIMIT_S) + 60


class OnDevice:
    """Of the worker `number`. Used by its thread."""

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
        self._registers = executors.name  # as what its worker is known
        Sensors(metrics.registry, read_gpus)

    def wait(self) -> bool:
        """Until the device may be tried, or another one that has taken its place. False when this worker should end
        first."""
        self._sharing.waits_for_stage(self._number)
        worker = self._settings.node_id or node_name(self._settings.device)
        with self._sharing.one_waits:
            before = self._executors.name
            taken = self._others.take_next(self._executors, self._asked)
            if self._executors.name != before:
                self._metrics.device.changes.inc()
            self._registers = self._executors.name
            if taken:
                return True
            return wait_for_device(self._executors, self._links, self._metrics.device, self._links.stop, worker=worker)

    def comes(self) -> None:
        """It has a stage, and no other than this worker uses it until it `leaves`."""
        self._sharing.comes(self._number, self._asked)

    def pages(self, folder: BlockFolder, stage: Stage, *, useful: int, kv_bytes: int) -> int:
        """KV pages of the stage that it is about to load: its share of the device's budget, or of `kv_bytes` where
        there is none. Raises UsageError where the stage has no room."""
        memory, budget = self._executors.memory(folder), self._executors.budget_bytes
        neighbours = self._sharing.neighbours(self._number, stage, self._asked)
        if budget is None:
            return pages_of_host(memory, stage, kv_bytes=kv_bytes, useful=useful, neighbours=neighbours)
        return pages_within(memory, stage, budget_bytes=budget, useful=useful, neighbours=neighbours)

    def has_loaded(self, stage: Stage, executor: Executor) -> None:
        """Raises DeviceLost (MOVED) where another worker has moved the device meanwhile: this one has to register
        anew."""
        assert isinstance(executor, DeviceStage), "nothing else is loaded on a device"
        executor.waiting = self._links.clock.waiting  # what other stages take is no time of our step
        executor.went_on = self._links.clock.went_on
        executor.allowed_s = lambda: self._links.clock.allowed_s
        self._stage = executor
        pool_bytes = self._executors.memory(executor.folder).pool_bytes(stage, executor.pool.pages)
        self._sharing.has_loaded(self._number, stage, pool_bytes)
        for reason in self._executors.begun_again():
            self._metrics.device.renewals.labels(reason).inc()
        if self._executors.name != self._registers:
            raise DeviceLost(f"the device is {self._executors.name} now", reason=MOVED, code="INTERNAL")

    def has_closed(self) -> None:
        self._stage = None
        self._sharing.has_closed(self._number)

    def care(self, mailbox: Mailbox) -> DeviceCare:
        """Of the device, for the engine whose events are in `mailbox`; it is woken when the device is lost."""
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
    def doing_what_it_can(self) -> Generator[None]:
        """What the device will never do is, done inside, a loss of it where another one may do it: DeviceLost."""
        try:
            yield
        except UsageError as error:
            if self._executors.name == self._executors.own and not self._others.are_left(self._asked):
                raise
            raise self._executors.give_up(str(error)) from error

    def tell_loss(self, lost: DeviceLost) -> None:
        """That it was lost before its stage was there."""
        get().warning("STAGE_NOT_LOADED", device=self._executors.name, reason=lost.reason, error=str(lost))
        self._metrics.device_losses.labels(lost.reason).inc()

    def is_ready(self) -> None:
        """It serves. After a renewal other devices may have their turn."""
        self._others.serves(self._executors)
        if self._renewing:
            self._links.retry_until_reachable(
                lambda: self._links.control.delete(self._links.keys.renewal(self._model)), "renewal"
            )
            self._renewing = False

    def leaves(self) -> None:
        """Nothing of it is on the device any more. Where all have to leave, it returns when they have, and what is
        loaded next is loaded in a new process."""
        self._renewing |= self._sharing.leaves(self._number, self._executors.renew, self._asked)

    def _turn_to_renew(self) -> bool:
        """One device of a model at a time is given a new process, and none twice within an hour."""
        links = self._links
        return (
            self._executors.may_be_renewed
            and links.retry_until_reachable(
                lambda: links.control.set(links.keys.renewal(self._model), self._executors.name, nx=True, ex=RENEWAL_S),
                "renewal",
            )
            is not None
        )

    def _asked(self) -> bool:
        """Whether this worker should end."""
        return self._links.stop.is_set()
