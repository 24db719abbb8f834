"""ONNX blocks that others made, computed by our kernels, with what `blockrelay import` made of them.

Workers of these blocks share a model with those that run the files themselves, and its KV pages: what one of them has
computed the other goes on with. Numbers are the same within what the import was compared with (docs/onnx-blocks.md).
"""

import hashlib
import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import Precision
from blockrelay.errors import BlockFolderError, UsageError
from blockrelay.onnx_blocks.blocks_file import why_no_stand_in
from blockrelay.protocol.plan import IMPORTED, Device
from blockrelay_worker.execution.cpu.loading import CpuExecutors
from blockrelay_worker.execution.cpu.stage import StageExecutor


class ImportedExecutors:
    """Makes the one stage that ONNX blocks are, of the block folder that was imported from them."""

    device: ClassVar[Device] = "cpu"
    varies: ClassVar[bool] = True

    def __init__(self, threads: int, folder: BlockFolder, imported: Path) -> None:
        """Raises BlockFolderError for a folder that cannot be opened, UsageError for one that was not imported from the
        blocks of `folder`, or has other KV pages."""
        self.imported = open_block_folder(imported, blocks=[])
        if why := why_no_stand_in(folder.manifest, self.imported.manifest):
            raise UsageError(f"{imported} cannot stand in for {folder.onnx_root}: {why}")
        self._executors = CpuExecutors(threads)

    @staticmethod
    def serves(device: Device, precisions: Collection[Precision]) -> bool:
        return CpuExecutors.serves(device, precisions)

    def numerics_id(self, manifest: Manifest) -> str:
        """`<precision>-imported-<16 hex digits>`: the blocks' own has the name of a provider there."""
        parts = {
            "blocks": manifest.numerics_inputs(),
            "imported": self._executors.numerics_id(self.imported.manifest),
        }
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return f"{self.imported.manifest.precision}-{IMPORTED}-{digest[:16]}"

    def load(self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int) -> StageExecutor:
        """All files are read and compared with the manifest. Not exact: the blocks themselves are not."""
        if (first_block, last_block) != (1, folder.model.blocks):
            raise BlockFolderError(f"an import serves all blocks as one stage: block_1 to block_{folder.model.blocks}")
        try:
            imported = open_block_folder(self.imported.root)
        except BlockFolderError as error:
            raise BlockFolderError(f"{error}; the next `up --blocks` imports them anew") from error
        if imported.manifest != self.imported.manifest:
            raise BlockFolderError(f"{imported.root}: imported anew since this worker began; start it again")
        stage = self._executors.load(imported, first_block, last_block, pages=pages)
        numerics = self.numerics_id(folder.manifest)
        stage.capabilities = replace(stage.capabilities, exact=False, numerics_id=numerics)
        stage.details = {**stage.details, "blocks": "imported"}
        return stage
