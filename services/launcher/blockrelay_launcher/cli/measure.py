"""The commands that measure: `blockrelay profile` (blocks), `bench` (speed) and `drill` (behaviour under faults).

Each command imports its code when it runs, so that the help comes fast and needs no optional package.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from blockrelay.errors import UsageError
from blockrelay.extras import need
from blockrelay.host.cpu import check_threads
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_launcher.cli.given import is_given
from blockrelay_launcher.drill.faults import parse_kinds, parse_roles
from blockrelay_launcher.drill.options import LONGEST_ANSWER, SHORTEST_ANSWER, DrillOptions
from blockrelay_launcher.supervisor.embedded_redis import Fsync

app = typer.Typer()
Form = Literal["full", "source"]
Model = Annotated[Path, typer.Option("--model", help="Block folder to serve (see: blockrelay convert).")]


@app.command("profile")
def profile(
    command: typer.Context,
    model: Model = BUNDLED_MODEL,
    blocks: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Measure ONNX blocks that you own, as they are, instead of --model."),
    ] = None,
    max_position: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --blocks: length of the context in tokens.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write the profile to.")] = Path(
        "profiling_results.json"
    ),
    threads: Annotated[
        int | None, typer.Option(min=1, callback=check_threads, help="Threads per worker; default: all cores.")
    ] = None,
    gpu: Annotated[
        str, typer.Option(metavar="ID,ID", help="Measure these devices too, such as webgpu:0 (blockrelay devices).")
    ] = "",
    form: Annotated[
        Form, typer.Option(help="source: only seconds of one token per block, in the form of the ONNX block server.")
    ] = "full",
) -> None:
    """Measure the time of each block, of a hop between stages and of a step on this machine, for `blockrelay plan`."""
    need("launcher")
    from blockrelay_launcher.onnx_blocks.describe import described
    from blockrelay_launcher.profile import run_profile

    if blocks is None and max_position is not None:
        raise UsageError("--max-position is for --blocks: converting a model decides about its context")
    if blocks is not None:
        if is_given(command, "model"):
            raise UsageError("--blocks is instead of --model: give one of them")
        model = Path(described(blocks, max_position).folder)
    raise typer.Exit(run_profile(model, out, threads=threads, gpu=gpu, form=form))


@app.command("bench")
def bench(
    model: Model = BUNDLED_MODEL,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Measure this gateway instead of starting a system.")
    ] = None,
    requests: Annotated[
        str, typer.Option(metavar="N,N", help="Numbers of requests at once, each measured.")
    ] = "1,4,16",
    prompt: Annotated[str, typer.Option(metavar="N,N", help="Prompt lengths in tokens, each measured.")] = "128",
    new: Annotated[int, typer.Option(metavar="N", help="New tokens of each request.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Number of measured rounds; the median counts.")] = 3,
    stages: Annotated[int, typer.Option(min=1, help="Number of equal stages that the model is cut into.")] = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, callback=check_threads, help="Threads per worker; default: all cores.")
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process/--no-in-process", help="Also measure the executor alone, without services.")
    ] = True,
    speculation: Annotated[bool, typer.Option("--speculation", help="Let workers draft tokens ahead.")] = False,
    prefix: Annotated[
        int, typer.Option(min=0, metavar="N", help="Also time two requests that share their first N tokens; 0: not.")
    ] = 0,
    kv_cache: Annotated[
        bool, typer.Option("--kv-cache", help="Also time requests with and without the KV cache.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Also measure the workers' memory while they serve.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure the speed on random prompts: through the gateway, in process, and their ratio."""
    need("launcher")
    from blockrelay_launcher.bench.command import BenchOptions, run_bench

    options = BenchOptions(
        model=model, url=url and url.rstrip("/"), requests=_numbers(requests, "--requests"),
        prompts=_numbers(prompt, "--prompt"), new=new, rounds=rounds, stages=stages, threads=threads,
        in_process=in_process, speculation=speculation, prefix=prefix, kv_cache=kv_cache, memory=memory,
    )  # fmt: skip
    raise typer.Exit(run_bench(options, as_json=as_json))


