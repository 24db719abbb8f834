"""Loads stages of ONNX blocks that others made onto the device of an execution provider, and proves that they compute
rightly."""

from collections.abc import Callable

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.errors import UsageError
from blockrelay.host.memory import available_bytes
from blockrelay.onnx_blocks.handed_on import check_borders
from blockrelay.protocol.plan import Stage
from blockrelay_worker.execution.device_memory import DeviceMemory
from blockrelay_worker.execution.numerics_id import PAGE_LAYOUT, SAMPLER_VERSION, hashed_id
from blockrelay_worker.execution.onnx.as_is.answers import TOLERANCES, Known, part_answers, prove
from blockrelay_worker.execution.onnx.as_is.served_blocks import ServedBlocks
from blockrelay_worker.execution.onnx.as_is.stage import AsIsStage
from blockrelay_worker.execution.onnx.as_is.warm_blocks import ALL, WarmLimits
from blockrelay_worker.execution.onnx.graphs.flavours import FloatType
from blockrelay_worker.execution.onnx.known_answers import PAGES_NEEDED, composed_answers
from blockrelay_worker.execution.onnx.probe import failure
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Provider
from blockrelay_worker.execution.onnx.tries import TRIES, TryLimits
from blockrelay_worker.execution.page_layout import layout_of

#: Version of the way that pages and blocks are put together: changes when a bit of the results may.
_VERSION = 1


class AsIsExecutors:
    """Makes stages of ONNX blocks on one device; they share its sessions. One thread uses it."""

    def __init__(
        self,
        provider: Provider,
        *,
        warm: WarmLimits = ALL,
        ran_block: Callable[[], None] = lambda: None,
        tries: TryLimits = TRIES,
    ) -> None:
        """`warm`: how many blocks of all stages may be on the device at once. `ran_block` is called after each block
        that has run. `tries`: how often making and running a block is tried."""
        self._provider, self._warm, self._ran_block, self._tries = provider, warm, ran_block, tries
        self._folders: dict[str, ServedBlocks] = {}

    def numerics_id(self, manifest: Manifest) -> str:
        """Returns `<type of the KV>-<provider>-<16 hex digits>`, the same for all stages."""
        parts = {
            "blocks": f"as they are {_VERSION}" if self._warm == ALL else f"one by one {_VERSION}",
            "sampler": SAMPLER_VERSION,
            "pages": PAGE_LAYOUT,
            "provider": self._provider.identity,
            "folder": manifest.numerics_inputs(),
        }
        return hashed_id(manifest, parts, self._provider.name)

    def memory(self, folder: BlockFolder) -> DeviceMemory:
        """Returns the memory that blocks and pages take on the device, and its budget where the provider knows it.

        The folder must be of ONNX blocks. Raises OnnxBlocksError for files of blocks that cannot be read or do not fit
        together.
        """
        layers = folder.model.onnx_layers
        assert layers is not None, "a model of ONNX blocks"
        one_layer = layers.index(max(layers)) + 1
        return DeviceMemory(
            device=self._provider.device,
            block_bytes=self._served(folder).bytes,
            block_layers=layers,
            table_bytes=0,
            layer_page_bytes=layout_of(folder, one_layer, one_layer).bytes_per_page // layers[one_layer - 1],
            least_pages=PAGES_NEEDED,
            canary_pages=PAGES_NEEDED,
            budget_bytes=self._provider.budget_bytes(),
            max_sessions=self._warm.sessions,
            max_bytes=self._warm.bytes,
        )

    def resident(self, folder: BlockFolder, first_block: int, last_block: int) -> set[int]:
        """Returns the blocks that are on the device already and need not be read: always an empty set.

        Sessions are made of a block's file, which may have changed.
        """
        return set()

    def loaded(
        self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int, weight_room: int = 0
    ) -> tuple[AsIsStage, Known]:
        """Returns the stage, and what it gives now: it must always give this, within `tolerance`.

        The stage has given its known answers, except on ONNX Runtime's CPU provider, which is the reference. It has at
        least PAGES_NEEDED pages. `weight_room` has no effect: `warm` limits the blocks on the device.

        Raises KnownAnswerMismatch for wrong numbers; BlockFolderError for blocks that do not exist, cannot be loaded,
        or cannot be a stage; ExecutionError for blocks that this device cannot load or run now; UsageError if it lacks
        the blocks' float type, or cannot hold the pages. A failure of the reference on the CPU provider is raised
        as ONNX Runtime raises it.
        """
        dtype: FloatType = "float32" if set(folder.manifest.precisions) == {"fp32"} else "float16"
        if self._provider.name != CpuProvider.name and (lacking := failure(self._provider, dtype)):
            raise UsageError(f"{self._provider.device} cannot run these blocks, which are in {dtype}: {lacking}")
        for index in (first_block, last_block):
            folder.manifest.block(index)  # raises BlockFolderError if there is no such block
        served = self._served(folder)
        check_borders(served.wiring, [Stage(first=first_block, last=last_block)], folder.model.max_position)
        stage = AsIsStage(
            served,
            first_block,
            last_block,
            pages=max(PAGES_NEEDED, pages),
            numerics_id=self.numerics_id(folder.manifest),
            ran_block=self._ran_block,
        )
        try:
            if self._provider.name != CpuProvider.name:
                prove(stage, tolerance=self.tolerance(folder.manifest), proved=self._ran_block)
            if last_block - first_block + 1 == folder.model.blocks:
                return stage, composed_answers(stage, first_block, last_block, folder.model)
            return stage, part_answers(stage, served, first_block, last_block)
        except BaseException:
            stage.close()
            raise

    def tolerance(self, manifest: Manifest) -> float:
        """Returns the allowed error of a row, relative to its length, for the folder's float type (`TOLERANCES`)."""
        return TOLERANCES["float32" if set(manifest.precisions) == {"fp32"} else "float16"]

    def _served(self, folder: BlockFolder) -> ServedBlocks:
        key = folder.manifest.model_hash
        if key not in self._folders:
            self._folders[key] = ServedBlocks(folder, self._provider, self._warm, self._tries)
        return self._folders[key]


def room_for_sessions(provider: Provider, budget_bytes: int | None) -> int | None:
    """Returns the bytes that sessions may take by default: half of the device's memory budget. The rest is for KV pages
    and steps.

    The budget is `budget_bytes`; if that is None or 0, `provider.budget_bytes()`. If that is None too, the budget of
    the CPU provider is the host's free memory, and for other providers the result is None.
    """
    room = budget_bytes or provider.budget_bytes()
    if room is None and provider.name == CpuProvider.name:
        room = available_bytes()
    return None if room is None else room // 2
