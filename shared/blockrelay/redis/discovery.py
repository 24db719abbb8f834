"""Finding the Redis of an address that is looked up, and what all connections of a pool know about where it is.

What was found holds until a connection meets an error that casts doubt on it. That is enough in a cluster, whose nodes
refuse what is not theirs. A master that its Sentinels have replaced while it was well does not know it for ten seconds,
and what is written there is thrown away: so a Sentinel is asked again every second in which a connection is used.

What to ask whom, and what follows from the answers, is decided by what touches no network (`Sentinels`, `Slots`); a
lookup for threads and one for tasks ask.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import redis
import redis.asyncio
from redis.crc import key_slot

from blockrelay.auth.redis_credentials import take_password_file
from blockrelay.errors import RedisRefused, RedisTrouble, RedisUnavailable
from blockrelay.redis.address import LookedUpAddress, Node
from blockrelay.redis.errors import CommandError, translated

#: Seconds that one of those who are asked has to answer: a host that is gone must not hold up a failover.
ANSWER_S = 1.0
#: Seconds between two questions whether the master is still the same, and after one that nobody answered.
CHECK_S, CHECK_LATER_S = 1.0, 5.0
#: `RedisTrouble.code` of an address under which nothing will ever be found, as far as those who are asked know.
NOT_FOUND = "ADDRESS"
#: Yields whom to ask, is sent what they answer (or RedisTrouble), returns where the Redis is. Raises RedisTrouble.
Search = Generator[Node, Any, Node]


class Places(Protocol):
    """Knows whom to ask. One search at a time."""

    question: str

    def search(self) -> Search: ...

    def witness(self) -> Node | None:
        """Whom to ask now and then whether the Redis is where it was; None: it says so itself."""
        ...

    def contradicts(self, answer: Any, place: Node) -> bool:
        """Whether it may not be at `place` any more, by what the witness has answered."""
        ...


class Sentinels:
    """The master of one name. More than half of the Sentinels are asked, and the newest configuration counts: one that
    was cut off, or has just started, may still name the master of before."""

    question = "SENTINEL MASTERS"

    def __init__(self, seeds: Sequence[Node], name: str) -> None:
        self._seeds, self._name, self._epoch = list(seeds), name, 0

    def search(self) -> Search:
        told: list[Mapping[str, Mapping[str, Any]]] = []
        failed: dict[Node, RedisTrouble] = {}
        for seed in list(self._seeds):
            answer = yield seed
            if isinstance(answer, RedisTrouble):
                failed[seed] = answer
                self._seeds.append(self._seeds.pop(self._seeds.index(seed)))  # the last to be asked from now on
                continue
            told.append(answer)
            if 2 * len(told) > len(self._seeds):
                break
        if not told:
            raise nobody_told("no Sentinel answers", failed)
        place = named_master(self._name, told)
        self._epoch = max(masters[self._name]["config-epoch"] for masters in told if self._name in masters)
        return place

    def witness(self) -> Node | None:
        self._seeds.append(self._seeds.pop(0))  # each in its turn: one may be cut off
        return self._seeds[-1]

    def contradicts(self, answer: Any, place: Node) -> bool:
        state = answer.get(self._name)
        if state is None or state["config-epoch"] < self._epoch:
            return False  # it knows less than we do
        if _place(state) == place:
            return not _is_well(state) or _is_replaced(state)
        return not _is_replaced(state)  # it may be ours that replaces that one


def _place(state: Mapping[str, Any]) -> Node:
    return Node(state["ip"], state["port"])


def _is_well(state: Mapping[str, Any]) -> bool:
    return bool(state["is_master"] and not state["is_sdown"] and not state["is_odown"])


def _is_replaced(state: Mapping[str, Any]) -> bool:
    """Whether this Sentinel leads a failover from the master that it names. It goes on naming it when the others know
    the new one already."""
    return "failover_in_progress" in state["flags"]


def named_master(name: str, told: Sequence[Mapping[str, Mapping[str, Any]]]) -> Node:
    """What follows from the answers of Sentinels to SENTINEL MASTERS, as redis-py reads them.

    Raises:
        RedisRefused: they do not know the name.
        RedisUnavailable: the master is down, or about to be replaced.
    """
    states = [masters[name] for masters in told if name in masters]
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
    """The node of a cluster that owns one slot. Any node that is known may be asked, each time another one: one that
    was cut off tells what was."""

    question = "CLUSTER SLOTS"

    def __init__(self, seeds: Sequence[Node], slot: int) -> None:
        self._seeds, self._slot = tuple(seeds), slot
        self._nodes = list(seeds)

    def search(self) -> Search:
        failed: dict[Node, RedisTrouble] = {}
        answered = False
        for node in list(self._nodes):
            answer = yield node
            self._nodes = [*(n for n in self._nodes if n != node), node]  # the last to be asked from now on
            if isinstance(answer, RedisTrouble):
                failed[node] = answer
                continue
            answered = True
            masters = masters_of_slots(answer, asked=node)
            self._learn(set(masters.values()))
            for (first, last), master in masters.items():
                if first <= self._slot <= last:
                    return master
        if answered:
            raise RedisUnavailable(f"Redis does not answer: no node of the cluster owns slot {self._slot}")
        raise nobody_told("no node of the cluster answers", failed)

    def witness(self) -> Node | None:
        return None

    def contradicts(self, answer: Any, place: Node) -> bool:
        return False

    def _learn(self, masters: set[Node]) -> None:
        """Masters are asked too, for as long as they are some: the seeds may all be gone one day."""
        kept = [node for node in self._nodes if node in masters or node in self._seeds]
        self._nodes = [*sorted(masters.difference(kept), key=str), *kept]


def masters_of_slots(answer: Sequence[Sequence[Any]], *, asked: Node) -> dict[tuple[int, int], Node]:
    """What CLUSTER SLOTS answers, as the server sends it: first and last slot -> their master.

    A node that knows no host for a master (or says `?`) means the one that it was asked by.
    """
    found: dict[tuple[int, int], Node] = {}
    for first, last, master, *_ in answer:
        host = master[0].decode() if isinstance(master[0], bytes) else master[0]
        found[int(first), int(last)] = Node(host if host and host != "?" else asked.host, int(master[1]))
    return found


def nobody_told(what: str, failed: Mapping[Node, RedisTrouble]) -> RedisTrouble:
    """Why a search ends without an answer: refused, if anybody refuses."""
    node, worst = min(failed.items(), key=lambda item: not isinstance(item[1], RedisRefused))
    if isinstance(worst, RedisRefused):
        return RedisRefused(f"{worst} (said by {node}, which was asked for the address)", code=worst.code)
    others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return RedisUnavailable(f"Redis does not answer: {what} ({node}{others}): {worst}")


def places_of(address: LookedUpAddress, cell: str | None) -> Places:
    """Whom to ask for the Redis of a cell. `cell` None is a bug of the caller where it is a cluster's."""
    if address.kind == "sentinel":
        return Sentinels(address.seeds, address.name)
    if cell is None:
        raise ValueError("which node of a cluster it is depends on the cell")
    return Slots(address.seeds, key_slot(f"{{{cell}}}".encode()))


