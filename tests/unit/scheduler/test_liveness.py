"""When the silence of a worker means that it is dead, one look at a time; test_loop.py has a running loop."""

from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import Scripts
from blockrelay.redis.registry import read_accounting
from blockrelay_scheduler.link import SchedulerLinks
from blockrelay_scheduler.liveness import Liveness
from tests.support.cell import MODEL, Cell, begin_cell
from tests.support.redis.redis_server import RedisServer


def test_another_server_may_not_have_the_last_beats(own_redis: RedisServer) -> None:
    """A failover that took no longer than a blink: nothing but the server's identity tells."""
    client, keys = own_redis.client(), Keys("t")
    begin_cell(client, keys)
    cell = Cell(client, keys, Scripts(client, keys))
    liveness = Liveness(SchedulerLinks(client, client, keys, cell.scripts), dead_after_ms=1000)

    def look() -> int:
        """How many workers were declared dead so far, after a look at a time at which silence means something."""
        liveness.trusted_from = float("-inf")
        liveness.declare_dead()
        return read_accounting(client, keys, MODEL).deaths

    cell.worker("a", stage=0)
    assert look() == 0
    own_redis.kill()
    own_redis.start()
    client.zadd(keys.workers, {"a": cell.now_ms() - 5000})
    assert look() == 0 and not liveness.trusted, "it has a whole second to beat"
    assert look() == 1, "and is dead if it does not"
    client.close()
