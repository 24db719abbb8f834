"""Every point of a scheduler and of a gateway, once with each action."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from blockrelay.failpoints import FAILURES, POINTS
from blockrelay.protocol.keys import SCRIPTS_OF
from tests.support.systems.fault_stand import (
    DEAD_AFTER_S,
    TOKENS,
    Stand,
    body_of,
    positions_and_tokens,
    shapes,
    standing,
)
from tests.support.systems.system import Job, assert_nothing_is_held
from tests.support.waiting import wait_until

#: Some of all for the default suite.
QUICK = ("scheduler.after_dead:kill", "gateway.after_event:kill", "gateway.after_accept:kill")
ACTIONS = ("kill", "stop", "raise", "delay=0.2")


def cases(role: str, *effects: str) -> list[Any]:
    """Marked parameters: every action that the points know."""
    found: list[Any] = []
    for action in ACTIONS:
        for point in POINTS:
            if not point.startswith(f"{role}.") or (effects and point.split("_", 1)[1] not in effects):
                continue
            if action != "raise" or FAILURES[point] is not None:
                case = f"{point}:{action}"
                found.append(case if case in QUICK else pytest.param(case, marks=pytest.mark.faults))
    return found


@pytest.fixture(scope="module")
def stand(tiny_model: Path) -> Iterator[Stand]:
    # With local rows the worker beside a dead one is faster than a scheduler.
    with standing(tiny_model, local_rows="off") as running:
        yield running


@pytest.fixture(scope="module")
def healthy(stand: Stand) -> str:
    """The URL of a gateway that nothing happens to."""
    url, _ = stand.system.start_gateway()
    return url


# --- scheduler ---


def plan_anew(stand: Stand) -> None:
    """A worker of the first stage goes and another comes."""
    stand.vacate(0)
    stand.worker()


def lose_a_worker(stand: Stand) -> None:
    os.kill(stand.system.pid_of(0), signal.SIGKILL)
    stand.worker()


def freeze_under_jobs(stand: Stand) -> tuple[int, list[Job]]:
    """The process of the last stage, which stands still, and jobs that do so with it: they have begun and not ended."""
    while True:
        jobs = stand.accept()
        wait_until(lambda: stand.system.tokens_so_far(jobs) > 10, "they run")  # noqa: B023
        frozen = stand.system.pid_of(1)
        os.kill(frozen, signal.SIGSTOP)
        if not stand.system.all_ended(jobs):
            return frozen, jobs
        os.kill(frozen, signal.SIGCONT)  # they were faster than this test


#: UPGRADE is called when the next release has come: tests/contract/test_protocol.py and test_two_releases.
SCHEDULER = [name.lower() for name in SCRIPTS_OF["scheduler"] if name != "UPGRADE"]


@pytest.mark.parametrize("case", cases("scheduler", *SCHEDULER))
def test_a_scheduler_fails_at_every_point(stand: Stand, case: str) -> None:
    point, action = case.split(":")
    action = action.partition("=")[0]
    effect = point.split("_", 1)[1]
    stand.full()
    scheduler = stand.system.scheduler
    assert scheduler is not None
    scheduler.kill()
    scheduler.wait()
    late: Job | None = None
    frozen = 0
    settings: dict[str, str] = {}
    jobs = stand.accept() if effect != "rerun" else []
    match effect:
        case "plan":
            plan_anew(stand)
        case "dead":
            wait_until(lambda: stand.system.tokens_so_far(jobs) > 10, "they run")
            lose_a_worker(stand)
        case "migrate":  # once a second
            wait_until(lambda: stand.system.tokens_so_far(jobs) > 10, "they run")
        case "rerun":  # stalled: its worker beats no more, and is not yet dead
            frozen, jobs = freeze_under_jobs(stand)
            settings = {"dead_after_s": "60", "stalled_after_s": "0.2", "prompt_tokens_per_s": "100000"}
        case _:
            late = stand.jobs()[0]
            stand.check(jobs)
            stand.vacate(0)
            stand.system.accept(late, deadline_ms=stand.now_ms() + 1)
    victim = stand.system.start_scheduler(failpoint=case, **settings)
    try:
        stand.wait_sprung(victim, point, action)
    finally:
        if frozen:
            os.kill(frozen, signal.SIGCONT)
    if action in ("kill", "stop"):
        stand.system.start_scheduler()
    if late is not None:
        stand.worker()
        wait_until(lambda: stand.system.log(late.request_id)[1] is not None, "its deadline ends it")
        end = stand.system.log(late.request_id)[1]
        assert end is not None and end.reason == "expired"
        assert_nothing_is_held(stand.system)
    else:
        stand.check(jobs)
    if action in ("kill", "stop"):
        victim.send_signal(signal.SIGCONT)
    if action == "stop":
        late_jobs = stand.accept()  # while two of them schedule
        stand.check(late_jobs)
        victim.terminate()
        assert victim.wait(30) == 0
    elif action != "kill":
        victim.terminate()
        assert victim.wait(30) == 0


# --- gateway ---


def ended(process: "subprocess.Popen[bytes]") -> bool:
    """Whether it has; one that stands still is woken."""
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
    return process.returncode is not None


@pytest.mark.parametrize("case", cases("gateway", "accept", "read", "event"))
@pytest.mark.usefixtures("first_gateway_first")
def test_a_gateway_fails_at_every_point(stand: Stand, healthy: str, case: str) -> None:
    point, action = case.split(":")
    action = action.partition("=")[0]
    effect = point.split("_", 1)[1]
    passage = {"read": 7, "event": 2}.get(effect, 1)  # a gateway that gets little CPU may send few, large pieces
    stand.full()
    url, victim = stand.system.start_gateway(failpoint=f"{case}@{passage}", grace_s="1")
    awake = threading.Timer(2 * DEAD_AFTER_S, lambda: victim.send_signal(signal.SIGCONT))
    if action == "stop":
        awake.start()
    positions, tokens = positions_and_tokens([url, healthy], body_of(shapes()[0]), key=case)
    assert tokens == stand.golden[0]
    assert positions == sorted(set(positions)) and positions[-1] >= TOKENS, "every event once, in order"
    if action == "stop":  # it is awake again; or one that reads little comes there only now
        wait_until(lambda: stand.passed(victim, point, action), f"{point} was passed")
    else:
        stand.wait_sprung(victim, point, action)
    assert_nothing_is_held(stand.system)
    if action != "kill":
        victim.terminate()
        wait_until(lambda: ended(victim), "the gateway has ended")
        assert victim.returncode == 0


@pytest.mark.faults
@pytest.mark.parametrize("action", ["kill", "raise"])
@pytest.mark.parametrize("point", ["gateway.before_finish", "gateway.after_finish"])
def test_a_gateway_fails_while_it_cancels(stand: Stand, healthy: str, point: str, action: str) -> None:
    stand.full()
    url, victim = stand.system.start_gateway(failpoint=f"{point}:{action}")
    stand.vacate(1)  # nothing is finished before it is cancelled
    body = {**body_of(shapes()[0]), "background": True}
    with httpx.Client(timeout=20) as http:
        accepted: dict[str, Any] = http.post(f"{healthy}/v1/completions", json=body).json()
        path = f"/v1/requests/{accepted['id']}"
        try:
            status = http.delete(url + path).status_code
        except httpx.TransportError:
            status = 0
        assert status == 0 if action == "kill" else status in (200, 503)
        stand.wait_sprung(victim, point, action)
        assert http.delete(healthy + path).json()["status"] == "cancelled"
    stand.worker()
    stand.check(stand.accept())
    if action != "kill":
        victim.terminate()
        assert victim.wait(30) == 0


@pytest.mark.faults
@pytest.mark.parametrize("case", cases("gateway", "forget"))
@pytest.mark.usefixtures("first_gateway_first")
def test_a_gateway_fails_while_it_makes_room(stand: Stand, healthy: str, case: str) -> None:
    """More than half of Redis' memory is in use, so that every look of a gateway asks what may be forgotten."""
    point, action = case.split(":")
    action = action.partition("=")[0]
    stand.full()
    client = stand.system.client
    memory: dict[str, int] = client.info("memory")  # pyright: ignore[reportAssignmentType]
    client.config_set("maxmemory", int(memory["used_memory"] * 1.7))
    try:
        url, victim = stand.system.start_gateway(failpoint=case)
        stand.wait_sprung(victim, point, action)
        if action == "stop":
            victim.send_signal(signal.SIGCONT)
        _, tokens = positions_and_tokens([url, healthy], body_of(shapes()[0]), key=case)
        assert tokens == stand.golden[0]
        assert_nothing_is_held(stand.system)
    finally:
        client.config_set("maxmemory", 0)
    if action != "kill":
        victim.terminate()
        assert victim.wait(30) == 0
