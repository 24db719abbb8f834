"""`python -m blockrelay_worker.execution.process PARENT`: the process of a device, started by the worker with pid
PARENT.

It ends when its worker does, from its first moment on: what takes long to import is imported later.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Asks Linux to kill this process when the process `parent` dies: while a driver holds the interpreter, no code of
    this process can end it. Exits with 0 if `parent` is not this process's parent any more: it has died. Does nothing
    on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent had died before prctl
            sys.exit(0)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    from blockrelay_worker.execution.process.child import main

    sys.exit(main())
