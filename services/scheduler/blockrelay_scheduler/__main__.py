"""The scheduler process: `python -m blockrelay_scheduler`, with settings from the environment.

SIGTERM and SIGINT end it.
"""

import signal
import sys
import threading
from functools import partial

from blockrelay import failpoints
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import BlockrelayError, UsageError
from blockrelay.exit_codes import complain, end_with_any_thread, exit_code
from blockrelay.observability import logs
from blockrelay.observability.certificates import Certificates
from blockrelay.observability.metrics.scheduler import SchedulerMetrics
from blockrelay.observability.registry import service_registry
from blockrelay.observability.status_server import StatusServer
from blockrelay.planning.costs import costs_of
from blockrelay.planning.cuts import check_stages
from blockrelay.planning.plan_file import read_plan_file
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.planned_split import PlannedSplit, equal_parts
from blockrelay.redis.client import Scripts, connect
from blockrelay.redis.connections import server_certificate_end
from blockrelay.settings import SchedulerSettings, read_settings
from blockrelay_scheduler.loop import Scheduler, SchedulerLinks
from blockrelay_scheduler.plan_command.inputs import PlanOptions, read_problem, read_profile
from blockrelay_scheduler.planning.cost_model import CostModel
from blockrelay_scheduler.planning.problem import Wishes
from blockrelay_scheduler.planning.strategies.registry import goes_by, place


def serve(settings: SchedulerSettings, stop: threading.Event) -> None:
    """Runs a scheduler until `stop` is set.

    Raises UsageError or BlockFolderError at the start for settings, models and Redis servers that cannot be used.
    """
    folder = open_block_folder(settings.model, blocks=[])
    blocks = folder.model.blocks
    planned = planned_by(settings, blocks)
    check_stages(folder, planned.stages)
    keys = Keys(settings.cell)
    client = connect(settings.control_redis, cell=settings.cell)
    payload = connect(settings.payload_redis, cell=settings.cell) if settings.payload_redis else client
    link = SchedulerLinks(client, payload, keys, Scripts(client, keys))
    metrics = SchedulerMetrics(
        service_registry("scheduler", cell=settings.cell, model=settings.served_name(folder.model.name))
    )
    Certificates(
        metrics.registry,
        {"control": settings.redis_url, "payload": settings.payload_redis_url},
        {"control": partial(server_certificate_end, client), "payload": partial(server_certificate_end, payload)},
    )
    profile = read_profile(settings.profile, folder) if settings.profile else None
    costs = CostModel(costs_of(folder), folder.manifest.precisions, profile)
    costs.check_profile()
    scheduler = Scheduler(
        settings=settings,
        link=link,
        metrics=metrics,
        model=folder.model_key,
        planned=planned,
        costs=costs,
        check_cut=partial(check_stages, folder),
    )
    try:
        status = StatusServer(settings.host, settings.port, metrics.registry, scheduler.gaps)
    except OSError as error:
        raise UsageError(f"port {settings.port} on {settings.host} cannot be used: {error.strerror}") from error
    logs.get().info("NODE_READY", role="scheduler", port=status.port, model=folder.model.name, blocks=blocks)
    try:
        scheduler.run(stop)
    finally:
        status.close()
        client.close()
        payload.close()
        logs.get().info("NODE_STOPPED", role="scheduler")


def planned_by(settings: SchedulerSettings, blocks: int) -> PlannedSplit:
    """Returns the stages that the settings ask for, of a model with `blocks` blocks.

    Raises UsageError for stages that the model cannot have, for settings that contradict each other, and for files that
    cannot be used. With a planning strategy, it also raises BlockFolderError for a model that cannot be used or cut.
    Strategies that choose the number of stages ignore BLOCKRELAY_STAGES, and others use it only above 1.
    """
    if settings.strategy is not None:
        if settings.plan is not None:
            raise UsageError("BLOCKRELAY_PLAN and BLOCKRELAY_STRATEGY: give one of them")
        return _planned_by_strategy(settings, settings.strategy)
    if settings.plan is None:
        return equal_parts(blocks, settings.stages, stage_devices=settings.stage_devices)
    planned = read_plan_file(settings.plan, blocks)
    if settings.stages not in (1, len(planned.stages)):
        raise UsageError(f"{settings.plan} has {len(planned.stages)} stages, BLOCKRELAY_STAGES is {settings.stages}")
    return planned


def _planned_by_strategy(settings: SchedulerSettings, strategy: str) -> PlannedSplit:
    """Has a planning strategy choose the stages."""
    options = PlanOptions(
        model=settings.model,
        profile=settings.profile,
        devices=settings.devices,
        objective=settings.objective,
        wishes=Wishes(parts=settings.stages if settings.stages > 1 and goes_by(strategy, "parts") else None),
    )
    problem = read_problem(options)
    return place(strategy, problem).as_planned(problem.fleet)


def main() -> int:
    """Runs the process and returns its exit code.

    It is 0 after a signal, 2 for unusable settings, model or Redis, and 70 for an error that a restart may mend.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    end_with_any_thread()
    try:
        settings = read_settings(SchedulerSettings, sys.argv[1:], program="python -m blockrelay_scheduler")
        logs.configure(settings.log_level, node_id=settings.node_id or logs.node_name("scheduler"))
        failpoints.arm("scheduler", settings.failpoint)
        serve(settings, stop)
    except BlockrelayError as error:
        complain(error)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
