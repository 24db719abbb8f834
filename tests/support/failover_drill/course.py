"""One drill: an `up` for each cell at servers that fail over, the load of `blockrelay drill`, and the verdict."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

import httpx

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.encoding.request_ids import parse_id
from blockrelay.protocol.plan import CPU
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_launcher.drill.clients import PATIENCE_S, RequestRecord
from blockrelay_launcher.drill.from_logs import own_ends, refusals, run_starts
from blockrelay_launcher.drill.report import Report, judge
from blockrelay_launcher.drill.system import DrilledSystem, drilled_system
from blockrelay_launcher.drill.workload import Numerics, References, learn, make_requests
from blockrelay_launcher.up_options.options import names_of
from tests.support.failover_drill.failovers import Failovers
from tests.support.failover_drill.load import FailoverLoad
from tests.support.redis.failover import Arrangement, AsDeployed, Cluster, WithSentinels, arranged
from tests.support.redis.redis_server import RedisServer
from tests.support.systems.cell_file import CellFile
from tests.support.waiting import wait_until

GATEWAYS, WORKERS = 2, 2  # in all; of each cell
KINDS: dict[str, type[WithSentinels] | type[Cluster]] = {"sentinel": AsDeployed, "cluster": Cluster}


def cells_of(redis: str, *, secured: bool) -> tuple[str, ...]:
    """Who shares the servers. In a cluster each has a master of its own, and every gateway serves both; the users of
    deploy/redis are those of one cell."""
    return ("c0", "c1") if redis == "cluster" and not secured else ("c0",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`report` is that of `blockrelay drill`. `gone`, `begun_again` and `taken_back` say what a failover took back,
    which is wrong where answers waited for `replicas`; `longest_pause_s` is that of `longest_pause`. `by_cell`: how
    many requests it had, without sessions. `unasked`: masters that lived and were replaced, because those who decide
    had no time. Behind Sentinels the other one of two replicas goes on to confirm what such a master writes, so that
    one confirmation promises nothing then."""

    redis: str
    secured: bool
    replicas: int
    report: Report
    by_cell: Mapping[str, int]
    killed: int
    planned: int
    in_vain: int
    unasked: int
    slowest_failover_s: float
    longest_pause_s: float
    gone: Sequence[str]
    begun_again: Sequence[str]
    taken_back: Sequence[str]

    @property
    def wrong(self) -> list[str]:
        """One line for each."""
        promised = self.replicas > (1 if self.unasked and self.redis == "sentinel" else 0)
        return [*self.report.wrong, *([*self.gone, *self.begun_again, *self.taken_back] if promised else [])]

    @property
    def row(self) -> dict[str, object]:
        """The figures."""
        report = self.report
        return {
            "redis": self.redis + (" with TLS and users" if self.secured else ""),
            "replicas": self.replicas,
            "seconds": report.seconds,
            "killed": self.killed,
            "planned": self.planned,
            "in vain": self.in_vain,
            "unasked": self.unasked,
            "accepted": report.accepted + len(self.gone),
            **{f"of {cell}": count for cell, count in self.by_cell.items()},
            "completed": report.completed,
            "lost": report.lost,
            "different": report.mismatched,
            "twice": report.duplicated,
            "keyless gone": len(self.gone),
            "sessions begun again": len(self.begun_again),
            "cancellations taken back": len(self.taken_back),
            "new master within s": round(self.slowest_failover_s, 1),
            "longest pause s": round(self.longest_pause_s, 1),
        }


def run(redis: str, replicas: int, *, secured: bool, seconds: float, seed: int, requests: int, data: Path) -> Verdict:
    """`replicas` is BLOCKRELAY_ACCEPT_REPLICAS; `secured`: over TLS, and each service as its user of deploy/redis. Logs
    stay in `data`. Raises ServiceUnavailable when a system does not become ready."""
    cells = cells_of(redis, secured=secured)
    with ExitStack() as stack:
        servers = stack.enter_context(arranged(KINDS[redis], data / "redis", secured=secured))
        systems = _start(stack, redis, cells, servers, replicas, data)
        asks = make_requests(30, rng=Random(seed), folder=open_block_folder(BUNDLED_MODEL, blocks=[]))
        left_out = learn(asks, lambda one: systems[0].record_of(one.path, one.body()), only_chats=True)
        (own,) = systems[0].numerics_ids(CPU)
        references = References(models=[BUNDLED_MODEL], requests=asks, ids={own: Numerics()})
        references.prepare((number, own) for number in range(len(asks)) if number not in left_out)
        urls = [url for system in systems for url in system.running.urls]
        load = FailoverLoad(urls=urls, requests=asks, clients=requests, rng=Random(f"{seed} load"))
        load.left_out |= left_out.keys()
        failovers = Failovers(systems, servers, cells, Random(f"{seed} failovers"))
        started = time.monotonic()
        load.start()
        failovers.start()
        try:
            with suppress(AssertionError):  # it goes on for so long, unless one ends by itself
                wait_until(lambda: bool(_ended(systems)), "an `up` has ended", timeout_s=seconds, poll_s=0.1)
        finally:
            failovers.finish()
            load.finish()
        taken_back, troubles = _settle(systems, load)
        troubles += failovers.troubles
        load.join()
        references.prepare((one.number, fingerprint) for one in load.seen for fingerprint in one.fingerprints)
        said = "".join((system.data / "up.log").read_text() for system in systems)
        troubles += own_ends(said, failovers.done)
        troubles += [line for system in systems for line in refusals(system.logs)]
        troubles += [line for system in systems for line in system.denied() if "denied admin" not in line]
        by_cell = _by_cell(load.seen, cells)
        troubles += [f"no request went to {cell}" for cell, count in by_cell.items() if not count]
        report = judge(
            load.seen,
            references.answer,
            failovers.done,
            seconds=time.monotonic() - started,
            runs=[run for system in systems for run in run_starts(system.logs)],
            troubles=troubles,
        )
        return Verdict(
            redis=redis,
            secured=secured,
            replicas=replicas,
            report=report,
            by_cell=by_cell,
            killed=failovers.killed,
            planned=failovers.planned,
            in_vain=failovers.in_vain,
            unasked=max(0, _elected(data) - failovers.killed - failovers.planned),
            slowest_failover_s=max(failovers.took, default=0.0),
            longest_pause_s=longest_pause(load.seen),
            gone=[f"{name} was accepted and is gone" for name in load.gone],
            begun_again=load.begun_again,
            taken_back=taken_back,
        )


