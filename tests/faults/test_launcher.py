"""Every point of the launcher: it dies there, and the next `up` on the same data finishes what was accepted."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockrelay.failpoints import FAILURES, POINTS
from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay_launcher.drill.system import command_line
from tests.support.systems.up_process import run_command, running_up
from tests.support.waiting import wait_until

TOKENS = 300
#: The third process is the scheduler, the fourth the worker: Redis runs already, the gateway does not.
PASSAGES = {"spawn": 4}
CASES = [
    f"{point}:{action}"
    for point in POINTS
    if point.startswith("launcher.")
    for action in ("kill", "raise", "delay=0.3")
    if action != "raise" or FAILURES[point] is not None
]
pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def abandoned(tiny_model: Path) -> Iterator[tuple[Path, str, list[int]]]:
    """The data of an `up` that was killed with an accepted request, its id, and what it would have answered."""
    with tempfile.TemporaryDirectory(prefix="br-up-") as folder:
        data = Path(folder) / "d"
        with running_up(tiny_model, data=data) as up:
            undisturbed = up.tokens(max_tokens=TOKENS)
            children = up.children()
            (worker,) = up.pid_of("blockrelay_worker")
            os.kill(worker, signal.SIGSTOP)  # so that the request is accepted and not finished
            accepted = up.complete(max_tokens=TOKENS, background=True)
            up.stop(signal.SIGKILL)
            wait_until(lambda: not any(command_line(pid) for pid in children), "all children have ended")
        yield data, own_id(accepted["id"]), undisturbed


@pytest.mark.parametrize("case", CASES)
def test_a_launcher_fails_at_every_point(
    tiny_model: Path, abandoned: tuple[Path, str, list[int]], tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, request_id, undisturbed = abandoned
    with tempfile.TemporaryDirectory(prefix="br-up-") as folder:  # short: unix socket paths are limited
        data = Path(folder) / "d"
        shutil.copytree(source, data, ignore=shutil.ignore_patterns("*.sock"))
        point, action = case.split(":")
        monkeypatch.setenv("BLOCKRELAY_FAILPOINT", f"{case}@{PASSAGES.get(point.split('_', 1)[1], 1)}")
        if action == "kill":
            done = run_command("up", "--model", tiny_model, "--port", "0", "--data", data)
            assert done.returncode == -signal.SIGKILL and point in done.stdout + done.stderr
            monkeypatch.delenv("BLOCKRELAY_FAILPOINT")
        with running_up(tiny_model, data=data) as up:
            assert up.finished(request_id) == undisturbed
            assert up.stop() == 0
