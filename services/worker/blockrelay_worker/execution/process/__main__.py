"""`python -m blockrelay_worker.execution.process PARENT`: the process of a device, of the worker with that pid.

It ends when its worker does, from its first moment on: what takes long to import comes later.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Where nothing of ours can end it, since a driver holds the interpreter, Linux does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it was gone before
            sys.exit(0)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    from blockrelay_worker.execution.process.child import main

    sys.exit(main())
