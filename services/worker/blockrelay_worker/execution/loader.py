"""Which executor runs a stage, by device, folder and precision."""

from collections.abc import Collection
from typing import ClassVar, Protocol

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import Precision
from blockrelay.errors import UsageError
from blockrelay.protocol.plan import Device
from blockrelay_worker.execution.cpu.loading import CpuExecutors
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.page_layout import PageLayout


class Executors(Protocol):
    """One implementation, on this machine, for the devices of one class."""

    device: ClassVar[Device]

    @staticmethod
    def serves(device: Device, precisions: Collection[Precision]) -> bool:
        """Whether it runs models with blocks of these precisions for workers of this device."""
        ...

    def numerics_id(self, manifest: Manifest) -> str:
        """Of all its executors of this model, known before one is loaded."""
        ...

    def layout(self, folder: BlockFolder, first_block: int, last_block: int) -> PageLayout:
        """Of the pages that a stage will have."""
        ...

    def load(self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int) -> Executor:
        """An executor of these blocks (numbered from 1, both included) with room for `pages` KV pages, or a few more.

        Every block has given its known answer on this machine, if it has one. Raises KnownAnswerMismatch naming the
        block, and BlockFolderError for blocks that the folder does not have or that cannot be loaded.
        """
        ...


#: The first that serves is taken.
IMPLEMENTATIONS = (CpuExecutors,)


def executors_for(device: Device, folder: BlockFolder, *, threads: int) -> Executors:
    """What runs stages of this folder on this machine. Raises UsageError where nothing does."""
    for implementation in IMPLEMENTATIONS:
        if implementation.serves(device, folder.manifest.precisions):
            return implementation(threads)
    raise UsageError(f"no executor runs {folder.manifest.precision} models on a {device} worker")


def devices_here(folder: BlockFolder) -> tuple[Device, ...]:
    """The classes of devices of this machine that run the folder by code of their own."""
    return tuple(
        dict.fromkeys(one.device for one in IMPLEMENTATIONS if one.serves(one.device, folder.manifest.precisions))
    )
