"""The `blockrelay` command and its options. Exit codes: 0 done, 1 something failed, 2 the request is impossible."""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from blockrelay.command_app import run_app
from blockrelay.errors import UsageError
from blockrelay.extras import need
from blockrelay.host.cpu import check_threads
from blockrelay.redis.cell_address import find_cell
from blockrelay.redis.connections import checked_url
from blockrelay.settings import BUNDLED_MODEL, check_names, is_link
from blockrelay.up_file import read_running
from blockrelay_launcher.cli import api_keys, cells, dead_letters, measure, status_events
from blockrelay_launcher.cli import status as cell_status
from blockrelay_launcher.cli.given import is_given
from blockrelay_launcher.cli.groups import Grouped
from blockrelay_launcher.cli.measure import Model
from blockrelay_launcher.cli.version import version_text
from blockrelay_launcher.onnx_blocks import command as onnx_blocks
from blockrelay_launcher.onnx_blocks.describe import BlocksOptions, StandInBy, served_blocks
from blockrelay_launcher.passed_on import become
from blockrelay_launcher.supervisor.embedded_redis import Fsync
from blockrelay_launcher.supervisor.up import up
from blockrelay_launcher.up_options.gpu_choice import first_gpus, named_gpus
from blockrelay_launcher.up_options.options import UpOptions
from blockrelay_launcher.up_options.plan_choice import PlanChoice

app = typer.Typer(
    name="blockrelay", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, cls=Grouped,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

app.add_typer(api_keys.app)
app.add_typer(dead_letters.app)
app.add_typer(measure.app)
app.add_typer(onnx_blocks.app)

RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis",
        metavar="URL",
        help="URL of the control Redis: redis://HOST:PORT/DB, unix://PATH, or redis+sentinel://, redis+cluster://.",
    ),
]
Data = Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Data folder of a running `blockrelay up`.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version_text())
        raise typer.Exit


@app.callback()
def root(
    shown: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_show_version,
            help="Show the release, protocol and numerics id, and exit.",
        ),
    ] = False,
) -> None:
    """Serves Llama-family models on the CPUs and GPUs people already have."""
    for name in [name for name, value in os.environ.items() if is_link(name, value)]:
        del os.environ[name]  # Kubernetes sets it for a service named blockrelay: no setting of ours
    check_names(os.environ)


#: Options of `up` that a topology file replaces.
OF_THE_TOPOLOGY = (
    "stages", "stage_devices", "plan", "strategy", "objective", "profile", "devices", "replicas", "gpu_workers",
    "gpu", "gpu_memory", "gateways", "schedulers", "redis", "payload_redis",
)  # fmt: skip


