"""How ONNX blocks that others made come onto the device of an execution provider."""

import hashlib
import json
from collections.abc import Callable, Sequence

from onnx import TensorProto

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.errors import BlockFolderError, UsageError
from blockrelay.host.memory import available_bytes
from blockrelay.onnx_blocks.model_file import model_without_weights
from blockrelay.onnx_blocks.served_shape import request_inputs, served_wiring
from blockrelay_worker.execution.device_memory import DeviceMemory
from blockrelay_worker.execution.numerics_id import PAGE_LAYOUT, SAMPLER_VERSION
from blockrelay_worker.execution.onnx.as_is.answers import TOLERANCES, Side, prove
from blockrelay_worker.execution.onnx.as_is.block import AsIsBlock
from blockrelay_worker.execution.onnx.as_is.stage import AsIsStage
from blockrelay_worker.execution.onnx.as_is.warm_blocks import ALL, WarmLimits
from blockrelay_worker.execution.onnx.bound.pages import DevicePages
from blockrelay_worker.execution.onnx.graphs.flavours import FloatType
from blockrelay_worker.execution.onnx.known_answers import (
    PAGES_NEEDED,
    STEPS,
    Answers,
    composed_answers,
    possible,
)
from blockrelay_worker.execution.onnx.probe import failure
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Provider
from blockrelay_worker.execution.onnx.tries import TRIES, TryLimits
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.execution.self_test import fixed_tokens

#: Of how pages and blocks are put together: a change of bits is a new one.
_VERSION = 1


class AsIsExecutors:
    """Makes the one stage that ONNX blocks are, on one device."""

    def __init__(
        self,
        provider: Provider,
        *,
        warm: WarmLimits = ALL,
        ran_block: Callable[[], None] = lambda: None,
        tries: TryLimits = TRIES,
    ) -> None:
        """As many blocks are on the device at once as `warm` allows; `ran_block` is called behind each that has run,
        which is tried as often as `tries` says."""
        self._provider, self._warm, self._ran_block, self._tries = provider, warm, ran_block, tries

    def numerics_id(self, manifest: Manifest) -> str:
        """`<type of the KV>-<provider>-<16 hex digits>`."""
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
        wiring, blocks = served_wiring(folder.root), folder.model.blocks
        layers = [0] * blocks
        for slot, present in wiring.presents.items():
            layers[present.index - 1] += slot.half == "key"
        return DeviceMemory(
            device=self._provider.device,
            block_bytes=self._warm.held(self._block_bytes(folder)),
            block_layers=layers,
            table_bytes=0,
            layer_page_bytes=layout_of(folder, 1, blocks).bytes_per_page // folder.model.layers,
            least_pages=PAGES_NEEDED,
            canary_pages=PAGES_NEEDED,
            budget_bytes=self._provider.budget_bytes(),
        )

    def _block_bytes(self, folder: BlockFolder) -> list[int]:
        """Of each block on the device. ONNX Runtime's CPU provider has float16 in float32, as long as the block is
        there for more than a step."""
        found = [_bytes_of(folder, block.file) for block in folder.manifest.blocks]
        if self._provider.name != CpuProvider.name or set(folder.manifest.precisions) == {"fp32"}:
            return found
        wide = [2 * size for size in found]
        return wide if self._warm.all_of(wide) else found

    def resident(self, folder: BlockFolder, first_block: int, last_block: int) -> set[int]:
        """None: sessions go with their stage."""
        return set()

    def loaded(
        self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int, weight_room: int = 0
    ) -> tuple[AsIsStage, Answers]:
        """The stage, and what it gives now: it must give that always, within `tolerance`.

        It has given its known answers, but on ONNX Runtime's CPU provider, which is the reference.

        Raises KnownAnswerMismatch; BlockFolderError for less than all blocks, and for those that cannot be loaded;
        ExecutionError for those that this device cannot load now; UsageError for one without the floats of the blocks.
        """
        dtype: FloatType = "float32" if set(folder.manifest.precisions) == {"fp32"} else "float16"
        if self._provider.name != CpuProvider.name and (lacking := failure(self._provider, dtype)):
            raise UsageError(f"{self._provider.device} cannot run these blocks, which are in {dtype}: {lacking}")
        if (first_block, last_block) != (1, folder.model.blocks):
            raise BlockFolderError(f"ONNX blocks are served together: block_1 to block_{folder.model.blocks}")
        stage = AsIsStage(
            folder,
            pages=max(PAGES_NEEDED, pages),
            provider=self._provider,
            numerics_id=self.numerics_id(folder.manifest),
            block_bytes=self._block_bytes(folder),
            warm=self._warm,
            ran_block=self._ran_block,
            tries=self._tries,
        )
        try:
            if self._provider.name != CpuProvider.name:
                self._prove(stage)
            return stage, composed_answers(stage, first_block, last_block, folder.model)
        except BaseException:
            stage.close()
            raise

    def tolerance(self, manifest: Manifest) -> float:
        """See `answers.TOLERANCES`."""
        return TOLERANCES["float32" if set(manifest.precisions) == {"fp32"} else "float16"]

    def _prove(self, stage: AsIsStage) -> None:
        folder = stage.folder
        cpu = CpuProvider()
        steps = possible(STEPS, folder.model)
        root = folder.onnx_root
        assert root is not None, "a model of ONNX blocks"

        def reference(index: int) -> AsIsBlock:
            return AsIsBlock(cpu, root, stage.wiring, stage.shape, index, steps="few")

        pages = DevicePages(
            cpu,
            reference(1).session,
            folder.model,
            range(1, folder.model.layers + 1),
            stage.layout,
            pages=PAGES_NEEDED,
            dtype=stage.shape.dtype,
        )
        prove(
            Side(stage.pages, stage.blocks.get),
            Side(pages, reference),
            steps,
            [fixed_tokens(folder.model, step.rows) for step in steps],
            request_inputs(stage.wiring),
            blocks=folder.model.blocks,
            single=stage.shape.single,
            one_by_one=stage.one_by_one,
            longest=folder.model.max_position,
            where=self._provider.device,
            tolerance=self.tolerance(folder.manifest),
            proved=self._ran_block,
        )


def room_for_sessions(provider: Provider, budget_bytes: int | None) -> int | None:
    """Bytes that sessions may take where nobody said how many: half of what may be used of the device's memory, or is
    free on the host where that is the device. The rest is for KV pages and steps. None where nobody knows."""
    found = budget_bytes or provider.budget_bytes()
    if found is None and provider.name == CpuProvider.name:
        found = available_bytes()
    return None if found is None else found // 2


def _bytes_of(folder: BlockFolder, file: str) -> int:
    """What the weights of a block take: those in its file, and those beside it that it names."""
    assert folder.onnx_root is not None, "a model of ONNX blocks"
    path = folder.onnx_root / file
    return path.stat().st_size + sum(_beside(model_without_weights(path, file).graph.initializer, file))


def _beside(tensors: Sequence[TensorProto], own: str) -> list[int]:
    """Bytes of each tensor that lies in another file than `own`."""
    found: list[int] = []
    for tensor in tensors:
        told = {str(entry.key): str(entry.value) for entry in tensor.external_data}
        if told.get("location", own) != own:
            found.append(int(told.get("length") or 0))
    return found
