"""The commands `blockrelay check`, `split` and `import`: try ONNX blocks, make them of a model, make a block folder."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from blockrelay_launcher.onnx_blocks.check import CheckOptions, run_check
from blockrelay_launcher.onnx_blocks.importing import ImportCommandOptions, run_import
from blockrelay_launcher.onnx_blocks.split import run_split
from blockrelay_launcher.option_groups import with_option_groups

app = typer.Typer()
#: The exit code after Ctrl-C, as shells report it.
_INTERRUPTED = 130
_GOES_ON = "the same command continues from the files that are written"


def _exit(run: Callable[[], int], interrupted: str) -> NoReturn:
    """Ends the command with the exit code of `run`; after Ctrl-C it says what is `interrupted`."""
    try:
        code = run()
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {interrupted}", err=True)
        code = _INTERRUPTED
    raise typer.Exit(code)


@app.command("check")
@with_option_groups
def check(options: CheckOptions) -> None:
    """Check ONNX blocks that you own: connect them by the names of their tensors, then run each with made-up inputs."""
    _exit(partial(run_check, options), "nothing was written")


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
    _exit(partial(run_split, model, out, copy_weights=copy_weights, as_json=as_json), _GOES_ON)


@app.command("import")
@with_option_groups
def import_blocks(options: ImportCommandOptions) -> None:
    """Import ONNX blocks of a Llama, Mistral, Qwen2 or Qwen3 as a block folder, and compare it with them."""
    _exit(partial(run_import, options), _GOES_ON)
