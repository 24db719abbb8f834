"""Real servers that fail over: a master with replicas and Sentinels, and a cluster; plain, or with TLS and users.

Everybody listens on a port of 127.0.0.1 that is kept for as long as the arrangement is.
"""

import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import redis
from redis.crc import key_slot

from blockrelay.errors import RedisTrouble, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.redis import client as redis_link
from blockrelay.redis.errors import CommandError
from blockrelay_launcher.supervisor.ports import kept_ports
from tests.support.redis.deployed import sentinel_options, server_options
from tests.support.redis.server_process import HOST, HOSTNAME, Process, Security, password_of
from tests.support.waiting import wait_until

NAME, CELL = "blockrelay", "c0"
#: The cell of the users of deploy/redis.
KEYS = Keys(CELL)
#: For so long a Sentinel does nothing behind a moment in which the machine stood still: else half a minute, after which
#: replicas count as too old to follow their master.
TILT_MS = 3000
BUS = 10_000  # a cluster's nodes talk on a second port, so much higher
SLOTS = 16_384
#: For so long those who decide do not hear of a master before they take it for dead.
DOWN_MS = 1000


@dataclass
class Arrangement(ABC):
    """Six servers, or three and as many Sentinels. Several cells may be on it: `cell` is the one whose master is meant,
    until somebody sets another."""

    folder: Path
    security: Security | None
    cell: str
    servers: list[Process] = field(default_factory=list[Process])
    disturbed: bool = False

    @property
    @abstractmethod
    def seeds(self) -> list[Process]:
        """Who is asked for the master."""

    @abstractmethod
    def address(self, seeds: str, *, user: str, parameters: str) -> str: ...

    @abstractmethod
    def master(self) -> Process:
        """Of the cell, as those who decide see it. Raises RedisTrouble, or StopIteration while there is none."""

    @abstractmethod
    def ask_for_failover(self, old: Process) -> None: ...

    @abstractmethod
    def hurry(self) -> None:
        """What they would do by themselves some time."""

    @abstractmethod
    def is_whole(self) -> bool:
        """Whether everybody knows everybody, and every master has replicas that follow it."""

    def url(self, role: str = "gateway", *, seeds: Sequence[int] | None = None) -> str:
        """For a service."""
        listed = self.seeds if seeds is None else [_Port(port) for port in seeds]
        hosts = ",".join(f"{HOST}:{seed.port}" for seed in listed)
        if self.security is None:
            return self.address(hosts, user="", parameters="")
        return self.address(hosts, user=f"{role}:{password_of(role)}@", parameters=self.security.parameters)

    def client(self, role: str = "gateway") -> redis.Redis:
        return redis_link.connect(self.url(role), cell=self.cell)

    def fail_over(self) -> tuple[Process, Process]:
        """Planned; the old and the new master."""
        old = self.agreed_master()
        self.disturbed = True
        for _ in range(5):  # it gives up after seconds in which the machine was busy
            self.ask_for_failover(old)
            with suppress(AssertionError):
                return old, self.wait_for_another(old, timeout_s=12)
        raise AssertionError(f"{old.folder.name} was asked in vain to be replaced")

    def kill_master(self) -> tuple[Process, Process]:
        """The old and the new master."""
        old = self.agreed_master()
        return old, self.kill(old)

    def kill(self, old: Process) -> Process:
        """Of the master; the new one."""
        self.disturbed = True
        old.kill()
        return self.wait_for_another(old)

    def agreed_master(self) -> Process:
        """Where the machine is busy, one may just be replaced that nobody asked to be."""
        return self._master_that(lambda found: True, "they agree on a master")

    def wait_for_another(self, old: Process, *, timeout_s: float = 60.0) -> Process:
        def replaces(found: Process) -> bool:
            return found is not old and found.role() == "master"

        return self._master_that(replaces, f"{old.folder.name} is replaced", timeout_s=timeout_s)

    def _master_that(self, fits: Callable[[Process], bool], what: str, *, timeout_s: float = 60.0) -> Process:
        seen: list[Process] = []

        def found() -> bool:
            seen.append(self.master())
            return fits(seen[-1])

        self.wait_until(found, what, timeout_s=timeout_s)
        return seen[-1]

    def mend(self) -> None:
        """Start what was killed, and wait until the next failover can be."""
        for process in self.servers:
            if not process.runs:
                process.start()
        for tries_left in reversed(range(3)):  # where the machine stood still, the next failover follows by itself
            if self.disturbed:
                self.hurry()
            try:
                self.wait_until(self.is_whole, "the arrangement is whole", timeout_s=45)
            except AssertionError:
                if not tries_left:
                    raise
                self.disturbed = True
            else:
                self.disturbed = False
                return

    def wait_until(self, condition: Callable[[], bool], what: str, *, timeout_s: float = 90) -> None:
        def holds() -> bool:
            with suppress(RedisTrouble, StopIteration):
                return condition()
            return False

        wait_until(holds, what, timeout_s=timeout_s, poll_s=0.1)

    def processes(self) -> list[Process]:
        return self.servers

    def stop(self) -> None:
        for process in self.processes():
            if process.runs:
                process.signal(signal.SIGCONT)
                process.kill()

    def _server(self, port: int) -> Process:
        return next(server for server in self.servers if server.port == port)

    def _server_options(self) -> dict[str, str]:
        """Those of deploy/k8s."""
        options = server_options(HOSTNAME)
        if self.security:
            options |= {"aclfile": str(self.security.folder / "users.acl")}
            options |= {"masteruser": "replica", "masterauth": password_of("replica")}
        return options


