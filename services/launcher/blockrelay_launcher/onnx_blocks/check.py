"""Runs `blockrelay check`: a process of the worker checks the blocks; this one shows progress and the result."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated

import typer
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from blockrelay.errors import UsageError
from blockrelay.exit_codes import FAILED
from blockrelay.host.child_command import how_it_ended
from blockrelay.onnx_blocks.reports.checking import CheckBegins, CheckedBlock, step_seconds
from blockrelay.onnx_blocks.reports.codec import decode
from blockrelay_launcher.onnx_blocks.check_table import table
from blockrelay_launcher.onnx_blocks.worker import code_of_silence, command_of, progress_bar, run_worker
from blockrelay_launcher.option_groups import OptionGroup, flag, option

_MODULE = "blockrelay_worker.offline.onnx_blocks.check"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions(OptionGroup):
    """The options of `blockrelay check`."""

    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Files block_1.onnx, block_2.onnx and so on.")]
    device: Annotated[str, option("ID", "Device that runs the blocks, such as webgpu:0 (blockrelay devices).")] = "cpu"
    batch: Annotated[int, option("N", "Sequences in the made-up batch.", min=1)] = 5
    sequence: Annotated[int, option("N", "New tokens of each sequence.", min=1)] = 10
    past: Annotated[int, option("N", "Tokens that each sequence already has in its KV cache.", min=0)] = 0
    against: Annotated[
        Path | None, option("FILE", "Refuse files that this blocks.json does not list; default: FOLDER's.")
    ] = None
    write: Annotated[
        Path | None, option("FILE", "Write a blocks.json with the SHA-256 of every file if all blocks pass.")
    ] = None
    gpu_python: Annotated[
        Path | None, option("PATH", "Python interpreter with the device's packages; default: this one.")
    ] = None
    as_json: Annotated[bool, flag("--json", "Print one JSON object instead of a table.")] = False

    def argv(self) -> list[str]:
        """Returns the command line of the worker's process."""
        return command_of(
            _MODULE, self.folder, python=self.gpu_python, device=self.device, batch=self.batch, sequence=self.sequence,
            past=self.past, against=self.against, write=self.write,
        )  # fmt: skip


def run_check(options: CheckOptions) -> int:
    """Checks the folder, prints the result and returns the exit code.

    Exit code 0: all blocks have passed; 1: one has not, or the worker was killed; 2: the folder cannot be checked, and
    the worker has printed why. If all have passed and the file of `--write` cannot be written, it is the worker's exit
    code. Raises UsageError if the worker's Python cannot be started, WireError if its output is no report.
    """
    try:
        (begin, reported), code = run_worker(options.argv(), _watch)
    except OSError as error:
        raise UsageError(f"--gpu-python: {options.gpu_python} cannot be run: {error.strerror}") from None
    if begin is None:
        return code_of_silence(code)
    blocks = _with_unreported(begin, reported, code)
    passed = sum(block.passed for block in blocks)
    if options.as_json:
        typer.echo(json.dumps(_as_json(options, blocks, passed)))
    else:
        typer.echo(table(blocks))
        if step := step_seconds(blocks):
            typer.echo(f"a step: {step.warm:.3f} s with all blocks warm, {step.one_by_one:.3f} s with each made again")
        typer.echo(f"{passed} of {len(blocks)}")
    if passed == len(blocks) and code:
        return code if code > 0 else FAILED  # all blocks have passed, but --write failed
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


def _watch(lines: IO[bytes]) -> tuple[CheckBegins | None, list[CheckedBlock]]:
    """Reads and returns all reports of the worker, with a progress bar on a terminal."""
    begin: CheckBegins | None = None
    blocks: list[CheckedBlock] = []
    with progress_bar("reads the files", MofNCompleteColumn(), TimeElapsedColumn()) as update:
        for line in lines:
            if begin is None:
                begin = decode(CheckBegins, line)
                update(total=len(begin.blocks))
            else:
                blocks.append(decode(CheckedBlock, line))
                update(advance=1)
            if len(blocks) < len(begin.blocks):
                update(description=begin.blocks[len(blocks)][0])
    return begin, blocks


def _with_unreported(begin: CheckBegins, reported: list[CheckedBlock], code: int) -> list[CheckedBlock]:
    """Returns the results of all blocks, also of those without a report.

    The first of these is the one that ended the worker (by a driver, or for lack of memory); the others did not run.
    """
    blocks = list(reported)
    for block, file in begin.blocks[len(blocks) :]:
        first = len(blocks) == len(reported)
        problem = (
            f"the process that ran it has ended {how_it_ended(code)}" if first else "not run: the process has ended"
        )
        blocks.append(CheckedBlock(block=block, file=file, problem=problem))
    return blocks
