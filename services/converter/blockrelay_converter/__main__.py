"""`python -m blockrelay_converter CHECKPOINT OUT --precision w8a8|w4a8|fp32 [--calibrate TEXT]`."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from blockrelay.command_app import run_app
from blockrelay_converter.convert import convert
from blockrelay_converter.quantisation.calibration import REPORT_NAME, report_table

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class PrecisionChoice(StrEnum):
    """How a block computes (see `blockrelay.block_folder.model.Precision`)."""

    W8A8 = "w8a8"
    W4A8 = "w4a8"
    FP32 = "fp32"


@app.command()
def main(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face folder: config.json, safetensors, tokenizer.json")],
    out: Annotated[Path, typer.Argument(help="block folder to write")],
    precision: Annotated[
        PrecisionChoice,
        typer.Option(
            help="w8a8: 8-bit, exact on every CPU; w4a8: 4-bit weights, as exact, half the memory, faster for few "
            "requests, a little less like the original; fp32: like the reference implementation"
        ),
    ] = PrecisionChoice.W8A8,
    name: Annotated[str | None, typer.Option(help="what clients call the model [default: the folder's name]")] = None,
    max_position: Annotated[int | None, typer.Option(min=1, help="shorten the context to this many tokens")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an existing block folder")] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="TEXT", help="UTF-8 file: see it go through the model and round what it uses more finely"),
    ] = None,
    known_answers: Annotated[bool, typer.Option(help="compute what each block must answer (workers insist)")] = True,
) -> None:
    """Convert a checkpoint of the Llama, Mistral, Qwen2 or Qwen3 family to a block folder."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task("", total=None)

    def report(what: str, done: int, total: int) -> None:
        progress.start()  # not earlier: a refusal is one line and nothing else
        progress.update(task, description=what, advance=done, total=total)

    try:
        manifest = convert(
            checkpoint,
            out,
            precision=precision.value,
            report=report,
            name=name,
            max_position=max_position,
            force=force,
            answers=known_answers,
            calibration_text=calibrate,
        )
    finally:
        progress.stop()
    if calibrate is not None:
        _show_errors((out / REPORT_NAME).read_bytes())
    size = sum(file.bytes for file in manifest.files.values())
    typer.echo(f"{out}: {manifest.model.name}, {manifest.precision}, {manifest.model.blocks} blocks, {size} bytes")


def _show_errors(report: bytes) -> None:
    """The table of a calibration, aligned."""
    lines = report_table(report)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    typer.echo("relative error of each linear's output, before > after calibration")
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def run(arguments: list[str] | None = None) -> int:
    """The exit code (see `run_app`)."""
    return run_app(app, arguments)


if __name__ == "__main__":
    sys.exit(run())
