"""Failovers of real servers: clients that try again get through to the new master, and the old one is left alone."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from blockrelay.errors import RedisRefused, RedisTrouble, RedisUnavailable, UsageError
from blockrelay.redis import client as redis_link
from blockrelay.redis.client import AsyncOneConnection, OneConnection, check_redis, server_run_id
from blockrelay.redis.subscription import subscribed, subscribed_async
from tests.support.redis.failover import CELL, KEYS, Arrangement, Cluster, WithSentinels, arranged
from tests.support.redis.redis_server import find_binary, has_tls
from tests.support.redis.server_process import HOST, LEFT_BY_SSL, Process
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.failovers, pytest.mark.filterwarnings(f"ignore:{LEFT_BY_SSL}:ResourceWarning")]
needs_tls = pytest.mark.skipif(
    not has_tls(find_binary()), reason=f"{find_binary()} has no TLS, NOT TESTED: install redis-server"
)
LOG = KEYS.log("req")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((WithSentinels, False), id="sentinels"),
        pytest.param((Cluster, False), id="cluster"),
        pytest.param((WithSentinels, True), id="sentinels with TLS and users", marks=needs_tls),
        pytest.param((Cluster, True), id="cluster with TLS and users", marks=needs_tls),
    ],
)
def everything(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arrangement]:
    kind, secured = request.param
    with arranged(kind, tmp_path_factory.mktemp("failover"), secured=secured) as found:
        yield found


@pytest.fixture
def processes_may_stay() -> bool:
    """Servers that a test killed are started again; they are the module's."""
    return True


@pytest.fixture
def servers(everything: Arrangement) -> Arrangement:
    """Whole, whatever the test before did to it."""
    everything.mend()
    return everything


FAILOVERS: list[Callable[[Arrangement], tuple[Process, Process]]] = [
    lambda servers: servers.fail_over(),
    lambda servers: servers.kill_master(),
]
both_failovers = pytest.mark.parametrize("failover", FAILOVERS, ids=["planned", "killed"])


def run_id(server: Process) -> str:
    return server.ask("INFO", "server")["run_id"]


def _pipeline(client: redis.Redis) -> Any:
    pipeline = client.pipeline(transaction=False)
    pipeline.xadd(LOG, {"by": "pipeline"})
    pipeline.get(KEYS.protocol)
    return pipeline.execute()


def _transaction(client: redis.Redis) -> Any:
    pipeline = client.pipeline(transaction=True)
    pipeline.xadd(LOG, {"by": "transaction"})
    return pipeline.execute()


@both_failovers
def test_threads_that_try_again_get_through(
    servers: Arrangement, failover: Callable[[Arrangement], tuple[Process, Process]]
) -> None:
    with servers.client() as client, servers.client() as quiet, servers.client() as kept:
        connection = OneConnection(kept)
        ways: dict[str, Callable[[], Any]] = {
            "command": lambda: client.xadd(LOG, {"by": "command"}),
            "pipeline": lambda: _pipeline(client),
            "transaction": lambda: _transaction(client),
            "script": lambda: client.eval("return redis.call('XADD', KEYS[1], '*', 'by', 'script')", 1, LOG),
            "one connection": lambda: connection.ask("XADD", LOG, "*", "by", "one"),
            "one that was idle": lambda: quiet.xadd(LOG, {"by": "idle"}),
        }
        for write in ways.values():
            write()
        _, new = failover(servers)

        def found() -> bool:
            """A node of a cluster refuses keys that it does not have, and nothing else."""
            return _worked(lambda: client.get(KEYS.protocol)) and _quiet(lambda: server_run_id(client)) == run_id(new)

        wait_until(found, "the new master is found", timeout_s=60)
        for way, write in ways.items():
            wait_until(lambda write=write: _worked(write), f"a {way} gets through")
        assert len(new.ask("XRANGE", LOG, "-", "+")) >= len(ways)


def _worked(action: Callable[[], Any]) -> bool:
    """Whether Redis did it. That it cannot right now is no refusal, in any kind of failover."""
    try:
        action()
    except RedisUnavailable:
        return False
    return True


@both_failovers
async def test_tasks_that_try_again_get_through(
    servers: Arrangement, failover: Callable[[Arrangement], tuple[Process, Process]]
) -> None:
    client = redis_link.connect_async(servers.url(), cell=CELL, connections=3)
    connection = AsyncOneConnection(client)

    async def in_a_pipeline() -> Any:
        pipeline = client.pipeline(transaction=False)
        pipeline.xadd(LOG, {"by": "pipeline"})
        return await pipeline.execute()

    ways: dict[str, Callable[[], Any]] = {
        "command": lambda: client.xadd(LOG, {"by": "command"}),
        "pipeline": in_a_pipeline,
        "one connection": lambda: connection.ask("XADD", LOG, "*", "by", "one"),
    }
    for write in ways.values():
        await write()
    _, new = await asyncio.to_thread(failover, servers)
    there = run_id(new)

    async def is_found() -> bool:
        with suppress(RedisUnavailable):
            await cast(Any, client.get(KEYS.protocol))
            return cast(Any, await client.info("server"))["run_id"] == there
        return False

    async with asyncio.timeout(60):
        while True:
            if await is_found():
                break
            await asyncio.sleep(0.02)
    async with asyncio.timeout(60):
        for write in ways.values():
            while True:
                with suppress(RedisUnavailable):
                    await write()
                    break
                await asyncio.sleep(0.02)
        # More tasks than connections, all at once.
        await asyncio.gather(*(client.xadd(LOG, {"by": str(number)}) for number in range(20)))
    assert await is_found()
    await client.aclose()


