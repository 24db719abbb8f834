"""Float kernels between the matrix products: `Kernels` (what they do), `numerics` (to which bits), `load_kernels`."""

import logging

from blockrelay_worker.kernels.interface import Kernels
from blockrelay_worker.kernels.numerics import FLOAT16_MAX, KERNEL_NUMERICS_VERSION, LANES, PAGE, ZERO_POINT
from blockrelay_worker.kernels.reference import ReferenceKernels

__all__ = [
    "FLOAT16_MAX",
    "KERNEL_NUMERICS_VERSION",
    "LANES",
    "PAGE",
    "ZERO_POINT",
    "Kernels",
    "load_kernels",
]

_log = logging.getLogger(__name__)


def load_kernels(threads: int, *, variant: str | None = None) -> Kernels:
    """The fastest kernels this machine can run, with `threads` threads of their own."""
    _log.warning("no native kernels: using the NumPy reference, about 100 times slower")
    return ReferenceKernels()
