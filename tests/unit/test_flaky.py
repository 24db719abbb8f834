"""`make flaky` counts what fails, run by run and commit by commit, and leaves no loop behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.leaks import processes
from tests.support.project import ROOT
from tests.support.waiting import wait_until

#: What `make test ARGS=--junitxml=FILE` does here: it fails every third time, and hangs where it is told to.
SUITE = """
import os, sys, time
with open("runs", "a+") as file:
    file.write("run\\n")
    file.seek(0)
    bad = len(file.readlines()) % 3 == 0
if os.environ.get("HANG"):
    time.sleep(600)
one = f"<testcase classname='a.b' name='one'>{'<failure/>' if bad else ''}</testcase>"
with open(sys.argv[1].partition("=")[2], "w") as file:
    file.write(f"<testsuites><testsuite>{one}<testcase classname='a.b' name='two'/></testsuite></testsuites>")
sys.exit(bad)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "suite.py").write_text(SUITE)
    (tmp_path / "Makefile").write_text(f"test:\n\t{sys.executable} -S suite.py $(ARGS)\n")
    (tmp_path / ".gitignore").write_text("runs\n.flaky/\n")
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def command_for(project: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    """What to give to `subprocess`."""
    command = [sys.executable, "-m", "tests.flaky", *arguments]
    return {"args": command, "cwd": project, "env": {**os.environ, "PYTHONPATH": str(ROOT), **environment}}


def flaky(project: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(**command_for(project, *arguments), capture_output=True, text=True, check=False, timeout=100)
    return done.returncode, done.stdout + done.stderr


def tally(project: Path) -> list[dict[str, Any]]:
    (file,) = (project / ".flaky").glob("*.json")
    return json.loads(file.read_text())


def test_a_tally_is_filled_in_pieces_and_every_second_run_is_loaded(project: Path) -> None:
    code, said = flaky(project, "--times", "2", "--load", "2")
    assert code == 0 and "no test has failed" in said, said
    code, said = flaky(project, "--times", "2", "--load", "2")
    assert code == 1 and "1 of 4: a.b::one" in said and "two" not in said, said
    runs = tally(project)
    assert [run["load"] for run in runs] == [0, 2, 0, 2] and [run["tests"] for run in runs] == [2] * 4
    assert [bool(run["failed"]) for run in runs] == [False, False, True, False]


def test_a_change_is_a_key_of_its_own(project: Path) -> None:
    assert flaky(project)[0] == 0
    for text, code in (("one", 0), ("two", 1)):  # the third run fails
        (project / "new").write_text(text)
        assert flaky(project)[0] == code
    names = {path.stem for path in (project / ".flaky").glob("*.json")}
    assert len(names) == 3 and len({name.partition("-")[0] for name in names}) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_ends_no_loop_goes_on_and_the_run_does_not_count(project: Path, number: int) -> None:
    assert flaky(project)[0] == 0
    loops = lambda: [pid for pid, command in processes().items() if "getppid() == parent" in command]  # noqa: E731
    command = command_for(project, "--load", "2", HANG="1")
    with subprocess.Popen(**command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            wait_until(lambda: len(loops()) == 2 and len((project / "runs").read_text().split()) == 2, "it runs")
            process.send_signal(number)
            assert process.wait(30) != 0
            wait_until(lambda: not loops(), "the loops have ended")
        finally:
            with contextlib.suppress(ProcessLookupError):  # what `make` has started
                os.killpg(process.pid, signal.SIGKILL)
    assert len(tally(project)) == 1
