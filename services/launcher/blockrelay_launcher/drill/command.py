"""Runs `blockrelay drill`: computes reference answers, runs a load under faults, and judges every answer."""

import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random, SystemRandom

import typer
from rich.console import Console

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.other_precisions import open_precisions
from blockrelay.errors import ServiceUnavailable, UsageError
from blockrelay.planning.plan_file import read_plan_file
from blockrelay.protocol.plan import CPU, GPU
from blockrelay_launcher.drill.clients import PATIENCE_S, DrillLoad, RequestRecord
from blockrelay_launcher.drill.closeness import Closeness, Verdict, computed_by
from blockrelay_launcher.drill.faults import CHANGES, Fault, possible, strikes
from blockrelay_launcher.drill.from_logs import own_ends, refusals, run_starts
from blockrelay_launcher.drill.options import DrillOptions
from blockrelay_launcher.drill.parts.killer import Killer
from blockrelay_launcher.drill.parts.memory import MemoryShortages, prepare_shortages
from blockrelay_launcher.drill.parts.operator import DeviceRetries, PlanSwitch, PrecisionChanges, Replans
from blockrelay_launcher.drill.parts.part import DrillPart
from blockrelay_launcher.drill.parts.ranks import RANKS, RankDeaths
from blockrelay_launcher.drill.parts.swap import SwapDamages, prepare_swaps
from blockrelay_launcher.drill.parts.upgrade import SALT, Upgrade
from blockrelay_launcher.drill.report import Report, judge, show
from blockrelay_launcher.drill.system import DrilledSystem, check_release, drilled_system, lasting_ports
from blockrelay_launcher.drill.users import put_in_force
from blockrelay_launcher.drill.workload import DrillRequest, Numerics, References, learn, make_requests, parts_of
from blockrelay_launcher.onnx_blocks.describe import described
from blockrelay_launcher.up_options.options import names_of


def run_drill(options: DrillOptions, *, as_json: bool) -> int:
    """Runs a drill and prints its report. Returns the exit code; ends all processes and keeps the logs of a bad drill.

    Exit code 0: the report is good (`Report.good`); 130: the drill was interrupted, and nothing was wrong until then;
    1: otherwise. Only for the main thread, because it handles signals. Raises UsageError for options that cannot work,
    BlockFolderError for a wrong block folder, ServiceUnavailable if the system does not start or a reference cannot be
    computed, and typer.Exit if the worker has printed an error of the ONNX blocks.
    """
    if options.blocks is not None:
        options = replace(options, model=Path(described(options.blocks, None).folder))
    elif options.sequential:
        raise UsageError("--sequential is for --blocks: other models are cut into stages")
    folder = open_block_folder(options.model, blocks=[])
    _check(options, folder)
    seed = SystemRandom().randrange(2**32) if options.seed is None else options.seed
    data = Path(tempfile.mkdtemp(prefix="blockrelay-drill-"))
    exact = folder.manifest.exact
    try:
        requests = make_requests(
            options.different_requests,
            rng=Random(seed),
            folder=folder,
            longest_answer=options.longest_answer,
            exact_every=5 if options.gpu and exact else None,
        )
        report = _drilled(_Course(options, seed, requests, data, exact=exact), folder)
    except BaseException:
        shutil.rmtree(data, ignore_errors=True)
        raise
    if as_json:
        typer.echo(json.dumps({"seed": seed, "fsync": options.fsync, **report.to_dict()}, indent=1))
    else:
        show(report, Console(soft_wrap=True))
    if report.wrong:
        typer.echo(f"kept for a look: {data}", err=True)
    else:
        shutil.rmtree(data, ignore_errors=True)
    return 130 if report.interrupted and not report.wrong else int(not report.good)


def _check(options: DrillOptions, folder: BlockFolder) -> None:
    """Raises UsageError for options that do not go together, or not with the model."""
    blocks = folder.model.blocks
    if options.stages > blocks:
        raise UsageError(f"--stages is {options.stages}, but the model has {blocks} blocks")
    for file in filter(None, (options.plan, options.apply)):
        read_plan_file(file, blocks)
    if (options.upgrade or options.upgrade_from) and not folder.manifest.exact:
        raise UsageError(
            "--upgrade and --upgrade-from are for models that promise equal answers: releases differ in bits"
        )
    if options.other_precision is not None:
        if options.gpu or options.blocks is not None or options.upgrade or options.upgrade_from:
            raise UsageError("--other-precision goes with none of --gpu, --blocks, --upgrade and --upgrade-from")
        if not all(one.manifest.exact for one in open_precisions(folder, [options.other_precision])):
            raise UsageError(
                "--other-precision is for two precisions that promise equal answers, such as w8a8 and w4a8"
            )
    if options.roles and {*options.kinds} - {*CHANGES} and not possible(options.kinds, options.roles):
        raise UsageError(f"--faults {','.join(options.kinds)} meets only redis, which --kill does not name")
    if options.gpu and (options.upgrade or options.upgrade_from):
        raise UsageError("--gpu goes with neither --upgrade nor --upgrade-from")
    if "device" in options.roles and not options.gpu and options.blocks is None:
        raise UsageError("--kill device is for drills with --gpu or --blocks")
    if options.upgrade_from is not None:
        if options.plan or options.apply:
            raise UsageError("--upgrade-from goes with neither --plan nor --apply: the other release may know none")
        if options.users is not None or options.upgrade:
            raise UsageError("--upgrade-from goes with neither --users nor --upgrade: releases differ in keys and bits")
        check_release(options.upgrade_from)


