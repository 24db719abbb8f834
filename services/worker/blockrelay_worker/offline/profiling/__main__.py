"""`python -m blockrelay_worker.offline.profiling`: measures each block of a model on this machine.

Writes `profiling_results.json` (`blockrelay.planning.profile`), which planners read. Needs an otherwise idle machine.
Noisy figures are named on stderr and written all the same. With `--form source` only a step of one row is measured,
without loading, hops and matmuls in other precisions.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from blockrelay.block_folder.analysis import BlockCost, ModelAnalysis
from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.precisions import kv_item_bytes
from blockrelay.command_app import run_app
from blockrelay.errors import UsageError
from blockrelay.host.cpu import MAX_RANKS, check_threads, cores, machine_name
from blockrelay.onnx_blocks.served_shape import served_wiring
from blockrelay.planning.costs import costs_of
from blockrelay.planning.profile import BASE_CONTEXT, BlockProfile, Hop, ProductTimes, Profile
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_worker.execution.loader import Executors
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.offline.profiling.block_times import (
    NOISY,
    BatchShape,
    Times,
    load_times,
    measure,
    one_row,
    shapes,
    whole_window,
    windows,
)
from blockrelay_worker.offline.profiling.hop_times import (
    redis_hop,
    rows_of_onnx_blocks,
    rows_of_ours,
    shared_memory_hop,
)
from blockrelay_worker.offline.profiling.product_times import product_times
from blockrelay_worker.offline.profiling.samples import ROUNDS, Samples
from blockrelay_worker.offline.profiling.targets import StageBytes, Target, stage_bytes, targets

Form = Literal["full", "source"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    model: Annotated[
        Path, typer.Option(help="block folder [default: the bundled model]", show_default=False)
    ] = BUNDLED_MODEL,
    out: Annotated[Path, typer.Option(help="file to write")] = Path("profiling_results.json"),
    threads: Annotated[
        int | None, typer.Option(min=1, callback=check_threads, help="of a worker [default: the cores]")
    ] = None,
    tensor_parallel: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_RANKS, help="processes that share each block on the CPU, with --threads threads each"
        ),
    ] = 1,
    gpu: Annotated[str, typer.Option(metavar="ID,ID", help="measure these devices too, such as webgpu:0")] = "",
    redis: Annotated[str | None, typer.Option(metavar="URL", help="measure hops over this Redis too")] = None,
    form: Annotated[
        Form, typer.Option(help="source: seconds of one row alone, as the ONNX block server reads")
    ] = "full",
) -> None:
    """Measure every block of a model on this machine's CPU and on the devices that are named, and what a hop between
    stages takes."""
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    folder, threads = open_block_folder(model), threads or max(1, cores() // tensor_parallel)
    costs = costs_of(folder)
    gpus = [name.strip() for name in gpu.split(",") if name.strip()]
    wanted, full = targets(folder, threads=threads, gpus=gpus, ranks=tensor_parallel), form == "full"
    if not full and len(gpus) > 1:
        raise UsageError(f"--form source has a CPU and one GPU, and --gpu names {len(gpus)}: name one")
    steps = shapes(folder) if full else [one_row(folder)]
    with ExitStack() as stack:  # all devices are opened first: one that fails costs no minutes spent on the others
        opened = {target.name: stack.enter_context(target.opened()) for target in wanted}
        sizes = {name: stage_bytes(folder, executors) for name, executors in opened.items()}
        times = {
            target.name: _times(folder, target, opened[target.name], sizes[target.name], steps) for target in wanted
        }
    loading = {target.name: _loading(folder, target) if full else {} for target in wanted}
    hop = _hops(folder, costs, redis) if full else {}
    profile = Profile(
        model=folder.model.name,
        model_hash=folder.manifest.model_hash,
        machine=machine_name(threads, tensor_parallel),
        measured=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        blocks={
            cost.name: {
                name: _block(cost, samples, loading[name], _bytes(cost, folder, sizes[name]), folder.manifest)
                for name, samples in times.items()
            }
            for cost in costs.blocks
        },
        products=_products(folder, threads) if full else {},
        hop=hop,
    )
    out.write_text(profile.encode() if full else profile.encode_source())
    what = f"{folder.model.name}, {folder.manifest.precision}, {len(profile.blocks)} blocks"
    typer.echo(f"{out}: {what} on {' and '.join(times)}")
    noisy = [
        f"{name} on {device}"
        for name, classes in profile.blocks.items()
        for device, block in classes.items()
        if _largest_spread(block) > NOISY
    ]
    if noisy:
        typer.echo(f"noisy after all rounds, the machine was busy: {', '.join(noisy)}", err=True)


def _times(
    folder: BlockFolder, target: Target, executors: Executors, sizes: StageBytes, steps: Sequence[BatchShape]
) -> Times:
    """Measures all blocks in these steps on a device; `executors` are its open ones."""
    limit: int | None = None
    if folder.model.onnx_blocks is None:
        cut = list(windows(folder, sizes, steps))
    else:
        whole, limit = whole_window(folder, sizes, steps)
        cut = [whole]
    times = Times()
    rounds = sum(ROUNDS * sum(shape.pages <= window.pages for shape in steps) for window in cut)
    limited = nullcontext(executors) if limit is None else target.opened(limit)
    with _bar(folder, target, rounds) as advance, limited as measured:
        for window in cut:
            times |= measure(folder, measured, window, steps, advance)
    return times


def _loading(folder: BlockFolder, target: Target) -> Mapping[int, Samples]:
    """Measures the loading of each block alone on a device."""
    with _bar(folder, target, target.loads * folder.model.blocks, what="loading ") as advance:
        return load_times(folder, target, advance)


@contextmanager
def _bar(folder: BlockFolder, target: Target, steps: int, *, what: str = "") -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on stderr (on a terminal). Yields a function to call with the number of steps just done."""
    with typer.progressbar(length=steps, label=f"{what}{folder.model.name} on {target.name}", file=sys.stderr) as bar:
        yield bar.update


