"""Commands of blockrelay as people type them, in a process of their own."""

import os
import signal
import subprocess
from pathlib import Path

from tests.support.systems.up_process import COMMAND
from tests.support.waiting import wait_until

INTERRUPTED = "interrupted: the same command continues from the files that are written\n"


def run(*argv: str | Path, path: Path | None = None, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """A command that has ended; modules are looked for in `path` first."""
    env = _looking_in(path) if path else None
    command = [*COMMAND, *map(str, argv)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False, env=env)


def run_without_onnx(path: Path, *argv: str | Path) -> "subprocess.CompletedProcess[str]":
    """The command where the package `onnx` is not installed; `path` is an empty folder."""
    (path / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'onnx' else find(name, *more)\n"
    )
    return run(*argv, path=path)


def interrupt(path: Path, written: Path, *argv: str | Path, pause_s: float) -> None:
    """Presses Ctrl-C when the file `written` is there, on a disk that takes `pause_s` for each file."""
    (path / "sitecustomize.py").write_text(
        "import os, time\nfsync = os.fsync\n"
        f"def slow(*a):\n    time.sleep({pause_s})\n    return fsync(*a)\nos.fsync = slow\n"
    )
    with subprocess.Popen(
        [*COMMAND, *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_looking_in(path)
    ) as process:
        wait_until(written.exists, "a file is written", timeout_s=60)
        process.send_signal(signal.SIGINT)
        told, err = process.communicate(timeout=60)
    assert (process.returncode, told, err) == (130, "", INTERRUPTED)


def _looking_in(path: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
