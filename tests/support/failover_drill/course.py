"""One drill: `blockrelay up` at servers that fail over, under the load of `blockrelay drill`, and the verdict."""

import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_launcher.drill.clients import PATIENCE_S, Seen
from blockrelay_launcher.drill.from_logs import own_ends, refusals, run_starts
from blockrelay_launcher.drill.report import Report, judge
from blockrelay_launcher.drill.system import DrilledSystem, drilled_system
from blockrelay_launcher.drill.workload import References, make_asks
from blockrelay_launcher.up_options.options import names_of
from tests.support.failover_drill.failovers import Failovers
from tests.support.failover_drill.load import FailoverLoad
from tests.support.redis.failover import Cluster, WithSentinels, arranged
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until

GATEWAYS, WORKERS = 2, 2
KINDS: dict[str, type[WithSentinels] | type[Cluster]] = {"sentinel": WithSentinels, "cluster": Cluster}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`report` is that of `blockrelay drill`. `gone`, `begun_again` and `taken_back` say what a failover took back,
    which is wrong where answers waited for `replicas`; `longest_pause_s` is that of `longest_pause`. `unasked`: masters
    that lived and were replaced, because a Sentinel had no time. Of two replicas the other one goes on to confirm what
    those write, so that one confirmation promises nothing then."""

    redis: str
    replicas: int
    report: Report
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
        promised = self.replicas > (1 if self.unasked else 0)
        return [*self.report.wrong, *([*self.gone, *self.begun_again, *self.taken_back] if promised else [])]

    @property
    def row(self) -> dict[str, object]:
        """The figures."""
        report = self.report
        return {
            "redis": self.redis,
            "replicas": self.replicas,
            "seconds": report.seconds,
            "killed": self.killed,
            "planned": self.planned,
            "in vain": self.in_vain,
            "unasked": self.unasked,
            "accepted": report.accepted + len(self.gone),
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


def run(redis: str, replicas: int, *, seconds: float, seed: int, requests: int, data: Path) -> Verdict:
    """`replicas` is BLOCKRELAY_ACCEPT_REPLICAS; logs stay in `data`. Raises ServiceUnavailable when the system does not
    become ready."""
    with ExitStack() as stack:
        servers = stack.enter_context(arranged(KINDS[redis], data / "redis"))
        payload = servers.url()
        if redis == "sentinel":
            rows = RedisServer(data / "rows", durable=False).start()
            stack.callback(rows.stop)
            payload = rows.url
        _set_replicas(data, replicas)
        up = ["--gateways", str(GATEWAYS), "--replicas", str(WORKERS), "--schedulers", "1"]
        up += ["--redis", servers.url(), "--payload-redis", payload]
        system = stack.enter_context(drilled_system(BUNDLED_MODEL, data, up))
        asks = make_asks(30, rng=Random(seed), folder=open_block_folder(BUNDLED_MODEL, blocks=[]))
        own = system.numerics_id()
        references = References(model=BUNDLED_MODEL, asks=asks, ids={own: ""})
        references.prepare((number, own) for number in range(len(asks)))
        load = FailoverLoad(urls=system.urls, asks=asks, clients=requests, rng=Random(f"{seed} load"))
        failovers = Failovers(system, servers, Random(f"{seed} failovers"))
        started = time.monotonic()
        load.start()
        failovers.start()
        try:
            with suppress(subprocess.TimeoutExpired):  # it goes on for so long, unless it ends by itself
                system.process.wait(seconds)
        finally:
            failovers.finish()
            load.finish()
        taken_back, troubles = _settle(system, load)
        troubles += failovers.troubles
        load.join()
        references.prepare((one.ask, fingerprint) for one in load.seen for fingerprint in one.fingerprints)
        by_sentinels = [log.read_text().count("+selected-slave") for log in data.glob("redis/sentinel-*/log")]
        unasked = max(0, sum(by_sentinels) - failovers.killed)
        report = judge(
            load.seen,
            references.answer,
            failovers.done,
            seconds=time.monotonic() - started,
            runs=run_starts(system.logs),
            troubles=[*troubles, *own_ends((data / "up.log").read_text(), failovers.done), *refusals(system.logs)],
        )
        return Verdict(
            redis=redis,
            replicas=replicas,
            report=report,
            killed=failovers.killed,
            planned=failovers.planned,
            in_vain=failovers.in_vain,
            unasked=unasked,
            slowest_failover_s=max(failovers.took, default=0.0),
            longest_pause_s=longest_pause(load.seen),
            gone=[f"{name} was accepted and is gone" for name in load.gone],
            begun_again=load.begun_again,
            taken_back=taken_back,
        )


def longest_pause(seen: Sequence[Seen]) -> float:
    """Seconds that the client of a stream waited for its next event, the first one included. Who cancels does not read
    meanwhile."""
    streams = [[one.started, *one.events] for one in seen if one.kind == "stream"]
    return max((b - a for events in streams for a, b in pairwise(events)), default=0.0)


def _set_replicas(data: Path, replicas: int) -> None:
    (data / "settings").mkdir(mode=0o700)
    for gateway in names_of("gateway", GATEWAYS):
        settings = data / "settings" / gateway
        settings.touch(mode=0o600)
        settings.write_text(f"BLOCKRELAY_ACCEPT_REPLICAS={replicas}\n")


def _settle(system: DrilledSystem, load: FailoverLoad) -> tuple[list[str], list[str]]:
    """Wait for what is under way. Cancellations that were taken back, and what is wrong with the system."""
    try:
        wait_until(lambda: load.idle, "nothing is under way", timeout_s=PATIENCE_S, poll_s=0.1)
        taken_back = load.no_longer_cancelled()
        troubles = system.left_behind()
    except AssertionError as error:
        taken_back, troubles = [], [str(error)]
    load.abandon()
    if (code := system.process.poll()) is not None:
        troubles.append(f"`up` ended with code {code}")
    return taken_back, troubles