@dataclass(frozen=True)
class _Port:
    port: int


def _follows(server: Process) -> bool:
    found = server.ask("INFO", "replication")
    return found["role"] == "slave" and found["master_link_status"] == "up"


@dataclass
class WithSentinels(Arrangement):
    """One master, two replicas, three Sentinels, two of which must agree."""

    sentinels: list[Process] = field(default_factory=list[Process])
    #: Whether masters are missed sooner than where they are deployed.
    in_a_hurry: ClassVar[bool] = True

    def start(self, ports: Sequence[int]) -> None:
        for number, port in enumerate(ports[:3]):
            options = self._server_options() | ({"replicaof": f"{HOSTNAME} {ports[0]}"} if number else {})
            self.servers.append(Process(self.folder / f"server-{number}", port, options, self.security))
            self.servers[-1].start()
        wait_until(lambda: all(_follows(server) for server in self.servers[1:]), "the replicas follow")
        for number, port in enumerate(ports[3:]):
            folder = self.folder / f"sentinel-{number}"
            self.sentinels.append(Process(folder, port, self._sentinel_options(ports[0]), self.security, sentinel=True))
            self.sentinels[-1].start()
            with suppress(CommandError):  # Redis 6.2 does not know it
                self.sentinels[-1].ask("SENTINEL DEBUG", "tilt-period", TILT_MS)
        self.mend()

    def _sentinel_options(self, master: int) -> dict[str, str]:
        """Those of deploy/k8s; in a hurry but for the times."""
        options = sentinel_options(HOSTNAME, HOSTNAME, master)
        if self.in_a_hurry:
            options |= {"sentinel down-after-milliseconds": f"{NAME} {DOWN_MS}"}
            options |= {"sentinel failover-timeout": f"{NAME} 6000"}
        if self.security:
            user = f"{NAME} sentinel", f"{NAME} {password_of('sentinel')}"
            options = {"aclfile": str(self.security.folder / "sentinels.acl"), **options}
            options |= {"sentinel auth-user": user[0], "sentinel auth-pass": user[1]}
            options |= {"sentinel sentinel-user": "peer", "sentinel sentinel-pass": password_of("peer")}
        return options

    @property
    def seeds(self) -> list[Process]:
        return self.sentinels

    def processes(self) -> list[Process]:
        return [*self.sentinels, *self.servers]

    def address(self, seeds: str, *, user: str, parameters: str, name: str = NAME) -> str:
        if not user:
            return f"redis+sentinel://{seeds}/{name}"
        more = f"sentinel_username=reader&sentinel_password={password_of('reader')}"
        return f"rediss+sentinel://{user}{seeds}/{name}/0?{parameters}&{more}"

    def _views(self) -> list[dict[str, Any]]:
        return [sentinel.ask("SENTINEL MASTERS")[NAME] for sentinel in self.sentinels]

    def master(self) -> Process:
        """More than half of the Sentinels must name it."""
        ports = [view["port"] for view in self._views()]
        return self._server(next(port for port in ports if 2 * ports.count(port) > len(ports)))

    def ask_for_failover(self, old: Process) -> None:
        with suppress(CommandError):  # one is under way
            self.sentinels[0].ask("SENTINEL FAILOVER", NAME)

    def hurry(self) -> None:
        """Sentinels let a replaced master go on for ten seconds, and look at replicas every ten."""

        def follow() -> bool:
            master = self.master()
            for server in self.servers:
                if server is not master and server.role() == "master":
                    server.ask("REPLICAOF", HOSTNAME, master.port)
            return all(_follows(server) for server in self.servers if server is not master)

        self.wait_until(follow, "the others follow")
        self.wait_until(lambda: not any("failover" in view["flags"] for view in self._views()), "nobody is replaced")
        for sentinel in self.sentinels:
            sentinel.ask("SENTINEL RESET", NAME)

    def is_whole(self) -> bool:
        views = self._views()
        if any(sentinel.ask("INFO", "sentinel")["sentinel_tilt"] for sentinel in self.sentinels):
            return False  # the machine stood still (TILT_MS)
        known = all(v["num-slaves"] == 2 and v["num-other-sentinels"] == 2 and v["flags"] == "master" for v in views)
        named = {view["port"] for view in views}
        master = self.master()
        return (
            known
            and named == {master.port}
            and master.role() == "master"
            and all(_follows(server) for server in self.servers if server is not master)
        )


