"""The Redis user of an autoscaler counts the unfinished requests of its cell, always, and may do nothing else."""

from collections.abc import Iterator

import pytest
import redis

from blockrelay.errors import RedisRefused
from blockrelay.protocol.keys import FAMILIES, Keys
from blockrelay.protocol.transitions import calls
from tests.support.cell import Cell
from tests.support.redis.keda import COUNT, keda, unfinished


@pytest.fixture
def autoscaler(client: redis.Redis, keys: Keys) -> Iterator[redis.Redis]:
    one = keda(client, keys)
    yield one
    one.close()
    client.execute_command("ACL", "DELUSER", "keda")


def test_it_counts_what_is_unfinished_from_the_acceptance_to_the_end(cell: Cell, autoscaler: redis.Redis) -> None:
    """Queued, running, run again, expired or cancelled: what has not ended counts, and once."""
    assert unfinished(autoscaler, cell.keys) == 0, "an empty cell has no such key"
    cell.worker("a", split="1-4")
    for accepted in range(1, 41):
        cell.accept(f"req-{accepted}")
        assert unfinished(autoscaler, cell.keys) == accepted
    cell.accept("req-1")
    assert unfinished(autoscaler, cell.keys) == 40, "the same request again is no other one"
    runs = cell.claim("a", 30)
    assert len(runs) == 30 and unfinished(autoscaler, cell.keys) == 40, "a run is no end"
    left = 40
    for run in runs[:10]:
        cell.commit(run, 0, [7], end="stop")
        left -= 1
        assert unfinished(autoscaler, cell.keys) == left
    assert cell.rerun(runs[10]) and unfinished(autoscaler, cell.keys) == left
    cell.scripts.run(calls.dead("a", silent_s=0, reason="death"))
    assert unfinished(autoscaler, cell.keys) == left, "a dead worker ends nothing"
    cell.worker("b", split="1-4")
    for run in cell.claim("b", 40):
        assert cell.scripts.run(calls.finish(run.request_id, "cancelled")) == "FINISHED"
        left -= 1
        assert unfinished(autoscaler, cell.keys) == left
    assert left == 0


@pytest.mark.parametrize("command", [
    "ZADD {key} 1 req-x", "ZREM {key} req-1", "ZRANGE {key} 0 -1", "DEL {key}", "GET {key}", "EXPIRE {key} 1",
    "KEYS *", "SCAN 0", "FLUSHALL", "CONFIG GET *", "ACL LIST", "INFO", "SCRIPT FLUSH", "PUBLISH {{t}}:status-events x",
    "XADD {key} * a b", "MULTI",
])  # fmt: skip
def test_it_may_do_nothing_else(cell: Cell, autoscaler: redis.Redis, command: str) -> None:
    cell.accept()
    before = cell.everything()
    with pytest.raises(RedisRefused):
        autoscaler.execute_command(*command.format(key=cell.keys.running).split())
    assert cell.everything() == before


@pytest.mark.parametrize("family", [family.name for family in FAMILIES if family.name != "running"])
def test_it_may_ask_for_no_other_key(cell: Cell, autoscaler: redis.Redis, family: str) -> None:
    with pytest.raises(RedisRefused):
        autoscaler.eval(COUNT, 1, cell.keys.sample(family))


def test_its_script_may_not_write_either(cell: Cell, autoscaler: redis.Redis) -> None:
    cell.accept()
    for command in ("'DEL', KEYS[1]", "'ZREM', KEYS[1], 'req-1'", "'ZCARD', '{other}:running'"):
        with pytest.raises(RedisRefused):
            autoscaler.eval(f"return redis.call({command})", 1, cell.keys.running)
    assert unfinished(autoscaler, cell.keys) == 1
