"""`python -m blockrelay_worker.offline.onnx_blocks.splitting.split MODEL.onnx OUT`: splits a decoder into blocks.

`blockrelay split` runs it and shows its progress: the first line of stdout is what will be written (SplitBegins), each
further one is a piece that was written (SplitWrites). Exit code 0 when OUT is complete, 2 when the model cannot be
split or OUT is refused: then stderr has one line, and a new run leaves nothing behind. Exit code 1 when writing fails.
That run, or one that was killed, leaves a folder `.OUT.unfinished`; the same command continues from it.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from blockrelay.command_app import run_app
from blockrelay.extras import need
from blockrelay.onnx_blocks.reports.codec import send

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def split(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx")],
    out: Annotated[Path, typer.Argument(metavar="OUT")],
    copy_weights: Annotated[bool, typer.Option("--copy-weights")] = False,
) -> None:
    """Cut one decoder into a folder of blocks; JSON lines of what is written."""
    need("converter", "onnx")
    from blockrelay_worker.offline.onnx_blocks.splitting.writing import split_model  # onnx is an extra

    split_model(model, out, copy_weights=copy_weights, tell=send)


def run(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code (see `run_app`). `arguments`: None takes those of this process."""
    return run_app(app, arguments, name="blockrelay split")


if __name__ == "__main__":
    sys.exit(run())
