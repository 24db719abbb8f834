"""A Redis that answers, but not as it should: no service ends, no answer is lost or different, nothing is held."""

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockrelay.up_file import read_running
from tests.support.redis.redis_answers import ANSWERS, LINES, again_and_again, answering
from tests.support.redis.redis_proxy import RedisProxy, proxied
from tests.support.redis.redis_server import RedisServer
from tests.support.systems.fault_stand import Process, Stand, body_of, positions_and_tokens, shapes, standing
from tests.support.systems.system import Job, System, assert_nothing_is_held, golden_tokens
from tests.support.systems.up_process import UpProcess, running_up
from tests.support.waiting import wait_until

#: Some of all for the suite of whole systems.
QUICK_ALL = (("OOM", "control"), ("OOM", "payload"))
QUICK_ONE = (("worker-1", "control", "MISCONF"), ("worker-0", "payload", "OOM"), ("scheduler", "control", "NOPERM"))
LONG = 400


@pytest.fixture(scope="module")
def stand(tiny_model: Path) -> Iterator[Stand]:
    with standing(tiny_model) as running:
        yield running


class Follower(threading.Thread):
    """A client that resumes, beside the test."""

    def __init__(self, urls: list[str], body: dict[str, Any], key: str) -> None:
        super().__init__(daemon=True)
        self._urls, self._body, self._key = urls, body, key
        self.positions: list[int] = []
        self.tokens: list[int] = []
        self.start()

    def run(self) -> None:
        self.positions, self.tokens = positions_and_tokens(self._urls, self._body, key=self._key)

    def check(self, golden: list[int]) -> None:
        self.join(90)
        assert not self.is_alive() and self.tokens == golden and self.positions == sorted(set(self.positions))


# --- one service alone is answered so ---


def cases_of_one() -> list[Any]:
    found: list[Any] = []
    for role in ("gateway", "scheduler", "worker-0", "worker-1"):
        for server in ("control", "payload"):
            for answer in LINES:
                case = (role, server, answer)
                marks = () if case in QUICK_ONE else pytest.mark.faults
                found.append(pytest.param(*case, marks=marks, id="-".join(case)))
    return found


@pytest.mark.parametrize(("role", "server", "answer"), cases_of_one())
@pytest.mark.usefixtures("first_gateway_first")
def test_a_service_that_is_answered_so_goes_on(stand: Stand, role: str, server: str, answer: str) -> None:
    with ExitStack() as stack:
        proxies = {
            "control": stack.enter_context(proxied(stand.system.control)),
            "payload": stack.enter_context(proxied(stand.system.payload)),
        }
        proxy = proxies[server]
        urls = {"redis_url": proxies["control"].url, "payload_redis_url": proxies["payload"].url}
        stand.full()
        followers: list[Follower] = []
        victim: Process
        if role == "gateway":
            url, victim = stand.system.start_gateway(**urls)
            followers = [Follower([url], body_of(shapes()[0]), key=f"{server}{answer}before")]
            wait_until(lambda: stand.system.client.zcard(stand.system.keys.running) == 1, "it is accepted")
            jobs = stand.accept()
        elif role == "scheduler":
            assert stand.system.scheduler is not None
            stand.system.scheduler.kill()
            stand.system.scheduler.wait()
            victim = stand.system.start_scheduler(**urls)
            stack.callback(stand.full)
            wait_until(lambda: proxies["control"].seen > 20, "it schedules")
            jobs = stand.accept()
        else:
            stand.vacate(int(role[-1]))
            jobs = stand.accept()
            victim = stand.worker(**urls)
        stack.callback(end, victim)
        wait_until(lambda: stand.system.tokens_so_far(jobs) > 10, "they run")
        proxy.answer(LINES[answer])
        if role == "gateway":
            followers.append(Follower([url], body_of(shapes()[0]), key=f"{server}{answer}meanwhile"))  # pyright: ignore
        if not (server == "payload" and role in ("gateway", "scheduler")):  # those ask it for results and for nothing
            wait_until(lambda: proxy.answered > 3, "it is told so")
            wait_until(lambda: "REDIS_TROUBLE" in stand.log_of(victim), "it says what is wrong")
        proxy.heal()
        for follower in followers:
            follower.check(stand.golden[0])
        stand.check(jobs)
        assert victim.poll() is None


def end(process: Process) -> None:
    process.terminate()
    assert process.wait(30) == 0


# --- all of them are, the launcher too ---


