"""`--at-most SECONDS`: no test begins later than that. The short form of a suite that takes longer.

The order is a random one, so that run after run reaches all. How many were left out is said at the end.
"""

import time
from typing import Any

import pytest


class AtMost:
    """Of one pytest process; with xdist the one that the user started adds up what the others left out."""

    def __init__(self, config: pytest.Config, seconds: float) -> None:
        self._config, self._seconds = config, seconds
        self._end = time.monotonic() + seconds
        self._left_out = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """True: dealt with."""
        if time.monotonic() < self._end:
            return None
        self._left_out += 1
        return True

    def pytest_sessionfinish(self) -> None:
        output: dict[str, Any] | None = getattr(self._config, "workeroutput", None)
        if output is not None:
            output["left_out"] = self._left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._left_out += getattr(node, "workeroutput", {}).get("left_out", 0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left_out:
            terminalreporter.write_line(f"NOT TESTED: {self._left_out} tests; {self._seconds:.0f} s had passed")
