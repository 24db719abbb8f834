"""The commands `blockrelay check`, `split` and `import`: try ONNX blocks, make them of a model, make a block folder."""

from pathlib import Path
from typing import Annotated

import typer

from blockrelay_launcher.onnx_blocks.check import CheckOptions, run_check
from blockrelay_launcher.onnx_blocks.importing import ImportOptions, run_import
from blockrelay_launcher.onnx_blocks.split import run_split

app = typer.Typer()
#: The exit code after Ctrl-C, as shells report it.
_INTERRUPTED = 130


def _interrupted(what: str) -> int:
    typer.echo(f"interrupted: {what}", err=True)
    return _INTERRUPTED


@app.command("check")
def check(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Files block_1.onnx, block_2.onnx and so on.")],
    device: Annotated[
        str, typer.Option(metavar="ID", help="Device that runs the blocks, such as webgpu:0 (blockrelay devices).")
    ] = "cpu",
    batch: Annotated[int, typer.Option(min=1, help="Sequences in the made-up batch.")] = 5,
    sequence: Annotated[int, typer.Option(min=1, help="New tokens of each sequence.")] = 10,
    past: Annotated[int, typer.Option(min=0, help="Tokens that each sequence already has in its KV cache.")] = 0,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Refuse files that this blocks.json does not list; default: FOLDER's."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a blocks.json with the SHA-256 of every file if all blocks pass."),
    ] = None,
    gpu_python: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Python interpreter with the device's packages; default: this one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Check ONNX blocks that you own: connect them by the names of their tensors, then run each with made-up inputs."""
    options = CheckOptions(
        folder=folder, device=device, batch=batch, sequence=sequence, past=past, against=against, write=write,
        python=gpu_python, as_json=as_json,
    )  # fmt: skip
    try:
        code = run_check(options)
    except KeyboardInterrupt:
        code = _interrupted("nothing was written")
    raise typer.Exit(code)


@app.command("split")
def split(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="A whole decoder with its KV cache as inputs.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write: block_1.onnx and so on.")],
    copy_weights: Annotated[
        bool,
        typer.Option("--copy-weights", help="Write a file of weights for each block, so that it can be moved alone."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Split an ONNX model into blocks, one for each layer and one for the head. Weights stay in their file."""
    try:
        code = run_split(model, out, copy_weights=copy_weights, as_json=as_json)
    except KeyboardInterrupt:
        code = _interrupted("the same command continues from the files that are written")
    raise typer.Exit(code)


@app.command("import")
def import_blocks(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Files block_1.onnx, block_2.onnx and so on.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Block folder to write.")],
    precision: Annotated[
        str | None,
        typer.Option(metavar="P", help="w8a8, w4a8, fp16, fp32 or a mix, as for convert; default: as stored."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="UTF-8 file on which the loss of perplexity is measured."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name by which clients call the model; default: the folder's name, or organisation/name of a snapshot "
            "in Hugging Face's cache."
        ),
    ] = None,
    max_position: Annotated[
        int | None, typer.Option(min=1, help="Context length in tokens; default: from the files beside the blocks.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Import ONNX blocks of a Llama, Mistral, Qwen2 or Qwen3 as a block folder, and compare it with them."""
    options = ImportOptions(
        folder=folder, out=out, precision=precision, text=text, name=name, max_position=max_position, as_json=as_json
    )
    try:
        code = run_import(options)
    except KeyboardInterrupt:
        code = _interrupted("the same command continues from the files that are written")
    raise typer.Exit(code)
