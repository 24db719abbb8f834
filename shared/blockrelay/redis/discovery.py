"""Finds the server of a looked-up Redis address by asking Sentinels or cluster nodes, for all connections of a pool.

The result holds until a connection has an error that casts doubt on it. That is enough in a cluster, whose nodes refuse
keys that are not theirs. But a healthy master that its Sentinels replaced does not notice it for ten seconds, and loses
what is written there meanwhile. So a Sentinel is asked again in every second in which a connection is used.

`Sentinels` and `Slots` decide what to ask and what follows from the answers, without a network. `Lookup` (for threads)
and `AsyncLookup` (for tasks) send the questions.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import redis
import redis.asyncio
from redis.crc import key_slot

from blockrelay.auth.redis_credentials import take_password_file
from blockrelay.errors import RedisRefused, RedisTrouble, RedisUnavailable
from blockrelay.redis.address import LookedUpAddress, RedisNode
from blockrelay.redis.errors import CommandError, translated

#: Seconds that a Sentinel or node has to answer: a host that is gone must not hold up a failover.
ANSWER_S = 1.0
#: Seconds between two checks that the master is still the same, and after a check without an answer.
CHECK_S, CHECK_LATER_S = 1.0, 5.0
#: `RedisTrouble.code` of an address whose server will never be found, by the answers of those that were asked.
NOT_FOUND = "ADDRESS"
#: Yields each node to ask, is sent its answer or RedisTrouble, and returns the server's place. Raises RedisTrouble.
Search = Generator[RedisNode, Any, RedisNode]


class Sentinels:
    """Finds the master of one name.

    It asks more than half of the Sentinels, and the newest configuration counts: a Sentinel that was cut off, or has
    just started, may still name the former master.
    """

    #: The command to send to each node that a search yields.
    question = "SENTINEL MASTERS"

    def __init__(self, seeds: Sequence[RedisNode], name: str) -> None:
        self._seeds, self._name, self._epoch = list(seeds), name, 0

    def search(self) -> Search:
        """Starts a search. Only one may run at a time."""
        answers: list[Mapping[str, Mapping[str, Any]]] = []
        failed: dict[RedisNode, RedisTrouble] = {}
        for seed in list(self._seeds):
            answer = yield seed
            if isinstance(answer, RedisTrouble):
                failed[seed] = answer
                self._seeds.append(self._seeds.pop(self._seeds.index(seed)))  # to be asked last from now on
                continue
            answers.append(answer)
            if 2 * len(answers) > len(self._seeds):
                break
        if not answers:
            raise unanswered("no Sentinel answers", failed)
        place = named_master(self._name, answers)
        self._epoch = max(masters[self._name]["config-epoch"] for masters in answers if self._name in masters)
        return place

    def witness(self) -> RedisNode | None:
        """Returns the node to ask whether the server is still the same; None if the server itself reports a change."""
        self._seeds.append(self._seeds.pop(0))  # each in turn: one may be cut off
        return self._seeds[-1]

    def contradicts(self, answer: Any, place: RedisNode) -> bool:
        """Returns whether the witness's answer means that the server may not be at `place` any more."""
        state = answer.get(self._name)
        if state is None or state["config-epoch"] < self._epoch:
            return False  # its configuration is older than the one that was found
        if _place(state) == place:
            return not _is_well(state) or _is_replaced(state)
        return not _is_replaced(state)  # else `place` may be the new master that replaces the one it names


def _place(state: Mapping[str, Any]) -> RedisNode:
    return RedisNode(state["ip"], state["port"])


def _is_well(state: Mapping[str, Any]) -> bool:
    return bool(state["is_master"] and not state["is_sdown"] and not state["is_odown"])


def _is_replaced(state: Mapping[str, Any]) -> bool:
    """Returns whether this Sentinel leads a failover away from the master that it names.

    It still names that master when the other Sentinels already know the new one.
    """
    return "failover_in_progress" in state["flags"]


def named_master(name: str, answers: Sequence[Mapping[str, Mapping[str, Any]]]) -> RedisNode:
    """Returns the master called `name` by Sentinels' answers to SENTINEL MASTERS, as redis-py reads them.

    Raises:
        RedisRefused: they do not know the name.
        RedisUnavailable: the master is down, or about to be replaced.
    """
    states = [masters[name] for masters in answers if name in masters]
    if not states:
        raise RedisRefused(f"Redis refuses: the Sentinels know no master {name!r}", code=NOT_FOUND)
    newest = max(state["config-epoch"] for state in states)
    states = [state for state in states if state["config-epoch"] == newest]
    replaced = {_place(state) for state in filter(_is_replaced, states)}
    for state in filter(_is_well, states):
        if _place(state) not in replaced:
            return _place(state)
    why = "is being replaced" if replaced else "is down"
    raise RedisUnavailable(f"Redis does not answer: the Sentinels say that the master of {name!r} {why}")