class AsDeployed(WithSentinels):
    """The same by the times of deploy/k8s, too."""

    in_a_hurry = False


@dataclass
class Cluster(Arrangement):
    """Three masters, each with a replica."""

    def start(self, ports: Sequence[int]) -> None:
        options = self._server_options() | {"cluster-enabled": "yes", "cluster-node-timeout": str(DOWN_MS)}
        options |= {"cluster-require-full-coverage": "no"}  # a master that is gone does not stop the others' cells
        # A replica would never be elected once those who elect had no time for eleven seconds.
        options |= {"cluster-replica-validity-factor": "0"}
        if self.security:
            options |= {"tls-cluster": "yes"}
        for number, port in enumerate(ports):
            self.servers.append(Process(self.folder / f"node-{number}", port, options, self.security))
            self.servers[-1].start()
        masters, replicas = self.servers[:3], self.servers[3:]
        for number, master in enumerate(masters):
            slots = range(SLOTS * number // 3, SLOTS * (number + 1) // 3)
            master.ask("CLUSTER ADDSLOTS", *slots)
            master.ask("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for node in self.servers[1:]:
            self.servers[0].ask("CLUSTER MEET", HOST, node.port)
        for master, replica in zip(masters, replicas, strict=True):
            name = master.ask("CLUSTER MYID").decode()

            def replicates(replica: Process = replica, name: str = name) -> bool:
                with suppress(CommandError):  # it does not know the master yet
                    return bool(replica.ask("CLUSTER REPLICATE", name))
                return False

            wait_until(replicates, f"{replica.folder.name} knows its master")
        self.mend()

    @property
    def seeds(self) -> list[Process]:
        return self.servers

    def hurry(self) -> None:
        """They are quick enough."""

    def address(self, seeds: str, *, user: str, parameters: str) -> str:
        return f"rediss+cluster://{user}{seeds}/0?{parameters}" if user else f"redis+cluster://{seeds}/0"

    def _owners(self, asked: Process) -> dict[int, Process]:
        """First slot -> master, and that of the cell under -1, as one node sees it."""
        mine = key_slot(Keys(self.cell).workers.encode())
        found: dict[int, Process] = {}
        for first, last, master, *_ in asked.ask("CLUSTER SLOTS"):
            found[first] = self._server(master[1])
            if first <= mine <= last:
                found[-1] = found[first]
        return found

    def master(self) -> Process:
        """All that run must name it."""
        named = [self._owners(server).get(-1) for server in self.servers if server.runs]
        return next(one for one in named if one and all(other is one for other in named))

    def others(self) -> list[Process]:
        """Masters that do not have the cell."""
        owners = self._owners(self.servers[0])
        return [node for slot, node in owners.items() if slot >= 0 and node is not owners[-1]]

    def ask_for_failover(self, old: Process) -> None:
        found = [replicas for master, *replicas in self._pairs(old).values() if master == old.port]
        for replica in found[0] if found else ():  # none while a failover that nobody asked for is under way
            with suppress(CommandError):
                self._server(replica).ask("CLUSTER FAILOVER")

    def _pairs(self, asked: Process) -> dict[int, list[int]]:
        """First slot -> ports of its master and its replicas, as one node sees it."""
        return {first: [node[1] for node in nodes] for first, _, *nodes in asked.ask("CLUSTER SLOTS")}

    def is_whole(self) -> bool:
        views = [server.ask("CLUSTER INFO") for server in self.servers]
        if not all(view["cluster_state"] == "ok" and view["cluster_known_nodes"] == "6" for view in views):
            return False
        seen = [self._pairs(server) for server in self.servers]  # whoever is not known as a replica gets no vote
        pairs = list(seen[0].values())
        return (
            all(one == seen[0] for one in seen)
            and len({port for pair in pairs for port in pair}) == 6
            and all(len(pair) == 2 and _follows(self._server(pair[1])) for pair in pairs)
        )


@contextmanager
def _kept(count: int, *, buses: bool) -> Iterator[list[int]]:
    with ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            (port,) = stack.enter_context(kept_ports(HOST, 0, 1))
            if buses:
                try:
                    stack.enter_context(kept_ports(HOST, port + BUS, 1))
                except UsageError:
                    continue
            found.append(port)
        yield found


@contextmanager
def arranged(
    kind: type[WithSentinels] | type[Cluster], folder: Path, *, secured: bool = False, cell: str = CELL
) -> Iterator[Arrangement]:
    """Everything started, everybody known to everybody. In a cluster `master` is that of `cell`."""
    folder.mkdir(exist_ok=True)
    found = kind(folder, Security.make(folder) if secured else None, cell)
    with _kept(6, buses=kind is Cluster) as ports:
        try:
            found.start(ports)
            yield found
        except BaseException:
            for log in sorted(folder.glob("*/log")):
                sys.stderr.write(f"--- {log.parent.name}\n{log.read_text()[-3000:]}\n")
            raise
        finally:
            found.stop()
