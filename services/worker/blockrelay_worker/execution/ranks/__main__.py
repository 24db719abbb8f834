"""`python -m blockrelay_worker.execution.ranks PARENT`: a rank, started by the worker with pid PARENT, which is rank 0.

It ends when its worker does, from its first moment on: what takes long to import is imported later.
"""

import signal
import sys

from blockrelay.host.parent_death import die_with

if __name__ == "__main__":
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a terminal signals all processes, and the worker decides when to end
        signal.signal(number, signal.SIG_IGN)
    die_with(int(sys.argv[1]))
    from blockrelay_worker.execution.ranks.member import main

    sys.exit(main())