class Slots:
    """Finds the cluster node that owns one slot.

    Any known node may be asked, each time another one, since a node that was cut off answers with the former owner.
    """

    #: The command to send to each node that a search yields.
    question = "CLUSTER SLOTS"

    def __init__(self, seeds: Sequence[RedisNode], slot: int) -> None:
        self._seeds, self._slot = tuple(seeds), slot
        self._nodes = list(seeds)

    def search(self) -> Search:
        """Starts a search. Only one may run at a time."""
        failed: dict[RedisNode, RedisTrouble] = {}
        answered = False
        for node in list(self._nodes):
            answer = yield node
            self._nodes = [*(n for n in self._nodes if n != node), node]  # to be asked last from now on
            if isinstance(answer, RedisTrouble):
                failed[node] = answer
                continue
            answered = True
            masters = masters_of_slots(answer, node=node)
            self._learn(set(masters.values()))
            for (first, last), master in masters.items():
                if first <= self._slot <= last:
                    return master
        if answered:
            raise RedisUnavailable(f"Redis does not answer: no node of the cluster owns slot {self._slot}")
        raise unanswered("no node of the cluster answers", failed)

    def witness(self) -> RedisNode | None:
        """Returns None: no node needs to be asked, since the server itself refuses keys that it does not own."""
        return None

    def contradicts(self, answer: Any, place: RedisNode) -> bool:
        """Returns False: there is no witness whose answer could contradict."""
        return False

    def _learn(self, masters: set[RedisNode]) -> None:
        """Adds the current masters to the nodes to ask, since all seeds may be gone one day; drops former masters."""
        kept = [node for node in self._nodes if node in masters or node in self._seeds]
        self._nodes = [*sorted(masters.difference(kept), key=str), *kept]


def masters_of_slots(answer: Sequence[Sequence[Any]], *, node: RedisNode) -> dict[tuple[int, int], RedisNode]:
    """Returns the master of each range of slots (first, last) from the raw answer of CLUSTER SLOTS.

    A node without a host, or with the host `?`, has the host of `node`, the node that answered.
    """
    masters: dict[tuple[int, int], RedisNode] = {}
    for first, last, master, *_ in answer:
        host = master[0].decode() if isinstance(master[0], bytes) else master[0]
        masters[int(first), int(last)] = RedisNode(host if host and host != "?" else node.host, int(master[1]))
    return masters


def unanswered(what: str, failed: Mapping[RedisNode, RedisTrouble]) -> RedisTrouble:
    """Returns the error for a search without an answer: RedisRefused if any node refused, else RedisUnavailable.

    `failed` has the error of each node that was asked, at least one. The message of RedisUnavailable has `what`.
    """
    node, worst = min(failed.items(), key=lambda item: not isinstance(item[1], RedisRefused))
    if isinstance(worst, RedisRefused):
        return RedisRefused(f"{worst} (said by {node}, which was asked for the address)", code=worst.code)
    others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return RedisUnavailable(f"Redis does not answer: {what} ({node}{others}): {worst}")


def places_of(address: LookedUpAddress, cell: str | None) -> Sentinels | Slots:
    """Returns the way to find the server of a cell. Raises ValueError if `cell` is None and the address a cluster's."""
    if address.kind == "sentinel":
        return Sentinels(address.seeds, address.name)
    if cell is None:
        raise ValueError("which node of a cluster it is depends on the cell")
    return Slots(address.seeds, key_slot(f"{{{cell}}}".encode()))


class _Location:
    """The place of the server, as far as known. The part of a lookup that needs no network.

    `generation` grows whenever connections that were made before must not be used any more.
    """

    def __init__(self, address: LookedUpAddress, cell: str | None, options: Mapping[str, Any]) -> None:
        """`options` are those of redis-py's `from_url`, for connections to Sentinels and cluster nodes."""
        self._address, self._places = address, places_of(address, cell)
        patience = min(ANSWER_S, options.get("socket_timeout", ANSWER_S))
        self._options = {**options, "socket_timeout": patience, "socket_connect_timeout": patience}
        self.names_masters = address.kind == "sentinel"
        self.generation = 0
        self._place: RedisNode | None = None
        self._former: RedisNode | None = None
        self._searches, self._failure = 0, RedisUnavailable("")
        self._check_at = float("-inf")

    def holds(self, generation: int) -> bool:
        """Returns whether a connection of this generation may be used for another command."""
        return self._place is not None and generation == self.generation

    def doubt(self, generation: int, *, demoted: bool) -> None:
        """Has the next connection look up the server again, after a connection of `generation` had an error.

        `demoted`: its server is not the master or owner any more, so that other connections to it are outdated too.
        """
        if generation == self.generation:
            self._place = None
            self.generation += demoted

    def _settled(self, searches: int) -> tuple[RedisNode, int] | None:
        """Returns place and generation if they are known; None if a search is needed.

        `searches` is the number of searches when the caller began to wait. If one has failed since, its error is raised
        instead of searching again.
        """
        if self._place is not None:
            return self._place, self.generation
        if self._searches != searches and str(self._failure):
            raise type(self._failure)(str(self._failure), code=self._failure.code)
        return None

    def _set_place(self, place: RedisNode) -> tuple[RedisNode, int]:
        self._searches += 1
        self._failure = RedisUnavailable("")
        self.generation += self._former not in (place, None)
        self._former = self._place = place
        self._check_at = time.monotonic() + CHECK_S
        return place, self.generation

    def _set_failure(self, error: RedisTrouble) -> None:
        self._searches += 1
        self._failure = error

    def _due_witness(self) -> RedisNode | None:
        """Returns the node to ask now whether the server is still the same; None while no check is due."""
        now = time.monotonic()
        if self._place is None or now < self._check_at:
            return None
        self._check_at = now + CHECK_S
        return self._places.witness()

    def _take_answer(self, generation: int, answer: Any) -> None:
        """Takes the witness's answer, or RedisTrouble: casts doubt on the place if the answer contradicts it."""
        if isinstance(answer, RedisTrouble):
            self._check_at = time.monotonic() + CHECK_LATER_S
        elif self._place is not None and self._places.contradicts(answer, self._place):
            self.doubt(generation, demoted=False)


