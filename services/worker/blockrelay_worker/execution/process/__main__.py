"""`python -m blockrelay_worker.execution.process PARENT`: the process of a device, started by the worker with pid
PARENT.

It ends when its worker does, from its first moment on: what takes long to import is imported later. While a driver
holds the interpreter, no code of this process can end it.
"""

import sys

from blockrelay.host.parent_death import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    from blockrelay_worker.execution.process.child import main

    sys.exit(main())