class _Known:
    """Where the Redis is. `generation` grows whenever connections that were made before must not be used any more."""

    def __init__(self, address: LookedUpAddress, cell: str | None, options: Mapping[str, Any]) -> None:
        """`options` are those of redis-py's `from_url`, for connections to those who are asked."""
        self._address, self._places = address, places_of(address, cell)
        patience = min(ANSWER_S, options.get("socket_timeout", ANSWER_S))
        self._options = {**options, "socket_timeout": patience, "socket_connect_timeout": patience}
        self.names_masters = address.kind == "sentinel"
        self.generation = 0
        self._place: Node | None = None
        self._former: Node | None = None
        self._searches, self._failure = 0, RedisUnavailable("")
        self._check_at = float("-inf")

    def holds(self, generation: int) -> bool:
        """Whether a connection of this generation may be used for another command."""
        return self._place is not None and generation == self.generation

    def doubt(self, generation: int, *, demoted: bool) -> None:
        """A connection of `generation` met an error: look again before the next one is made. `demoted`: what it was
        connected to is not the master, or not the owner, so that every other connection to it is as bad."""
        if generation == self.generation:
            self._place = None
            self.generation += demoted

    def _settled(self, searches: int) -> tuple[Node, int] | None:
        """The answer, if none has to be searched for. `searches`: how many there had been when it was wanted; who
        waited for one in vain does not search for the same again."""
        if self._place is not None:
            return self._place, self.generation
        if self._searches != searches and str(self._failure):
            raise type(self._failure)(str(self._failure), code=self._failure.code)
        return None

    def _found(self, place: Node) -> tuple[Node, int]:
        self._searches += 1
        self._failure = RedisUnavailable("")
        self.generation += self._former not in (place, None)
        self._former = self._place = place
        self._check_at = time.monotonic() + CHECK_S
        return place, self.generation

    def _failed(self, error: RedisTrouble) -> None:
        self._searches += 1
        self._failure = error

    def _due(self) -> Node | None:
        """The witness, when the last word is too old."""
        now = time.monotonic()
        if self._place is None or now < self._check_at:
            return None
        self._check_at = now + CHECK_S
        return self._places.witness()

    def _heard(self, generation: int, answer: Any) -> None:
        """Of the witness."""
        if isinstance(answer, RedisTrouble):
            self._check_at = time.monotonic() + CHECK_LATER_S
        elif self._place is not None and self._places.contradicts(answer, self._place):
            self.doubt(generation, demoted=False)


