"""The `blockrelay` command and its options.

Exit codes: 0 done, 1 something failed, 2 the request is impossible, 130 after Ctrl-C.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from blockrelay.command_app import run_app
from blockrelay.extras import need
from blockrelay.settings import check_names, is_link
from blockrelay.up_file import read_running
from blockrelay_launcher.cli import api_keys, cells, dead_letters, measure, status_events
from blockrelay_launcher.cli import status as cell_status
from blockrelay_launcher.cli.cell_options import CellOptions
from blockrelay_launcher.cli.groups import Grouped
from blockrelay_launcher.cli.version import version_text
from blockrelay_launcher.demo.options import DemoOptions
from blockrelay_launcher.onnx_blocks import command as onnx_blocks
from blockrelay_launcher.option_groups import with_option_groups
from blockrelay_launcher.other_services import OTHER_SERVICES, become
from blockrelay_launcher.supervisor.up import up
from blockrelay_launcher.up_options.groups import (
    AdvancedOptions,
    DeviceOptions,
    LimitOptions,
    NetworkOptions,
    ServedModelOptions,
    TopologyOptions,
)
from blockrelay_launcher.up_options.options import composed

app = typer.Typer(
    name="blockrelay", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, cls=Grouped,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

app.add_typer(api_keys.app)
app.add_typer(dead_letters.app)
app.add_typer(measure.app)
app.add_typer(onnx_blocks.app)


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


@app.command("up")
@with_option_groups
def start(
    model: ServedModelOptions,
    topology: TopologyOptions,
    devices: DeviceOptions,
    limits: LimitOptions,
    network: NetworkOptions,
    advanced: AdvancedOptions,
) -> None:
    """Start a whole system on this machine: Redis, scheduler, workers, gateway. Ctrl-C drains and ends it."""
    need("launcher")
    from blockrelay_launcher.up_options.topology import options_for, read_topology

    options = composed(model, devices, topology, limits, network, advanced)
    if topology.topology is not None:
        options = options_for(read_topology(topology.topology), options)
    raise typer.Exit(up(options))


@app.command("status")
@with_option_groups
def show_status(
    named: CellOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show the events of all stages as they happen, until Ctrl-C.")
    ] = False,
) -> None:
    """Show the plan, the workers and the queue."""
    cell = named.find()
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            status_events.follow(cell, typer.echo, as_json=as_json)
        return
    status = cell_status.read_status(cell)
    cell_status.add_totals(status)
    status["refused"] = read_running(named.data).refused if named.data else {}
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
@with_option_groups
def cancel(
    request: Annotated[str, typer.Argument(metavar="ID", help="Id of the request: req-..., cmpl-... or chatcmpl-...")],
    named: CellOptions,
) -> None:
    """Cancel a request that waits or runs."""
    typer.echo(cell_status.cancel(named.find(), request))


@app.command("demo")
@with_option_groups
def demo(options: DemoOptions) -> None:
    """Start a system, stream one answer to the terminal, show its times, and end the system."""
    need("launcher")
    from blockrelay_launcher.demo.command import run_demo

    raise typer.Exit(run_demo(options))


_FORWARDED = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
Arguments = Annotated[list[str] | None, typer.Argument(metavar="...", help="See --help of the command itself.")]


def _pass_on(name: str) -> None:
    """Adds a command that another process runs, with its own options and help."""

    @app.command(name, context_settings=_FORWARDED, add_help_option=False)
    def command(arguments: Arguments = None) -> None:  # pyright: ignore[reportUnusedFunction]
        become(name, arguments)


for _name in OTHER_SERVICES:
    _pass_on(_name)


def main() -> None:
    """Runs the command line and exits. Expected errors and wrong options give one line on stderr."""
    sys.exit(run_app(app, name="blockrelay"))
