"""The command line of the converter, behind `blockrelay convert`.

python -m blockrelay_converter CHECKPOINT OUT [--precision P | --budget-perplexity B --text FILE | --like FOLDER]
"""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from blockrelay.block_folder.precisions import DEFAULT_PRECISION
from blockrelay.command_app import run_app
from blockrelay.errors import UsageError
from blockrelay.quantities import aligned
from blockrelay_converter.checkpoint.other_folders import refuse_other_folders

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face folder: config.json, safetensors, tokenizer.json")],
    out: Annotated[Path, typer.Argument(help="block folder to write")],
    precision: Annotated[
        str | None,
        typer.Option(
            help="precision of the weights. w8a8: 8-bit, the same bits on every CPU; w4a8: 4-bit weights, the same "
            "bits on every CPU, half the memory, faster for few requests, a little further from the original; fp32: "
            "like the reference implementation; fp16: for GPUs that compute in float16. By block: "
            f"w8a8,block_33=fp32,block_1-4=w4a8 [default: {DEFAULT_PRECISION}]"
        ),
    ] = None,
    budget_perplexity: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="find the smallest mix of w8a8 and w4a8 whose perplexity is at most this share above float32, such as "
            "0.5%; needs --text",
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 file that the perplexity is measured on")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="tokens of that file to measure on, from its beginning")] = 4096,
    name: Annotated[
        str | None,
        typer.Option(
            help="name by which clients call the model [default: the folder's name; for a snapshot in Hugging Face's "
            "cache organisation/name]"
        ),
    ] = None,
    max_position: Annotated[int | None, typer.Option(min=1, help="shorten the context to this many tokens")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an existing block folder")] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="TEXT",
            help="UTF-8 file to calibrate with, such as a book (SmoothQuant, GPTQ): w8a8 and w4a8 come nearer to "
            "the original",
        ),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="block folder whose precisions, context and calibration are taken, such as that of the model that "
            "CHECKPOINT was fine-tuned from: blocks whose tensors did not change become hard links to its files",
        ),
    ] = None,
    known_answers: Annotated[
        bool, typer.Option(help="compute the output that each block must give; workers refuse a model without it")
    ] = True,
) -> None:
    """Convert a checkpoint of the Llama, Mistral, Qwen2 or Qwen3 family to a block folder."""
    _check(budget_perplexity, text, precision, known_answers, like)
    if not (checkpoint / "block_1.onnx").exists():  # ONNX blocks get a refusal of their own from `read_source`
        refuse_other_folders(checkpoint)
    # Imported after the checks: these modules take a second to load.
    from blockrelay_converter.convert import convert
    from blockrelay_converter.mixing.budget import convert_within_budget, parse_budget, report_lines
    from blockrelay_converter.mixing.like import open_like

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task("", total=None)

    def report(what: str, done: int, total: int) -> None:
        progress.start()  # not earlier: a refusal is one line and nothing else
        progress.update(task, description=what, advance=done, total=total)

    budget, earlier = None if budget_perplexity is None else parse_budget(budget_perplexity), None
    if budget is not None and text is not None:
        run_conversion = partial(convert_within_budget, budget=budget, text=text, tokens=tokens)
    else:
        earlier = None if like is None else open_like(like, out)
        run_conversion = partial(convert, precision=precision, answers=known_answers, like=earlier)
    try:
        manifest = run_conversion(
            checkpoint, out, report=report, note=_note, name=name, max_position=max_position, force=force,
            calibration_text=calibrate,
        )  # fmt: skip
    finally:
        progress.stop()
    if budget is not None:
        typer.echo("\n".join(report_lines(out)))
    elif calibrate is not None:
        _show_errors(out)
    if earlier is not None:
        typer.echo(earlier.line())
    size = sum(file.bytes for file in manifest.files.values())
    typer.echo(f"{out}: {manifest.model.name}, {manifest.precision}, {manifest.model.blocks} blocks, {size} bytes")


def _note(line: str) -> None:
    typer.echo(f"note: {line}", err=True)


def _check(
    budget: str | None, text: Path | None, precision: str | None, known_answers: bool, like: Path | None
) -> None:
    """Raises UsageError for options that do not go together."""
    if like is not None and budget is not None:
        raise UsageError("--budget-perplexity chooses the precisions, --like takes those of a folder: leave one out")
    if like is not None and not known_answers:
        raise UsageError("--like takes the known answers of a folder: leave out --no-known-answers")
    if (budget is None) != (text is None):
        raise UsageError("--budget-perplexity and --text FILE go together: the perplexity is measured on that text")
    if budget is not None and precision is not None:
        raise UsageError("--budget-perplexity chooses the precisions: leave out --precision")
    if budget is not None and not known_answers:
        raise UsageError("--budget-perplexity runs the blocks: it needs their known answers")


def _show_errors(out: Path) -> None:
    """Prints the calibration report in the block folder `out` as an aligned table."""
    from blockrelay_converter.quantisation.calibration_record import REPORT_NAME, report_table

    typer.echo("relative error of each linear's output, before > after smoothing")
    typer.echo(aligned(report_table((out / REPORT_NAME).read_bytes())))


def run(arguments: list[str] | None = None) -> int:
    """Runs the command with `arguments` (None: those of the process) and returns its exit code.

    It is 0, 2 for input that the user must change, 130 after Ctrl-C, or 1 for any other failure. An error is one line
    on stderr.
    """
    return run_app(app, arguments, name="blockrelay convert")


if __name__ == "__main__":
    sys.exit(run())
