"""Runs the services of a drill as the Redis users in deploy/redis, with the rights of these files and no others."""

import hashlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from blockrelay.errors import UsageError
from blockrelay.redis.users import ROLES
from blockrelay_launcher.supervisor.embedded_redis import MAX_SOCKET_PATH, USERS_FILE

SERVERS = ("control", "payload")
#: The Redis user of the launcher and the drill: access to the folder of an embedded Redis gives all rights.
ADMINISTRATOR = "user default on nopass ~* &* +@all"


def put_in_force(users: Path, data: Path, services: Sequence[str]) -> None:
    """Writes the Redis users of both servers and settings by which `services` use them, into the folder `data`.

    Call it before the first start of `up` on `data`. The users come from control.acl and payload.acl in the folder
    `users`, each with a new password. The role of a service is its name up to the first `-`. Raises UsageError if a
    file cannot be read, or if the path of `data` is too long for a socket.
    """
    passwords = {role: secrets.token_hex(32) for role in ROLES}
    sockets = {server: data / server / "redis.sock" for server in SERVERS}
    for server, socket in sockets.items():
        if len(os.fsencode(socket)) > MAX_SOCKET_PATH:
            raise UsageError(f"{socket} is too long for a socket: choose another TMPDIR")
        try:
            rules = (users / f"{server}.acl").read_text()
        except OSError as error:
            raise UsageError(f"--users {users}: {server}.acl: {error.strerror}") from error
        for role, password in passwords.items():
            rules = rules.replace(f"{role.upper()}_SHA256", hashlib.sha256(password.encode()).hexdigest())
        kept = [line for line in rules.splitlines() if line.strip() and not line.startswith("user default ")]
        socket.parent.mkdir(mode=0o700)
        _write(socket.parent / USERS_FILE, [*kept, ADMINISTRATOR])
    (data / "settings").mkdir(mode=0o700, exist_ok=True)
    for service in services:
        role = service.partition("-")[0]
        urls = {server: f"unix://{role}:{passwords[role]}@{quote(str(socket))}" for server, socket in sockets.items()}
        lines = [f"BLOCKRELAY_REDIS_URL={urls['control']}", f"BLOCKRELAY_PAYLOAD_REDIS_URL={urls['payload']}"]
        if role == "worker":  # stores KV pages on the payload Redis too, so that its user needs all of its rights
            lines.append(f"BLOCKRELAY_PAGE_STORE_REDIS_BYTES={1 << 26}")
        _write(data / "settings" / service, lines)


def _write(path: Path, lines: Sequence[str]) -> None:
    path.touch(mode=0o600)
    path.write_text("".join(f"{line}\n" for line in lines))
