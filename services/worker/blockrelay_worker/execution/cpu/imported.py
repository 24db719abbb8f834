"""Executor of a model given as ONNX files, computed by our kernels from the folder that `blockrelay import` made.

Such workers serve the same model as workers that run the ONNX files themselves, and share its KV pages: each can
continue from pages of the other. Results agree within the tolerance that the import checked (docs/onnx-blocks.md).
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.errors import BlockFolderError, UsageError
from blockrelay.onnx_blocks.blocks_file import why_no_stand_in
from blockrelay.protocol.plan import IMPORTED
from blockrelay_worker.execution.cpu.loading import CpuExecutors
from blockrelay_worker.execution.cpu.stage import StageExecutor


class ImportedExecutors:
    """Loads the whole model as one stage, from the block folder that was imported from its ONNX files.

    Implements `loader.Executors`.
    """

    nondeterministic: ClassVar[bool] = True

    def __init__(self, threads: int, folder: BlockFolder, imported: Path) -> None:
        """Opens the block folder `imported`, to be computed with `threads` threads.

        Raises BlockFolderError if it cannot be opened. Raises UsageError if it was not imported from the ONNX files of
        `folder`, has other blocks or KV pages of another layout, or has a shorter context.
        """
        self.imported = open_block_folder(imported, blocks=[])
        if why := why_no_stand_in(folder.manifest, self.imported.manifest):
            raise UsageError(f"{imported} cannot stand in for {folder.onnx_root}: {why}")
        self._executors = CpuExecutors(threads)

    def numerics_id(self, manifest: Manifest) -> str:
        """Returns `<precision>-imported-<16 hex digits>`; ids of the ONNX files have a provider's name there."""
        parts = {
            "blocks": manifest.numerics_inputs(),
            "imported": self._executors.numerics_id(self.imported.manifest),
        }
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return f"{self.imported.manifest.precision}-{IMPORTED}-{digest[:16]}"

    def load(self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int) -> StageExecutor:
        """Loads all blocks (see `Executors.load`), after checking every file against the manifest.

        The executor is not exact, because the ONNX files are not. Raises BlockFolderError for a part of the blocks, or
        if the imported folder is damaged or was changed since this object was made. Raises KnownAnswerMismatch (a
        BlockFolderError) for a wrong known answer, and ExecutionError if a checked block cannot be computed.
        """
        if (first_block, last_block) != (1, folder.model.blocks):
            raise BlockFolderError(f"an import serves all blocks as one stage: block_1 to block_{folder.model.blocks}")
        try:
            imported = open_block_folder(self.imported.root)
        except BlockFolderError as error:
            raise BlockFolderError(f"{error}; the next `up --blocks` imports them again") from error
        if imported.manifest != self.imported.manifest:
            raise BlockFolderError(f"{imported.root}: imported again since this worker started; restart it")
        stage = self._executors.load(imported, first_block, last_block, pages=pages)
        numerics = self.numerics_id(folder.manifest)
        stage.capabilities = replace(stage.capabilities, exact=False, numerics_id=numerics)
        stage.details = {**stage.details, "blocks": "imported"}
        return stage

    def bytes_to_load(self, manifest: Manifest, first_block: int, last_block: int) -> int:
        """Returns the bytes of the imported blocks, without those that this process has loaded already."""
        return self._executors.bytes_to_load(self.imported.manifest, 1, self.imported.model.blocks)
