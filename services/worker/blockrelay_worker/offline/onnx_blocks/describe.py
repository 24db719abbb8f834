"""`python -m blockrelay_worker.offline.onnx_blocks.describe FOLDER`: makes a folder of ONNX blocks ready to be served.

`blockrelay up --blocks` runs this command. The command reads and hashes the files of FOLDER and wires the blocks. It
writes a manifest, `blocks.json` and copies of tokenizer and chat template into a folder of the cache, which points to
the blocks. Nothing is written into FOLDER. One JSON line on stdout has the new folder, and what no file of FOLDER says
(Described). `--max-position N` sets the context in tokens; it may not exceed the model's own.
Exit code 2 when the folder cannot be served: then stderr has one line, and nothing is written. It is also 2 when the
cache cannot be written. The manifest is the last file, so a folder without one is incomplete.
"""

import hashlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from blockrelay.block_folder.folder import MODEL_KEY_DIGITS, ONNX_FOLDER_NAME
from blockrelay.block_folder.hub_cache import model_name
from blockrelay.block_folder.manifest import MANIFEST_NAME, ONNX_BLOCKS_NAME, FileSpec
from blockrelay.command_app import run_app
from blockrelay.errors import UsageError
from blockrelay.extras import need
from blockrelay.onnx_blocks.beside import read_beside
from blockrelay.onnx_blocks.blocks_file import encode_blocks_file
from blockrelay.onnx_blocks.reports.codec import send
from blockrelay.onnx_blocks.reports.describing import Described
from blockrelay.onnx_blocks.served_manifest import served_manifest
from blockrelay.onnx_blocks.served_shape import served_shape
from blockrelay.settings import WorkerSettings
from blockrelay_worker.execution.onnx.compiled.cache_folder import default_root
from blockrelay_worker.execution.onnx.installation import check_one_onnxruntime

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def describe(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    max_position: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Describe a folder of ONNX blocks, so that services can serve it."""
    check_one_onnxruntime()
    need("converter", "onnx")
    # Imported after the checks above: with two ONNX Runtimes in one environment it may fail; onnx is an extra.
    from blockrelay_worker.offline.onnx_blocks.folder import open_onnx_folder

    opened = open_onnx_folder(folder)
    shape = served_shape(opened.wiring)
    beside = read_beside(folder, vocabulary=shape.vocabulary, max_position=max_position)
    blocks = opened.facts()
    own = {ONNX_BLOCKS_NAME: encode_blocks_file(blocks).encode(), **beside.texts.files()}
    specs = {
        path: FileSpec(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content)) for path, content in own.items()
    }
    manifest = served_manifest(blocks, shape, beside, name=model_name(folder), own=specs)
    out = _place(folder, manifest.model_hash)
    own[ONNX_FOLDER_NAME] = f"{folder.resolve()}\n".encode()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path, content in [*own.items(), (MANIFEST_NAME, manifest.encode())]:  # manifest last: it marks completeness
            _write(out / path, content)
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror}; BLOCKRELAY_CACHE_DIR names another folder to write in") from None
    send(Described(str(out), beside.lacking))


def _place(folder: Path, model_hash: str) -> Path:
    """The cache folder for `folder` with this content. Raises UsageError if there is no cache folder.

    Changed files get another one: so processes that serve the old content keep its folder.
    """
    root = WorkerSettings().cache_dir or default_root(os.environ)
    if root is None:
        raise UsageError("there is no cache folder to write in: BLOCKRELAY_CACHE_DIR names one")
    here = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()
    return root / "onnx_blocks" / here[:MODEL_KEY_DIGITS] / model_hash[:MODEL_KEY_DIGITS]


def _write(path: Path, content: bytes) -> None:
    """Writes a file atomically; other processes may write the same content at the same time.

    Does nothing if the content is there already: the place may be read-only.
    """
    if path.exists() and path.read_bytes() == content:
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def run(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code (see `run_app`). `arguments`: None takes those of this process."""
    return run_app(app, arguments, name="blockrelay up --blocks")


if __name__ == "__main__":
    sys.exit(run())