@app.command("up")
def start(
    command: typer.Context,
    model: Model = BUNDLED_MODEL,
    blocks: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Serve ONNX blocks that you own, as they are, instead of --model."),
    ] = None,
    max_position: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --blocks: length of the context in tokens.")
    ] = None,
    stand_in: Annotated[
        StandInBy | None,
        typer.Option(help="With --blocks --gpu: what CPU workers compute with; default: imported, if possible."),
    ] = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="With --blocks: run block after block, with few of them in memory.")
    ] = False,
    max_warm_sessions: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="With --sequential: most blocks in memory; default: GPU 5, CPU 3."),
    ] = None,
    memory: Annotated[
        int | None, typer.Option(min=1, metavar="BYTES", help="With --sequential: most bytes of the blocks in memory.")
    ] = None,
    stages: Annotated[int, typer.Option(min=1, help="Number of stages that the model is cut into.")] = 1,
    stage_devices: Annotated[
        str, typer.Option(metavar="CLASSES", help="Class of device for each of --stages, gpu or cpu: gpu,cpu,gpu.")
    ] = "",
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Use the stages of this plan (blockrelay plan --json) instead of --stages."),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Let this strategy plan the stages; for its other options use blockrelay plan --json and --plan.",
        ),
    ] = None,
    objective: Annotated[
        str | None, typer.Option(metavar="AIM", help="With --strategy: latency or throughput.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --strategy: the file that blockrelay profile wrote.")
    ] = None,
    devices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --strategy: file of the devices; default: this machine.")
    ] = None,
    topology: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of all hosts, their devices and roles; --host names this host in it."),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Number of CPU workers per stage.")] = 1,
    gpu_workers: Annotated[
        int, typer.Option(min=0, help="Run workers on the first N GPUs of blockrelay devices, instead of --gpu.")
    ] = 0,
    gpu: Annotated[
        str, typer.Option(metavar="ID,ID", help="Run workers on these GPUs, such as webgpu:0 (blockrelay devices).")
    ] = "",
    gpu_memory: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="BYTES",
            help="Most bytes of each GPU's memory for weights and KV pages; default: most of what is free.",
        ),
    ] = None,
    gateways: Annotated[
        int, typer.Option(min=1, help="Number of gateways, on consecutive ports; clients may use any.")
    ] = 1,
    schedulers: Annotated[
        int,
        typer.Option(
            min=1, help="Number of schedulers; one is enough, with more the system survives the death of one."
        ),
    ] = 1,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address of the gateway; default: 127.0.0.1. With --topology: name of this host in the file."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the first gateway; 0 picks a free one.")] = 8000,
    redis: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Control Redis to use (AOF, fsync always) instead of an embedded one."),
    ] = None,
    payload_redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Redis for activations between stages, without AOF; default: that of --redis."
        ),
    ] = None,
    fsync: Annotated[
        Fsync,
        typer.Option(help="When the embedded Redis syncs to disk; with everysec a crash loses up to 2 s."),
    ] = "always",
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep accepted requests in this folder and continue them at the next start."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, callback=check_threads, help="Threads per worker; default: the cores, shared by one stage's workers."
        ),
    ] = None,
    speculation: Annotated[
        bool,
        typer.Option("--speculation/--no-speculation", help="Draft repeated text ahead (speculation); same answers."),
    ] = True,
    prefix_cache: Annotated[
        bool,
        typer.Option("--prefix-cache/--no-prefix-cache", help="Reuse KV pages of prompts with the same beginning."),
    ] = True,
    page_store_bytes: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Bytes of KV pages shared in /dev/shm; 0: none; default: 1/8 of the free memory."
        ),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Accept only API keys of this file (see: blockrelay keys)."),
    ] = None,
    cors_origins: Annotated[
        str | None,
        typer.Option(metavar="URL,...", help="Origins of web pages that may use the gateway; with API keys also *."),
    ] = None,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Host names that the gateway accepts, besides localhost; *: any."),
    ] = None,
    root_path: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Path prefix under which a proxy publishes the gateway, such as /llm."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Write every log line to stderr, not only errors.")
    ] = False,
) -> None:
    """Start a whole system on this machine: Redis, scheduler, workers, gateway. Ctrl-C drains and ends it."""
    need("launcher")
    from blockrelay_launcher.up_options.topology import options_for, read_topology

    if payload_redis and not redis:
        raise UsageError("--payload-redis needs --redis: the embedded Redis brings its own")
    if gpu_workers and gpu:
        raise UsageError("--gpu and --gpu-workers: the one names GPUs, the other takes the first ones")
    gpus = first_gpus(gpu_workers) if gpu_workers else named_gpus(list(filter(None, gpu.split(","))))
    if gpu_memory and not gpus:
        raise UsageError("--gpu-memory needs --gpu: CPU workers have BLOCKRELAY_KV_BYTES")
    if blocks is not None and (is_given(command, "model") or topology is not None):
        raise UsageError("--blocks is instead of --model and --topology: give one of them")
    served = served_blocks(BlocksOptions(
        folder=blocks, max_position=max_position, stand_in=stand_in, sequential=sequential,
        max_warm_sessions=max_warm_sessions, memory=memory,
    ), gpus=bool(gpus))  # fmt: skip
    options = UpOptions(
        model=(served.model if served else model).absolute(), blocks=served,
        plan=PlanChoice(
            stages=stages, stage_devices=stage_devices, plan=plan and plan.absolute(), strategy=strategy,
            objective=objective, profile=profile, devices=devices,
        ),
        replicas=replicas, gpus=gpus, gpu_memory=gpu_memory, gateways=gateways,
        schedulers=schedulers, fsync=fsync, host=host or "127.0.0.1", port=port,
        redis_url=redis and checked_url(redis), payload_redis_url=payload_redis and checked_url(payload_redis),
        data=data, threads=threads, speculation=speculation, prefix_cache=prefix_cache,
        page_store_bytes=page_store_bytes, api_keys=api_keys and api_keys.absolute(),
        cors_origins=cors_origins, allowed_hosts=allowed_hosts, root_path=root_path, verbose=verbose,
    )  # fmt: skip
    if topology is not None:
        for name in OF_THE_TOPOLOGY:
            if is_given(command, name):
                raise UsageError(f"--{name.replace('_', '-')} and --topology: the file says what runs where")
        options = options_for(read_topology(topology), host, options)
    raise typer.Exit(up(options))


