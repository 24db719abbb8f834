"""Opens a folder of ONNX blocks: reads its files in order, wires them, and compares them with a `blocks.json`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockrelay.block_folder.folder import file_sha256
from blockrelay.block_folder.manifest import ONNX_BLOCKS_NAME, FileSpec
from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.blocks_file import (
    BlockFiles,
    all_files,
    block_names,
    check_unaltered,
    read_blocks_file,
)
from blockrelay.onnx_blocks.wiring import Wiring, wire
from blockrelay_worker.offline.onnx_blocks.onnx_file import OnnxFile, read_onnx_file
from blockrelay_worker.offline.onnx_blocks.operators import check_operators


@dataclass(frozen=True, slots=True)
class OnnxFolder:
    """A folder of ONNX blocks that fit together. Holds no open file and no weights."""

    root: Path
    files: tuple[OnnxFile, ...]
    """The file of each block, in order."""
    wiring: Wiring

    def facts(self) -> tuple[BlockFiles, ...]:
        """The content of `blocks.json` for this folder. Reads all weight files beside the graphs, to hash them.

        Raises OSError if one of them cannot be read any more.
        """
        beside: dict[str, FileSpec] = {}
        blocks: list[BlockFiles] = []
        for file in self.files:
            for name in file.weights:
                if name not in beside:
                    path = self.root / name
                    beside[name] = FileSpec(sha256=file_sha256(path), bytes=path.stat().st_size)
            graph = {file.signature.file: FileSpec(sha256=file.sha256, bytes=file.bytes)}
            blocks.append(BlockFiles(file.signature, graph | {name: beside[name] for name in file.weights}))
        return tuple(blocks)


def open_onnx_folder(root: Path, *, against: Path | None = None) -> OnnxFolder:
    """Reads every file of the folder and wires the blocks by tensor names. Writes nothing.

    The files must match `against`, the path of a `blocks.json`. None takes the one in the folder, if it has one. With
    either, all weight files are read too, to hash them. Raises OnnxBlocksError with the file, and with the tensor if
    one is wrong. Raises OSError if a file cannot be read to hash it.
    """
    names = block_names(root)
    listing = against or (root / ONNX_BLOCKS_NAME if (root / ONNX_BLOCKS_NAME).exists() else None)
    known = None if listing is None else read_blocks_file(listing)
    files: list[OnnxFile] = []
    for index, name in enumerate(names, 1):
        try:
            files.append(read_onnx_file(root, name, index))
        except OnnxBlocksError:
            if known is not None and listing is not None:  # "altered" says more than the error that it caused
                _check_file(root / name, known, str(listing))
            raise
    check_operators(files)
    folder = OnnxFolder(root, tuple(files), wire([file.signature for file in files]))
    if known is not None:
        check_unaltered(known, folder.facts(), str(listing))
    return folder


def _check_file(path: Path, known: Sequence[BlockFiles], where: str) -> None:
    """Raises OnnxBlocksError for a file whose SHA-256 is not the one in the `blocks.json` at `where`."""
    expected = all_files(known).get(path.name)
    if expected is not None and path.is_file() and file_sha256(path) != expected.sha256:
        raise OnnxBlocksError(f"altered: its SHA-256 is not the one in {where}", file=path.name)
