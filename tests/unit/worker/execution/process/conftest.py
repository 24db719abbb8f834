"""Stages on a device whose provider fails in a way that the test chooses."""

import os
import sys
from collections.abc import Iterator

import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from tests.support.worker.devices import Misbehaving


@pytest.fixture
def misbehaving(fp32: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Misbehaving]:
    """Executors whose process is told these variables (tests/support/worker/failing_child.py says which)."""
    made: list[DeviceExecutors] = []

    def begin(device: str = "cpu", **how: str) -> DeviceExecutors:
        for name, value in how.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        module = "tests.support.worker.failing_child"
        made.append(DeviceExecutors(fp32, Gpu(device, 5.0), module=module))
        return made[-1]

    yield begin
    for executors in made:
        executors.close()