class Lookup(_Known):
    """For connections of threads."""

    def __init__(self, address: LookedUpAddress, cell: str | None, options: Mapping[str, Any]) -> None:
        super().__init__(address, cell, options)
        self._lock = threading.Lock()

    def find(self) -> tuple[Node, int]:
        """Where the Redis is, and the generation of connections to it. Raises RedisTrouble."""
        searches = self._searches
        with self._lock:
            return self._settled(searches) or self._search()

    def confirms(self, generation: int) -> bool:
        """As `holds`, and asks a witness when it is time to."""
        if (witness := self._due()) is not None:
            self._heard(generation, self._ask(witness))
        return self.holds(generation)

    def _search(self) -> tuple[Node, int]:
        search = self._places.search()
        try:
            node = next(search)
            while True:
                node = search.send(self._ask(node))
        except StopIteration as end:
            return self._found(end.value)
        except RedisTrouble as error:
            self._failed(error)
            raise

    def _ask(self, node: Node) -> Any:
        pool = redis.ConnectionPool.from_url(self._address.seed_url(node), **self._options)
        take_password_file(pool.connection_kwargs)
        try:
            with redis.Redis.from_pool(pool) as client, translated(pool):
                return client.execute_command(self._places.question)
        except (RedisTrouble, CommandError) as error:
            return _as_trouble(error)


class AsyncLookup(_Known):
    """For connections of tasks."""

    def __init__(
        self,
        address: LookedUpAddress,
        cell: str | None,
        options: Mapping[str, Any],
        interruptible: Callable[[Any], Any],
    ) -> None:
        """`interruptible` makes a kind of connection one on which a task that sends can be cancelled."""
        super().__init__(address, cell, options)
        self._interruptible, self._lock = interruptible, asyncio.Lock()

    async def find(self) -> tuple[Node, int]:
        """As `Lookup.find`."""
        searches = self._searches
        async with self._lock:
            return self._settled(searches) or await self._search()

    async def confirms(self, generation: int) -> bool:
        """As `Lookup.confirms`."""
        if (witness := self._due()) is not None:
            self._heard(generation, await self._ask(witness))
        return self.holds(generation)

    async def _search(self) -> tuple[Node, int]:
        search = self._places.search()
        try:
            node = next(search)
            while True:
                node = search.send(await self._ask(node))
        except StopIteration as end:
            return self._found(end.value)
        except RedisTrouble as error:
            self._failed(error)
            raise

    async def _ask(self, node: Node) -> Any:
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
    """One who is asked and does not understand the question is no Sentinel, or no node of a cluster."""
    if isinstance(error, RedisTrouble):
        return error
    return RedisRefused(f"Redis refuses: {error}", code=NOT_FOUND)