@app.command("drill")
def drill(
    command: typer.Context,
    model: Model = BUNDLED_MODEL,
    blocks: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Serve ONNX blocks that you own, as they are, instead of --model."),
    ] = None,
    sequential: Annotated[bool, typer.Option("--sequential", help="With --blocks: as for `up`.")] = False,
    minutes: Annotated[float, typer.Option(min=0.05, help="Duration of the load in minutes.")] = 10.0,
    kill: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE,ROLE",
            help="Roles to hurt: worker, scheduler, gateway, redis, device (the process of a GPU, or of ONNX blocks); "
            "empty: none; default: all that exist.",
        ),
    ] = None,
    faults: Annotated[
        str,
        typer.Option(
            metavar="KIND,KIND",
            help="Kinds of faults: kill; stop (a process, up to 8 s); full (Redis has no room, up to 3 s); cut "
            "(connections of Redis).",
        ),
    ] = "kill,stop,full,cut",
    every: Annotated[float, typer.Option(min=0.1, metavar="S", help="Mean time between two faults, in seconds.")] = 2.0,
    upgrade: Annotated[
        bool,
        typer.Option("--upgrade", help="Replace all workers, in the middle third, by workers that compute other bits."),
    ] = False,
    upgrade_from: Annotated[
        str | None,
        typer.Option(
            metavar="PYTHON",
            help="Run the release of this Python in the first half; then this release continues with its data.",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Begin with this plan (blockrelay plan --json) instead of --stages."),
    ] = None,
    apply: Annotated[Path | None, typer.Option(metavar="FILE", help="Apply this plan in the middle.")] = None,
    users: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run services as the Redis users of DIR/control.acl and DIR/payload.acl."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of requests, victims and times; default: a new one.")] = None,
    fsync: Annotated[Fsync, typer.Option(help="When the control Redis syncs to disk.")] = "always",
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="Number of requests at once.")] = 8,
    longest_answer: Annotated[
        int, typer.Option(min=SHORTEST_ANSWER, metavar="TOKENS", help="Most new tokens of a request; most have fewer.")
    ] = LONGEST_ANSWER,
    stages: Annotated[int, typer.Option(min=1, help="Number of equal stages that the model is cut into.")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="Number of CPU workers per stage.")] = 2,
    gateways: Annotated[int, typer.Option(min=1, help="Number of gateways; clients move to another if one dies.")] = 2,
    schedulers: Annotated[int, typer.Option(min=1, help="Number of schedulers.")] = 1,
    gpu: Annotated[str, typer.Option(metavar="ID,ID", help="Run workers on these GPUs too, as for `up`.")] = "",
    stage_devices: Annotated[str, typer.Option(metavar="CLASSES", help="With --gpu: as for `up`.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Hurt a loaded system at random and compare every answer with the undisturbed one.

    Answers must be equal; on nondeterministic devices they must be close.
    """
    if blocks is not None and is_given(command, "model"):
        raise UsageError("--blocks is instead of --model: give one of them")
    with_device = ",device" if gpu or blocks is not None else ""
    roles = parse_roles(f"worker,scheduler,gateway,redis{with_device}" if kill is None else kill)
    options = DrillOptions(
        model=model.absolute(), seconds=60 * minutes, roles=roles, kinds=parse_kinds(faults), every_s=every,
        seed=seed, fsync=fsync, requests=requests, longest_answer=longest_answer, stages=stages, replicas=replicas,
        gateways=gateways, schedulers=schedulers, upgrade=upgrade, users=users, upgrade_from=upgrade_from,
        plan=plan and plan.absolute(), apply=apply and apply.absolute(), gpu=gpu, stage_devices=stage_devices,
        blocks=blocks and blocks.absolute(), sequential=sequential,
    )  # fmt: skip
    need("launcher")
    from blockrelay_launcher.drill.command import run_drill

    raise typer.Exit(run_drill(options, as_json=as_json))


def _numbers(text: str, option: str) -> tuple[int, ...]:
    """Returns the numbers of a text such as `1,4,16`. Raises UsageError that names the option."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{option} takes whole numbers with commas between them, not {text!r}") from None