def _drilled(course: "_Course", folder: BlockFolder) -> Report:
    """Runs the system, or with --upgrade-from two releases of it in turn, and returns the report."""
    options, data = course.options, course.data
    up: list[object] = ["--model", options.model] if options.blocks is None else ["--blocks", options.blocks.absolute()]
    up += ["--sequential"] if options.sequential else []
    up += ["--other-precision", options.other_precision] if options.other_precision else []
    up += ["--degrade"] if options.degrades else []
    up += ["--plan", options.plan] if options.plan else ["--stages", options.stages]
    up += ["--replicas", options.replicas, "--gateways", options.gateways]
    up += ["--schedulers", options.schedulers, "--fsync", options.fsync]
    up += ["--gpu", options.gpu] if options.gpu else []
    up += ["--tensor-parallel", RANKS] if options.loses_ranks else []
    up += ["--stage-devices", options.stage_devices] if options.stage_devices else []
    if options.users is not None:
        gateways, schedulers = names_of("gateway", options.gateways), names_of("scheduler", options.schedulers)
        put_in_force(options.users, data, [*gateways, *schedulers, *options.workers])
    if options.degrades:
        prepare_shortages(data, options.workers, names_of("scheduler", options.schedulers))
    if options.swaps:
        longest = max(len(one.prompt) + one.params.max_tokens for one in course.requests)
        prepare_swaps(data, options.workers, folder, longest=longest, stages=options.stages)
    releases = [*filter(None, [options.upgrade_from]), sys.executable]
    seconds = 60 * options.minutes / len(releases)
    ports = lasting_ports(options.gateways) if options.upgrade_from else contextlib.nullcontext(0)
    if options.upgrade_from:
        (asked := data / "asked").mkdir()
        with drilled_system(asked, list(map(str, up))) as system:
            course.ask(system)
    with _interruptible() as interrupts, ports as port:
        for number, python in enumerate(releases, 1):
            with drilled_system(data, list(map(str, up)), python=python, port=port) as system:
                if number == 1:
                    course.begin(system)
                course.run(system, interrupts, seconds=seconds, last=number == len(releases))
            if interrupts:
                break
    return course.verdict(interrupted=bool(interrupts))


