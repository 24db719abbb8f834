"""The network between one service and one Redis: cut, a black hole, slow, or losing replies of commands that ran."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from blockrelay.protocol.transitions.source import source
from tests.support.redis.redis_proxy import RedisProxy, proxied
from tests.support.systems.fault_stand import (
    Process,
    Stand,
    body_of,
    positions_and_tokens,
    registered,
    shapes,
    standing,
)
from tests.support.waiting import wait_until

FAULTS = ("cut", "black hole", "delay", "lost reply")
#: Commands whose replies are lost, one after the other: scripts by their hash.
COMMANDS = {
    ("worker-0", "control"): ("claim", "beat", "XTRIM"),
    ("worker-1", "control"): ("commit", "beat", "XTRIM"),
    ("worker-0", "payload"): ("XADD", "EXPIRE"),
    ("worker-1", "payload"): ("XADD", "XREAD", "XTRIM"),
    ("scheduler", "control"): ("dead", "plan"),
    ("gateway", "control"): ("accept", "XREAD"),
}
QUICK = (("worker-1", "control", "lost reply"), ("worker-0", "payload", "cut"), ("gateway", "control", "cut"))


def cases(*roles: str) -> list[Any]:
    found: list[Any] = []
    for role, server in COMMANDS:
        for fault in FAULTS:
            case = (role, server, fault)
            if role.startswith(roles):
                found.append(pytest.param(*case, marks=() if case in QUICK else pytest.mark.faults, id="-".join(case)))
    return found


@pytest.fixture(scope="module")
def stand(tiny_model: Path) -> Iterator[Stand]:
    # All that workers say goes through the Redis that is cut off here.
    with standing(tiny_model, local_rows="off") as running:
        yield running


def needle(command: str) -> bytes:
    return command.encode() if command.isupper() else source(command).sha.encode()


def begin(proxy: RedisProxy, fault: str, commands: tuple[str, ...]) -> None:
    match fault:
        case "cut":
            proxy.cut()
        case "black hole":
            proxy.black_hole()
        case "delay":
            proxy.delay_s = 0.02
        case _:
            for size, command in enumerate(commands):
                proxy.lose_reply(needle(command), after_bytes=size)


@pytest.mark.parametrize(("role", "server", "fault"), cases("worker"))
def test_a_worker_without_its_redis(stand: Stand, role: str, server: str, fault: str) -> None:
    with ExitStack() as stack:
        proxies = {
            "control": stack.enter_context(proxied(stand.system.control)),
            "payload": stack.enter_context(proxied(stand.system.payload)),
        }
        proxy, commands = proxies[server], COMMANDS[role, server]
        stand.full()
        stand.vacate(int(role[-1]))
        jobs = stand.accept()
        victim = stand.worker(redis_url=proxies["control"].url, payload_redis_url=proxies["payload"].url)
        stack.callback(end, victim)
        wait_until(lambda: stand.system.tokens_so_far(jobs) > 10, "they run")
        begin(proxy, fault, commands)
        if fault in ("cut", "black hole"):
            wait_until(lambda: victim.pid not in registered(stand), "it is declared dead")
            proxy.heal()
        if fault == "lost reply":
            more = stand.accept()  # so that CLAIM is called again
            stand.check(more)
            wait_until(lambda: proxy.lost_replies == len(commands), "the replies were lost")
        stand.check(jobs)
        assert victim.poll() is None


def end(process: Process) -> None:
    process.terminate()
    assert process.wait(30) == 0


@pytest.mark.parametrize(("role", "server", "fault"), cases("scheduler"))
def test_a_scheduler_without_its_redis(stand: Stand, role: str, server: str, fault: str) -> None:
    """While it cannot be reached a worker dies and a new one comes."""
    with ExitStack() as stack:
        proxy = stack.enter_context(proxied(stand.system.control))
        stand.full()
        before = stand.system.scheduler
        assert before is not None
        before.kill()
        before.wait()
        stack.callback(stand.full)
        stack.callback(end, stand.system.start_scheduler(redis_url=proxy.url))
        jobs = stand.accept()
        wait_until(lambda: stand.system.tokens_so_far(jobs) > 10, "they run")
        begin(proxy, fault, COMMANDS[role, server])
        os.kill(stand.system.pid_of(0), signal.SIGKILL)
        stand.worker()
        if fault in ("cut", "black hole"):
            wait_until(lambda: any(not w.ready for w in stand.system.infos()), "a worker waits for a plan")
            proxy.heal()
        stand.check(jobs)
        assert proxy.lost_replies == (len(COMMANDS[role, server]) if fault == "lost reply" else 0)


@pytest.mark.parametrize(("role", "server", "fault"), cases("gateway"))
@pytest.mark.usefixtures("first_gateway_first")
def test_a_gateway_without_its_redis(stand: Stand, role: str, server: str, fault: str) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(proxied(stand.system.control))
        stand.full()
        url, victim = stand.system.start_gateway(redis_url=proxy.url)
        stack.callback(end, victim)
        commands = COMMANDS[role, server]
        if fault in ("delay", "lost reply"):
            begin(proxy, fault, commands)
            positions, tokens = positions_and_tokens([url], body_of(shapes()[0]), key=f"{role}{fault}")
        else:
            stand.vacate(1)  # it is accepted, and nothing of it done before the fault
            follow = Follower(lambda: positions_and_tokens([url], body_of(shapes()[0]), key=f"{role}{fault}"))
            wait_until(lambda: stand.system.client.zcard(stand.system.keys.running) == 1, "it is accepted")
            begin(proxy, fault, commands)
            stand.worker()
            wait_until(lambda: stand.system.client.zcard(stand.system.keys.running) == 0, "it is done")
            assert follow.answer is None
            proxy.heal()
            positions, tokens = follow.result()
        assert tokens == stand.golden[0] and positions == sorted(set(positions))
        assert proxy.lost_replies == (len(commands) if fault == "lost reply" else 0)


class Follower(threading.Thread):
    """Reads a stream beside the test."""

    def __init__(self, read: Callable[[], tuple[list[int], list[int]]]) -> None:
        super().__init__(daemon=True)
        self._read = read
        self.answer: tuple[list[int], list[int]] | None = None
        self.start()

    def run(self) -> None:
        self.answer = self._read()

    def result(self) -> tuple[list[int], list[int]]:
        self.join(60)
        assert self.answer is not None
        return self.answer