@app.command("status")
def show_status(
    redis: RedisUrl = None,
    data: Data = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show the events of all stages as they happen, until Ctrl-C.")
    ] = False,
) -> None:
    """Show the plan, the workers and the queue."""
    cell = find_cell(redis, data)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            status_events.follow(cell, typer.echo, as_json=as_json)
        return
    status = cell_status.read_status(cell)
    cell_status.add_totals(status)
    status["refused"] = read_running(data).refused if data else {}
    typer.echo(json.dumps(status, indent=1)) if as_json else cell_status.show(status)


@app.command("cells")
def show_cells(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="File of cells; default: BLOCKRELAY_CELLS.")
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file that gateways use now: check that the new one may replace it."),
    ] = None,
) -> None:
    """Check a file of cells; show which list is in force and the load of each cell."""
    cells.show(cells.read(file, before))


@app.command("cancel")
def cancel(
    request: Annotated[str, typer.Argument(metavar="ID", help="Id of the request: req-..., cmpl-... or chatcmpl-...")],
    redis: RedisUrl = None,
    data: Data = None,
) -> None:
    """Cancel a request that waits or runs."""
    typer.echo(cell_status.cancel(find_cell(redis, data), request))


@app.command("demo")
def demo(
    model: Model = BUNDLED_MODEL,
    stages: Annotated[int, typer.Option(min=1, help="Number of equal stages that the model is cut into.")] = 3,
    prompt: Annotated[str | None, typer.Option(help="Text that the answer continues.")] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", help="Chat instead: every line of stdin is a turn.")
    ] = False,
    batch: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Answer all prompts of this file, one per line: texts or JSON objects."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, max=1024, help="With --batch: most prompts at once; default: 8.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --batch: print a JSON object per prompt and one with the figures.")
    ] = False,
) -> None:
    """Start a system, stream one answer to the terminal, show its times, and end the system."""
    need("launcher")
    from blockrelay_launcher.demo.command import DemoOptions, run_demo

    options = DemoOptions(
        model=model.absolute(), stages=stages, prompt=prompt, interactive=interactive, batch=batch,
        concurrency=concurrency, as_json=as_json,
    )  # fmt: skip
    raise typer.Exit(run_demo(options))


_PASSED_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
Arguments = Annotated[list[str] | None, typer.Argument(metavar="...", help="See --help of the command itself.")]


@app.command("generate", context_settings=_PASSED_ON, add_help_option=False)
def generate(arguments: Arguments = None) -> None:
    """Generate text in one process, without services."""
    become("generate", arguments)


@app.command("evaluate", context_settings=_PASSED_ON, add_help_option=False)
def evaluate(arguments: Arguments = None) -> None:
    """Measure how well a model predicts a text (perplexity), in one process."""
    become("evaluate", arguments)


@app.command("convert", context_settings=_PASSED_ON, add_help_option=False)
def convert(arguments: Arguments = None) -> None:
    """Convert a Hugging Face checkpoint into a block folder."""
    become("convert", arguments)


@app.command("devices", context_settings=_PASSED_ON, add_help_option=False)
def devices(arguments: Arguments = None) -> None:
    """Show this machine's devices, what each can do, and why one cannot be used."""
    become("devices", arguments)


@app.command("gpu-report", context_settings=_PASSED_ON, add_help_option=False)
def gpu_report(arguments: Arguments = None) -> None:
    """Print one JSON object about this machine's GPUs, with known answers and timings, to send to us."""
    become("gpu-report", arguments)


@app.command("plan", context_settings=_PASSED_ON, add_help_option=False)
def plan(arguments: Arguments = None) -> None:
    """Choose which device runs which blocks, explain it, and compare plans."""
    become("plan", arguments)


@app.command("analyse", context_settings=_PASSED_ON, add_help_option=False)
def analyse(arguments: Arguments = None) -> None:
    """Show what each block of a model costs, and with --sizing what a load of it needs."""
    become("analyse", arguments)


def main() -> None:
    """Runs the command line and exits. Expected errors and wrong options give one line on stderr."""
    sys.exit(run_app(app, name="blockrelay"))
