"""The reason and code of a GPU's failure that clients see."""

import pytest

from blockrelay.errors import DeviceFailed, DeviceLost, ExecutionError, RowNotFinite
from blockrelay_worker.execution.fallback_reason import fallback_reason


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, ("", "")),
        (DeviceFailed("x", reason="out_of_memory", code="OOM", capacity=True), ("gpu_memory_error", "OOM")),
        (DeviceFailed("x", reason="device_limit", code="OOM", capacity=True), ("gpu_memory_error", "OOM")),
        (DeviceFailed("x", reason="refused", code="INTERNAL", capacity=False), ("gpu_driver_error", "INTERNAL")),
        (DeviceFailed("x", reason="not_finite", code="INTERNAL", capacity=False), ("gpu_wrong_numbers", "INTERNAL")),
        (DeviceFailed("x", reason="canary", code="INTERNAL", capacity=False), ("gpu_driver_error", "INTERNAL")),
        (DeviceLost("x", reason="hang", code="TIMEOUT"), ("gpu_timeout", "TIMEOUT")),
        (DeviceLost("x", reason="process_ended", code="INTERNAL"), ("gpu_device_lost", "INTERNAL")),
        (DeviceLost("x", reason="canary", code="INTERNAL", block="block_2"), ("gpu_wrong_numbers", "INTERNAL")),
        (ExecutionError("x"), ("gpu_driver_error", "INTERNAL")),
        (RowNotFinite("x"), ("gpu_driver_error", "INTERNAL")),
    ],
)
def test_a_failure_in_the_words_of_clients(error: ExecutionError | None, said: tuple[str, str]) -> None:
    assert fallback_reason(error) == said