@both_failovers
def test_a_blocked_read_ends_and_the_next_one_works(
    servers: Arrangement, failover: Callable[[Arrangement], tuple[Process, Process]]
) -> None:
    errors: list[RedisTrouble] = []
    found: list[Any] = []
    rounds = 0

    def read() -> None:
        nonlocal rounds
        with servers.client() as client:
            connection = OneConnection(client)
            while not found:
                try:
                    rounds += 1
                    answer = connection.ask("XREAD", "BLOCK", 1000, "STREAMS", KEYS.log("blocked"), "0")
                    found.extend(answer or [])
                except RedisTrouble as error:
                    errors.append(error)
                    threading.Event().wait(0.02)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    wait_until(lambda: rounds > 1, "it reads")
    failover(servers)
    with servers.client() as client:
        wait_until(lambda: _worked(lambda: client.xadd(KEYS.log("blocked"), {"a": "b"})), "it is written")
        reader.join(30)
        wait_until(lambda: _worked(lambda: client.delete(KEYS.log("blocked"))), "it is deleted")
    assert found, errors
    assert all(isinstance(error, RedisUnavailable) for error in errors), errors


@both_failovers
async def test_so_does_that_of_a_task(
    servers: Arrangement, failover: Callable[[Arrangement], tuple[Process, Process]]
) -> None:
    client = redis_link.connect_async(servers.url(), cell=CELL)
    connection, errors, read_once = AsyncOneConnection(client), list[RedisTrouble](), asyncio.Event()

    async def read() -> Any:
        while True:
            try:
                if found := await connection.ask("XREAD", "BLOCK", 1000, "STREAMS", KEYS.log("blocked"), "0"):
                    return found
                read_once.set()
            except RedisTrouble as error:
                errors.append(error)
                await asyncio.sleep(0.02)

    async with asyncio.timeout(90):
        reading = asyncio.create_task(read())
        await read_once.wait()
        await asyncio.to_thread(failover, servers)
        for action in (lambda: client.xadd(KEYS.log("blocked"), {"a": "b"}), lambda: reading):
            while True:
                with suppress(RedisUnavailable):
                    await cast(Any, action())
                    break
                await asyncio.sleep(0.02)
    await client.delete(KEYS.log("blocked"))
    await client.aclose()
    assert all(isinstance(error, RedisUnavailable) for error in errors), errors


@both_failovers
def test_a_subscription_comes_back(
    servers: Arrangement, failover: Callable[[Arrangement], tuple[Process, Process]]
) -> None:
    heard: list[bytes] = []
    holds = threading.Event()

    def listen() -> None:
        with servers.client() as client:
            while not heard:
                with suppress(RedisUnavailable):
                    for message in subscribed(client, KEYS.status_channel):
                        holds.set()
                        if message is not None:
                            heard.append(message)
                            break

    async def listen_async() -> list[bytes]:
        client = redis_link.connect_async(servers.url(), cell=CELL)
        try:
            while True:
                messages = cast(Any, subscribed_async(client, KEYS.status_channel))
                with suppress(RedisUnavailable):
                    async for message in messages:
                        if message is not None:
                            return [message]
                await messages.aclose()
        finally:
            await client.aclose()

    async def publish() -> None:
        listening = asyncio.create_task(listen_async())
        with servers.client("worker") as client:
            async with asyncio.timeout(60):
                while not (heard and listening.done()):
                    await asyncio.to_thread(_worked, lambda: client.publish(KEYS.status_channel, "news"))
                    await asyncio.sleep(0.05)
        assert await listening == [b"news"]

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    wait_until(holds.is_set, "it is subscribed")
    failover(servers)
    asyncio.run(publish())
    listener.join(30)
    assert heard == [b"news"]


def test_any_seed_will_do(servers: Arrangement) -> None:
    """One of which nobody listens, one that is not the master."""
    with ExitStack() as stack:
        for seed in servers.seeds:
            url = servers.url(seeds=[1, seed.port])
            client = stack.enter_context(redis_link.connect(url, cell=CELL))
            client.xadd(LOG, {"by": str(seed.port)})
    nobody = servers.url(seeds=[1, 2])
    with (
        redis_link.connect(nobody, cell=CELL) as client,
        pytest.raises(RedisUnavailable, match=r"127\.0\.0\.1:1 and 1 more"),
    ):
        client.get(KEYS.protocol)


