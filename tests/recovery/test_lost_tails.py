"""Redis with everysec, whose crash loses what was written last: accepted requests, cancels and tokens among it.

The clients are the reference client; the gateway that still holds a request sends ACCEPT again.
"""

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from blockrelay_launcher.client.resuming import resuming_stream
from tests.support.systems.system import StartSystem, assert_nothing_is_held
from tests.support.waiting import wait_until

CLIENTS, TOKENS = 6, 200


def body_of(index: int) -> dict[str, Any]:
    return {
        "prompt": list(range(3 + index, 30 + 3 * index)), "max_tokens": TOKENS, "temperature": 0.8 * (index % 2),
        "seed": 5, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip


class Client(threading.Thread):
    """Reads one answer to its end, over whatever happens."""

    def __init__(self, gateways: Sequence[str], index: int, key: str) -> None:
        super().__init__(daemon=True)
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.trouble: object = None
        self._gateways, self._index, self._key = gateways, index, key
        self.start()

    def run(self) -> None:
        for event in resuming_stream(self._gateways, "/v1/completions", body_of(self._index), key=self._key):
            if "error" in event.data:
                self.trouble = event.data
                return
            self.positions.append(int(event.id.rpartition(":")[2]))
            for choice in event.data["choices"]:
                self.tokens += choice.get("token_ids") or []

    def result(self) -> list[int]:
        self.join(90)
        assert not self.is_alive() and not self.trouble, self.trouble
        assert self.positions == sorted(set(self.positions)), "no event twice, none out of order"
        return self.tokens


@pytest.mark.parametrize(
    ("stages", "seed"),
    [
        (1, 1),
        *(pytest.param(stages, seed, marks=pytest.mark.faults) for stages, seed in [(1, 2), (2, 1), (2, 2), (2, 3)]),
    ],
)
def test_a_redis_that_lost_its_tail_is_told_everything_again(start_system: StartSystem, stages: int, seed: int) -> None:
    rng = random.Random(seed)
    system = start_system(stages=stages, fsync="everysec")
    gateways = [system.start_gateway()[0] for _ in range(2)]
    empty = system.control.aof_size()
    undisturbed = [Client(gateways, i, f"before-{seed}-{i}").result() for i in range(CLIENTS)]
    full = system.control.aof_size()
    clients = [Client(gateways, i, f"after-{seed}-{i}") for i in range(CLIENTS)]
    wait_until(lambda: sum(len(c.tokens) for c in clients) > CLIENTS * TOKENS * 0.3, "they are under way")
    system.control.kill()
    assert empty < full < system.control.aof_size()
    # The earliest cut forgets that they were accepted at all.
    system.control.truncate_aof(rng.randrange(full, system.control.aof_size()))
    system.control.start()
    assert [client.result() for client in clients] == undisturbed
    assert_nothing_is_held(system)


def test_a_control_redis_that_was_emptied_is_told_everything_again(start_system: StartSystem) -> None:
    """The same process, without a record, a plan or a worker."""
    system = start_system(stages=2)
    gateways = [system.start_gateway()[0]]
    undisturbed = [Client(gateways, i, f"before-{i}").result() for i in range(CLIENTS)]
    ids = {w.id for w in system.infos()}
    clients = [Client(gateways, i, f"after-{i}") for i in range(CLIENTS)]
    wait_until(lambda: sum(len(c.tokens) for c in clients) > CLIENTS * TOKENS * 0.3, "they are under way")
    system.client.flushall()
    assert [client.result() for client in clients] == undisturbed
    assert_nothing_is_held(system)
    assert ids.isdisjoint(w.id for w in system.infos()), "the workers came back under new names"
