"""ONNX blocks imported in this process (but for the comparison, which is the worker's process)."""

from dataclasses import dataclass
from pathlib import Path

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.onnx_blocks.reports.importing import ImportResult
from blockrelay_converter.onnx_source.importing import ImportOptions, import_blocks


@dataclass(frozen=True, slots=True)
class Imported:
    folder: BlockFolder
    result: ImportResult


def imported(blocks: Path, out: Path, *, precision: str | None = None, text: Path | None = None) -> Imported:
    """The block folder `out`, made of the blocks."""
    result = import_blocks(ImportOptions(folder=blocks, out=out, precision=precision, text=text), lambda step: None)
    return Imported(open_block_folder(out), result)
