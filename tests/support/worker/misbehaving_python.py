"""A Python for `--gpu-python` whose device misbehaves as tests/support/worker/failing_child.py says, or another module.

Everything else that is run under it, such as `blockrelay devices`, runs as under the Python of the tests.
"""

import os
import shlex
import sys
from pathlib import Path

from blockrelay_worker.execution.process.device_process import CHILD

FAILING = "tests.support.worker.failing_child"
COMMANDED = "tests.support.worker.commanded_child"


def misbehaving_python(folder: Path, module: str = FAILING, **how: str) -> str:
    """Its path. A worker calls it as `PATH -P -m MODULE PID`; `module` runs in the place of the device's process."""
    variables = how | {"PYTHONPATH": os.pathsep.join(sys.path)}
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    python = shlex.quote(sys.executable)
    device = f'if [ "$3" = {CHILD} ]; then exec {python} -P -m {module} "$4"; fi\n'
    path = folder / "python"
    path.write_text(f'#!/bin/sh\n{exports}{device}exec {python} "$@"\n')
    path.chmod(0o755)
    return str(path)
