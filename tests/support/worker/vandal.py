"""Somebody who breaks stored pages while they are in use: what is read must be a miss, never data."""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from blockrelay.protocol.keys import Keys
from blockrelay.redis import client as redis_link
from blockrelay.up_file import read_running
from tests.support.beside import beside
from tests.support.systems.up_process import UpProcess

#: Seconds between two acts: a few pages of those that are read are broken, most are whole.
PAUSE_S = 0.03


@contextmanager
def vandal(up: UpProcess, folder: Path) -> Iterator[None]:
    """In the background, break pages in the shared folder and on the payload Redis of `up`."""
    chance = random.Random(1)
    assert up.data is not None
    running = read_running(up.data)
    client, keys = redis_link.connect(running.payload_redis_url or running.redis_url), Keys(running.cell)

    def act(over: threading.Event) -> None:
        while not over.wait(PAUSE_S):
            files = sorted(path for path in folder.glob("*.*-*") if not path.name.startswith("."))
            if len(files) > 1:
                path, other = chance.sample(files, 2)
                _break_file(path, other, chance)
            names = cast(list[bytes], list(client.scan_iter(keys.page("*"), count=1000)))
            if len(names) > 1:
                name, another = chance.sample(names, 2)
                _break_hash(client, name, another, chance)

    with client, beside(act):
        yield


def _break_file(path: Path, other: Path, chance: random.Random) -> None:
    """Flip a byte, cut the end off, or put another page in its place. The file may vanish meanwhile."""
    try:
        data = bytearray(path.read_bytes())
        act = chance.randrange(3)
        if act == 0:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif act == 1:
            del data[chance.randrange(len(data)) :]
        else:
            data = bytearray(other.read_bytes())
        draft = path.with_name(f".vandal-{os.getpid()}")
        draft.write_bytes(data)
        draft.replace(path)
    except FileNotFoundError:
        return


def _break_hash(client: Any, name: bytes, other: bytes, chance: random.Random) -> None:
    """The same with one field of a page on Redis."""
    fields = sorted(client.hgetall(name).items())
    if not fields:
        return
    field, value = chance.choice(fields)
    act = chance.randrange(3)
    if act == 0:
        broken = bytearray(value)
        broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
    elif act == 1:
        broken = value[: chance.randrange(len(value))]
    else:
        broken = client.hget(other, field) or b""
    client.hset(name, field, bytes(broken))
