"""Asks the worker what every block computes for the fixed input. Another process: services do not import each other."""

import subprocess
import sys
from pathlib import Path

from blockrelay.errors import ExecutionError
from blockrelay.manifest import Manifest
from blockrelay.strict_json import Fields

_MODULE = "blockrelay_worker.known_answers"


def known_answers(folder: Path, manifest: Manifest) -> dict[int, str]:
    """Block index -> SHA-256 (hex) of its output, computed from the folder's files alone.

    ExecutionError carries the worker's last line if it fails.
    """
    done = subprocess.run([sys.executable, "-m", _MODULE, str(folder)], capture_output=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise ExecutionError(f"the known answers could not be computed: {lines[-1]}")
    answers = Fields.parse(done.stdout, _MODULE, ExecutionError)
    found = {block.index: answers.text(block.name) for block in manifest.blocks}
    answers.done()
    return found
