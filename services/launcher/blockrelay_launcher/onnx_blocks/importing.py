"""Runs `blockrelay import`: a process of the converter imports ONNX blocks; this one shows progress and the result."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated

import typer
from rich.progress import DownloadColumn, TimeRemainingColumn

from blockrelay.exit_codes import FAILED
from blockrelay.extras import need
from blockrelay.onnx_blocks.reports.codec import decode
from blockrelay.onnx_blocks.reports.importing import ComparedBlock, ImportReport, ImportResult
from blockrelay.quantities import format_quantity
from blockrelay_launcher.onnx_blocks.worker import code_of_silence, command_of, progress_bar, run_worker
from blockrelay_launcher.option_groups import OptionGroup, flag, option

_MODULE = "blockrelay_converter.onnx_source"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportCommandOptions(OptionGroup):
    """The options of `blockrelay import`."""

    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Files block_1.onnx, block_2.onnx and so on.")]
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Block folder to write.")]
    precision: Annotated[
        str | None, option("P", "w8a8, w4a8, fp16, fp32 or a mix, as for convert; default: as stored.")
    ] = None
    text: Annotated[Path | None, option("FILE", "UTF-8 file on which the loss of perplexity is measured.")] = None
    name: Annotated[
        str | None,
        option(
            "TEXT",
            "Name by which clients call the model; default: the folder's name, or organisation/name of a snapshot "
            "in Hugging Face's cache.",
        ),
    ] = None
    max_position: Annotated[
        int | None, option("N", "Context length in tokens; default: from the files beside the blocks.", min=1)
    ] = None
    as_json: Annotated[bool, flag("--json", "Print one JSON object instead of text.")] = False
    served: Path | None = None
    """For `up --blocks`: the block folder that describes the blocks in whose place the import is to compute."""

    def argv(self) -> list[str]:
        """Returns the command line of the converter's process."""
        return command_of(
            _MODULE, self.folder, self.out, precision=self.precision, text=self.text, name=self.name,
            max_position=self.max_position, served=self.served,
        )  # fmt: skip


def run_import(options: ImportCommandOptions) -> int:
    """Imports the blocks, prints the result and returns the exit code.

    Exit code 0: the folder is complete; 1: the converter failed or was killed; 2: the blocks cannot be imported or
    `out` cannot be written, and the converter has printed why. Raises UsageError if the converter is not installed,
    WireError if its output is no report, OSError if its process cannot be started.
    """
    need("converter", "onnx")
    result, code = run_worker(options.argv(), watch)
    if code:
        return code_of_silence(code)
    if result is None:
        return FAILED
    if options.as_json:
        typer.echo(json.dumps({"folder": str(options.folder), "out": str(options.out), **asdict(result)}))
    else:
        typer.echo("\n".join(result_lines(options.out, result)))
    return 0


def watch(lines: IO[bytes]) -> ImportResult | None:
    """Reads the converter's reports and returns its result, if there is one, with a progress bar on a terminal.

    `lines` is its stdout. Raises WireError for a line that is no report.
    """
    with progress_bar("reads the blocks", DownloadColumn(), TimeRemainingColumn()) as update:
        for line in lines:
            report = decode(ImportReport, line)
            if step := report.step:
                update(description=step.what, advance=step.bytes, total=step.total)
            if report.result:
                return report.result
    return None


def result_lines(out: Path, result: ImportResult) -> Iterator[str]:
    """Yields the lines for people: the comparison with the originals, the notes, and the facts of the folder `out`.

    `result` has at least one compared block.
    """
    worst = max(result.compared, key=_furthest)
    what = max(worst.errors, key=lambda name: worst.errors[name])
    yield (
        f"compared with the originals: {len(result.compared)} of {result.blocks} blocks are the same; "
        f"furthest off are the {what} of {worst.block}, with {worst.errors[what]:.1%} of what is allowed"
    )
    yield from (f"note: {note}" for note in result.notes)
    if result.cost is not None:
        yield f"{result.precision} costs {result.cost:+.2%} of perplexity beside the weights as they were"
    yield (
        f"{out}: {result.name}, {result.family}, {result.precision}, {result.blocks} blocks, "
        f"{format_quantity(result.bytes, 'B')}"
    )


def _furthest(block: ComparedBlock) -> float:
    return max(block.errors.values())
