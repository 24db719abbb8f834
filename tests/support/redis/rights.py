"""Redis users for tests: each script with the rights to the families that the table of keys gives it, and no more."""

from collections.abc import Iterable
from typing import Any, TypeVar

import redis

from blockrelay.protocol.keys import FAMILIES, Keys, declared
from blockrelay.protocol.transitions.calls import Call
from blockrelay.redis.client import Scripts

T = TypeVar("T")


def user(client: redis.Redis, name: str, families: Iterable[str], *, commands: str = "+@all") -> redis.Redis:
    """A client of its own for a new user that may touch `families` of every cell. The caller closes it."""
    wanted = set(families)
    patterns = [f"~*:{f.name}{':*' if f.of else ''}" for f in FAMILIES if f.name in wanted]
    client.execute_command("ACL", "SETUSER", name, "reset", "on", "nopass", *commands.split(), *patterns)
    options: dict[str, Any] = {**client.connection_pool.connection_kwargs, "username": name, "password": "any"}
    pool = redis.ConnectionPool(connection_class=client.connection_pool.connection_class, **options)
    return type(client).from_pool(pool)


class ConfinedScripts(Scripts):
    """Runs every script as a user that may touch what the script declares, so that an undeclared key fails its test."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        super().__init__(client, keys)
        self._confined: dict[str, tuple[redis.Redis, Scripts]] = {}

    def run(self, call: Call[T]) -> T:
        if call.script not in self._confined:
            client = user(self._client, f"script-{call.script}", declared(call.script.upper()))
            self._confined[call.script] = (client, Scripts(client, self._keys))
        return self._confined[call.script][1].run(call)

    def close(self) -> None:
        """Also to be called when the server is started anew: it has forgotten the users."""
        for client, _ in self._confined.values():
            client.close()
        self._confined.clear()
