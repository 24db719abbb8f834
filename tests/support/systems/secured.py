"""Two Redis servers with TLS and the users of deploy/redis, and services that come to them, each role as its user."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import redis
import trustme

from blockrelay.errors import RedisTrouble
from blockrelay.redis import client as redis_link
from blockrelay.redis.users import ROLES
from blockrelay_launcher.supervisor.embedded_redis import find_server_program
from blockrelay_launcher.supervisor.ports import kept_ports
from tests.support.project import ROOT
from tests.support.swapped_folder import SwappedFolder
from tests.support.waiting import wait_until

FOLDER = ROOT / "deploy" / "redis"
PROGRAM = find_server_program().path
SERVERS = ("control", "payload")


@dataclass
class Secured:
    """A control and a payload Redis with TLS and the users of deploy/redis, and services that use them.

    `ports` are kept for the two servers and the gateway. Redis knows all `passwords` of a role, which uses the first:
    services read them in `files`, as a pod shows a Secret.
    """

    folder: Path
    ports: dict[str, int]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, subprocess.Popen[bytes]])
    passwords: dict[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    files: dict[str, SwappedFolder] = field(default_factory=dict[str, SwappedFolder])

    def __post_init__(self) -> None:
        for role in ROLES:
            self.passwords[role] = [f"password-of-{role}"]
            self.files[role] = SwappedFolder(self.folder / f"password-{role}", {"password": self.password(role)})

    def password(self, role: str) -> str:
        return self.passwords[role][0]

    def url(self, server: str, role: str, *, with_password: bool = True) -> str:
        ca = self.folder / "ca.pem"
        who = f"{role}:{self.password(role)}" if with_password else role
        return f"rediss://{who}@127.0.0.1:{self.ports[server]}/0?ssl_ca_certs={ca}"

    def client(self, server: str, role: str) -> redis.Redis:
        return redis_link.connect(self.url(server, role))

    def give(self, role: str, *passwords: str) -> None:
        """Redis is to know these of it (`load_users`), and its services take the first for their next connections."""
        self.passwords[role] = passwords
        self.files[role].swap({"password": "".join(f"{one}\n" for one in passwords)})

    def write_users(self, *, without: Sequence[str] = ()) -> None:
        """The files of users of both servers, as the passwords are now."""
        for server in SERVERS:
            rules = (FOLDER / f"{server}.acl").read_text()
            for role, known in self.passwords.items():
                digests = " #".join(hashlib.sha256(one.encode()).hexdigest() for one in known)
                rules = rules.replace(f"{role.upper()}_SHA256", digests)
            kept = [line for line in rules.splitlines() if line.split()[1] not in without]
            (self.folder / server / "users.acl").write_text("\n".join(kept) + "\n")

    def load_users(self, *, without: Sequence[str] = ()) -> None:
        """Both servers know them from now on."""
        self.write_users(without=without)
        for server in SERVERS:
            with self.client(server, "reloader") as client:
                assert client.acl_load()

    def start_redis(self) -> None:
        for server in SERVERS:
            (self.folder / server).mkdir()
        self.write_users()
        for server in SERVERS:
            self._start_redis(server)

    def _start_redis(self, server: str) -> None:
        place = self.folder / server
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
            "BLOCKRELAY_REDIS_URL": self.url("control", role, with_password=False),
            "BLOCKRELAY_PAYLOAD_REDIS_URL": self.url("payload", role, with_password=False),
            "BLOCKRELAY_REDIS_PASSWORD_FILE": str(self.files[role] / "password"),
            "BLOCKRELAY_PAGE_STORE_REDIS_BYTES": str(1 << 26),
            **{f"BLOCKRELAY_{key.upper()}": value for key, value in settings.items()},
        }
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", f"blockrelay_{role}"]
            self.processes[name] = subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=log)

    def start_services(self, *, workers: int) -> str:
        """A scheduler of two stages, a gateway, and so many workers; the gateway's URL, when it is ready."""
        port = self.ports["gateway"]
        base = f"http://127.0.0.1:{port}"
        self.start("scheduler", "scheduler", port="0", stages="2")
        self.start("gateway", "gateway", port=str(port))
        for index in range(workers):
            self.start("worker", f"worker-{index}")

        def ready() -> bool:
            try:
                return httpx.get(f"{base}/readyz").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(ready, "a token can be produced", timeout_s=60)
        return base

    def services(self) -> dict[str, int]:
        """Those that run, and their processes."""
        running = {name: process for name, process in self.processes.items() if process.poll() is None}
        return {name: process.pid for name, process in running.items() if name not in SERVERS}

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

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


@contextmanager
def secured_servers() -> Iterator[Secured]:
    """The two servers, and room for services that are ended with them."""
    folder = Path(tempfile.mkdtemp(prefix="br-sec-"))
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    names = (*SERVERS, "gateway")
    with kept_ports("127.0.0.1", 0, len(names)) as ports:
        system = Secured(folder, dict(zip(names, ports, strict=True)))
        try:
            system.start_redis()
            yield system
        finally:
            system.stop()
            shutil.rmtree(folder)
