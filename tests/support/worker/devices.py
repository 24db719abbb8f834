"""What tests of a device's process are made of: its executors, a clock, its metrics."""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from blockrelay.observability.metrics.devices import DeviceMetrics
from blockrelay_worker.execution.process.executors import DeviceExecutors

#: Makes executors whose process misbehaves as its variables say.
Misbehaving = Callable[..., DeviceExecutors]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Told:
    """Metrics of a device, and what they say."""

    group: DeviceMetrics
    registry: CollectorRegistry

    def value(self, name: str, **labels: str) -> float:
        """Of a counter without its ending, or of a gauge."""
        full = f"blockrelay_worker_{name}"
        found = [self.registry.get_sample_value(one, labels) for one in (full, f"{full}_total")]
        (value,) = [one for one in found if one is not None]
        return value


def device_metrics() -> Told:
    registry = CollectorRegistry()
    return Told(DeviceMetrics(registry), registry)
