"""Has the converter import ONNX blocks, watches it, and shows what came of it."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from blockrelay.exit_codes import FAILED
from blockrelay.extras import need
from blockrelay.onnx_blocks.llama.import_report import ComparedBlock, ImportResult, decode_told
from blockrelay.quantities import format_quantity
from blockrelay_launcher.onnx_blocks.worker import code_of_silence, worker

_MODULE = "blockrelay_converter.onnx_source"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What `blockrelay import` was asked for. `served`: of `up --blocks`, the folder that describes
    the blocks, in whose place the import is to compute."""

    folder: Path
    out: Path
    precision: str | None
    text: Path | None
    name: str | None
    max_position: int | None
    as_json: bool = False
    served: Path | None = None

    def argv(self) -> list[str]:
        """The converter's command line."""
        argv = [sys.executable, "-P", "-m", _MODULE]
        for option, value in (
            ("--precision", self.precision),
            ("--text", self.text),
            ("--name", self.name),
            ("--max-position", self.max_position),
            ("--served", self.served),
        ):
            argv += [option, str(value)] if value is not None else []
        return [*argv, "--", str(self.folder), str(self.out)]


def run_import(options: ImportOptions) -> int:
    """The exit code: 0 when the folder is there, 2 when the blocks cannot be imported or `out` not be written: then the
    converter has said why. Raises UsageError where it is not installed."""
    need("converter", "onnx")
    with worker(options.argv()) as process:
        assert process.stdout is not None
        result = watch(process.stdout)
        code = process.wait()
    if code:
        return code_of_silence(code)
    if result is None:
        return FAILED
    if options.as_json:
        typer.echo(json.dumps({"folder": str(options.folder), "out": str(options.out), **result.as_json()}))
    else:
        typer.echo("\n".join(result_lines(options.out, result)))
    return 0


def watch(lines: IO[bytes]) -> ImportResult | None:
    """Read what the converter tells to its end, with a bar where somebody looks."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("reads the blocks", total=None)
        for line in lines:
            told = decode_told(line)
            if isinstance(told, ImportResult):
                return told
            progress.update(bar, description=told.what, advance=told.bytes, total=told.total)
    return None


def result_lines(out: Path, result: ImportResult) -> Iterator[str]:
    """What people read: how near the import is, what was assumed, and what is there."""
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