class _Course:
    """The course of a drill: its load and faults, while one system, or two releases in turn, run on the folder `data`.

    `exact`: CPUs give one right answer, bit by bit.
    """

    def __init__(
        self, options: DrillOptions, seed: int, requests: list[DrillRequest], data: Path, *, exact: bool
    ) -> None:
        self.options, self.data = options, data
        self._seed, self.requests, self._exact = seed, requests, exact
        self._faults: list[Fault] = []
        self._troubles: list[str] = []
        self._seconds = 0.0
        self._load = DrillLoad(urls=[], requests=requests, clients=options.requests, rng=Random(f"{seed} load"))
        self._of_cpus: set[str] = set()
        self._references = References(models=options.models, requests=requests, ids={})
        self._closeness = Closeness(options.model, requests, self._load.logits)

    def run(self, system: DrilledSystem, interrupts: list[int], *, seconds: float, last: bool) -> None:
        """Hurts a ready system for `seconds`; the last one is then left alone until all requests have ended."""
        release = "" if last else f" with the release of {self.options.upgrade_from}"
        typer.echo(f"under load for {seconds:.0f} s{release}; data and logs: {self.data}", err=True)
        started = time.monotonic()
        parts = _faults(self.options, system, f"{self._seed} faults", started, seconds)
        for part in parts:
            part.start()
        _wait(interrupts, system, started + seconds)
        for part in parts:
            part.finish()
        self._seconds += time.monotonic() - started
        self._troubles += [trouble for part in parts for trouble in part.troubles]
        if last and not interrupts:
            self._settle(system, interrupts)
        if (code := system.process.poll()) is not None:
            self._troubles.append(f"`up` ended with code {code}")
        if last or interrupts:
            self._load.abandon()
        self._faults += [fault for part in parts for fault in part.done]

    def ask(self, system: DrilledSystem) -> None:
        """Reads what the system makes of chats, and leaves out those that cannot be judged.

        With --upgrade-from it sends all requests, and leaves out those that one of the releases refuses. Raises
        ServiceUnavailable if none is left, or if a gateway does not answer.
        """
        why = learn(
            self.requests,
            lambda one: system.record_of(one.path, one.body()),
            only_chats=self.options.upgrade_from is None,
        )
        for reason, count in Counter(why[number] for number in why.keys() - self._load.left_out).items():
            typer.echo(f"{count} of the requests are left out: {reason}", err=True)
        self._load.left_out |= why.keys()
        if len(self._load.left_out) == len(self.requests):
            raise ServiceUnavailable("none of the requests can be sent")

    def begin(self, system: DrilledSystem) -> None:
        """Reads records of chats, computes reference answers, waits for the GPUs, and starts the load.

        `system` is the first one.
        """
        typer.echo(
            f"seed {self._seed}; {len(self.requests)} different requests" + (", first alone" if self._exact else ""),
            err=True,
        )
        self.ask(system)
        if self._exact:
            (own,) = system.numerics_ids(CPU)
            self._references.ids = {own: Numerics(), f"{own}-{SALT}": Numerics(SALT)}
            self._references.ids |= {other: Numerics(folder=1) for other in system.other_numerics()}
            sent = [n for n in range(len(self.requests)) if n not in self._load.left_out]
            self._references.prepare((n, own) for n in sent)
        if self.options.gpu:
            typer.echo(f"waiting until {self.options.gpu} serves", err=True)
            system.wait_for_gpus(len(self.options.gpu.split(",")))
        self._of_cpus = system.numerics_ids(CPU) - system.numerics_ids(GPU)
        self._load.urls = system.running.urls
        self._load.start()

    def _settle(self, system: DrilledSystem, interrupts: list[int]) -> None:
        """Stops new requests, waits for the running ones, and then looks for state that Redis should not have."""
        typer.echo("no more faults and no new requests; waiting for those under way", err=True)
        self._load.finish()
        _wait(interrupts, system, time.monotonic() + PATIENCE_S, until_done=self._load)
        if self._load.idle:
            self._troubles += system.left_behind()
            self._troubles += system.denied() if self.options.users is not None else []

    def verdict(self, *, interrupted: bool) -> Report:
        """Waits for the clients and returns the report. Raises ServiceUnavailable if a reference process fails."""
        self._load.join()
        troubles = [*self._troubles, *own_ends((self.data / "up.log").read_text(), self._faults)]
        seen, logs = self._load.seen, self.data / "logs"
        inexact = [one for one in seen if not self._is_exact(one)]
        exact = [one for one in seen if self._is_exact(one)]
        self._references.prepare((one.number, fingerprint) for one in exact for fingerprint in one.fingerprints)
        typer.echo(f"{len(inexact)} answers are measured by reference logits", err=True) if inexact else None
        self._closeness.prepare(inexact)
        return judge(
            seen,
            self._references.answer,
            self._faults,
            seconds=self._seconds,
            interrupted=interrupted,
            runs=run_starts(logs),
            troubles=[*troubles, *refusals(logs)],
            inexact=self._inexact,
        )

    def _inexact(self, one: RequestRecord) -> Verdict | None:
        """Returns the verdict on a request with nondeterministic bits; None for one with a single right answer."""
        if self._is_exact(one):
            return None
        return self._closeness.verdict(one, on_gpu=not computed_by(one.fingerprints, self._of_cpus))

    def _is_exact(self, one: RequestRecord) -> bool:
        """True if the request has one right answer, bit by bit.

        In a drill with GPUs an unknown fingerprint counts as a GPU's; in any other its answer is wrong.
        """
        if not self._exact:
            return False
        ids = self._references.ids
        return not self.options.gpu or all(parts_of(fingerprint, ids) is not None for fingerprint in one.fingerprints)


def _faults(options: DrillOptions, system: DrilledSystem, seed: str, started: float, seconds: float) -> list[DrillPart]:
    """Returns the parts of the drill that the options ask for."""
    parts: list[DrillPart] = []
    if possible(options.kinds, options.roles):
        rng = Random(seed)
        parts.append(Killer(system, strikes(rng, kinds=options.kinds, roles=options.roles, every_s=options.every)))
    if options.replans:
        parts.append(Replans(system, Random(f"{seed} replans"), options.stages))
    if options.changes_precision:
        parts.append(PrecisionChanges(system, Random(f"{seed} precisions"), options.models))
    if options.degrades:
        parts.append(MemoryShortages(system, Random(f"{seed} memory")))
    if options.swaps:
        parts.append(SwapDamages(system, Random(f"{seed} swaps")))
    if options.loses_ranks:
        parts.append(RankDeaths(system, Random(f"{seed} ranks")))
    if options.gpu:
        parts.append(DeviceRetries(system))
    if options.upgrade:
        third = seconds / 3
        parts.append(Upgrade(system, options.workers, begin=started + third, end=started + 2 * third))
    if options.apply is not None:
        parts.append(PlanSwitch(system, options.apply, at=started + seconds / 2))
    return parts


def _wait(interrupts: list[int], system: DrilledSystem, until: float, *, until_done: DrillLoad | None = None) -> None:
    """Waits until the time `until`, an interruption, the end of the system, or the end of all requests."""
    while not interrupts and time.monotonic() < until and not (until_done and until_done.idle):
        if system.process.poll() is not None:
            return
        time.sleep(min(0.1, max(0.0, until - time.monotonic())))


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Yields a list of the signals (Ctrl-C, SIGTERM) received so far: they end the drill, not the process."""
    received: list[int] = []
    former = {n: signal.signal(n, lambda number, _: received.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
