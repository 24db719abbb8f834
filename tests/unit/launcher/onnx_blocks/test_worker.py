"""The process that does a command's work."""

import subprocess
import sys

from blockrelay_launcher.drill.system import command_line
from tests.support.waiting import wait_until

PARENT = """
import sys
from blockrelay_launcher.onnx_blocks.worker import run_worker
child = "import os, time; print(os.getpid(), 'begun', flush=True); time.sleep(600)"
run_worker([sys.executable, "-c", child], lambda lines: print(lines.readline().decode(), flush=True))
"""


def test_it_ends_when_the_command_is_killed() -> None:
    """At once, whatever it does: the same command goes on with what it has left."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, begun = parent.stdout.readline().split()
        assert begun == "begun" and command_line(int(pid))
        parent.kill()
        parent.wait()
    wait_until(lambda: not command_line(int(pid)), "it has ended")
