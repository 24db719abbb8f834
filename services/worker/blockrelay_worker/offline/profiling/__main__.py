"""`python -m blockrelay_worker.offline.profiling`: how long this machine takes for each block of a model.

Writes `profiling_results.json` (`blockrelay.planning.profile`), which planners read. On an otherwise idle machine.
"""

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from blockrelay.block_folder.analysis import BlockCost, analyse
from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.precisions import kv_item_bytes
from blockrelay.command_app import run_app
from blockrelay.errors import UsageError
from blockrelay.host.cpu import cores, machine_name
from blockrelay.planning.profile import BlockProfile, Profile
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.offline.profiling.block_times import (
    NOISY,
    Times,
    load_times,
    measure,
    shapes,
    windows,
)
from blockrelay_worker.offline.profiling.hop_times import redis_hop, shared_memory_hop
from blockrelay_worker.offline.profiling.product_times import product_times
from blockrelay_worker.offline.profiling.samples import ROUNDS, Samples
from blockrelay_worker.offline.profiling.targets import Target, stage_bytes, targets

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    model: Annotated[
        Path, typer.Option(help="block folder [default: the bundled model]", show_default=False)
    ] = BUNDLED_MODEL,
    out: Annotated[Path, typer.Option(help="file to write")] = Path("profiling_results.json"),
    threads: Annotated[int | None, typer.Option(min=1, help="of a worker [default: the cores]")] = None,
    gpu: Annotated[str, typer.Option(metavar="ID,ID", help="measure these devices too, such as webgpu:0")] = "",
    redis: Annotated[str | None, typer.Option(metavar="URL", help="measure hops over this Redis too")] = None,
) -> None:
    """Measure every block of a model on this machine's CPU and on the devices that are named, and what a hop between
    stages takes."""
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    folder, threads = open_block_folder(model), threads or cores()
    if folder.model.onnx_blocks is not None:
        raise UsageError(f"{model}: ONNX blocks as they are cannot be profiled yet; import them (blockrelay import)")
    gpus = [name.strip() for name in gpu.split(",") if name.strip()]
    wanted = targets(folder, threads=threads, gpus=gpus)
    for target in wanted:  # a device that cannot be opened is told before minutes are spent on the others
        with target.opened():
            pass
    measured = {target.name: _measure(folder, target) for target in wanted}
    hop = {"shared_memory": shared_memory_hop(folder.model.hidden_size)}
    if redis is not None:
        hop["redis"] = redis_hop(redis, folder.model.hidden_size)
    profile = Profile(
        model=folder.model.name,
        model_hash=folder.manifest.model_hash,
        machine=machine_name(threads),
        measured=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        blocks={
            cost.name: {name: _block(cost, folder.manifest, *found) for name, found in measured.items()}
            for cost in analyse(folder.model).blocks
        },
        products={"CPU": product_times(folder.model, load_kernels(threads))},
        hop=hop,
    )
    out.write_text(profile.encode())
    what = f"{folder.model.name}, {folder.manifest.precision}, {len(profile.blocks)} blocks"
    typer.echo(f"{out}: {what} on {' and '.join(measured)}")
    noisy = [
        f"{name} on {device}"
        for name, classes in profile.blocks.items()
        for device, block in classes.items()
        if _largest_spread(block) > NOISY
    ]
    if noisy:
        typer.echo(f"noisy after all rounds, the machine was busy: {', '.join(noisy)}", err=True)


def _measure(folder: BlockFolder, target: Target) -> tuple[Times, dict[int, Samples]]:
    """Samples of all blocks on a device, and of loading each."""
    wanted, times = shapes(folder), Times()
    with target.opened() as executors:
        cut = list(windows(folder, stage_bytes(folder, executors), wanted))
        rounds = sum(ROUNDS * sum(shape.pages <= window.pages for shape in wanted) for window in cut)
        steps, label = rounds + target.loads * folder.model.blocks, f"{folder.model.name} on {target.name}"
        with typer.progressbar(length=steps, label=label, file=sys.stderr) as bar:
            for window in cut:
                times |= measure(folder, executors, window, wanted, bar.update)
            return times, load_times(folder, target, bar.update)


def _block(cost: BlockCost, manifest: Manifest, times: Times, loading: Mapping[int, Samples]) -> BlockProfile:
    """Of one block; a model whose context is shorter than the base one is measured at its own."""
    samples = {shape: one for (index, shape), one in times.items() if index == cost.index}
    base, *longer = sorted({shape.context for shape in samples})

    def at(context: int) -> dict[int, Samples]:
        return {shape.rows: one for shape, one in samples.items() if shape.context == context}

    def medians(context: int) -> dict[int, float]:
        return {rows: one.median for rows, one in at(context).items()}

    def spreads(context: int) -> dict[int, float]:
        return {rows: one.spread for rows, one in at(context).items()}

    return BlockProfile(
        seconds=medians(base),
        spread=spreads(base),
        seconds_at_context={context: medians(context) for context in longer},
        spread_at_context={context: spreads(context) for context in longer},
        load_seconds=loading[cost.index].median,
        load_spread=loading[cost.index].spread,
        bytes=cost.bytes[manifest.precision_of(cost.index)],
        kv_bytes_per_token=cost.kv_values_per_token * kv_item_bytes(manifest.precisions),
    )


def _largest_spread(block: BlockProfile) -> float:
    return max(spread for by_rows in (block.spread, *block.spread_at_context.values()) for spread in by_rows.values())


def run(arguments: list[str] | None = None) -> int:
    """The exit code (see `run_app`)."""
    return run_app(app, arguments)


if __name__ == "__main__":
    sys.exit(run())
