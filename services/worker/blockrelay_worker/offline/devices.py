"""`python -m blockrelay_worker.offline.devices`: lists this machine's devices, and whether a stage can run on each.

With `--json` one object is printed: onnxruntime (its version); devices, a list of objects with id, name, kind (cpu,
gpu, npu), vendor, uuid, memory_bytes, driver (null: not known), features, problem (empty: it can be used) and missing
(true: the device, or what it needs, is not here; false: it is here and fails); and slow, why CPU workers
compute more slowly than this CPU can (empty: they do not). Exit code 2 if several distributions of ONNX Runtime are
installed in one environment.

`retry ID` makes workers that lost this device, and wait before they try it again, try it now. Exit code 2 if no
worker waits for it.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockrelay.command_app import run_app
from blockrelay.errors import UsageError
from blockrelay.quantities import aligned
from blockrelay.redis.cell_address import connected, find_cell
from blockrelay.redis.registry import read_lost_devices, retry_lost_device
from blockrelay_worker.execution.onnx.installation import check_one_onnxruntime

if TYPE_CHECKING:
    from blockrelay_worker.execution.onnx.devices import FoundDevice

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def devices(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Show this machine's devices, what each can do, and why one cannot be used."""
    if context.invoked_subcommand is not None:
        return
    check_one_onnxruntime()
    # Imported after the check above: with two ONNX Runtimes in one environment, the import may fail.
    from blockrelay_worker.execution.onnx.devices import devices_here, onnxruntime_version
    from blockrelay_worker.kernels.libraries import shortcoming

    here, slow = devices_here(os.environ), shortcoming()
    if as_json:
        report = {"onnxruntime": onnxruntime_version(), "devices": [asdict(one) for one in here], "slow": slow}
        typer.echo(json.dumps(report))
    else:
        typer.echo(table(here))
        if slow:
            typer.echo(f"slow: {slow}")


@app.command()
def retry(
    device: Annotated[str, typer.Argument(metavar="ID", help="A lost device, as `blockrelay status` names it.")],
    redis_url: Annotated[str | None, typer.Option("--redis", metavar="URL", help="Control Redis of the cell.")] = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Data folder of a running `blockrelay up`.")
    ] = None,
) -> None:
    """Try a device that was lost now, quarantine or not."""
    cell = find_cell(redis_url, data)
    with connected(cell) as client:
        lost = read_lost_devices(client, cell.keys)
        matching = [one for one in lost if device in (one.device, one.name)]
        if not matching:
            there = ", ".join(one.device for one in lost) or "none"
            raise UsageError(f"no worker of cell {cell.settings.cell} waits for {device}; lost devices: {there}")
        for one in matching:
            retry_lost_device(client, cell.keys, one)
            typer.echo(f"{one.worker} tries {one.device} now")


def table(devices: "list[FoundDevice]") -> str:
    """A text table with a line for each device."""
    rows = [("DEVICE", "CLASS", "NAME", "VENDOR", "MEMORY", "DRIVER", "FLOATS", "USABLE")]
    for one in devices:
        memory = "" if one.memory_bytes is None else f"{one.memory_bytes / 2**30:.1f} GiB"
        usable = f"no: {one.problem}" if one.problem else "yes"
        rows.append((one.id, one.kind, one.name, one.vendor, memory, one.driver or "", " ".join(one.features), usable))
    return aligned(rows)


def run(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code (see `run_app`)."""
    return run_app(app, arguments, name="blockrelay devices")


if __name__ == "__main__":
    sys.exit(run())
