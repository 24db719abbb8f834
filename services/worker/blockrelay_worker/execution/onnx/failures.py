"""What an error of a provider means. ONNX Runtime has no error codes for it, so its texts are told apart, by one table.

    capacity  memory or a limit is used up: release, try less at once, hand the youngest over
    device    the device or the process on it is lost: end the process, go on elsewhere
    refused   this batch cannot be run: it alone goes elsewhere
    unknown   no row of the table says so: as refused, but `device` when it comes again (`Judge`)

Sources of the texts: ONNX Runtime 1.31 and its providers, and reports by people; tests/unit/worker/execution/onnx has
each in its place.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from blockrelay.errors import DeviceCode

Kind = Literal["capacity", "device", "refused", "unknown"]

_BLOCK = re.compile(r"\b(block_\d+)/")


@dataclass(frozen=True, slots=True)
class Failure:
    """`reason` names the row of the table; `block` the block whose node failed, if the text names it."""

    kind: Kind
    reason: str
    code: DeviceCode
    block: str | None
    text: str


@dataclass(frozen=True, slots=True)
class _Row:
    kind: Kind
    reason: str
    texts: tuple[str, ...]
    code: DeviceCode = "INTERNAL"


#: The first row with a text that is found counts; small and capital letters are alike.
TABLE = (
    _Row(
        "device",
        "device_removed",  # DXGI: removed, hung, reset, driver error, and what DirectML says of them
        ("887A0005", "887A0006", "887A0007", "887A0020", "GPU will not respond to more commands"),
    ),
    _Row(
        "device", "device_lost", ("device lost", "device is lost", "DeviceLost", "ERROR_DEVICE_LOST")
    ),  # Vulkan and Level Zero name it like that
    _Row(
        "capacity",
        "out_of_memory",
        (
            "Failed to allocate memory for requested buffer",
            "CUDA failure 2:",
            "out of memory",
            "CUBLAS_STATUS_ALLOC_FAILED",
            "CUDNN_STATUS_ALLOC_FAILED",
            "Failed to create GPU buffer",
            "Allocation size too large",
            "8007000E",  # E_OUTOFMEMORY
            "CL_OUT_OF_RESOURCES",  # OpenVINO's GPUs by OpenCL, its NPUs by Level Zero
            "CL_MEM_OBJECT_ALLOCATION_FAILURE",
            "ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
        ),
        "OOM",
    ),
    _Row(
        "capacity",
        "device_limit",
        (
            "exceeds the max buffer size limit",
            "is invalid due to a previous error",
            "Exceeded max size of memory object",
        ),
        "OOM",
    ),
    _Row(
        "device",
        "illegal_access",
        (
            *(f"CUDA failure {number}:" for number in (700, 710, 716, 719, 999)),
            "cudaErrorIllegalAddress",
            "illegal memory access",
            "unspecified launch failure",
            "CUBLAS_STATUS_EXECUTION_FAILED",
        ),
    ),
    _Row("device", "ecc_error", ("CUDA failure 214:", "uncorrectable ECC error")),
    _Row(
        "refused",
        "refused",
        ("INVALID_ARGUMENT", "batch_size must be 1", "must not exceed", "887A0001", "requires f16 but the device"),
    ),
)


def judged(text: str) -> Failure:
    """What an error with this text means. Pure."""
    found = _BLOCK.search(text)
    block = found[1] if found else None
    folded = text.casefold()
    for row in TABLE:
        if any(one.casefold() in folded for one in row.texts):
            return Failure(row.kind, row.reason, row.code, block, text)
    return Failure("unknown", "unknown", "INTERNAL", block, text)


class Judge:
    """The errors of one process on a device: one that the table does not know may pass, a second means `device`."""

    def __init__(self) -> None:
        self._unknown = False

    def judge(self, text: str) -> Failure:
        failure = judged(text)
        if failure.kind == "unknown":
            if self._unknown:
                return replace(failure, kind="device", reason="unknown_twice")
            self._unknown = True
        return failure
