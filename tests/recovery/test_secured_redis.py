"""The users of deploy/redis over TLS: a whole system works with them, and none may do more than it must."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import redis
import trustme

from blockrelay.errors import RedisRefused, RedisTrouble
from blockrelay.protocol.keys import Keys
from blockrelay.redis import client as redis_link
from blockrelay.redis.users import ROLES
from blockrelay_launcher.supervisor.embedded_redis import find_server_program
from blockrelay_launcher.supervisor.ports import kept_ports
from tests.support.redis.redis_server import has_tls
from tests.support.waiting import wait_until

FOLDER = Path(__file__).parents[2] / "deploy" / "redis"
KEYS = Keys("c0")


PROGRAM = find_server_program().path
needs_tls = pytest.mark.skipif(not has_tls(PROGRAM), reason=f"{PROGRAM} has no TLS: install redis-server")


@dataclass
class Secured:
    """A control and a payload Redis with TLS and the users of deploy/redis, and services that use them.

    `ports` are kept for the two servers and the gateway.
    """

    folder: Path
    ports: dict[str, int]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, subprocess.Popen[bytes]])

    def password(self, role: str) -> str:
        return f"password-of-{role}"

    def url(self, server: str, role: str) -> str:
        ca = self.folder / "ca.pem"
        return f"rediss://{role}:{self.password(role)}@127.0.0.1:{self.ports[server]}/0?ssl_ca_certs={ca}"

    def client(self, server: str, role: str) -> redis.Redis:
        return redis_link.connect(self.url(server, role))

    def start_redis(self, server: str) -> None:
        rules = (FOLDER / f"{server}.acl").read_text()
        for role in ROLES:
            digest = hashlib.sha256(self.password(role).encode()).hexdigest()
            rules = rules.replace(f"{role.upper()}_SHA256", digest)
        place = self.folder / server
        place.mkdir()
        (place / "users.acl").write_text(rules)
        options = {
            "bind": "127.0.0.1",
            "port": "0",
            "tls-port": str(self.ports[server]),
            "tls-cert-file": str(self.folder / "server.pem"),
            "tls-key-file": str(self.folder / "server.pem"),
            "tls-ca-cert-file": str(self.folder / "ca.pem"),
            "tls-auth-clients": "no",
            "aclfile": str(place / "users.acl"),
            "dir": str(place),
            "appendonly": "yes" if server == "control" else "no",
            "appendfsync": "always",
            "save": "",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        with (place / "log").open("wb") as log:
            self.processes[server] = subprocess.Popen([PROGRAM, *arguments], stdout=log)
        with self.client(server, "worker") as client:
            wait_until(lambda: answers(client), f"the {server} Redis answers")

    def start(self, role: str, name: str, **settings: str) -> None:
        env = {
            "BLOCKRELAY_REDIS_URL": self.url("control", role),
            "BLOCKRELAY_PAYLOAD_REDIS_URL": self.url("payload", role),
            "BLOCKRELAY_PAGE_STORE_REDIS_BYTES": str(1 << 26),
            **{f"BLOCKRELAY_{key.upper()}": value for key, value in settings.items()},
        }
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", f"blockrelay_{role}"]
            self.processes[name] = subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=log)

    def logs(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.log"))

    def stop(self) -> None:
        for process in reversed(self.processes.values()):
            process.kill()
            process.wait()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except RedisTrouble:
        return False


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    folder = Path(tempfile.mkdtemp(prefix="br-sec-"))
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    names = ("control", "payload", "gateway")
    with kept_ports("127.0.0.1", 0, len(names)) as ports:
        system = Secured(folder, dict(zip(names, ports, strict=True)))
        try:
            for server in ("control", "payload"):
                system.start_redis(server)
            yield system
        finally:
            system.stop()
            shutil.rmtree(folder)


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
    port = secured.ports["gateway"]
    base = f"http://127.0.0.1:{port}"
    secured.start("scheduler", "scheduler", port="0", stages="2")
    secured.start("gateway", "gateway", port=str(port))
    for index in range(4):
        secured.start("worker", f"worker-{index}")

    def ready() -> bool:
        try:
            return httpx.get(f"{base}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    wait_until(ready, "a token can be produced", timeout_s=60)
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
