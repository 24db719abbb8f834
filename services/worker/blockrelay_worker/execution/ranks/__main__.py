"""`python -m blockrelay_worker.execution.ranks PARENT`: a rank, started by the worker with pid PARENT, which is rank 0.

It ends when its worker does, from its first moment on: what takes long to import is imported later.
"""

import sys

from blockrelay.host.parent_death import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    from blockrelay_worker.execution.ranks.member import main

    sys.exit(main())
