"""Canaries, clean-ups, renewals and metrics of a device in a process of its own, between the steps of its worker."""

import time
from collections.abc import Callable

from blockrelay.errors import DeviceFailed, DeviceLost
from blockrelay.observability.logs import get
from blockrelay.observability.metrics.devices import DeviceMetrics
from blockrelay_worker.execution.process.sharing import Sharing
from blockrelay_worker.execution.process.stage import DeviceStage
from blockrelay_worker.policy import RENEWAL_ASK_S


class DeviceCare:
    """Looks after the device of one stage, which it may share with other stages. Used by the engine's thread."""

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
        """`canary_every_s`: seconds between two canaries. `may_renew` returns whether it is this device's turn to get a
        new process; requests of all its stages then have `drain_s` seconds to end. `sharing`: the other workers of the
        device; None: there are none."""
        self._stage, self._metrics, self._clock = stage, metrics, clock
        self._every_s, self._canary_at = canary_every_s, clock() + canary_every_s
        self._may_renew, self._ask_at, self._drain_s = may_renew, clock(), drain_s
        self._sharing = sharing or Sharing(1)
        # The bytes that loading moved belong to no step, so counters start after them.
        self._counted = {"up_bytes": stage.figures.up_bytes, "down_bytes": stage.figures.down_bytes}
        metrics.show(lambda figure: getattr(stage.figures, figure) if stage.usable else 0)

    @property
    def renews(self) -> bool:
        """True while the worker takes nothing new and leaves when nothing is left, to come back with a new process."""
        return self._sharing.leave_at is not None

    @property
    def leaves_now(self) -> bool:
        """True once the time to drain is over: what is left continues on other workers."""
        leave_at = self._sharing.leave_at
        return leave_at is not None and self._clock() >= leave_at

    def doubt(self) -> None:
        """Makes the canary due at once: a step gave numbers that cannot be right."""
        self._canary_at = self._clock()

    def between_steps(self) -> None:
        """Does what is due, at most one thing, which takes no longer than a step may.

        Raises DeviceLost, also for a process that has ended while nothing was asked of it, and for a wrong canary.
        Raises what `may_renew` raises, and takes longer if that waits for Redis.
        """
        self._stage.check()
        self._count()
        now = self._clock()
        if now >= self._canary_at:
            self._canary()
            self._canary_at = self._clock() + self._every_s
        elif self._stage.drift.due == "clean_up":
            self._clean_up()
        elif (why := self._why_renew()) and not self.renews and now >= self._ask_at:
            self._ask_at = now + RENEWAL_ASK_S
            if self._may_renew():
                self._sharing.ask_all_to_leave(now + self._drain_s)
                get().warning("DEVICE_RENEWAL", reason=why)

    def _why_renew(self) -> str:
        """Returns why the process should be renewed; empty if there is no reason."""
        if self._stage.figures.grown:
            return "the memory of sessions that have gone does not come back"
        slow = self._stage.drift.due == "renewal"
        return "its steps take 1.5 times as long as at first, after a clean-up too" if slow else ""

    def _count(self) -> None:
        """Adds what the stage's figures have grown by to the metrics."""
        now = self._stage.figures.counted
        if now != self._counted:
            for name, value in now.items():
                self._metrics.counters[name].inc(value - self._counted.get(name, 0))
            self._counted: dict[str, float] = now

    def _canary(self) -> None:
        """Runs a canary and counts it as right, wrong or failed. Raises DeviceLost if it is wrong or the device is
        gone."""
        try:
            self._stage.canary()
        except DeviceLost as lost:
            self._metrics.canaries.labels("wrong" if lost.reason == "canary" else "failed").inc()
            raise
        except DeviceFailed as failed:  # for want of memory, for example: that says nothing about its numbers
            self._metrics.canaries.labels("failed").inc()
            get().warning("CANARY_FAILED", reason=failed.reason, error=str(failed))
        else:
            self._metrics.canaries.labels("right").inc()

    def _clean_up(self) -> None:
        """Has the device give back memory, and counts that. A failure is only logged."""
        self._metrics.cleanups.inc()
        get().warning("DEVICE_CLEAN_UP", reason="its steps take 1.5 times as long as at first")
        try:
            self._stage.clean_up()
        except DeviceFailed as failed:  # the device stays slow, and is renewed
            get().warning("DEVICE_CLEAN_UP_FAILED", reason=failed.reason, error=str(failed))
