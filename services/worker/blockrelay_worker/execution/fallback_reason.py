"""Reason and error code of a GPU's failure, as clients see them in fallback events. Pure."""

from typing import Literal

from blockrelay.errors import DeviceFailed, DeviceLost, ErrorCode, ExecutionError

FallbackReason = Literal["gpu_memory_error", "gpu_timeout", "gpu_wrong_numbers", "gpu_device_lost", "gpu_driver_error"]
#: Reasons of a `DeviceLost` and a `DeviceFailed` that mean wrong results from a device that still computes.
WRONG_WHEN_LOST, WRONG_WHEN_FAILED = "canary", "not_finite"


def fallback_reason(error: ExecutionError | None) -> tuple[FallbackReason | Literal[""], ErrorCode | Literal[""]]:
    """Returns (reason, error code) of `error`, both empty for None.

    A memory error has the code OOM, a step that took too long TIMEOUT, and everything else INTERNAL.
    """
    if error is None:
        return "", ""
    if not isinstance(error, (DeviceFailed, DeviceLost)):
        return "gpu_driver_error", "INTERNAL"
    if error.code == "OOM":
        return "gpu_memory_error", error.code
    if error.code == "TIMEOUT":
        return "gpu_timeout", error.code
    lost = isinstance(error, DeviceLost)
    if error.reason == (WRONG_WHEN_LOST if lost else WRONG_WHEN_FAILED):
        return "gpu_wrong_numbers", error.code
    return ("gpu_device_lost" if lost else "gpu_driver_error"), error.code
