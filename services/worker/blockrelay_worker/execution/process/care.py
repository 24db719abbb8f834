"""What a device in a process of its own needs between the steps of its worker."""

import time
from collections.abc import Callable

from blockrelay.errors import DeviceFailed, DeviceLost
from blockrelay.observability.logs import get
from blockrelay.observability.metrics.devices import DeviceMetrics
from blockrelay_worker.execution.process.sharing import Sharing
from blockrelay_worker.execution.process.stage import DeviceStage

#: How often a device that should be renewed asks whether it may. Seconds.
ASK_S = 10.0


class DeviceCare:
    """Of the device that one stage is on, alone or with others. Used by the engine's thread."""

    def __init__(
        self,
        stage: DeviceStage,
        metrics: DeviceMetrics,
        *,
        canary_every_s: float,
        may_renew: Callable[[], bool] = lambda: False,
        drain_s: float = 0.0,
        sharing: Sharing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`may_renew`: whether it is this device's turn to be given a new process, for which requests of all its stages
        have `drain_s` to end."""
        self._stage, self._metrics, self._clock = stage, metrics, clock
        self._every_s, self._canary_at = canary_every_s, clock() + canary_every_s
        self._may_renew, self._ask_at, self._drain_s = may_renew, clock(), drain_s
        self._sharing = sharing or Sharing(1)
        # What loading took over the bus is nobody's step.
        self._told = {"up_bytes": stage.figures.up_bytes, "down_bytes": stage.figures.down_bytes}
        metrics.show(lambda: stage.figures if stage.usable else None)

    @property
    def renews(self) -> bool:
        """The worker takes nothing new, and leaves when nothing is left: it comes back with a new process."""
        return self._sharing.leave_at is not None

    @property
    def leaves_now(self) -> bool:
        """What is left goes on elsewhere."""
        leave_at = self._sharing.leave_at
        return leave_at is not None and self._clock() >= leave_at

    def doubt(self) -> None:
        """A step gave numbers that cannot be right: the canary is due at once."""
        self._canary_at = self._clock()

    def between_steps(self) -> None:
        """What is due: at most one thing, that takes no longer than a step may. Raises DeviceLost, also for a process
        that has ended though nothing was asked of it."""
        self._stage.check()
        self._count()
        now = self._clock()
        if now >= self._canary_at:
            self._canary()
            self._canary_at = self._clock() + self._every_s
        elif self._stage.drift.due == "clean_up":
            self._clean_up()
        elif (why := self._why_renew()) and not self.renews and now >= self._ask_at:
            self._ask_at = now + ASK_S
            if self._may_renew():
                self._sharing.ask_all_to_leave(now + self._drain_s)
                get().warning("DEVICE_RENEWAL", reason=why)

    def _why_renew(self) -> str:
        """Empty: there is no reason to."""
        if self._stage.figures.grown:
            return "the memory of sessions that have gone does not come back"
        slow = self._stage.drift.due == "renewal"
        return "its steps take half as long again, after a clean-up too" if slow else ""

    def _count(self) -> None:
        now = self._stage.figures.counted
        if now != self._told:
            for name, value in now.items():
                self._metrics.counters[name].inc(value - self._told.get(name, 0))
            self._told: dict[str, float] = now

    def _canary(self) -> None:
        try:
            self._stage.canary()
        except DeviceLost as lost:
            self._metrics.canaries.labels("wrong" if lost.reason == "canary" else "failed").inc()
            raise
        except DeviceFailed as failed:  # it had no room, for example: that says nothing about its numbers
            self._metrics.canaries.labels("failed").inc()
            get().warning("CANARY_FAILED", reason=failed.reason, error=str(failed))
        else:
            self._metrics.canaries.labels("right").inc()

    def _clean_up(self) -> None:
        self._metrics.cleanups.inc()
        get().warning("DEVICE_CLEAN_UP", reason="its steps take half as long again")
        try:
            self._stage.clean_up()
        except DeviceFailed as failed:  # then it stays slow, and is renewed
            get().warning("DEVICE_CLEAN_UP_FAILED", reason=failed.reason, error=str(failed))
