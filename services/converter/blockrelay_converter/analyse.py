"""The command line of `blockrelay analyse MODEL [--sizing] [--json]`: the cost of each block, and the needs of a load.

Everything is computed from the model's shape and from measured costs; no weight is read.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from blockrelay.block_folder.analysis import ModelAnalysis, analyse
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.block_folder.manifest import MANIFEST_NAME
from blockrelay.block_folder.model import Precision
from blockrelay.command_app import run_app
from blockrelay.errors import UsageError
from blockrelay.quantities import format_quantity
from blockrelay_converter.block_writer import BlockSource
from blockrelay_converter.checkpoint.safetensors import Checkpoint
from blockrelay_converter.checkpoint.source import read_source
from blockrelay_converter.sizing.command import AT_ONCE, CONTEXT, CORES, NEW, PRECISION, PROMPT, SizingOptions, sized_by
from blockrelay_converter.sizing.report import lines, to_json
from blockrelay_converter.sizing.shapes import NAMES

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    model: Annotated[
        str | None, typer.Argument(help=f"block folder, or Hugging Face folder; with --sizing also a shape: {NAMES}")
    ] = None,
    named: Annotated[str | None, typer.Option("--model", metavar="MODEL", help="the model, in place of MODEL")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
    sizing: Annotated[
        bool, typer.Option("--sizing", help="show what a load needs: memory, Redis, disk, network, processes")
    ] = False,
    precision: Annotated[
        str | None,
        typer.Option(
            help=f"precision of the weights, as `convert` takes it [default: the block folder's, else {PRECISION}]"
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help=f"most tokens of a request, prompt included [default: {CONTEXT}, or the model's]")
    ] = None,
    requests_per_second: Annotated[float | None, typer.Option(help="requests per second [default: 1]")] = None,
    prompt: Annotated[int | None, typer.Option(help=f"tokens of each prompt [default: {PROMPT}]")] = None,
    new: Annotated[int | None, typer.Option(help=f"new tokens of each request [default: {NEW}]")] = None,
    stages: Annotated[
        int | None, typer.Option(help="number of equal stages that the model is cut into [default: 1]")
    ] = None,
    requests_at_once: Annotated[
        int | None,
        typer.Option(help=f"most requests that a worker runs at once, BLOCKRELAY_MAX_REQUESTS [default: {AT_ONCE}]"),
    ] = None,
    tokens_per_second_per_worker: Annotated[
        float | None,
        typer.Option(help="new tokens per second that one worker (or one worker per stage) gives under this load"),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="profiling_results.json of this model, from which a worker's speed is computed")
    ] = None,
    device: Annotated[str | None, typer.Option(help="class of device in the profile: CPU or GPU")] = None,
    cores: Annotated[
        int | None, typer.Option(help=f"cores of a CPU worker, where there is no --profile [default: {CORES}]")
    ] = None,
) -> None:
    """Show parameters, bytes, operations and KV bytes of every block of a model, without reading its weights.

    With --sizing: what a load needs, and what each figure rests on (docs/sizing.md).
    """
    if (model is None) == (named is None):
        raise UsageError("give one model, as MODEL or with --model")
    chosen = model or named or ""
    wishes = SizingOptions(
        precision=precision, context=context, requests_per_second=requests_per_second, prompt=prompt, new=new,
        stages=stages, requests_at_once=requests_at_once, tokens_per_second_per_worker=tokens_per_second_per_worker,
        profile=profile, device=device, cores=cores,
    )  # fmt: skip
    if sizing:
        sized = sized_by(chosen, wishes)
        typer.echo(json.dumps(to_json(sized), indent=1) if as_json else "\n".join(lines(sized)))
        return
    if stray := wishes.given():
        raise UsageError(f"{stray[0]} says what to size: give --sizing too")
    analysis = read_analysis(Path(chosen))
    typer.echo(json.dumps(analysis.to_json(), indent=1)) if as_json else show(analysis)


def read_analysis(folder: Path) -> ModelAnalysis:
    """Returns the cost of each block of the model in a block folder or a checkpoint.

    Raises BlockFolderError, UsageError or UnsupportedModel for a folder that cannot be served or converted. Raises
    UsageError also for the description of ONNX blocks made by others. Only the headers of a checkpoint's weights are
    read.
    """
    if (folder / MANIFEST_NAME).exists():
        return analyse(open_block_folder(folder, blocks=[]).model)
    source = read_source(folder)
    BlockSource(Checkpoint(folder), source.model, ("fp32",) * source.model.blocks, tied=source.config.tied)
    return analyse(source.model)


def show(analysis: ModelAnalysis) -> None:
    """Prints the analysis as a table; neighbouring blocks of the same cost share one line."""
    heads = ("parameters", *analysis.precisions, "operations", "KV bytes")
    table = Table(
        "blocks",
        title=f"{analysis.model}: {len(analysis.blocks)} blocks, context {analysis.context}",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),  # to fit in 80 columns
    )
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for _, group in groupby(analysis.blocks, key=lambda block: replace(block, index=0)):
        alike = list(group)
        first, last = alike[0], alike[-1]
        name = str(first.index) if first is last else f"{first.index}-{last.index}"
        table.add_row(name, *_cells(first.parameters, first.bytes, first.flops_per_row, first.kv_values_per_token))
    table.add_section()
    sums = analysis.totals()
    values = sum(block.kv_values_per_token for block in analysis.blocks)
    cells = _cells(sums["parameters"], sums["bytes"], sums["flops_per_row"], values)
    table.add_row("all", *cells)
    console = Console()
    console.print(table)
    console.print(
        "Figures are for one block. Operations are for each token computed, plus "
        f"{sums['attention_flops_per_row_and_token']} in all blocks for each token that it attends to; KV bytes "
        f"are for one token, in 16 and in 32 bits. A stage sends {sums['hop_bytes_per_row']} bytes to the next stage "
        "for each token."
    )


def _cells(parameters: int, sizes: Mapping[Precision, int], operations: int, kv_values: int) -> list[str]:
    by_kind = "/".join(str(size) for size in dict.fromkeys((2 * kv_values, 4 * kv_values)))
    return [
        format_quantity(parameters),
        *(format_quantity(size, "B") for size in sizes.values()),
        format_quantity(operations),
        by_kind,
    ]


def run(arguments: list[str] | None = None) -> int:
    """Runs the command with `arguments` (None: those of the process) and returns its exit code.

    It is 0, 2 for input that the user must change, 130 after Ctrl-C, or 1 for any other failure. An error is one line
    on stderr.
    """
    return run_app(app, arguments, name="blockrelay analyse")


if __name__ == "__main__":
    sys.exit(run())
