"""The meaning of a provider's error. ONNX Runtime has no error codes for it, so one table matches its texts.

    capacity  memory or a limit is used up: release, run less at once, hand the youngest request over
    device    the device or its process is lost: end the process, continue elsewhere
    refused   this batch cannot run here: it alone goes elsewhere
    unknown   no row of the table matches: as refused, but `device` the second time (`Judge`)

Sources of the texts: ONNX Runtime 1.31 and its providers, and user reports; tests/unit/worker/execution/onnx has each
of them in its context.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from blockrelay.errors import DeviceCode

Kind = Literal["capacity", "device", "refused", "unknown"]

_BLOCK = re.compile(r"\b(block_\d+)/")


@dataclass(frozen=True, slots=True)
class Failure:
    """A classified error. `reason` names the row of the table, `block` the block whose node failed, if the text names
    it, `code` the code that the worker reports."""

    kind: Kind
    reason: str
    code: DeviceCode
    block: str | None
    text: str


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the table: an error with one of `texts` in it is of this kind."""

    kind: Kind
    reason: str
    texts: tuple[str, ...]
    code: DeviceCode = "INTERNAL"


#: The first matching row counts; case is ignored.
TABLE = (
    _Row(
        "device",
        "device_removed",  # DXGI: removed, hung, reset, driver error, and what DirectML says of them
        ("887A0005", "887A0006", "887A0007", "887A0020", "GPU will not respond to more commands"),
    ),
    _Row(
        "device", "device_lost", ("device lost", "device is lost", "DeviceLost", "ERROR_DEVICE_LOST")
    ),  # as named by Vulkan and Level Zero
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


def classify(text: str) -> Failure:
    """Returns the failure that an error with this text stands for. Pure."""
    match = _BLOCK.search(text)
    block = match[1] if match else None
    folded = text.casefold()
    for row in TABLE:
        if any(one.casefold() in folded for one in row.texts):
            return Failure(row.kind, row.reason, row.code, block, text)
    return Failure("unknown", "unknown", "INTERNAL", block, text)


class Judge:
    """Classifies the errors of one process on a device: one unknown error may pass, a second one means `device`."""

    def __init__(self) -> None:
        self._unknown = False

    def judge(self, text: str) -> Failure:
        """Returns the failure that an error with this text stands for, given the errors before it.

        Every unknown error after the first one is of kind `device`, with the reason `unknown_twice`.
        """
        failure = classify(text)
        if failure.kind == "unknown":
            if self._unknown:
                return replace(failure, kind="device", reason="unknown_twice")
            self._unknown = True
        return failure
