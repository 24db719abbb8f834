"""Failure points: what the setting may say, and what happens at a point."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from blockrelay import failpoints
from blockrelay.errors import ExecutionError, RedisUnavailable, UsageError
from blockrelay.failpoints import POINTS, SCRIPTS, Trap, arm, parse, reach, reach_script
from blockrelay.protocol.transitions.source import NAMES
from tests.support.systems.fault_stand import state_of
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def disarmed():
    yield
    arm("worker", "")


def test_a_setting_is_a_list_of_traps() -> None:
    assert parse("") == parse(" ") == ()
    assert parse("worker.after_commit:kill@3, gateway.before_read:delay=0.5") == (
        Trap("worker.after_commit", "kill", 0.0, 3),
        Trap("gateway.before_read", "delay", 0.5, 1),
    )


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("worker.before_lunch:kill", "worker.before_claim"),
        ("worker.before_claim:explode", "kill, stop, raise, delay"),
        ("worker.before_claim", "<point>:<action>"),
        ("worker.before_claim:kill@0", "count from 1"),
        ("worker.before_claim:delay", "=<seconds>"),
        ("worker.before_claim:kill=3", "=<seconds>"),
        ("worker.before_page_put:raise", "no failure"),
        ("worker.before_claim:kill#7", "tokens are not known"),
        ("worker.before_compute:kill#7@2", "<point>:<action>"),
    ],
)
def test_what_is_no_setting_is_refused_with_what_there_is(setting: str, told: str) -> None:
    with pytest.raises(UsageError, match=f"BLOCKRELAY_FAILPOINT: .*{re.escape(told)}"):
        arm("worker", setting)


@pytest.mark.parametrize(
    "service", ["scheduler", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("worker", "gateway"))]
)
def test_no_service_starts_with_a_name_that_does_not_exist(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKRELAY_FAILPOINT", "worker.before_lunch:kill")
    done = subprocess.run([sys.executable, "-m", f"blockrelay_{service}"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "worker.before_claim" in done.stderr and done.stderr.count("\n") == 1


def test_a_trap_springs_once_at_its_passage_and_only_in_its_role() -> None:
    arm("worker", "worker.before_forward:raise@2,gateway.before_read:raise")
    reach("worker.before_forward")
    with pytest.raises(RedisUnavailable, match=r"worker\.before_forward"):
        reach("worker.before_forward")
    reach("worker.before_forward")
    reach("gateway.before_read")
    reach_script("before", "commit")


def test_a_trap_for_a_token_springs_whenever_it_is_computed() -> None:
    assert parse("worker.before_compute:kill#77") == (Trap("worker.before_compute", "kill", 0.0, 1, 77),)
    arm("worker", "worker.before_compute:raise#7")
    for _ in range(2):
        reach("worker.before_compute", [5, 6])
        with pytest.raises(ExecutionError):
            reach("worker.before_compute", [6, 7])


def test_scripts_have_points_around_them() -> None:
    arm("scheduler", "scheduler.after_plan:raise")
    reach_script("before", "plan")
    with pytest.raises(RedisUnavailable):
        reach_script("after", "plan")


@pytest.mark.parametrize(("action", "code"), [("kill", -signal.SIGKILL), ("delay=0.01", 0)])
def test_actions_meet_the_process_itself(action: str, code: int) -> None:
    program = (
        "from blockrelay.failpoints import *; import sys; arm('worker', sys.argv[1]); reach_script('after', 'claim')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, f"worker.after_claim:{action}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == code and "FAILPOINT" in done.stdout + done.stderr


SLEEPER = """
import sys, threading
from blockrelay.failpoints import arm, reach

def work():
    for passage in range(1, NAPS + 1):
        reach("worker.before_commit")
        print(passage, flush=True)

arm("worker", ",".join(f"worker.before_commit:stop@{n}" for n in range(1, NAPS + 1)))
thread = threading.Thread(target=work)
thread.start()
thread.join()
""".replace("NAPS", "40")


def test_nothing_behind_a_point_happens_before_the_process_is_woken() -> None:
    """Whichever thread takes the signal, the one at the point goes no further."""
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        os.set_blocking(pipe, False)
        printed: list[bytes] = []

        def read() -> int:
            with contextlib.suppress(BlockingIOError):
                printed.extend(line for line in os.read(pipe, 65536).splitlines() if line.isdigit())
            return len(printed)

        try:
            for passed in range(40):
                wait_until(lambda: state_of(process.pid) == "T", "it sleeps", poll_s=0.001)
                assert read() == passed
                process.send_signal(signal.SIGCONT)
                wait_until(lambda: read() > passed, "it goes on", poll_s=0.001)  # noqa: B023
        finally:
            process.kill()


def test_every_line_in_the_services_is_in_the_table_and_the_other_way_round() -> None:
    sources = [p.read_text() for p in (ROOT / "services").rglob("*.py")]
    used = {name for text in sources for name in re.findall(r'reach\("([a-z_.]+)"[,)]', text)}
    scripts = {
        f"{role}.{m}_{script}" for role, names in SCRIPTS.items() for script in names for m in ("before", "after")
    }
    assert used == set(POINTS) - scripts
    assert {script for names in SCRIPTS.values() for script in names} == set(NAMES)


def test_the_document_names_every_point() -> None:
    text = (ROOT / "docs" / "states.md").read_text()
    for point in POINTS:
        (row,) = [row for row in text.splitlines() if row.startswith("| ") and f"`{point}`" in row]
        assert row.endswith("| yes |" if failpoints.FAILURES[point] is not None else "| no |"), point
