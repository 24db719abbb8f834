"""The model is about our scripts: random walks through it, step by step beside a real server."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from blockrelay.protocol.constants import LUA, MAX_QUARANTINE_DEATHS, QUARANTINE_AFTER
from blockrelay.protocol.transitions.source import source
from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import Budget, State
from tests.protocol_model.explorer import Step
from tests.protocol_model.protocol import Protocol
from tests.support.model_replay import Recorded, Replay, comparable, recording, way
from tests.support.redis.redis_server import RedisServer

pytestmark = pytest.mark.model

#: As in the scripts; in a configuration that is explored such numbers would be too large.
REAL = Bounds(
    quarantine_after=QUARANTINE_AFTER,
    max_quarantine_deaths=MAX_QUARANTINE_DEATHS,
    delays=True,
    either_worker=False,
    ends_when_done=False,
)
WALKS = {
    "pipeline": replace(
        REAL, requests=2, room=2, tokens=3,
        faults=Budget(kill=3, pause=2, restart=1, lost_reply=1, early_dead=2, stalled=3, cancel=1, deadline=1),
    ),
    "tight pools": replace(
        REAL, workers=1, requests=3, room=2, pages=7, needs=(4, 9, 3), faults=Budget(kill=2, stalled=2, cancel=1)
    ),
    "growing runs": replace(
        REAL, workers=1, requests=4, room=3, prompt=1, tokens=4, pages=8, faults=Budget(kill=1, stalled=1, cancel=1)
    ),
    "poison": replace(
        REAL, stages=1, requests=3, room=2, tenants=(0, 0, 1), poison=frozenset({0}), faults=Budget(kill=1, cancel=1)
    ),
    "upgrade": replace(
        REAL, ids=(0, 1, 0, 1), requests=3, room=2, tokens=3, exact=frozenset({2}),
        faults=Budget(kill=2, pause=2, restart=1, lost_reply=1, stalled=3, cancel=1, retire=2),
    ),
    "plans": replace(
        REAL, plans=(0, 1, 0, 1), requests=3, room=2, tokens=3,
        faults=Budget(kill=2, pause=1, restart=1, lost_reply=1, stalled=3, cancel=1, move=1),
    ),
    "precisions": replace(
        REAL, workers=3, ids=(0, 0, 1, 0, 0, 1), pools=(6, 9, 9, 6, 9, 9), needs=(5, 8, 5), requests=3, room=2,
        tokens=4, prompt=1, exact=frozenset({2}),
        faults=Budget(kill=1, restart=1, lost_reply=1, stalled=3, cancel=1, change=4, call_off=2),
    ),
    "precisions of a whole model": replace(
        REAL, stages=1, ids=(0, 1), alone=True, requests=3, room=1, tokens=3,
        faults=Budget(kill=1, restart=1, stalled=3, change=1, call_off=1),
    ),
    "mixed": replace(
        REAL, ids=(0, 1, 0, 1), varying=frozenset({1}), requests=3, room=2, tokens=3, exact=frozenset({2}),
        faults=Budget(kill=2, pause=2, restart=1, lost_reply=1, stalled=3, cancel=1, retire=1),
    ),
    "hand-over": replace(
        REAL, ids=(0, 1, 0, 1), varying=frozenset({1}), gpus=frozenset({1}), handover=True, requests=3, room=2,
        tokens=3, deny=frozenset({1}), recompute=frozenset({2}), choices=frozenset({1, 2}),
        faults=Budget(kill=2, pause=1, restart=1, lost_reply=1, stalled=2, cancel=1, device=3, drain=2, wipe=1),
    ),
    "hand-over of a whole model": replace(
        REAL, stages=1, ids=(0, 1), varying=frozenset({1}), gpus=frozenset({1}), handover=True, requests=3, room=2,
        tokens=3, deny=frozenset({1}), limited=frozenset({2}), choices=frozenset({1, 2}),
        faults=Budget(kill=2, restart=1, lost_reply=1, stalled=2, retire=1, device=3, drain=2),
    ),
    "pools": replace(
        REAL, stages=1, workers=3, ids=(0, 0, 1), pools=(60, 100, 100), needs=(70, 60, 70), requests=3, room=2,
        tokens=3, faults=Budget(kill=1, restart=1, stalled=3, retire=1),
    ),
    "clients": replace(
        REAL, stages=1, workers=1, clients=2, gateways=2,
        faults=Budget(restart=1, gateway_kill=2, deadline=1, lost_reply=1, leave=3, forget=2),
    ),
    "failovers": replace(
        REAL, stages=1, workers=1, clients=2, gateways=2, replicas=True,
        faults=Budget(failover=2, gateway_kill=1, cancel=2, lost_reply=1),
    ),
    "sessions": replace(
        REAL, stages=1, workers=1, clients=1, gateways=1, steps=3, requests=6, tokens=0, prompt=1,
        faults=Budget(restart=1, gateway_kill=2, lost_reply=1, forget=2),
    ),
}  # fmt: skip
STEPS = 80


@pytest.fixture(autouse=True)
def pages_of_one_token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts for which a page holds one token, as in the model, and which count no drafts."""
    monkeypatch.setitem(LUA, "PAGE_TOKENS", 1)
    monkeypatch.setitem(LUA, "MAX_DRAFTS", 0)
    source.cache_clear()
    yield
    source.cache_clear()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_through_the_model_is_one_through_the_scripts(
    walk: str, seed: int, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = WALKS[walk]
    protocol, replay, choose = Protocol(bounds), Replay(bounds, own_redis), random.Random(f"{walk} {seed}")
    with recording(monkeypatch) as made:
        state = protocol.initial()
    for call in made:
        replay.make(call)
    on_disk, walked = 0, list[str]()
    for _ in range(STEPS):
        assert comparable(replay.state()) == comparable(state.redis), "\n".join(walked)
        state = replace_order(state, replay)
        with recording(monkeypatch) as made:
            steps = list(protocol.steps(state))
        without_effect(made, state, replay)
        if not steps:
            break
        name, after, _ = pick(steps, choose)
        walked.append(name)
        if "reaches the disk" in name or name == "the replicas fall behind":
            on_disk = own_redis.aof_size()
        elif name.startswith(("kill -9 Redis", "a failover")):  # to scripts both are the same
            replay.crash(on_disk)
        else:
            for call in way(made, state.redis, after.redis):
                replay.make(call)
        state = after
    replay.client.close()


def pick(steps: list[Step[State]], choose: random.Random) -> Step[State]:
    """Faults now and then, or a walk would spend them all at its beginning."""
    faults = [step for step in steps if step[2]]
    others = [step for step in steps if not step[2]]
    return choose.choice(faults if faults and (not others or choose.random() < 0.15) else others)


def without_effect(made: list[Recorded], state: State, replay: Replay) -> None:
    """What does nothing in the model must do nothing, with the same answer."""
    for call in made:
        if call.before == state.redis == call.after and call.name not in ("announce", "name", "take"):
            replay.make(call)


def replace_order(state: State, replay: Replay) -> State:
    """DEAD re-runs what is on a worker in any order: from here on in that of the server."""
    found = replay.state()
    return state._replace(redis=state.redis._replace(reruns=found.reruns, pinned=found.pinned))
