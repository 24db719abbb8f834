"""The commands that measure: `blockrelay profile` (blocks), `bench` (speed) and `drill` (behaviour under faults).

Each command imports its code when it runs, so that the help comes fast and needs no optional package.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from blockrelay.extras import need
from blockrelay.host.cpu import MAX_RANKS, check_threads
from blockrelay_launcher.bench.options import BenchOptions
from blockrelay_launcher.drill.options import DrillOptions
from blockrelay_launcher.option_groups import flag, option, with_option_groups
from blockrelay_launcher.up_options.groups import MeasuredModelOptions

app = typer.Typer()
Form = Literal["full", "source"]
AsJson = Annotated[bool, flag("--json", "Print one JSON object instead of tables.")]


@app.command("profile")
@with_option_groups
def profile(
    measured: MeasuredModelOptions,
    out: Annotated[Path, option("FILE", "File to write the profile to.")] = Path("profiling_results.json"),
    threads: Annotated[
        int | None, option("N", "Threads per worker; default: all cores.", min=1, callback=check_threads)
    ] = None,
    tensor_parallel: Annotated[
        int, option("N", "Processes that share each block on the CPU, --threads threads each.", min=1, max=MAX_RANKS)
    ] = 1,
    gpu: Annotated[str, option("ID,ID", "Measure these devices too, such as webgpu:0 (blockrelay devices).")] = "",
    form: Annotated[
        Form,
        option("full|source", "source: only seconds of one token per block, in the form of the ONNX block server."),
    ] = "full",
) -> None:
    """Measure the time of each block, of a hop between stages and of a step on this machine, for `blockrelay plan`."""
    need("launcher")
    from blockrelay_launcher.onnx_blocks.describe import described
    from blockrelay_launcher.profile import run_profile

    blocks = measured.blocks
    model = measured.model if blocks is None else Path(described(blocks, measured.max_position).folder)
    raise typer.Exit(run_profile(model, out, threads=threads, tensor_parallel=tensor_parallel, gpu=gpu, form=form))


@app.command("bench")
@with_option_groups
def bench(options: BenchOptions, as_json: AsJson = False) -> None:
    """Measure the speed on random prompts: through the gateway, in process, and their ratio."""
    need("launcher")
    from blockrelay_launcher.bench.command import run_bench

    raise typer.Exit(run_bench(options, as_json=as_json))


@app.command("drill")
@with_option_groups
def drill(options: DrillOptions, as_json: AsJson = False) -> None:
    """Hurt a loaded system at random and compare every answer with the undisturbed one.

    Answers must be equal; on nondeterministic devices they must be close.
    """
    need("launcher")
    from blockrelay_launcher.drill.command import run_drill

    raise typer.Exit(run_drill(options, as_json=as_json))
