"""`python -m blockrelay_worker.offline.profiling`: how long this machine takes for each block of a model.

Writes `profiling_results.json` (`blockrelay.planning.profile`), which planners read. On an otherwise idle machine.
"""

import sys
from dataclasses import replace
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
from blockrelay.host.memory import available_bytes
from blockrelay.planning.profile import BlockProfile, Hop, Profile
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_worker.execution.loader import executors_for
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.offline.profiling.block_times import (
    MEMORY_SHARE,
    NOISY,
    ROUNDS,
    Times,
    measure,
    shapes,
    windows,
)
from blockrelay_worker.offline.profiling.hop_times import redis_hop, shared_memory_hop
from blockrelay_worker.offline.profiling.product_times import product_times

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    model: Annotated[
        Path, typer.Option(help="block folder [default: the bundled model]", show_default=False)
    ] = BUNDLED_MODEL,
    out: Annotated[Path, typer.Option(help="file to write")] = Path("profiling_results.json"),
    threads: Annotated[int | None, typer.Option(min=1, help="of a worker [default: the cores]")] = None,
    redis: Annotated[str | None, typer.Option(metavar="URL", help="measure hops over this Redis too")] = None,
) -> None:
    """Measure every block of a model on every device that is here, and what a hop between stages takes."""
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    folder = open_block_folder(model)
    blocks, loading = _measure(folder, threads or cores())
    hop = {"shared_memory": shared_memory_hop(folder.model.hidden_size)}
    if redis is not None:
        hop["redis"] = redis_hop(redis, folder.model.hidden_size)
    products = {"CPU": product_times(folder.model, load_kernels(threads or cores()))}
    profile = replace(_profile(folder, blocks, loading, hop, threads or cores()), products=products)
    out.write_text(profile.encode())
    noisy = [name for name, block in profile.blocks.items() if max(block["CPU"].spread.values()) > NOISY]
    typer.echo(f"{out}: {folder.model.name}, {folder.manifest.precision}, {len(profile.blocks)} blocks on CPU")
    if noisy:
        typer.echo(f"noisy after all rounds, the machine was busy: {', '.join(noisy)}", err=True)


def _measure(folder: BlockFolder, threads: int) -> tuple[Times, dict[int, float]]:
    """Samples of all blocks, and the seconds that loading each took."""
    executors = executors_for("cpu", folder, threads=threads)
    wanted = shapes(folder)
    cut = list(windows(folder, executors, wanted, int(available_bytes() * MEMORY_SHARE)))
    times: Times = {}
    loading: dict[int, float] = {}
    rounds = sum(ROUNDS * sum(shape.pages <= window.pages for shape in wanted) for window in cut)
    with typer.progressbar(length=rounds, label=folder.model.name, file=sys.stderr) as bar:
        for window in cut:
            found, seconds = measure(folder, executors, window, wanted, bar.update)
            times |= found
            files = [(block.index, folder.manifest.files[block.file].bytes) for block in folder.manifest.blocks]
            sizes = {index: size for index, size in files if window.first <= index <= window.last}
            loading |= {index: seconds * size / sum(sizes.values()) for index, size in sizes.items()}
    return times, loading


def _profile(
    folder: BlockFolder, times: Times, loading: dict[int, float], hop: dict[str, Hop], threads: int
) -> Profile:
    return Profile(
        model=folder.model.name,
        model_hash=folder.manifest.model_hash,
        machine=machine_name(threads),
        measured=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        blocks={
            cost.name: {"CPU": _block(cost, folder.manifest, times, loading[cost.index])}
            for cost in analyse(folder.model).blocks
        },
        hop=hop,
    )


def _block(cost: BlockCost, manifest: Manifest, times: Times, loading: float) -> BlockProfile:
    """Of one block; a model whose context is shorter than the base one is measured at its own."""
    samples = {shape: one for (index, shape), one in times.items() if index == cost.index}
    base, *longer = sorted({shape.context for shape in samples})
    return BlockProfile(
        seconds={shape.rows: one.median for shape, one in samples.items() if shape.context == base},
        spread={shape.rows: one.spread for shape, one in samples.items() if shape.context == base},
        seconds_at_context={
            context: {shape.rows: one.median for shape, one in samples.items() if shape.context == context}
            for context in longer
        },
        load_seconds=loading,
        bytes=cost.bytes[manifest.precision_of(cost.index)],
        kv_bytes_per_token=cost.kv_values_per_token * kv_item_bytes(manifest.precisions),
    )


def run(arguments: list[str] | None = None) -> int:
    """The exit code (see `run_app`)."""
    return run_app(app, arguments)


if __name__ == "__main__":
    sys.exit(run())
