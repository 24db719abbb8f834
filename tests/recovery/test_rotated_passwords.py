"""Passwords of Redis change under load: no process is replaced, nothing is lost, and answers are what they were."""

import threading
from collections.abc import Iterator
from secrets import token_hex

import httpx
import pytest

from tests.support.redis.redis_server import has_tls
from tests.support.systems.secured import PROGRAM, Secured, secured_servers
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not has_tls(PROGRAM), reason=f"{PROGRAM} has no TLS: install redis-server")
PROMPTS = ("Once upon a time", "Tom and Lily", "The little dog", "One day")
SERVICES = ("gateway", "scheduler", "worker")


@pytest.fixture
def secured() -> Iterator[Secured]:
    with secured_servers() as system:
        yield system


def answer(base: str, prompt: str, key: str) -> httpx.Response:
    body = {"model": "storyteller", "prompt": prompt, "max_tokens": 40, "temperature": 0}
    return httpx.post(f"{base}/v1/completions", json=body, headers={"idempotency-key": key}, timeout=120)


class Load(threading.Thread):
    """One client that asks again and again, and tries again under the same key where it gets 503."""

    def __init__(self, base: str, prompt: str, stop: threading.Event) -> None:
        super().__init__()
        self.base, self.prompt, self.stop = base, prompt, stop
        self.texts: list[str] = []
        self.failed: list[str] = []

    def run(self) -> None:
        while not self.stop.is_set() and not self.failed:
            key = token_hex(8)
            try:
                while (got := answer(self.base, self.prompt, key)).status_code == 503:
                    self.stop.wait(0.1)
            except httpx.HTTPError as error:
                self.failed.append(repr(error))
                return
            if got.status_code == 200:
                self.texts.append(got.json()["choices"][0]["text"])
            else:
                self.failed.append(got.text)


def test_passwords_are_rotated_under_load(secured: Secured) -> None:
    base = secured.start_services(workers=3)
    expected = {prompt: answer(base, prompt, token_hex(8)).json()["choices"][0]["text"] for prompt in PROMPTS}
    processes, stop = secured.services(), threading.Event()
    clients = [Load(base, prompt, stop) for prompt in PROMPTS]
    for client in clients:
        client.start()

    def all_go_on(what: str) -> None:
        """Each client gets answers that it asked for after now."""
        wanted = {client: len(client.texts) + 2 for client in clients}
        wait_until(
            lambda: all(len(c.texts) >= most or c.failed for c, most in wanted.items()),
            f"all go on {what}",
            timeout_s=60,
        )
        assert not [client.failed for client in clients if client.failed]

    try:
        all_go_on("before")
        for role in (*SERVICES, "reloader"):
            old = secured.password(role)
            secured.give(role, old, f"new-password-of-{role}")
            secured.load_users()
            secured.give(role, f"new-password-of-{role}", old)
            secured.give(role, f"new-password-of-{role}")
            secured.load_users()
            all_go_on(f"with the new password of {role}")
        # A mistake: Redis knows none of them for a while. Everybody is sent away, and waits.
        secured.load_users(without=SERVICES)
        for name in processes:
            wait_until(lambda name=name: tells(secured, name), f"{name} says what helps")
        secured.load_users()
        all_go_on("after the mistake")
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert secured.services() == processes, "no process is another one than before"
    for client in clients:
        assert set(client.texts) == {expected[client.prompt]} and not client.failed
    assert "password-of-" not in secured.logs(), "no password in a log"


def tells(secured: Secured, name: str) -> bool:
    """Whether its log names the file and what helps."""
    role = name.partition("-")[0]
    wanted = ("REDIS_TROUBLE", "WRONGPASS", str(secured.files[role] / "password"), "ACL LOAD")
    return any(all(word in line for word in wanted) for line in secured.log(name).splitlines())
