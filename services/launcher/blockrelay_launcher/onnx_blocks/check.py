"""Has the worker check a folder, watches it, and shows what it told."""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from blockrelay.errors import UsageError
from blockrelay.exit_codes import FAILED
from blockrelay.onnx_blocks.report import CheckBegins, CheckedBlock, decode_begin, decode_checked, step_seconds
from blockrelay_launcher.onnx_blocks.check_table import table
from blockrelay_launcher.onnx_blocks.worker import code_of_silence, how_it_ended, worker

_MODULE = "blockrelay_worker.offline.onnx_blocks.check"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """What `blockrelay check` was asked for."""

    folder: Path
    device: str
    batch: int
    sequence: int
    past: int
    against: Path | None
    write: Path | None
    python: Path | None
    as_json: bool

    def argv(self) -> list[str]:
        """The worker's command line."""
        argv = [str(self.python or sys.executable), "-P", "-m", _MODULE, "--device", self.device]
        argv += ["--batch", str(self.batch), "--sequence", str(self.sequence), "--past", str(self.past)]
        for name, path in (("--against", self.against), ("--write", self.write)):
            argv += [name, str(path)] if path is not None else []
        return [*argv, "--", str(self.folder)]


@dataclass(slots=True)
class _Told:
    begin: CheckBegins | None = None
    blocks: list[CheckedBlock] = field(default_factory=list[CheckedBlock])


def run_check(options: CheckOptions) -> int:
    """The exit code: 0 when all blocks have passed, 1 when one has not, 2 when the folder cannot be checked: then the
    worker has said why. Raises UsageError where its Python cannot be started."""
    told = _Told()
    try:
        with worker(options.argv()) as process:
            assert process.stdout is not None
            _watch(process.stdout, told)
            code = process.wait()
    except OSError as error:
        raise UsageError(f"--gpu-python: {options.python} cannot be run: {error.strerror}") from None
    if told.begin is None:
        return code_of_silence(code)
    blocks = _with_the_untold(told, code)
    passed = sum(block.passed for block in blocks)
    if options.as_json:
        typer.echo(json.dumps(_as_json(options, blocks, passed)))
    else:
        typer.echo(table(blocks))
        if step := step_seconds(blocks):
            typer.echo(f"a step: {step.warm:.3f} s with all blocks warm, {step.one_by_one:.3f} s with each made anew")
        typer.echo(f"{passed} of {len(blocks)}")
    if passed == len(blocks) and code:
        return code if code > 0 else FAILED  # behind the blocks: what was to be written could not be
    return 0 if passed == len(blocks) else FAILED


def _as_json(options: CheckOptions, blocks: list[CheckedBlock], passed: int) -> dict[str, object]:
    step = step_seconds(blocks)
    return {
        "folder": str(options.folder),
        "device": options.device,
        "batch": options.batch,
        "sequence": options.sequence,
        "past": options.past,
        "passed": passed,
        "of": len(blocks),
        "step_seconds": step and asdict(step),
        "blocks": [block.as_json() for block in blocks],
    }


def _watch(lines: IO[bytes], told: _Told) -> None:
    """Read what the worker tells to its end, with a bar where somebody looks."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("reads the files", total=None)
        for line in lines:
            if told.begin is None:
                told.begin = decode_begin(line)
                progress.update(bar, total=len(told.begin.blocks))
            else:
                told.blocks.append(decode_checked(line))
                progress.advance(bar)
            if len(told.blocks) < len(told.begin.blocks):
                progress.update(bar, description=told.begin.blocks[len(told.blocks)][0])


def _with_the_untold(told: _Told, code: int) -> list[CheckedBlock]:
    """All blocks: the one that a driver, or a lack of memory, ended the worker with, and those behind it, too."""
    assert told.begin is not None
    blocks = list(told.blocks)
    for block, file in told.begin.blocks[len(blocks) :]:
        first = len(blocks) == len(told.blocks)
        problem = (
            f"the process that ran it has ended {how_it_ended(code)}" if first else "not run: the process has ended"
        )
        blocks.append(CheckedBlock(block=block, file=file, problem=problem))
    return blocks
