"""`blockrelay drill`: asks, golden answers, load under kills, the end, the verdict."""

import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random, SystemRandom

import typer
from rich.console import Console

from blockrelay.block_folder import open_block_folder
from blockrelay.errors import UsageError
from blockrelay_launcher.drill.asks import answers_alone, make_asks
from blockrelay_launcher.drill.kills import Killer
from blockrelay_launcher.drill.load import PATIENCE_S, Load
from blockrelay_launcher.drill.report import judge, run_starts, show
from blockrelay_launcher.drill.system import ROLES, Role, drilled_system
from blockrelay_launcher.embedded_redis import Fsync

#: Different requests; each is sent many times, under other salts and beside others.
ASKS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """`requests` at once. `seed` None: a new one, which is told."""

    model: Path
    seconds: float
    roles: tuple[Role, ...]
    every_s: float = 2.0
    seed: int | None = None
    fsync: Fsync = "always"
    requests: int = 8
    stages: int = 1
    replicas: int = 2
    gateways: int = 2
    schedulers: int = 1
    stops: bool = False
    asks: int = ASKS


def parse_roles(text: str) -> tuple[Role, ...]:
    """`worker,redis` as roles; none for an empty text. Raises UsageError."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in ROLES:
            raise UsageError(f"--kill takes {', '.join(ROLES)} with commas between them, not {name!r}")
    return tuple(role for role in ROLES if role in names)


def run_drill(options: DrillOptions, *, as_json: bool) -> int:
    """0 when every accepted request completed with its own answer, once; 1 otherwise; 130 when interrupted.

    Leaves nothing running; the logs stay when something is wrong. Raises UsageError and ServiceUnavailable.
    """
    folder = open_block_folder(options.model, blocks=[])
    if options.stages > folder.model.blocks:
        raise UsageError(f"--stages is {options.stages}, but the model has {folder.model.blocks} blocks")
    if not folder.manifest.exact:
        raise UsageError(f"{options.model} is {folder.manifest.precision}, which promises no equal answers")
    seed = SystemRandom().randrange(2**32) if options.seed is None else options.seed
    rng = Random(seed)
    asks = make_asks(options.asks, rng=rng, folder=folder)
    _say(f"seed {seed}; {len(asks)} different requests, first alone")
    answers = answers_alone(options.model, asks)
    data = Path(tempfile.mkdtemp(prefix="blockrelay-drill-"))
    up = ["--stages", options.stages, "--replicas", options.replicas, "--gateways", options.gateways]
    up += ["--schedulers", options.schedulers, "--fsync", options.fsync]
    with _interruptible() as interrupts, drilled_system(options.model, data, list(map(str, up))) as system:
        load = Load(urls=system.urls, asks=asks, clients=options.requests, rng=rng)
        killer = Killer(system=system, roles=options.roles, every_s=options.every_s, rng=rng, stops=options.stops)
        _say(f"under load for {options.seconds:.0f} s; data and logs: {data}")
        started = time.monotonic()
        load.start()
        if options.roles:
            killer.start()
        _wait(interrupts, started + options.seconds)
        killer.finish()
        seconds = time.monotonic() - started
        if not interrupts:
            _say("no more kills and no new requests; waiting for those under way")
            load.finish()
            _wait(interrupts, time.monotonic() + PATIENCE_S, until_done=load)
        left = system.left_behind() if load.idle and not interrupts else []
        load.abandon()
    load.join()
    interrupted = bool(interrupts)
    report = judge(
        load.seen,
        answers,
        killer.kills,
        seconds=seconds,
        interrupted=interrupted,
        runs=run_starts(data / "logs"),
        left_behind=left,
    )
    if as_json:
        typer.echo(json.dumps({"seed": seed, "fsync": options.fsync, **report.to_dict()}, indent=1))
    else:
        show(report, Console(soft_wrap=True))
    if report.good:
        shutil.rmtree(data, ignore_errors=True)
        return 130 if interrupted else 0
    _say(f"kept for a look: {data}")
    return 130 if interrupted and not report.wrong else 1


def _wait(interrupts: list[int], until: float, *, until_done: Load | None = None) -> None:
    """Until the time, an interruption, or the end of all requests under way."""
    while not interrupts and time.monotonic() < until and not (until_done and until_done.idle):
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