class Lookup(_Location):
    """Finds the server of a looked-up address for connections of threads. Thread-safe."""

    def __init__(self, address: LookedUpAddress, cell: str | None, options: Mapping[str, Any]) -> None:
        super().__init__(address, cell, options)
        self._lock = threading.Lock()

    def find(self) -> tuple[RedisNode, int]:
        """Returns the server and the generation of connections to it; searches if needed. Raises RedisTrouble."""
        searches = self._searches
        with self._lock:
            return self._settled(searches) or self._search()

    def confirms(self, generation: int) -> bool:
        """Returns whether a connection of this generation may be used; asks a witness first when that is due."""
        if (witness := self._due_witness()) is not None:
            self._take_answer(generation, self._ask(witness))
        return self.holds(generation)

    def _search(self) -> tuple[RedisNode, int]:
        search = self._places.search()
        try:
            node = next(search)
            while True:
                node = search.send(self._ask(node))
        except StopIteration as end:
            return self._set_place(end.value)
        except RedisTrouble as error:
            self._set_failure(error)
            raise

    def _ask(self, node: RedisNode) -> Any:
        pool = redis.ConnectionPool.from_url(self._address.seed_url(node), **self._options)
        take_password_file(pool.connection_kwargs)
        try:
            with redis.Redis.from_pool(pool) as client, translated(pool):
                return client.execute_command(self._places.question)
        except (RedisTrouble, CommandError) as error:
            return _as_trouble(error)


class AsyncLookup(_Location):
    """Finds the server of a looked-up address for connections of asyncio tasks."""

    def __init__(
        self,
        address: LookedUpAddress,
        cell: str | None,
        options: Mapping[str, Any],
        interruptible: Callable[[Any], Any],
    ) -> None:
        """`interruptible` returns a subclass of a connection class on which a sending task can be cancelled."""
        super().__init__(address, cell, options)
        self._interruptible, self._lock = interruptible, asyncio.Lock()

    async def find(self) -> tuple[RedisNode, int]:
        """Returns the server and the generation of connections to it; searches if needed. Raises RedisTrouble."""
        searches = self._searches
        async with self._lock:
            return self._settled(searches) or await self._search()

    async def confirms(self, generation: int) -> bool:
        """Returns whether a connection of this generation may be used; asks a witness first when that is due."""
        if (witness := self._due_witness()) is not None:
            self._take_answer(generation, await self._ask(witness))
        return self.holds(generation)

    async def _search(self) -> tuple[RedisNode, int]:
        search = self._places.search()
        try:
            node = next(search)
            while True:
                node = search.send(await self._ask(node))
        except StopIteration as end:
            return self._set_place(end.value)
        except RedisTrouble as error:
            self._set_failure(error)
            raise

    async def _ask(self, node: RedisNode) -> Any:
        pool = redis.asyncio.ConnectionPool.from_url(self._address.seed_url(node), **self._options)
        pool.connection_class = self._interruptible(pool.connection_class)
        take_password_file(pool.connection_kwargs)
        try:
            async with redis.asyncio.Redis.from_pool(pool) as client:
                with translated(pool):
                    return await client.execute_command(self._places.question)
        except (RedisTrouble, CommandError) as error:
            return _as_trouble(error)


def _as_trouble(error: Exception) -> RedisTrouble:
    """Returns `error` as RedisTrouble; a server that does not know the command is no Sentinel or cluster node."""
    if isinstance(error, RedisTrouble):
        return error
    return RedisRefused(f"Redis refuses: {error}", code=NOT_FOUND)
