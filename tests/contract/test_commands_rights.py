"""The commands with which runbooks begin, with the rights of a scheduler: as that they run in its container or pod."""

from collections.abc import Iterator

import pytest
import redis

from blockrelay.protocol.keys import Keys
from blockrelay.protocol.plan import Plan
from blockrelay.protocol.transitions import calls
from blockrelay.redis.cell_address import CellAddress
from blockrelay.redis.registry import LostDevice, read_lost_devices, retry_lost_device, tell_lost_device
from blockrelay.redis.users import families_of, rules
from blockrelay.settings import Settings
from blockrelay_launcher.cli.dead_letters import read_letters
from blockrelay_launcher.cli.status import cancel, read_status
from tests.support.cell import MODEL, Cell
from tests.support.redis.redis_server import RedisServer
from tests.support.redis.rights import user

PLAN = Plan(epoch=1, split="1-4", route_class="cpu", assignments={"a": 0}, blocks={}, reasons=("all of it",))
LOST = LostDevice(device="cuda:0", worker="w", reason="hang", losses=3, quarantine=True, wait_s=3000.0)


@pytest.fixture
def scheduler(client: redis.Redis) -> Iterator[redis.Redis]:
    """A client with the commands and families that deploy/redis/control.acl gives a scheduler, of any cell."""
    (line,) = [line for line in rules("control") if line.startswith("user scheduler ")]
    commands = " ".join(word for word in line.split() if word[0] in "+-")
    families = (family.name for family in families_of("scheduler", "control"))
    one = user(client, "scheduler", families, commands=commands)
    yield one
    one.close()


def test_a_scheduler_may_tell_how_its_cell_is_and_end_a_request(
    cell: Cell, redis_server: RedisServer, scheduler: redis.Redis
) -> None:
    client, keys, scripts = cell.client, cell.keys, cell.scripts
    scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="cpu", plan=PLAN.to_json()))
    cell.worker("a", split="1-4", numerics="old")
    for name in ("req-1", "req-2"):
        cell.accept(name)
    run = next(run for run in cell.claim("a", 2) if run.request_id == "req-2")
    cell.commit(run, 0, [5])
    scripts.run(calls.dead("a", silent_s=0))
    tell_lost_device(client, keys, LOST)

    address = CellAddress(redis_server.url.replace("unix://", "unix://scheduler:any@"), Settings(cell=keys.cell))
    found = read_status(address)
    assert found["in_flight"] == 2 and [one["device"] for one in found["trouble"]["lost_devices"]] == ["cuda:0"]
    assert found["trouble"]["numerics"] == {MODEL: {"old": 1}}
    assert cancel(address, "req-1") == "req-1 is cancelled"
    assert read_letters(scheduler, keys) == []


def test_a_scheduler_may_have_a_worker_try_a_lost_device(
    client: redis.Redis, keys: Keys, scheduler: redis.Redis
) -> None:
    tell_lost_device(client, keys, LOST)
    (lost,) = read_lost_devices(scheduler, keys)
    retry_lost_device(scheduler, keys, lost)
    assert tell_lost_device(client, keys, LOST), "the worker is told"
