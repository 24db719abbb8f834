"""`python -m blockrelay_worker.offline.onnx_blocks.describe FOLDER`: make what services need to serve it as it is.

For `blockrelay up --blocks`. It reads and hashes the files of the folder, wires the blocks, and writes a manifest,
`blocks.json` and copies of the files about text into a folder of the cache, which says where the blocks are; nothing is
written into the folder itself. One JSON line on stdout has the made folder and what is lacking (`encode_described`).
Exit code 2 when the folder cannot be served: then stderr has one line, and nothing is written.
"""

import hashlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from blockrelay.block_folder.folder import MODEL_KEY_DIGITS, ONNX_FOLDER_NAME
from blockrelay.block_folder.hub_cache import model_name
from blockrelay.block_folder.manifest import (
    CHAT_TEMPLATE_NAME,
    MANIFEST_NAME,
    ONNX_BLOCKS_NAME,
    TOKENIZER_NAME,
    FileSpec,
)
from blockrelay.command_app import run_app
from blockrelay.errors import UsageError
from blockrelay.extras import need
from blockrelay.onnx_blocks.beside import read_beside
from blockrelay.onnx_blocks.blocks_file import encode_blocks_file
from blockrelay.onnx_blocks.report import Described, encode_described
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
    # Only here: of two ONNX Runtimes in one environment, neither may be one that can be imported; onnx is an extra.
    from blockrelay_worker.offline.onnx_blocks.folder import open_onnx_folder

    opened = open_onnx_folder(folder)
    shape = served_shape(opened.wiring)
    beside = read_beside(folder, vocabulary=shape.vocabulary, max_position=max_position)
    blocks, texts = opened.facts(), beside.texts
    own = {ONNX_BLOCKS_NAME: encode_blocks_file(blocks).encode()}
    if texts.tokenizer is not None:
        own[TOKENIZER_NAME] = texts.tokenizer
    if texts.chat_template is not None:
        own[CHAT_TEMPLATE_NAME] = texts.chat_template.encode()
    specs = {
        path: FileSpec(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content)) for path, content in own.items()
    }
    manifest = served_manifest(blocks, shape, beside, name=model_name(folder), own=specs)
    out = _place(folder, manifest.model_hash)
    own[ONNX_FOLDER_NAME] = f"{folder.resolve()}\n".encode()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path, content in [*own.items(), (MANIFEST_NAME, manifest.encode())]:  # the manifest last: then all is there
            _write(out / path, content)
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror}; BLOCKRELAY_CACHE_DIR names another folder to write in") from None
    typer.echo(encode_described(Described(str(out), beside.lacking)))


def _place(folder: Path, model_hash: str) -> Path:
    """Of what is made for it: a folder of the cache that is its own. Other files in it get another one: whoever serves
    them goes on with what it began with."""
    root = WorkerSettings().cache_dir or default_root(os.environ)
    if root is None:
        raise UsageError("there is no cache folder to write in: BLOCKRELAY_CACHE_DIR names one")
    here = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()
    return root / "onnx_blocks" / here[:MODEL_KEY_DIGITS] / model_hash[:MODEL_KEY_DIGITS]


def _write(path: Path, content: bytes) -> None:
    """Whole, whatever others write at the same time: for the same blocks they write the same. What is there already
    may lie where nobody can write."""
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
    """The exit code (see `run_app`)."""
    return run_app(app, arguments, name="blockrelay up --blocks")


if __name__ == "__main__":
    sys.exit(run())