def cases_of_all() -> list[Any]:
    found: list[Any] = []
    for answer in LINES:
        for server in ("control", "payload"):
            marks = () if (answer, server) in QUICK_ALL else pytest.mark.faults
            found.append(pytest.param(answer, server, marks=marks, id=f"{answer}-{server}"))
    return found


def trouble(answer: str, server: RedisServer, proxy: RedisProxy) -> AbstractContextManager[object]:
    """The real server answers so; where it cannot be made to, a proxy does."""
    if answer in ANSWERS:
        return answering(server, answer)
    return again_and_again(server, answer) if answer in ("NOSCRIPT", "UNBLOCKED") else answered(proxy, answer)


@contextmanager
def answered(proxy: RedisProxy, answer: str) -> Iterator[None]:
    proxy.answer(LINES[answer])
    try:
        yield
    finally:
        proxy.heal()


def silent(up: UpProcess, answer: str, server: str) -> list[str]:
    """The services that must notice and have not said so."""
    if answer == "NOSCRIPT":  # the next call brings the script along
        return []
    who = {"control": ["gateway", "scheduler", "worker"], "payload": ["worker"]}[server]
    if answer == "UNBLOCKED":  # the scheduler reads nothing that blocks
        who = [name for name in who if name != "scheduler"]
    assert up.data is not None
    # A gateway that sees that memory is short before anybody asks refuses what comes, and asks for nothing either.
    said = ("REDIS_TROUBLE", "REDIS_MEMORY_SHORT") if answer == "OOM" else ("REDIS_TROUBLE",)
    logs = {log.name: log.read_text() for log in (up.data / "logs").glob("*.log")}
    return [name for name in who if not any(word in text for log, text in logs.items() for word in said if name in log)]


def wait_until_all_have_noticed(up: UpProcess, answer: str, server: str) -> None:
    # A scheduler that gets no processor for seconds forgives silence and so asks for nothing.
    try:
        wait_until(lambda: not silent(up, answer, server), "the services say what is wrong", timeout_s=120)
    except AssertionError as error:
        raise AssertionError(f"{error}: {silent(up, answer, server)} did not") from None


@pytest.mark.parametrize(("answer", "server"), cases_of_all())
def test_a_whole_system_that_is_answered_so_goes_on(
    tiny_model: Path, answer: str, server: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLOCKRELAY_CELL", "t")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="br-ans-", ignore_cleanup_errors=True)))
        servers = {
            "control": RedisServer(folder / "c").start(),
            "payload": RedisServer(folder / "p", durable=False).start(),
        }
        for one in servers.values():
            stack.callback(one.stop)
        proxies = {name: stack.enter_context(proxied(one)) for name, one in servers.items()}
        system = System(
            folder=folder, model=tiny_model, control=servers["control"], payload=servers["payload"], stages=2
        )  # only to look
        stack.callback(system.client.close)
        redis = ["--redis", proxies["control"].url, "--payload-redis", proxies["payload"].url]
        (folder / "d").mkdir()
        up = stack.enter_context(running_up(tiny_model, "--stages", "2", "--gateways", "2", *redis, data=folder / "d"))
        urls = read_running(folder / "d").urls
        before = up.children()
        bodies = [{**body_of(job), "max_tokens": LONG} for job in shapes()]
        golden = list(golden_tokens(system.block_folder, long_jobs(), seed=7).values())
        followers = [Follower(urls, body, key=f"before-{i}") for i, body in enumerate(bodies)]
        wait_until(lambda: system.client.zcard(system.keys.running) == len(bodies), "they are accepted")
        with trouble(answer, servers[server], proxies[server]):
            killed = up.pid_of("blockrelay_worker")[0]
            os.kill(killed, signal.SIGKILL)
            followers += [Follower(urls, body, key=f"meanwhile-{i}") for i, body in enumerate(bodies)]
            wait_until_all_have_noticed(up, answer, server)
            wait_until(lambda: len(up.pid_of("blockrelay_worker")) == 2, "the launcher starts another worker")
            assert up.process.poll() is None
        for follower, tokens in zip(followers, golden * 2, strict=True):
            follower.check(tokens)
        assert_nothing_is_held(system)
        after = up.children()
        assert before.keys() - after.keys() == {killed} and len(after) == len(before)
        assert up.stop() == 0
    assert "Traceback" not in capfd.readouterr().err


def long_jobs() -> list[Job]:
    return [
        replace(job, request_id=str(i), params=replace(job.params, max_tokens=LONG)) for i, job in enumerate(shapes())
    ]
