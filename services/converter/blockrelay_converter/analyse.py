"""`blockrelay analyse MODEL [--json]`: what a model costs, block by block, from its shape. Reads no weight."""

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
from blockrelay.quantities import format_quantity
from blockrelay_converter.block_writer import BlockSource
from blockrelay_converter.checkpoint.safetensors import Checkpoint
from blockrelay_converter.checkpoint.source import read_source

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    model: Annotated[Path, typer.Argument(help="block folder, or Hugging Face folder")],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of a table")] = False,
) -> None:
    """Show parameters, bytes, operations and KV bytes of every block of a model, without reading its weights."""
    analysis = read_analysis(model)
    typer.echo(json.dumps(analysis.to_json(), indent=1)) if as_json else show(analysis)


def read_analysis(folder: Path) -> ModelAnalysis:
    """Of a block folder or a checkpoint. BlockFolderError, UsageError or UnsupportedModel for one that could not be
    served or converted; of a checkpoint's weights the headers are looked at."""
    if (folder / MANIFEST_NAME).exists():
        return analyse(open_block_folder(folder, blocks=[]).model)
    source = read_source(folder)
    BlockSource(Checkpoint(folder), source.model, ("fp32",) * source.model.blocks, tied=source.config.tied)
    return analyse(source.model)


def show(analysis: ModelAnalysis) -> None:
    """A table; neighbours that cost the same are one line."""
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
        "Figures are of one block. Operations are of a row, and "
        f"{sums['attention_flops_per_row_and_token']} more in all blocks for each token that it attends to; KV bytes "
        f"are of a token, in 16 and in 32 bits. A stage sends the next one {sums['hop_bytes_per_row']} bytes for each "
        "row."
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
    """The exit code (see `run_app`)."""
    return run_app(app, arguments, name="blockrelay analyse")


if __name__ == "__main__":
    sys.exit(run())
