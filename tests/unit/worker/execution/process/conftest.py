"""Stages on a device whose provider misbehaves as it is told."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.observability.metrics.devices import DeviceMetrics
from blockrelay_worker.execution.process.stage import DeviceExecutors

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


@pytest.fixture
def misbehaving(fp32: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Misbehaving]:
    """Executors whose process is told these variables (tests/support/worker/failing_child.py says which)."""
    made: list[DeviceExecutors] = []

    def begin(**how: str) -> DeviceExecutors:
        for name, value in how.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        module = "tests.support.worker.failing_child"
        made.append(DeviceExecutors("cpu", fp32, python=sys.executable, limit_s=5.0, module=module))
        return made[-1]

    yield begin
    for executors in made:
        executors.close()
