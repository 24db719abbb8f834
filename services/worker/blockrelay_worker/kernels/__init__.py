"""Float kernels between the matrix products: `Kernels` (what they do), `specification` (which bits), `load_kernels`."""

import logging

from blockrelay_worker.kernels.interface import Kernels
from blockrelay_worker.kernels.libraries import shortcoming, supported_variants
from blockrelay_worker.kernels.native import NativeKernels
from blockrelay_worker.kernels.reference import ReferenceKernels
from blockrelay_worker.kernels.specification import FLOAT16_MAX, KERNEL_NUMERICS_VERSION, LANES, PAGE, ZERO_POINT

__all__ = [
    "FLOAT16_MAX",
    "KERNEL_NUMERICS_VERSION",
    "LANES",
    "PAGE",
    "ZERO_POINT",
    "Kernels",
    "load_kernels",
    "supported_variants",
]

_log = logging.getLogger(__name__)


def load_kernels(threads: int, *, variant: str | None = None) -> Kernels:
    """The fastest kernels this machine can run, or the named variant (`reference` included).

    `threads` is how many threads one call may use, the caller's among them; no result depends on it or on the variant.
    Falls back to the NumPy reference, with a warning where a faster variant is missing. UsageError for a named variant
    that cannot run here.
    """
    if variant == "reference":
        return ReferenceKernels()
    usable = supported_variants()
    if variant is None and (slow := shortcoming()):
        _log.warning("%s", slow)
    if variant is None and not usable:
        return ReferenceKernels()
    return NativeKernels(variant or usable[0], threads)
