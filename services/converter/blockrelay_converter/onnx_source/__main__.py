"""The command line that imports ONNX blocks of other tools: `python -m blockrelay_converter.onnx_source FOLDER OUT`.

`blockrelay import` and `up --blocks` run it and show its progress. The options are the fields of ImportOptions. Each
line of stdout is an ImportReport; the last one has the result.

Exit code 0: OUT is complete. Exit code 2: the options, the blocks or OUT cannot be used. Exit code 1: something else
failed. Both give one line on stderr. Exit code 130: interrupted. A run that ends before OUT is complete may leave a
folder `.OUT.unfinished`, from which the same command continues.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from blockrelay.command_app import run_app
from blockrelay.onnx_blocks.reports.codec import send
from blockrelay.onnx_blocks.reports.importing import ImportReport
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
    """Import ONNX blocks and print JSON lines: one for each step, then the result."""
    options = ImportOptions(
        folder=folder, out=out, precision=precision, text=text, name=name, max_position=max_position, served=served
    )
    send(ImportReport(result=import_blocks(options, lambda step: send(ImportReport(step=step)))))


def run(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code (see `run_app`)."""
    return run_app(app, arguments, name="blockrelay import")


if __name__ == "__main__":
    sys.exit(run())
