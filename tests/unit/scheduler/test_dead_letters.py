"""Dead letters have users' prompts in them, and the scheduler deletes them when their time is over."""

import redis

from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import Scripts
from blockrelay.settings import SchedulerSettings
from blockrelay_scheduler.link import SchedulerLinks
from blockrelay_scheduler.rescuer import Rescuer
from tests.support.cell import Cell


def test_dead_letters_are_forgotten_with_their_prompts(
    cell: Cell, client: redis.Redis, keys: Keys, scripts: Scripts
) -> None:
    rescuer = Rescuer(SchedulerLinks(client, client, keys, scripts), SchedulerSettings(dead_letters_s=3600))
    rescuer.forget_letters()
    client.xadd(keys.dead_letters, {"request": "req-old"}, id=f"{cell.now_ms() - 3_700_000}-0")
    client.xadd(keys.dead_letters, {"request": "req-young"}, id=f"{cell.now_ms() - 3_000_000}-0")
    rescuer.forget_letters()
    ((_, kept),) = client.xrange(keys.dead_letters)  # pyright: ignore[reportGeneralTypeIssues]
    assert kept == {b"request": b"req-young"}
