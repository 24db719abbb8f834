"""The version of a rank: all ranks of a stage are of one, since they share memory and numbers."""

from importlib.metadata import version

from blockrelay_worker.kernels.libraries import LIBRARY_VERSION
from blockrelay_worker.kernels.specification import KERNEL_NUMERICS_VERSION

VERSION = f"{version('blockrelay')}, kernels {LIBRARY_VERSION}, numbers {KERNEL_NUMERICS_VERSION}"