def test_services_join_the_cell(servers: Arrangement) -> None:
    for role in ("scheduler", "gateway", "worker"):
        with servers.client(role) as client:
            check_redis(client, "control Redis", cell=KEYS)
            assert cast(Any, client.info("memory"))["maxmemory_policy"] == "noeviction"


def test_what_no_waiting_mends_is_told_at_the_start(servers: Arrangement, tmp_path: Path) -> None:
    url = servers.url()
    wrong = {url.replace("/blockrelay", "/other"): "is not found: .* know no master 'other'"}
    if servers.security:
        wrong = {url.replace("password-of-gateway", "wrong"): "does not let us in: .*WRONGPASS", **wrong}
        wrong[url.replace("password-of-reader", "wrong")] = "does not let us in: .*WRONGPASS.*asked for the address"
    for bad, why in wrong.items():
        if bad != url:
            with redis_link.connect(bad, cell=CELL) as client, pytest.raises(UsageError, match=why) as caught:
                check_redis(client, "control Redis", cell=KEYS)
            assert "password-of" not in str(caught.value)
    other = (
        url.replace("+cluster:", "+sentinel:").replace("/0", "/m")
        if isinstance(servers, Cluster)
        else url.replace("sentinel:", "cluster:")
    )
    other = other.replace("/blockrelay", "")
    with pytest.raises(UsageError), redis_link.connect(re.sub(r"&sentinel_\w+=[^&]*", "", other), cell=CELL) as client:
        check_redis(client, "control Redis", cell=KEYS)


def test_a_replica_that_sentinels_name_is_not_written_to(servers: Arrangement) -> None:
    """They may not have noticed yet."""
    if isinstance(servers, Cluster):
        return
    master = servers.master()
    client = servers.client()
    client.xadd(LOG, {"a": "b"})
    other = next(server for server in servers.servers if server is not master)
    master.ask("REPLICAOF", HOST, other.port)
    with servers.client() as new, pytest.raises(RedisUnavailable, match=r"no master \(slave\)"):
        new.xread({LOG: "0"})
    with pytest.raises(RedisUnavailable, match=r"READONLY|no master|closed"):
        client.xadd(LOG, {"a": "b"})
    master.ask("REPLICAOF", "NO", "ONE")
    wait_until(lambda: _worked(lambda: client.xadd(LOG, {"a": "b"})), "it is the master again")
    client.close()


def test_a_master_of_yesterday_gets_nothing(servers: Arrangement) -> None:
    """It is started again, and nobody tells it that it was replaced: to itself it is the master."""
    if isinstance(servers, Cluster):
        return
    with servers.client() as client:
        client.xadd(LOG, {"a": "b"})
        old, _ = servers.kill_master()
        wait_until(lambda: _worked(lambda: client.xadd(LOG, {"a": "b"})), "the new master is found")
        sentinels = servers.seeds
        for sentinel in sentinels:
            sentinel.kill()
        try:
            old.start()
            assert old.role() == "master"
            length = old.ask("XLEN", LOG)
            client.xadd(LOG, {"a": "b"})  # the Sentinels are silent, and there is no reason for doubt
            with servers.client() as another, pytest.raises(RedisUnavailable, match="no Sentinel answers"):
                another.xadd(LOG, {"a": "b"})
            client.connection_pool.disconnect()
            client.xadd(LOG, {"a": "b"})
            assert old.ask("XLEN", LOG) == length
        finally:
            for sentinel in sentinels:
                sentinel.start()


def test_a_planned_failover_is_noticed_although_the_old_master_goes_on(servers: Arrangement) -> None:
    """For ten seconds it takes what it is given, and all of that is thrown away; here nobody can make it a replica."""
    if isinstance(servers, Cluster):
        return
    sentinels_come_as = "default" if servers.security is None else "sentinel"
    with servers.client() as client:
        connection = OneConnection(client)
        connection.ask("XADD", LOG, "*", "a", "b")
        old, new = servers.fail_over()
        old.ask("ACL", "SETUSER", sentinels_come_as, "-slaveof", "-replicaof")

        def arrives_at_the_new_master() -> bool:
            _worked(lambda: connection.ask("XADD", LOG, "*", "a", "b"))
            return run_id(new) in str(_quiet(lambda: connection.ask("INFO", "server")))

        try:
            wait_until(arrives_at_the_new_master, "the new master is found")
            assert old.role() == "master"
        finally:
            old.ask("ACL", "SETUSER", sentinels_come_as, "+slaveof", "+replicaof")


def _quiet(ask: Callable[[], Any]) -> Any:
    with suppress(RedisUnavailable):
        return ask()
    return None


def test_one_node_of_a_cluster_says_how_it_is_addressed(servers: Arrangement) -> None:
    if not isinstance(servers, Cluster):
        return
    (other, *_) = servers.others()
    with redis_link.connect(other.url) as client, pytest.raises(RedisRefused, match=r"redis\+cluster://") as caught:
        client.get(KEYS.protocol)
    assert caught.value.code == "MOVED"
