"""Devices of ONNX Runtime to run on."""

import pytest

from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from tests.support.worker.onnx_devices import DEVICES


@pytest.fixture(scope="module", params=DEVICES)
def executors(request: pytest.FixtureRequest) -> OnnxExecutors:
    """Of one device."""
    return OnnxExecutors(open_provider(request.param))