def _start(
    stack: ExitStack, redis: str, cells: tuple[str, ...], servers: Arrangement, replicas: int, data: Path
) -> Sequence[DrilledSystem]:
    """A system for each cell, all ready."""
    secured = servers.security is not None
    payload = servers.url()
    if redis == "sentinel" or secured:
        rows = RedisServer(data / "rows", durable=False).start()
        stack.callback(rows.stop)
        payload = rows.url
    settings = {"BLOCKRELAY_ACCEPT_REPLICAS": str(replicas)}
    if len(cells) > 1:
        _check_masters(servers, cells)
        file = CellFile(data / "cells.json", dict.fromkeys(cells, servers.url())).put(
            cells=cells, **dict.fromkeys(cells, 1)
        )
        settings["BLOCKRELAY_CELLS"] = str(file.path)
    up = ["--gateways", str(GATEWAYS // len(cells)), "--replicas", str(WORKERS), "--schedulers", "1"]
    up += ["--model", str(BUNDLED_MODEL), "--redis", servers.url("admin"), "--payload-redis", payload]
    systems: list[DrilledSystem] = []
    for cell in cells:
        (data / cell).mkdir()
        if secured:
            _come_as_users(servers, data / cell)
        environment = {**settings, "BLOCKRELAY_CELL": cell}
        systems.append(stack.enter_context(drilled_system(data / cell, up, environment=environment)))
    probes = [f"{url}/readyz" for system in systems for url in system.running.urls]  # 200 while one cell can serve
    wait_until(lambda: not any(httpx.get(url).json()["reasons"] for url in probes), "all cells serve", timeout_s=60)
    return systems


def _come_as_users(servers: Arrangement, data: Path) -> None:
    """Each service of an `up` on this folder as the user of its role, before its first start."""
    (data / "settings").mkdir(mode=0o700)
    names = [*names_of("gateway", GATEWAYS), *names_of("scheduler", 1)]
    names += [f"worker-{number}" for number in range(1, WORKERS + 1)]
    for name in names:
        path = data / "settings" / name
        path.touch(mode=0o600)
        path.write_text(f"BLOCKRELAY_REDIS_URL={servers.url(name.partition('-')[0])}\n")


def _check_masters(servers: Arrangement, cells: Sequence[str]) -> None:
    masters: set[int] = set()
    for cell in cells:
        servers.cell = cell
        masters.add(servers.master().port)
    assert len(masters) == len(cells), f"of {cells} two are on one master"


def _elected(data: Path) -> int:
    """How many masters replaced another one, as those say who did it, or became it."""
    logs = {"sentinel": "+selected-slave", "node": "Failover election won"}
    found = {log: said for kind, said in logs.items() for log in data.glob(f"redis/{kind}-*/log")}
    return sum(log.read_text().count(said) for log, said in found.items())


def _by_cell(seen: Sequence[RequestRecord], cells: Sequence[str]) -> dict[str, int]:
    """How many accepted requests were in each. Sessions have names of their own."""
    names = [found.cell for one in seen if (found := parse_id(one.request_id))]
    return {cell: names.count(cell) for cell in cells}


def _ended(systems: Sequence[DrilledSystem]) -> list[str]:
    codes = {system.data.name: system.process.poll() for system in systems}
    return [f"the `up` of {cell} ended with code {code}" for cell, code in codes.items() if code is not None]


def longest_pause(seen: Sequence[RequestRecord]) -> float:
    """Seconds that the client of a stream waited for its next event, the first one included. Who cancels does not read
    meanwhile."""
    streams = [[one.started, *one.events] for one in seen if one.kind == "stream"]
    return max((b - a for events in streams for a, b in pairwise(events)), default=0.0)


def _settle(systems: Sequence[DrilledSystem], load: FailoverLoad) -> tuple[list[str], list[str]]:
    """Wait for what is under way. Cancellations that were taken back, and what is wrong with the systems."""
    try:
        wait_until(lambda: load.idle, "nothing is under way", timeout_s=PATIENCE_S, poll_s=0.1)
        taken_back = load.no_longer_cancelled()
        troubles = [line for system in systems for line in system.left_behind()]
    except AssertionError as error:
        taken_back, troubles = [], [str(error)]
    load.abandon()
    return taken_back, [*troubles, *_ended(systems)]
