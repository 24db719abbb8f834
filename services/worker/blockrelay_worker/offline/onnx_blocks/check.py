"""`python -m blockrelay_worker.offline.onnx_blocks.check FOLDER`: runs each ONNX block of a folder alone on one device.

`blockrelay check` runs it and shows the results: the first line of stdout names the blocks (CheckBegins), each further
one is a block that was run (CheckedBlock). Exit code 0 when all passed, 1 when one did not, 2 when the folder cannot be
checked: then stderr has one line.

`--against` names the `blocks.json` that the files must match; without it, that of the folder, if there is one.
`--write` names a `blocks.json` to write when all blocks passed. Nothing is written otherwise.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from blockrelay.command_app import run_app
from blockrelay.errors import OnnxBlocksError, UsageError
from blockrelay.exit_codes import FAILED
from blockrelay.extras import need
from blockrelay.onnx_blocks.blocks_file import BlockFiles, encode_blocks_file, read_blocks_file
from blockrelay.onnx_blocks.dimensions import StepSizes
from blockrelay.onnx_blocks.reports.checking import CheckBegins
from blockrelay.onnx_blocks.reports.codec import send
from blockrelay.onnx_blocks.served_shape import logits_of
from blockrelay_worker.execution.onnx.installation import check_one_onnxruntime

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    device: Annotated[str, typer.Option()],
    batch: Annotated[int, typer.Option(min=1)],
    sequence: Annotated[int, typer.Option(min=1)],
    past: Annotated[int, typer.Option(min=0)],
    against: Annotated[Path | None, typer.Option()] = None,
    write: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Run every ONNX block of a folder alone; one JSON line for each."""
    check_one_onnxruntime()
    need("converter", "onnx")
    # Imported after the checks above: with two ONNX Runtimes in one environment it may fail; onnx is an extra.
    from blockrelay_worker.execution.onnx.providers.opening import open_provider
    from blockrelay_worker.offline.onnx_blocks.folder import open_onnx_folder
    from blockrelay_worker.offline.onnx_blocks.trial import check_blocks

    if write is not None:
        _check_writable(write)
    with contextlib.redirect_stdout(sys.stderr):  # drivers print
        provider = open_provider(device)
    opened = open_onnx_folder(folder, against=against)
    logits_of(opened.wiring)
    send(CheckBegins(tuple((one.block, one.file) for one in opened.wiring.blocks)))
    passed = True
    for checked in check_blocks(opened, provider, StepSizes(batch=batch, new=sequence, past=past)):
        send(checked)
        passed = passed and checked.passed
    if not passed:
        raise typer.Exit(FAILED)
    if write is not None:
        write_blocks_file(write, opened.facts())


def write_blocks_file(path: Path, blocks: Sequence[BlockFiles]) -> None:
    """Writes a `blocks.json` atomically. If that fails, the file stays as it was, and the error (OSError) is raised."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(encode_blocks_file(blocks))
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _check_writable(path: Path) -> None:
    """Raises UsageError if `path` is another file than a `blocks.json`, such as weights, or its folder is missing."""
    if not path.parent.is_dir():
        raise UsageError(f"--write {path}: there is no folder {path.parent}")
    if path.exists():
        try:
            read_blocks_file(path)
        except OnnxBlocksError as error:
            raise UsageError(f"--write would overwrite what is no blocks.json: {error}") from None


def run(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code (see `run_app`)."""
    return run_app(app, arguments, name="blockrelay check")


if __name__ == "__main__":
    sys.exit(run())
