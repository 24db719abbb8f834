"""What holds for a whole cell: every script and every reader goes by what a scheduler has published."""

import pytest
from prometheus_client import CollectorRegistry

from blockrelay.observability.metrics.scheduler import SchedulerMetrics
from blockrelay.protocol.capabilities import Pace
from blockrelay.protocol.plan import missing_stages
from blockrelay.protocol.planned_split import equal_parts
from blockrelay.protocol.transitions import calls
from blockrelay.protocol.transitions.calls import Limits
from blockrelay.redis.cell_address import CellAddress
from blockrelay.redis.cell_settings import CellSettings, publish_cell_settings
from blockrelay.redis.registry import read_plan, read_workers
from blockrelay.settings import SchedulerSettings, Settings
from blockrelay_launcher.cli.status import read_status
from blockrelay_scheduler.link import SchedulerLinks
from blockrelay_scheduler.loop import Scheduler
from tests.support.cell import MODEL, Cell
from tests.support.plan_problems import costs
from tests.support.redis.redis_server import RedisServer


def test_a_finished_request_is_kept_as_long_as_the_cell_says(cell: Cell) -> None:
    """Whoever ends it, and whatever that service was started with."""
    publish_cell_settings(cell.client, cell.keys, CellSettings(retention_s=7777, dead_after_ms=3000))
    cell.accept()
    cell.scripts.run(calls.finish("req-1", "cancelled"))
    assert 7700 < cell.client.ttl(cell.keys.request("req-1")) <= 7777  # pyright: ignore


@pytest.mark.parametrize(("silent_s", "alive"), [(6, True), (14, False)])
def test_all_mean_the_same_workers_by_alive(cell: Cell, redis_server: RedisServer, silent_s: int, alive: bool) -> None:
    """Dead is who has been silent for ten seconds here: for CLAIM, ACCEPT, readiness, status, gauge and planner."""
    cell.worker("a", split="1-4")
    cell.scripts.run(calls.heartbeat("a", Pace(row_s=1.0, steps={1: 1.0})))
    seconds, _ = cell.client.time()  # pyright: ignore
    cell.client.zadd(cell.keys.workers, {"a": (seconds - silent_s) * 1000})  # pyright: ignore
    options = {"stages": 1, "cell": cell.keys.cell, "dead_after_s": 10.0, "vacancy_s": 0.0001}
    scheduler = Scheduler(
        settings=SchedulerSettings.model_validate(options),
        link=SchedulerLinks(cell.client, cell.client, cell.keys, cell.scripts),
        metrics=SchedulerMetrics(CollectorRegistry()),
        model=MODEL,
        planned=equal_parts(4, 1),
        costs=costs(4),
    )
    scheduler.tick()  # which declares nobody dead: it has just begun
    gauge = {
        state: scheduler.metrics.registry.get_sample_value("blockrelay_workers", {"device": "cpu", "state": state})
        for state in ("ready", "silent")
    }
    assert gauge == {"ready": float(alive), "silent": float(not alive)}
    (worker,) = read_workers(cell.client, cell.keys, MODEL)
    assert worker.is_alive == alive
    plan = read_plan(cell.client, cell.keys, MODEL)
    assert bool(missing_stages(plan, [worker])) != alive
    status = read_status(CellAddress(redis_server.url, Settings(cell=cell.keys.cell)))
    assert status["models"][MODEL]["workers"][0]["state"] == ("ready" if alive else "silent")
    forecast = cell.accept("req-1", limits=Limits(wait_s=0.001))
    assert forecast.status == ("WAIT" if alive else "OK"), "what nobody computes has no forecast"
    cell.accept("req-2")
    assert bool(cell.claim("a")) == alive


def test_a_scheduler_that_was_started_with_other_values_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    cell = CellSettings(retention_s=900, dead_after_ms=3000)
    cell.tell(cell)
    assert capsys.readouterr().out == ""
    cell.tell(CellSettings(retention_s=60, dead_after_ms=1000))
    (line,) = capsys.readouterr().out.splitlines()
    assert "retention_s is 900 in this cell, not 60, dead_after_ms is 3000 in this cell, not 1000" in line
