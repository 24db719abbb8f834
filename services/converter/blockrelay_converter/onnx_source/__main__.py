"""`python -m blockrelay_converter.onnx_source FOLDER OUT`: ONNX blocks that others made as a block folder.

For `blockrelay import` and `up --blocks`, which show what comes: lines of stdout are steps (`encode_step`), the last
one is what was written (`encode_result`). Exit code 0 when OUT is there, 2 when the blocks cannot be imported or OUT
cannot be written: then stderr has one line and nothing is left. A run that was ended otherwise leaves a folder
`.OUT.unfinished`, with which the same command goes on.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from blockrelay.command_app import run_app
from blockrelay.onnx_blocks.llama.import_report import encode_result, encode_step
from blockrelay_converter.onnx_source.importing import ImportOptions, import_blocks

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    out: Annotated[Path, typer.Argument(metavar="OUT")],
    precision: Annotated[str | None, typer.Option()] = None,
    text: Annotated[Path | None, typer.Option()] = None,
    name: Annotated[str | None, typer.Option()] = None,
    max_position: Annotated[int | None, typer.Option(min=1)] = None,
    served: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Import ONNX blocks; JSON lines of what is done."""
    options = ImportOptions(
        folder=folder, out=out, precision=precision, text=text, name=name, max_position=max_position, served=served
    )
    _tell(encode_result(import_blocks(options, lambda step: _tell(encode_step(step)))))


def _tell(line: str) -> None:
    """At once: somebody watches."""
    typer.echo(line)
    sys.stdout.flush()


def run(arguments: list[str] | None = None) -> int:
    """The exit code (see `run_app`)."""
    return run_app(app, arguments, name="blockrelay import")


if __name__ == "__main__":
    sys.exit(run())
