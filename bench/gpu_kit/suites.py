"""Runs the tests of the WebGPU executor on this machine's device: `python -m bench.gpu_kit.suites [--float16]`.

`--story` runs instead a system of CPU and GPU stages whose device is killed during answers, and compares all answers
(tests/stories/test_source.py). The figures are reported after each test: how many passed, and which failed.
"""

import argparse
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from bench.gpu_kit.machine import ROOT
from bench.gpu_kit.parts import NOT_HERE, tell

EXECUTORS, STORY = "tests/unit/worker/execution", "tests/stories/test_source.py"
#: Tests that take SwiftShader, a driver that computes on CPUs, only minutes.
SMALL = (f"{EXECUTORS}/test_every_executor.py", f"{EXECUTORS}/onnx/test_selection.py")
#: The only plug-ins of pytest that are loaded, whichever the machine has.
PLUGINS = ("xdist.plugin", "pytest_timeout", "pytest_asyncio.plugin")
#: Most processes of tests on one device, and most lines of a failure in the figures.
_PROCESSES, _LINES = 6, 6


@dataclass(slots=True)
class Outcomes:
    """A plug-in of pytest that counts outcomes, and reports the figures after each test."""

    counts: Counter[str] = field(default_factory=Counter[str])
    failed: dict[str, str] = field(default_factory=dict[str, str])

    def figures(self) -> dict[str, Any]:
        """Returns the counts of outcomes, and the end of each failure by test."""
        return {**{name: self.counts[name] for name in ("passed", "failed", "skipped")}, "failures": self.failed}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts an outcome; pytest calls it."""
        if report.failed:
            self.counts["failed"] += report.nodeid not in self.failed
            self.failed[report.nodeid] = "\n".join(report.longreprtext.splitlines()[-_LINES:])
        elif report.skipped or report.when == "call":
            self.counts[report.outcome] += 1
        tell(self.figures())


def arguments(*, story: bool, small: bool, float16: bool) -> list[str]:
    """Returns the arguments of pytest for the suites that a GPU can run, or with `story` for the story alone.

    `small`: only some tests, for a driver that computes on CPUs. `float16`: the device has it.
    """
    marked = "software_gpu and not driver_on_cpu" + ("" if float16 else " and not float16")
    chosen = [STORY] if story else [*SMALL, "-k", "fp32 or selection"] if small else [EXECUTORS]
    spread = [] if story or small else ["-n", str(min(_PROCESSES, os.cpu_count() or 1)), "--dist", "loadfile"]
    limit = "900" if small else "75"
    return ["-q", "-p", "no:cacheprovider", "-W", "default", "--timeout", limit, "-m", marked, *spread, *chosen]


def main() -> int:
    """Runs the tests and returns pytest's exit code; NOT_HERE without a checkout's tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("story", "small", "float16"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    if not (ROOT / "tests").is_dir():
        print("the tests are not beside the kit: it belongs into a checkout")
        return NOT_HERE
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    outcomes = Outcomes()
    plugins = [word for name in PLUGINS for word in ("-p", name)]
    code = pytest.main([*plugins, *arguments(**vars(options))], plugins=[outcomes])
    tell(outcomes.figures())
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
