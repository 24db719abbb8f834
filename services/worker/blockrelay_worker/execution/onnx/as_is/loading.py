"""How ONNX blocks that others made come onto the device of an execution provider."""

import hashlib
import json
from collections.abc import Callable

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.errors import UsageError
from blockrelay.host.memory import available_bytes
from blockrelay.onnx_blocks.handed_on import check_borders
from blockrelay.protocol.plan import Stage
from blockrelay_worker.execution.device_memory import DeviceMemory
from blockrelay_worker.execution.numerics_id import PAGE_LAYOUT, SAMPLER_VERSION
from blockrelay_worker.execution.onnx.as_is.answers import TOLERANCES, Side, part_answers, prove
from blockrelay_worker.execution.onnx.as_is.served_blocks import ServedBlocks
from blockrelay_worker.execution.onnx.as_is.stage import AsIsStage
from blockrelay_worker.execution.onnx.as_is.warm_blocks import ALL, WarmLimits
from blockrelay_worker.execution.onnx.canary import Known
from blockrelay_worker.execution.onnx.graphs.flavours import FloatType
from blockrelay_worker.execution.onnx.known_answers import PAGES_NEEDED, composed_answers
from blockrelay_worker.execution.onnx.probe import failure
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Provider
from blockrelay_worker.execution.onnx.tries import TRIES, TryLimits
from blockrelay_worker.execution.page_layout import layout_of

#: Of how pages and blocks are put together: a change of bits is a new one.
_VERSION = 1


class AsIsExecutors:
    """Makes stages of ONNX blocks that others made, on one device, which share its sessions. One thread uses it."""

    def __init__(
        self,
        provider: Provider,
        *,
        warm: WarmLimits = ALL,
        ran_block: Callable[[], None] = lambda: None,
        tries: TryLimits = TRIES,
    ) -> None:
        """As many blocks of all stages are on the device at once as `warm` allows; `ran_block` is called behind each
        that has run, which is tried as often as `tries` says."""
        self._provider, self._warm, self._ran_block, self._tries = provider, warm, ran_block, tries
        self._folders: dict[str, ServedBlocks] = {}

    def numerics_id(self, manifest: Manifest) -> str:
        """`<type of the KV>-<provider>-<16 hex digits>`, the same for all stages."""
        parts = {
            "blocks": f"as they are {_VERSION}" if self._warm == ALL else f"one by one {_VERSION}",
            "sampler": SAMPLER_VERSION,
            "pages": PAGE_LAYOUT,
            "provider": self._provider.identity,
            "folder": manifest.numerics_inputs(),
        }
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return f"{manifest.precision}-{self._provider.name}-{digest[:16]}"

    def memory(self, folder: BlockFolder) -> DeviceMemory:
        """Of the device, as far as it tells."""
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
            most_sessions=self._warm.sessions,
            most_bytes=self._warm.bytes,
        )

    def resident(self, folder: BlockFolder, first_block: int, last_block: int) -> set[int]:
        """None: what is made of a block is made of its file, which may have changed."""
        return set()

    def loaded(
        self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int, weight_room: int = 0
    ) -> tuple[AsIsStage, Known]:
        """The stage, and what it gives now: it must give that always, within `tolerance`.

        It has given its known answers, but on ONNX Runtime's CPU provider, which is the reference.

        Raises KnownAnswerMismatch; BlockFolderError for blocks that there are not, that cannot be loaded, or that can
        be no stage; ExecutionError for those that this device cannot load now; UsageError for one without the floats
        of the blocks.
        """
        dtype: FloatType = "float32" if set(folder.manifest.precisions) == {"fp32"} else "float16"
        if self._provider.name != CpuProvider.name and (lacking := failure(self._provider, dtype)):
            raise UsageError(f"{self._provider.device} cannot run these blocks, which are in {dtype}: {lacking}")
        for index in (first_block, last_block):
            folder.manifest.block(index)  # raises where there is none
        served, blocks = self._served(folder), range(first_block, last_block + 1)
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
                self._prove(stage, served, blocks)
            if len(blocks) == folder.model.blocks:
                return stage, composed_answers(stage, first_block, last_block, folder.model)
            return stage, part_answers(stage, served, first_block, last_block)
        except BaseException:
            stage.close()
            raise

    def tolerance(self, manifest: Manifest) -> float:
        """See `answers.TOLERANCES`."""
        return TOLERANCES["float32" if set(manifest.precisions) == {"fp32"} else "float16"]

    def _served(self, folder: BlockFolder) -> ServedBlocks:
        key = folder.manifest.model_hash
        if key not in self._folders:
            self._folders[key] = ServedBlocks(folder, self._provider, self._warm, self._tries)
        return self._folders[key]

    def _prove(self, stage: AsIsStage, served: ServedBlocks, blocks: range) -> None:
        pages = served.pages_for_reference(blocks.start, blocks[-1], PAGES_NEEDED)
        prove(
            Side(stage.pages, stage.blocks.get),
            Side(pages, served.reference),
            served,
            blocks,
            single=stage.single,
            tolerance=self.tolerance(served.folder.manifest),
            proved=self._ran_block,
        )


def room_for_sessions(provider: Provider, budget_bytes: int | None) -> int | None:
    """Bytes that sessions may take where nobody said how many: half of what may be used of the device's memory, or is
    free on the host where that is the device. The rest is for KV pages and steps. None where nobody knows."""
    found = budget_bytes or provider.budget_bytes()
    if found is None and provider.name == CpuProvider.name:
        found = available_bytes()
    return None if found is None else found // 2
