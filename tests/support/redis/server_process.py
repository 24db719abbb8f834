"""One server or Sentinel of an arrangement that fails over, plain, or with TLS and users."""

import hashlib
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme

from blockrelay.errors import RedisTrouble, RedisUnavailable
from blockrelay.redis import client as redis_link
from blockrelay.redis.users import files
from tests.support.redis.redis_server import find_binary
from tests.support.waiting import wait_until

HOST = "127.0.0.1"
#: As which servers and Sentinels know each other.
HOSTNAME = "localhost"
#: How often a server is asked that has no time to answer.
TRIES = 5
#: CPython (3.11.7, ssl.py `_create`) leaves a socket to the garbage collector whose peer had gone before the handshake
#: began: it has no address of that peer any more. One of ours that nobody closes has.
LEFT_BY_SSL = r"unclosed <ssl\.SSLSocket fd=\d+, family=\d+, type=\d+, proto=\d+, laddr=\('127\.0\.0\.1', \d+\)>"


@dataclass(frozen=True)
class Security:
    """TLS for everybody, the users of deploy/redis on servers and Sentinels, and `admin`, who is the tests'."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> "Security":
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        authority.issue_cert(HOST, HOSTNAME).private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
        made, admin = files(), f"user admin on >{password_of('admin')} ~* &* +@all"
        for name, lines in (("users", made["control"] + made["replication"]), ("sentinels", made["sentinel"])):
            text = "\n".join([*lines, admin, ""])
            text = re.sub(r"#([A-Z]+)_SHA256", lambda found: f"#{_digest(found[1].lower())}", text)
            (folder / f"{name}.acl").write_text(text)
        return cls(folder)

    @property
    def tls(self) -> dict[str, str]:
        certificates = {f"tls-{kind}-file": str(self.folder / "server.pem") for kind in ("cert", "key")}
        ca = {"tls-ca-cert-file": str(self.folder / "ca.pem"), "tls-auth-clients": "no", "tls-replication": "yes"}
        return certificates | ca

    @property
    def parameters(self) -> str:
        return f"ssl_ca_certs={self.folder / 'ca.pem'}"


def password_of(user: str) -> str:
    return f"password-of-{user}"


def _digest(user: str) -> str:
    return hashlib.sha256(password_of(user).encode()).hexdigest()


@dataclass
class Process:
    """A server or a Sentinel."""

    folder: Path
    port: int
    options: dict[str, str]
    security: Security | None = None
    sentinel: bool = False
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Returns when it answers."""
        self.folder.mkdir(exist_ok=True)
        where = {"port": str(self.port)}
        if self.security:
            where = {"port": "0", "tls-port": str(self.port), **self.security.tls}
        common = {"bind": f"{HOST} -::1", "dir": str(self.folder), "logfile": str(self.folder / "log")}
        lines = [f"{name} {value}" for name, value in {**common, **where, **self.options}.items()]
        config = self.folder / "config"
        if not config.exists():  # Sentinels write into it what they know, and into those of servers whom to follow
            config.write_text("\n".join(lines) + "\n")
        arguments = [find_binary(), str(config), *(["--sentinel"] if self.sentinel else [])]
        self.process = subprocess.Popen(arguments)
        wait_until(self.answers, f"{self.folder.name} answers")

    @property
    def url(self) -> str:
        """For administrators."""
        if self.security is None:
            return f"redis://{HOST}:{self.port}/0"
        return f"rediss://admin:{password_of('admin')}@{HOST}:{self.port}/0?{self.security.parameters}"

    def ask(self, *words: str | int) -> Any:
        """Patiently where it is there and has no time: a machine may be busy."""
        for tries_left in reversed(range(TRIES)):
            try:
                with redis_link.connect(self.url) as client:
                    return client.execute_command(*words)
            except RedisUnavailable as error:
                if not tries_left or "imeout" not in str(error):
                    raise
        raise AssertionError("unreachable")

    def answers(self) -> bool:
        try:
            return bool(self.ask("PING"))
        except RedisTrouble as error:
            return error.code == "MASTERDOWN"

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def role(self) -> str:
        return self.ask("ROLE")[0].decode()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, as a crash would."""
        if self.runs:
            assert self.process is not None
            self.signal(signal.SIGKILL)
            self.process.wait()
