"""CPU kernels: matmuls and the float operations between them. `Kernels` is the interface, `specification` the bits."""

import logging
from functools import cache

from blockrelay_worker.kernels.interface import Kernels
from blockrelay_worker.kernels.libraries import shortcoming, supported_isas
from blockrelay_worker.kernels.native import NativeKernels
from blockrelay_worker.kernels.reference import ReferenceKernels
from blockrelay_worker.kernels.specification import KERNEL_NUMERICS_VERSION, PAGE

__all__ = [
    "KERNEL_NUMERICS_VERSION",
    "PAGE",
    "Kernels",
    "load_kernels",
    "supported_isas",
]

_log = logging.getLogger(__name__)


@cache
def _warn_once(message: str) -> None:
    _log.warning("%s", message)


def load_kernels(threads: int, *, isa: str | None = None) -> Kernels:
    """Returns the fastest kernels that this machine can run, or those of the named variant (`reference` included).

    `threads` is the number of threads that one call may use, the caller's among them; no result depends on it or on the
    variant. Without compiled kernels it returns the NumPy reference. It logs a warning where a faster variant is
    missing. Raises UsageError for a named variant that cannot run here.
    """
    if isa == "reference":
        return ReferenceKernels()
    usable = supported_isas()
    if isa is None and (slow := shortcoming()):
        _warn_once(slow)
    if isa is None and not usable:
        return ReferenceKernels()
    return NativeKernels(isa or usable[0], threads)