def _hops(folder: BlockFolder, costs: ModelAnalysis, redis: str | None) -> dict[str, Hop]:
    """Measures hops to the next stage, by way; none for a model of one block.

    For ONNX blocks of other makers a hop has the tensors after the block that hands on most, at the base context.
    """
    if len(costs.blocks) == 1:
        return {}
    if folder.model.onnx_blocks is None:
        rows = rows_of_ours(folder.model.hidden_size)
    else:
        context = min(BASE_CONTEXT, folder.model.max_position)
        largest = max(costs.blocks, key=lambda one: one.hop_bytes_per_row + context * one.hop_bytes_per_row_and_token)
        rows = rows_of_onnx_blocks(served_wiring(folder.root), largest.index, context)
        if not rows.bytes:  # the model cannot be cut into stages anywhere
            return {}
    hops = {"shared_memory": shared_memory_hop(rows)}
    if redis is not None:
        hops["redis"] = redis_hop(redis, rows)
    return hops


def _products(folder: BlockFolder, threads: int) -> dict[str, dict[str, ProductTimes]]:
    if folder.model.onnx_blocks is not None:
        return {}
    return {"CPU": product_times(folder.model, load_kernels(threads))}


def _bytes(cost: BlockCost, folder: BlockFolder, sizes: StageBytes) -> int:
    """Bytes of a block's weights: in its file, or on the device for an ONNX block of another maker."""
    if folder.model.onnx_blocks is not None:
        return sizes.weights(cost.index, cost.index)
    return cost.bytes[folder.manifest.precision_of(cost.index)]


def _block(
    cost: BlockCost, times: Times, loading: Mapping[int, Samples], size: int, manifest: Manifest
) -> BlockProfile:
    """The profile of one block of `size` bytes.

    The base context is the shortest one measured: the model's own, if that is below BASE_CONTEXT.
    """
    medians: dict[int, dict[int, float]] = {}
    spreads: dict[int, dict[int, float]] = {}
    for (index, shape), samples in times.items():
        if index == cost.index:
            medians.setdefault(shape.context, {})[shape.rows] = samples.median
            spreads.setdefault(shape.context, {})[shape.rows] = samples.spread
    base, *longer = sorted(medians)
    return BlockProfile(
        seconds=medians[base],
        spread=spreads[base],
        seconds_at_context={context: medians[context] for context in longer},
        spread_at_context={context: spreads[context] for context in longer},
        load_seconds=loading[cost.index].median if loading else None,
        load_spread=loading[cost.index].spread if loading else None,
        bytes=size,
        kv_bytes_per_token=cost.kv_values_per_token * kv_item_bytes(manifest.precisions),
    )


def _largest_spread(block: BlockProfile) -> float:
    return max(spread for by_rows in (block.spread, *block.spread_at_context.values()) for spread in by_rows.values())


def run(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code (see `run_app`). `arguments`: None takes those of this process."""
    return run_app(app, arguments, name="blockrelay profile")


if __name__ == "__main__":
    sys.exit(run())
