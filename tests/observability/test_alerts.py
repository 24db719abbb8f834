"""The alert drill: each cause on a real system, real Prometheus and Alertmanager, and somebody who is told.

Rules are those of deploy/prometheus/alerts.yml with their times shortened. A loaded system without a cause is told
nothing.
"""

from pathlib import Path

import pytest

from tests.support.alert_drill import BY_SERIES_ONLY, STOPPED, Expected, alerts, drill, drilled_system, hastened
from tests.support.systems.causes import CAUSES
from tests.support.systems.outages import OUTAGES
from tests.support.systems.system import StartSystem

pytestmark = [pytest.mark.observability, pytest.mark.timeout(900)]

EXPECTED = (
    Expected("idle", "BlockrelayNoWorkers", 'cell="t"'),
    Expected("unwatched", "BlockrelayRedisUnwatched", '{job="blockrelay-redis"} => 1'),
    Expected("rewrite", "BlockrelayRedisAppendFails", r"redis_aof_last_bgrewrite_status\{.*redis\.sock"),
    Expected("replica", "BlockrelayRedisReplica", r"redis_master_link_up\{.*redis\.sock"),
    Expected("kill", "BlockrelayStandsStill", r"no progress for .*: req-[0-9a-f]{24}"),
    Expected(
        "kill", "BlockrelayStageWithoutWorker", r"not ready: stage 1 \(block_\d+ to block_\d+\) has no live worker"
    ),
    Expected("kill", "BlockrelayWorkersDie", "{dead}"),
    Expected("kill", "BlockrelayProcessDown", "{dead}"),
    Expected("books", "BlockrelayBooksDoNotBalance", "the books do not balance by 3"),
    Expected("overload", "BlockrelayRefuses", 'limit="in_flight"'),
    Expected("overload", "BlockrelayErrorsBurnFast", 'status="503"'),
    Expected("overload", "BlockrelayErrorsBurnSlow", 'status="503"'),
    Expected("crowd", "BlockrelayPreempts", r'instance="127.0.0.1:\d+"'),
    Expected("gpu", "BlockrelayGpuFails", r'block="block_\d+", instance="127.0.0.1:\d+", reason="gpu_error"'),
    Expected("device", "BlockrelayDeviceLost", r'instance="127.0.0.1:\d+", reason="process_ended"'),
    Expected("device", "BlockrelayDeviceQuarantined", r'instance="127.0.0.1:\d+"'),
    Expected("poison", "BlockrelayDeadLetters", "req-3-0"),
    Expected("numerics", "BlockrelayNumericsGone", r"numerics id .*-b, of which none is left: \d requests"),
    Expected("memory", "BlockrelayRedisTooSmall", r"Redis uses \d+ of \d+ MiB"),
    Expected("memory", "BlockrelayRedisMemory", r"redis\.sock"),
    Expected("redis", "BlockrelayNotAccepting", "Redis does not answer"),
    Expected("redis", "BlockrelayRedisTrouble", "Redis does not answer"),
)


def test_every_alert_has_a_cause_here() -> None:
    assert {expected.alert for expected in (*EXPECTED, *STOPPED)} | BY_SERIES_ONLY == alerts().keys()


def test_each_cause_fires_its_alerts_whose_runbooks_name_it_and_which_resolve(
    start_system: StartSystem, tmp_path: Path
) -> None:
    with drilled_system(start_system, tmp_path, hastened()) as (watched, told):
        with CAUSES["load"](watched):
            pass
        assert not told.fired, "a loaded system without a cause"
        drill(watched, told, EXPECTED, CAUSES | OUTAGES)
