"""The users of deploy/redis over TLS: a whole system works with them, and none may do more than it must."""

import signal
from collections.abc import Iterator

import httpx
import pytest

from blockrelay.errors import RedisRefused
from blockrelay.protocol.keys import Keys
from blockrelay.redis import client as redis_link
from blockrelay.redis.users import ROLES
from tests.support.redis.redis_server import has_tls
from tests.support.systems.secured import PROGRAM, Secured, secured_servers
from tests.support.waiting import wait_until

KEYS = Keys("c0")
needs_tls = pytest.mark.skipif(not has_tls(PROGRAM), reason=f"{PROGRAM} has no TLS: install redis-server")


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    with secured_servers() as system:
        yield system


@pytest.fixture
def processes_may_stay() -> bool:
    """Its services are the module's, which ends them."""
    return True


def ask(base: str, **fields: object) -> str:
    body = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, **fields}
    answer = httpx.post(f"{base}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@needs_tls
def test_a_whole_system_works_with_a_user_for_each_role(secured: Secured) -> None:
    base = secured.start_services(workers=4)
    first = ask(base)
    ids = {"_tensor_": True, "data": [[1, 15, 7]]}
    step = httpx.post(f"{base}/v1/infer", json={"session_id": "s", "step": 1, "input_tensors": {"input_ids": ids}})
    assert step.status_code == 200, step.text
    secured.processes["worker-0"].send_signal(signal.SIGKILL)
    secured.processes["worker-0"].wait()
    assert ask(base) == first
    traced = httpx.post(f"{base}/v1/completions", json={"prompt": "x", "max_tokens": 20, "trace": True}).json()
    assert httpx.get(f"{base}/v1/requests/{traced['id']}/trace").status_code == 200
    cancelled = httpx.post(f"{base}/v1/completions", json={"prompt": "x", "max_tokens": 400, "background": True}).json()
    assert httpx.delete(f"{base}/v1/requests/{cancelled['id']}").status_code == 200
    with secured.client("control", "worker") as client:
        wait_until(lambda: len(client.zrange(KEYS.workers, 0, -1)) == 3, "the dead worker was declared dead")  # pyright: ignore[reportArgumentType]
        wait_until(lambda: client.zcard(KEYS.running) == 0, "nothing is left running")
    assert "NoPermission" not in secured.logs() and "NOPERM" not in secured.logs()
    for role in ROLES:
        assert secured.password(role) not in secured.logs(), "no password in a log"


@needs_tls
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("server", ["control", "payload"])
def test_no_role_may_administer(secured: Secured, server: str, role: str) -> None:
    commands = ("FLUSHALL", "FLUSHDB", "KEYS *", "CONFIG GET *", "SHUTDOWN", "ACL LIST", "SCRIPT FLUSH")
    with secured.client(server, role) as client:
        for command in (*commands, "MONITOR", "REPLICAOF NO ONE"):
            with pytest.raises(RedisRefused):
                client.execute_command(*command.split())
        with pytest.raises(RedisRefused):
            client.get("{other}:running")


@needs_tls
@pytest.mark.parametrize(
    ("server", "role", "key"),
    [
        ("payload", "gateway", KEYS.page("00")),
        ("payload", "scheduler", KEYS.page("00")),
        ("payload", "gateway", KEYS.inbox("w")),
        ("payload", "scheduler", KEYS.result("r")),
        ("control", "worker", KEYS.session("s")),
        ("control", "scheduler", KEYS.wake("g")),
    ],
)
def test_roles_do_not_see_each_others_data(secured: Secured, server: str, role: str, key: str) -> None:
    with secured.client(server, role) as client, pytest.raises(RedisRefused):
        client.hgetall(key)


@needs_tls
def test_nobody_comes_in_without_a_password(secured: Secured) -> None:
    url = secured.url("control", "worker").replace(secured.password("worker"), "wrong")
    with redis_link.connect(url) as client, pytest.raises(RedisRefused):
        client.ping()
    anonymous = url.replace("worker:wrong@", "")
    with redis_link.connect(anonymous) as client, pytest.raises(RedisRefused):
        client.ping()
    with redis_link.connect(url.replace("worker:wrong", "probe:any")) as client:
        assert client.ping()
        with pytest.raises(RedisRefused):
            client.get(KEYS.running)
