"""`python -m blockrelay_worker.offline.onnx_blocks.comparison.compare FOLDER IMPORTED < PLACES`: compares two folders.

For `blockrelay import`: stdin says where in the original graphs rows, keys, values and logits are (ComparedPlaces),
stdout has one line for each imported block (ComparedBlock), up to the first that differs too much from its original.
Exit code 0 if none does, 1 if one does or fails while it runs. It is 2 if the originals cannot run or an imported block
cannot be loaded. A failure is one line on stderr.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.command_app import run_app
from blockrelay.exit_codes import FAILED
from blockrelay.onnx_blocks.reports.codec import decode, send
from blockrelay.onnx_blocks.reports.importing import ComparedPlaces
from blockrelay_worker.offline.onnx_blocks.comparison.imported import compare_blocks
from blockrelay_worker.offline.onnx_blocks.comparison.originals import record
from blockrelay_worker.offline.onnx_blocks.comparison.prompts import prompts
from blockrelay_worker.offline.onnx_blocks.folder import open_onnx_folder

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def compare(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    imported: Annotated[Path, typer.Argument(metavar="IMPORTED")],
) -> None:
    """Compare imported blocks with their originals; one JSON line for each."""
    places = decode(ComparedPlaces, sys.stdin.buffer.read())
    originals = open_onnx_folder(folder)
    opened = open_block_folder(imported)
    model = opened.model
    recorded = record(
        originals, places, prompts(model.vocab_size, model.max_position), (model.kv_heads, model.head_dim)
    )
    files = [file.signature.file for file in originals.files]
    same = True
    for block in compare_blocks(opened, places, recorded, files):
        send(block)
        same = not block.problem
    if not same:
        raise typer.Exit(FAILED)


def run(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code (see `run_app`)."""
    return run_app(app, arguments, name="blockrelay import")


if __name__ == "__main__":
    sys.exit(run())
