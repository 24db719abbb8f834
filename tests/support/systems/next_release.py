"""A service of the next release: it speaks our protocol number and the one after it, which changes nothing else.

`python -m tests.support.systems.next_release blockrelay_worker`.
"""

import runpy
import sys

from blockrelay.protocol import number

NEXT = number.PROTOCOL + 1
#: What starts a service of it; the service's module comes behind.
COMMAND = (sys.executable, "-m", __name__)

if __name__ == "__main__":
    ours = number.PROTOCOL
    number.__dict__.update(PROTOCOL=NEXT, LOWEST_PROTOCOL=ours, NUMBERS=f"{ours} to {NEXT}")
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
