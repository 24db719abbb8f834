"""A Python for `--gpu-python` whose device misbehaves as tests/support/worker/failing_child.py says."""

import os
import shlex
import sys
from pathlib import Path


def misbehaving_python(folder: Path, **how: str) -> str:
    """Its path. A worker calls it as `PATH -P -m MODULE PID`."""
    variables = how | {"PYTHONPATH": os.pathsep.join(sys.path)}
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    command = f'exec {shlex.quote(sys.executable)} -P -m tests.support.worker.failing_child "$4"\n'
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{exports}{command}")
    path.chmod(0o755)
    return str(path)
