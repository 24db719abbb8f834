"""How stages come onto a CPU: the fastest products that give the known answers there."""

import logging
from collections.abc import Collection
from typing import ClassVar

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import Precision, is_exact
from blockrelay.errors import KnownAnswerMismatch
from blockrelay.host.cpu import cpu_name
from blockrelay.protocol.plan import Device
from blockrelay_worker.execution.cpu.linears import Variant
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.numerics_id import numerics_id
from blockrelay_worker.execution.self_test import first_mismatch
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.kernels.interface import Kernels

_log = logging.getLogger(__name__)


class CpuExecutors:
    """Makes executors that compute with `threads` threads: our kernels and, where they have none, ONNX Runtime's."""

    device: ClassVar[Device] = "cpu"
    varies: ClassVar[bool] = False

    def __init__(self, threads: int) -> None:
        self._threads, self._kernels = threads, load_kernels(threads)

    @staticmethod
    def serves(device: Device, precisions: Collection[Precision]) -> bool:
        """All there are."""
        return device == "cpu"

    def numerics_id(self, manifest: Manifest) -> str:
        return numerics_id(manifest)

    def load(self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int) -> StageExecutor:
        return load_stage(
            folder, first_block, last_block, pages=max(2, pages), threads=self._threads, kernels=self._kernels
        )


def load_stage(
    folder: BlockFolder, first_block: int, last_block: int, *, pages: int, threads: int, kernels: Kernels
) -> StageExecutor:
    """An executor whose every block has given its known answer on this machine, by the fastest variant that does.

    The check needs two pages. Raises KnownAnswerMismatch naming the block and the CPU. Blocks of precisions that are
    not exact have no known answers and are loaded as they are.
    """
    exact = any(is_exact(precision) for precision in folder.manifest.precisions[first_block - 1 : last_block])
    variants: list[Variant] = ["u8s8", "u8u8"] if exact else ["u8s8"]
    if kernels.multiplies and exact:
        variants.insert(0, "native")
    wrong: str | None = None
    for variant in variants:
        executor = StageExecutor(
            folder, first_block, last_block, pages=pages, threads=threads, kernels=kernels, variant=variant
        )
        wrong = first_mismatch(executor)
        if wrong is None:
            return executor
        if variant != variants[-1]:
            _log.info("this CPU saturates %s products, seen at %s: others are tried, which do not", variant, wrong)
        executor.close()
    raise KnownAnswerMismatch(
        f"{wrong} of {folder.root} computes other bits on this CPU ({cpu_name()}) with {kernels.variant} kernels than "
        "when it was converted: refusing to serve it; convert the model again, or report this CPU",
        block=str(wrong),
    )
