"""`--at-most` begins no test when its time is over, and says how many it left out."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.project import ROOT

pytestmark = pytest.mark.thorough

CONFTEST = """
from tests.support.at_most import AtMost

def pytest_addoption(parser):
    parser.addoption("--at-most", type=float)

def pytest_configure(config):
    config.pluginmanager.register(AtMost(config, config.getoption("at_most")))
"""
TESTS = """
import pytest

@pytest.mark.parametrize("n", range(6))
def test_something(n):
    pass
"""


@pytest.mark.parametrize(("processes", "seconds", "runs"), [("0", "0", 0), ("2", "0", 0), ("0", "60", 6)])
def test_no_test_begins_when_the_time_is_over(tmp_path: Path, processes: str, seconds: str, runs: int) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_a.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        "/dev/null",
        "-p",
        "no:randomly",
        "--rootdir",
        str(tmp_path),
        "-n",
        processes,
    ]
    done = subprocess.run(
        [*command, "-o", f"pythonpath={ROOT}", "--at-most", seconds, str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (f"{runs} passed" in done.stdout) == bool(runs), done.stdout
    assert (f"NOT TESTED: {6 - runs} tests" in done.stdout) == (runs < 6), done.stdout
