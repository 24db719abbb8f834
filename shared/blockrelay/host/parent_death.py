"""Ends a process when the one that started it dies. Imported at the first moment of a child: it imports little."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Asks Linux to kill this process when the process `parent` dies, also while no code of it can run.

    Exits with 0 if `parent` is not this process's parent any more: it has died. Does nothing on other systems.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent had died before prctl
            sys.exit(0)
