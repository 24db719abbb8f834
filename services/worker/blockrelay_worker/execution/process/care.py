"""What a device in a process of its own needs between the steps of its worker."""

import time
from collections.abc import Callable

from blockrelay.errors import DeviceFailed, DeviceLost
from blockrelay.observability.logs import get
from blockrelay.observability.metrics.devices import DeviceMetrics
from blockrelay_worker.execution.process.stage import DeviceStage


class DeviceCare:
    """Of the device that one stage is on. Used by the engine's thread."""

    def __init__(
        self,
        stage: DeviceStage,
        metrics: DeviceMetrics,
        *,
        canary_every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage, self._metrics, self._clock = stage, metrics, clock
        self._every_s, self._canary_at = canary_every_s, clock() + canary_every_s

    def between_steps(self) -> None:
        """What is due: at most one thing, that takes no longer than a step may. Raises DeviceLost."""
        if self._clock() >= self._canary_at:
            self._canary()
            self._canary_at = self._clock() + self._every_s

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
