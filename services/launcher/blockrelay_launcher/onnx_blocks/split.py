"""Runs `blockrelay split`: a process of the worker splits a model; this one shows progress and the blocks."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import IO

import typer
from rich.progress import DownloadColumn, TimeRemainingColumn

from blockrelay.onnx_blocks.reports.codec import decode
from blockrelay.onnx_blocks.reports.splitting import SplitBegins, SplitWrites
from blockrelay_launcher.onnx_blocks.split_table import split_table
from blockrelay_launcher.onnx_blocks.worker import code_of_silence, command_of, progress_bar, run_worker

_MODULE = "blockrelay_worker.offline.onnx_blocks.splitting.split"
_WEIGHTS = {
    "inside": "weights are inside the blocks",
    "linked": "weights are in the model's own files, which have a second name here",
    "copied": "weights are in copies of the model's files",
    "cut": "weights are in a file for each block",
}


def run_split(model: Path, out: Path, *, copy_weights: bool, as_json: bool) -> int:
    """Splits the ONNX file `model` into blocks in the folder `out`, prints them and returns the exit code.

    `copy_weights`: each block gets a file of its weights. Exit code 0: the blocks are complete; 1: the worker
    failed or was killed; 2: the model cannot be split or `out` cannot be written, and the worker has printed why.
    Raises WireError if its output is no report.
    """
    begin, code = run_worker(command_of(_MODULE, model, out, copy_weights=copy_weights), _watch)
    if begin is None or code:
        return code_of_silence(code)
    if as_json:
        blocks = [asdict(block) for block in begin.blocks]
        typer.echo(json.dumps({"model": str(model), "out": str(out), "weights": begin.weights, "blocks": blocks}))
    else:
        typer.echo(split_table(begin.blocks))
        typer.echo(f"{out}: {len(begin.blocks)} blocks; {_WEIGHTS[begin.weights]}")
    return 0


def _watch(lines: IO[bytes]) -> SplitBegins | None:
    """Reads the worker's reports and returns the first one, if there is one, with a progress bar on a terminal."""
    begin: SplitBegins | None = None
    with progress_bar("reads the model", DownloadColumn(), TimeRemainingColumn()) as update:
        for line in lines:
            if begin is None:
                begin = decode(SplitBegins, line)
                update(total=begin.bytes)
            else:
                written = decode(SplitWrites, line)
                update(description=written.file, advance=written.bytes)
    return begin
