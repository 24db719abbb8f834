"""`blockrelay drill`: asks, golden answers, load under faults, the end, the verdict."""

import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random, SystemRandom

import typer
from rich.console import Console

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import UsageError
from blockrelay_launcher.drill.clients import PATIENCE_S, Load
from blockrelay_launcher.drill.faults import KINDS, Kind, Role, possible, strikes
from blockrelay_launcher.drill.from_logs import own_ends, refusals, run_starts
from blockrelay_launcher.drill.killer import Killer
from blockrelay_launcher.drill.report import Report, judge, show
from blockrelay_launcher.drill.system import DrilledSystem, drilled_system
from blockrelay_launcher.drill.upgrade import SALT, Upgrade
from blockrelay_launcher.drill.users import put_in_force
from blockrelay_launcher.drill.workload import Ask, References, make_asks
from blockrelay_launcher.supervisor.embedded_redis import Fsync
from blockrelay_launcher.supervisor.service_specs import names_of

#: Different requests; each is sent many times, under other salts and beside others.
ASKS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """`requests` at once. `seed` None: a new one, which is told. `upgrade`: in the middle third all workers are
    replaced by such that compute other bits. `users`: folder of the ACL files that are in force."""

    model: Path
    seconds: float
    roles: tuple[Role, ...]
    kinds: tuple[Kind, ...] = KINDS
    every_s: float = 2.0
    seed: int | None = None
    fsync: Fsync = "always"
    requests: int = 8
    stages: int = 1
    replicas: int = 2
    gateways: int = 2
    schedulers: int = 1
    upgrade: bool = False
    users: Path | None = None
    asks: int = ASKS

    @property
    def workers(self) -> list[str]:
        """The names that `up` gives them."""
        return [f"worker-{n}" for n in range(1, self.stages * self.replicas + 1)]


def run_drill(options: DrillOptions, *, as_json: bool) -> int:
    """0 when every accepted request completed with its own answer, once, and no process ended by itself; 1 otherwise;
    130 when interrupted.

    Leaves nothing running; the logs stay when something is wrong. Raises UsageError and ServiceUnavailable.
    """
    folder = open_block_folder(options.model, blocks=[])
    if options.stages > folder.model.blocks:
        raise UsageError(f"--stages is {options.stages}, but the model has {folder.model.blocks} blocks")
    if not folder.manifest.exact:
        raise UsageError(f"{options.model} is {folder.manifest.precision}, which promises no equal answers")
    if options.roles and options.kinds and not possible(options.kinds, options.roles):
        raise UsageError(f"--faults {','.join(options.kinds)} meets only redis, which --kill does not name")
    seed = SystemRandom().randrange(2**32) if options.seed is None else options.seed
    data = Path(tempfile.mkdtemp(prefix="blockrelay-drill-"))
    try:
        report = _drilled(options, seed, make_asks(options.asks, rng=Random(seed), folder=folder), data)
    except BaseException:
        shutil.rmtree(data, ignore_errors=True)
        raise
    if as_json:
        typer.echo(json.dumps({"seed": seed, "fsync": options.fsync, **report.to_dict()}, indent=1))
    else:
        show(report, Console(soft_wrap=True))
    if report.wrong:
        _say(f"kept for a look: {data}")
    else:
        shutil.rmtree(data, ignore_errors=True)
    return 130 if report.interrupted and not report.wrong else int(not report.good)


def _drilled(options: DrillOptions, seed: int, asks: Sequence[Ask], data: Path) -> Report:
    """The verdict on one drill whose system lives in the folder `data`."""
    up = ["--stages", options.stages, "--replicas", options.replicas, "--gateways", options.gateways]
    up += ["--schedulers", options.schedulers, "--fsync", options.fsync]
    if options.users is not None:
        gateways, schedulers = names_of("gateway", options.gateways), names_of("scheduler", options.schedulers)
        put_in_force(options.users, data, [*gateways, *schedulers, *options.workers])
    with _interruptible() as interrupts, drilled_system(options.model, data, list(map(str, up))) as system:
        own = system.numerics_id()
        references = References(model=options.model, asks=asks, ids={own: "", f"{own}-{SALT}": SALT})
        _say(f"seed {seed}; {len(asks)} different requests, first alone")
        references.prepare((n, own) for n in range(len(asks)))
        load = Load(urls=system.urls, asks=asks, clients=options.requests, rng=Random(f"{seed} load"))
        _say(f"under load for {options.seconds:.0f} s; data and logs: {data}")
        started = time.monotonic()
        parts = _faults(options, system, seed, started)
        load.start()
        for part in parts:
            part.start()
        _wait(interrupts, system, started + options.seconds)
        for part in parts:
            part.finish()
        seconds = time.monotonic() - started
        troubles = [f"{name} was not upgraded" for part in parts for name in part.missed]
        if not interrupts:
            _say("no more faults and no new requests; waiting for those under way")
            load.finish()
            _wait(interrupts, system, time.monotonic() + PATIENCE_S, until_done=load)
            if load.idle:
                troubles += system.left_behind()
                troubles += system.denied() if options.users is not None else []
        if (code := system.process.poll()) is not None:
            troubles.append(f"`up` ended with code {code}")
        load.abandon()
    load.join()
    faults = [fault for part in parts for fault in part.done]
    troubles += own_ends((data / "up.log").read_text(), faults)
    references.prepare((one.ask, fingerprint) for one in load.seen for fingerprint in one.fingerprints)
    return judge(
        load.seen,
        references.answer,
        faults,
        seconds=seconds,
        interrupted=bool(interrupts),
        runs=run_starts(data / "logs"),
        troubles=[*troubles, *refusals(data / "logs")],
    )


def _faults(options: DrillOptions, system: DrilledSystem, seed: int, started: float) -> list[Killer | Upgrade]:
    """What will be done to the system."""
    found: list[Killer | Upgrade] = []
    if possible(options.kinds, options.roles):
        rng = Random(f"{seed} faults")
        found.append(Killer(system, strikes(rng, kinds=options.kinds, roles=options.roles, every_s=options.every_s)))
    if options.upgrade:
        third = options.seconds / 3
        found.append(Upgrade(system, options.workers, begin=started + third, end=started + 2 * third))
    return found


def _wait(interrupts: list[int], system: DrilledSystem, until: float, *, until_done: Load | None = None) -> None:
    """Until the time, an interruption, the end of all requests under way, or that of the system."""
    while not interrupts and time.monotonic() < until and not (until_done and until_done.idle):
        if system.process.poll() is not None:
            return
        time.sleep(min(0.1, max(0.0, until - time.monotonic())))


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """The signals that asked for an end so far: Ctrl-C and SIGTERM stop the drill, not the process."""
    seen: list[int] = []
    former = {n: signal.signal(n, lambda number, _: seen.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
