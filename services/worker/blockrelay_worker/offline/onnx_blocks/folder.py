"""A folder of ONNX blocks as a whole: its files in order, wired, and compared with a `blocks.json`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockrelay.block_folder.folder import file_sha256
from blockrelay.block_folder.manifest import ONNX_BLOCKS_NAME
from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.blocks_file import (
    BlockFiles,
    FileFacts,
    block_names,
    check_unaltered,
    read_blocks_file,
)
from blockrelay.onnx_blocks.wiring import Wiring, wire
from blockrelay_worker.offline.onnx_blocks.onnx_file import OnnxFile, read_onnx_file
from blockrelay_worker.offline.onnx_blocks.operators import check_operators


@dataclass(frozen=True, slots=True)
class OnnxFolder:
    """Blocks that fit together. Holds no file open and no weight."""

    root: Path
    files: tuple[OnnxFile, ...]
    wiring: Wiring

    def facts(self) -> tuple[BlockFiles, ...]:
        """What `blocks.json` says of it. Reads all weights that lie beside the graphs."""
        beside: dict[str, FileFacts] = {}
        found: list[BlockFiles] = []
        for file in self.files:
            for name in file.weights:
                if name not in beside:
                    path = self.root / name
                    beside[name] = FileFacts(name, path.stat().st_size, file_sha256(path))
            graph = FileFacts(file.signature.file, file.bytes, file.sha256)
            found.append(BlockFiles(file.signature, (graph, *(beside[name] for name in file.weights))))
        return tuple(found)


def open_onnx_folder(root: Path, *, against: Path | None = None) -> OnnxFolder:
    """Read every file of the folder and wire the blocks by name.

    Files must be as `against` says, or else as the folder's own `blocks.json` if it has one. Raises OnnxBlocksError
    that names the file, and the tensor if it is one that is wrong. Writes nothing.
    """
    names = block_names(root)
    listing = against or (root / ONNX_BLOCKS_NAME if (root / ONNX_BLOCKS_NAME).exists() else None)
    known = None if listing is None else read_blocks_file(listing)
    files: list[OnnxFile] = []
    for index, name in enumerate(names, 1):
        try:
            files.append(read_onnx_file(root, name, index))
        except OnnxBlocksError:
            if known is not None and listing is not None:  # which says more, where the file has been altered
                _check_file(root / name, known, str(listing))
            raise
    check_operators(files)
    folder = OnnxFolder(root, tuple(files), wire([file.signature for file in files]))
    if known is not None:
        check_unaltered(known, folder.facts(), str(listing))
    return folder


def _check_file(path: Path, known: Sequence[BlockFiles], where: str) -> None:
    """Raises OnnxBlocksError for a file that is not as `where` says."""
    expected = {file.name: file for block in known for file in block.files}.get(path.name)
    if expected is not None and path.is_file() and file_sha256(path) != expected.sha256:
        raise OnnxBlocksError(f"altered: its SHA-256 is not the one in {where}", file=path.name)
