"""A service as of the release before: it speaks the lower of our two protocol numbers alone.

`python -m tests.support.systems.older_release blockrelay_worker`. With OLDER_RELEASE_PYTHON, the Python of a virtual
environment with a release that speaks that number, tests take that release itself.
"""

import os
import runpy
import sys

from blockrelay.protocol import number


def command() -> tuple[str, ...]:
    """What starts a service of it; the service's module comes behind."""
    if python := os.environ.get("OLDER_RELEASE_PYTHON"):
        return (python, "-P", "-m")
    return (sys.executable, "-m", __name__)


if __name__ == "__main__":
    lower = number.LOWEST_PROTOCOL
    number.__dict__.update(PROTOCOL=lower, NUMBERS=f"{lower}")
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
