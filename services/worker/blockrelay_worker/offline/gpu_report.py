"""`python -m blockrelay_worker.offline.gpu_report`: prints a JSON report on this machine's GPUs, for users to send.

It has versions, the devices of this machine, and the result of a trial with the bundled model for each usable device
but the CPU. With `--device` only that device is tried, which may be `cpu`. The report names no user, no host, no folder
and no UUID. Each device is tried in a process of its own. A trial that fails or crashes is reported, with exit code 0.
Exit code 2 for a `--device` that is not here, or if two ONNX Runtimes are installed.
"""

import getpass
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, replace
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockrelay import __version__
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.command_app import run_app
from blockrelay.host.child_command import how_it_ended, run_command
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_worker.execution.onnx.installation import check_one_onnxruntime
from blockrelay_worker.policy import GPU_REPORT_TRIAL_S

if TYPE_CHECKING:
    from blockrelay_worker.execution.onnx.devices import FoundDevice

#: Packages that decide how a device computes.
_PACKAGES = re.compile(r"onnx.*|openvino.*|numpy|nvidia-(cublas|cudnn|cuda-runtime).*")
#: The host's name in CUDA's errors, and the folders of paths: they are removed, a library's file name stays.
_HOST = re.compile(r"\bhostname=\S*")
_FOLDERS = re.compile(r"(?:[A-Za-z]:\\|\\\\)(?:[^\\\s'\"]+\\)*|(?<![\w/])/(?:[^/\s'\":]+/)+")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def gpu_report(
    device: Annotated[
        str, typer.Option(metavar="ID", help="Try this device alone; default: each that can be used.")
    ] = "",
    trial_only: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Print one JSON object about this machine's GPUs, with known answers and timings, to send to us."""
    check_one_onnxruntime()
    if trial_only:
        with redirect_stdout(sys.stderr):
            tried = _tried_here(device)
        typer.echo(json.dumps(tried))
        return
    # Imported after the check above: with two ONNX Runtimes in one environment, the import may fail.
    from blockrelay_worker.execution.onnx.devices import devices_here
    from blockrelay_worker.execution.onnx.providers.opening import open_provider

    with redirect_stdout(sys.stderr):
        devices = devices_here(os.environ)
        if device:
            device = open_provider(device).device  # replaces a UUID, which would identify the card
    chosen = [device] if device else [one.id for one in devices if not one.problem and one.kind != "cpu"]
    report = {
        "report": 1,
        "blockrelay": __version__,
        "python": platform.python_version(),
        "os": _anonymous(f"{platform.system()} {platform.release()} {platform.machine()}"),
        "packages": versions(),
        "devices": [_described(one) for one in devices],
        "trials": [_tried(one) for one in chosen],
    }
    typer.echo(json.dumps(report, indent=1))


def versions() -> dict[str, str]:
    """Versions, by name, of the installed packages that decide how a device computes."""
    named: dict[str, str] = {}
    for one in distributions():
        named.setdefault(str(one.metadata["Name"]).lower(), one.version)  # the first one is what is imported
    return {name: named[name] for name in sorted(named) if _PACKAGES.fullmatch(name)}


def anonymous(text: str, private: Iterable[str]) -> str:
    """Removes folders from `text`, and puts `...` in place of `private` words that stand alone. Pure.

    The host's name in CUDA's errors becomes `...` too.
    """
    text = _FOLDERS.sub("", _HOST.sub("hostname=...", text))
    for word in private:
        text = re.sub(rf"(?<![\w]){re.escape(word)}(?![\w])", "...", text)
    return text


def _anonymous(text: str) -> str:
    """Removes folders and the names of user and host from a message of a driver or library."""
    private = {socket.gethostname(), platform.node()}
    with suppress(OSError, KeyError):  # a user id without a name
        private.add(getpass.getuser())
    return anonymous(text, filter(None, private))


def _described(one: "FoundDevice") -> dict[str, Any]:
    return asdict(replace(one, uuid=None, problem=_anonymous(one.problem)))


def _tried(device: str) -> dict[str, Any]:
    """Runs the trial in a process of its own: a driver that crashes must not end the report."""
    command = [sys.executable, "-P", "-m", "blockrelay_worker.offline.gpu_report", "--trial-only", "--device", device]
    try:
        done = run_command(command, timeout_s=GPU_REPORT_TRIAL_S)
    except subprocess.TimeoutExpired:
        return {"device": device, "problem": f"no answer for {GPU_REPORT_TRIAL_S:g} s"}
    if done.code == 0:
        trial: dict[str, Any] = json.loads(done.stdout)
        return trial | {"problem": _anonymous(trial["problem"])}
    last_lines = _anonymous(" | ".join(done.stderr.strip().splitlines()[-5:]))
    return {"device": device, "problem": f"its process has ended {how_it_ended(done.code)}: {last_lines}"}


def _tried_here(device: str) -> dict[str, Any]:
    from blockrelay_worker.execution.onnx.providers.opening import open_provider
    from blockrelay_worker.offline.device_trial import try_device

    return asdict(try_device(open_provider(device), open_block_folder(BUNDLED_MODEL)))


def run(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code (see `run_app`)."""
    return run_app(app, arguments, name="blockrelay gpu-report")


if __name__ == "__main__":
    sys.exit(run())
