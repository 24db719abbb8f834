"""Alerts whose causes cannot be had here, by series: they go in, the alert comes out, and comes for nothing else."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.alert_drill import ALERTS, BY_SERIES_ONLY, alerts
from tests.support.project import ROOT
from tests.support.prometheus import binary

pytestmark = pytest.mark.observability

C0 = 'cell="c0",model="m"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Series, a value for each minute, and the labels of those that fire at `at` (beside the severity)."""

    what: str
    alert: str
    series: Mapping[str, str]
    at: str = "10m"
    fires: Sequence[Mapping[str, str]] = field(default_factory=tuple[Mapping[str, str], ...])


def _build(cell: str, service: str) -> str:
    return f'blockrelay_build_info{{cell="{cell}",model="m",service="{service}",instance="{service}-{cell}"}}'


def _up_to_minute_3(*gone: tuple[str, str]) -> dict[str, str]:
    """Two cells, of which `gone` end after three minutes."""
    all_of = [(cell, service) for cell in ("c0", "c1") for service in ("gateway", "scheduler", "worker")]
    return {_build(*one): "1 1 1 1 _x10" if one in gone else "1x14" for one in all_of}


_ENDED = f'blockrelay_finished_requests_total{{{C0},finished_reason="%s"}}'


def _requests(*, refused: tuple[str, int], ended: tuple[str, int]) -> dict[str, str]:
    """The series of requests refused and ended, with their number in each minute."""
    rejections = f'blockrelay_admission_rejections_total{{{C0},status="{refused[0]}"}}'
    return {rejections: f"0+{refused[1]}x80", _ENDED % ended[0]: f"0+{ended[1]}x80"}


def _histogram(name: str, buckets: Mapping[str, int]) -> dict[str, str]:
    """The series of a histogram, with the number of values in each minute up to each bound."""
    counts = {**buckets, "+Inf": max(buckets.values())}
    return {f'{name}_bucket{{{C0},le="{bound}"}}': f"0+{count}x80" for bound, count in counts.items()}


_COMMITS = f'blockrelay_worker_commits_total{{{C0},instance="a",verdict="%s"}}'
_VOLUME = 'kubelet_volume_stats_%s_bytes{namespace="n",persistentvolumeclaim="data-redis-control-0"}'
_MANAGED = 'certmanager_certificate_expiration_timestamp_seconds{namespace="n",name="%s"}'
_REDIS = 'job="blockrelay-redis",instance="redis://%s:6379"'
_EVERYONE = ("gateway", "scheduler", "worker")

CASES = (
    Case(
        what="an answer that diverges",
        alert="BlockrelayAnswersDiverge",
        series={_COMMITS % "DIVERGED": "0 0 1x8", _COMMITS % "LOST": "0 3 5 9x7"},
        fires=[{"cell": "c0", "model": "m"}],
    ),
    Case(
        what="commits that are lost alone",
        alert="BlockrelayAnswersDiverge",
        series={_COMMITS % "DIVERGED": "0x10", _COMMITS % "LOST": "0 3 5 9x7"},
    ),
    Case(
        what="no series at all", alert="BlockrelayServiceAbsent", series={}, fires=[{"service": s} for s in _EVERYONE]
    ),
    Case(what="two cells that are well", alert="BlockrelayServiceAbsent", series=_up_to_minute_3()),
    Case(
        what="a cell without a scheduler beside another",
        alert="BlockrelayServiceAbsent",
        series=_up_to_minute_3(("c1", "scheduler")),
        fires=[{"cell": "c1", "service": "scheduler"}],
    ),
    Case(
        what="a cell that sleeps",
        alert="BlockrelayServiceAbsent",
        series={
            **_up_to_minute_3(("c1", "worker")),
            'blockrelay_workers_wanted{cell="c1",model="m",device="cpu"}': "0x14",
        },
    ),
    Case(
        what="all cells sleep",
        alert="BlockrelayServiceAbsent",
        series={
            **_up_to_minute_3(("c0", "worker"), ("c1", "worker")),
            'blockrelay_workers_wanted{cell="c0",model="m",device="cpu"}': "0x14",
            'blockrelay_workers_wanted{cell="c1",model="m",device="cpu"}': "0x14",
        },
    ),
    Case(
        what="a cell whose workers are gone while one is wanted, beside one that sleeps",
        alert="BlockrelayServiceAbsent",
        series={
            **_up_to_minute_3(("c0", "worker"), ("c1", "worker")),
            'blockrelay_workers_wanted{cell="c0",model="m",device="cpu"}': "1x14",
            'blockrelay_workers_wanted{cell="c1",model="m",device="cpu"}': "0x14",
        },
        fires=[{"cell": "c0", "service": "worker"}],
    ),
    Case(
        what="one Redis of two that is not asked any more",
        alert="BlockrelayRedisUnwatched",
        series={f"redis_up{{{_REDIS % 'a'}}}": "1x60", f"redis_up{{{_REDIS % 'b'}}}": "1x50 stale"},
        at="55m",
        fires=[{"job": "blockrelay-redis"}],
    ),
    Case(
        what="a Redis without a limit",
        alert="BlockrelayRedisMemory",
        series={
            f"redis_memory_used_bytes{{{_REDIS % 'a'}}}": "900x10",
            f"redis_memory_max_bytes{{{_REDIS % 'a'}}}": "0x10",
        },
    ),
    Case(
        what="errors of ours",
        alert="BlockrelayErrorsBurnFast",
        series=_requests(refused=("503", 1), ended=("stop", 50)),
        fires=[{"cell": "c0", "model": "m"}],
    ),
    Case(
        what="ends by error",
        alert="BlockrelayErrorsBurnFast",
        series=_requests(refused=("503", 0), ended=("error", 1)) | _requests(refused=("503", 0), ended=("stop", 50)),
        fires=[{"cell": "c0", "model": "m"}],
    ),
    Case(
        what="what clients do wrong",
        alert="BlockrelayErrorsBurnFast",
        series=_requests(refused=("400", 30), ended=("stop", 50))
        | _requests(refused=("429", 30), ended=("expired", 1)),
    ),
    Case(
        what="few errors",
        alert="BlockrelayErrorsBurnFast",
        series=_requests(refused=("500", 1), ended=("stop", 150)),
        at="70m",
    ),
    Case(
        what="few errors for hours",
        alert="BlockrelayErrorsBurnSlow",
        series=_requests(refused=("500", 1), ended=("stop", 150)),
        at="70m",
        fires=[{"cell": "c0", "model": "m"}],
    ),
    Case(
        what="errors that are over",
        alert="BlockrelayErrorsBurnFast",
        series={_ENDED % "error": "0+9x60 540x20", _ENDED % "stop": "0+50x80"},
        at="70m",
    ),
    Case(
        what="first tokens that come late",
        alert="BlockrelayFirstTokenLate",
        series=_histogram("blockrelay_time_to_first_token_seconds", {"10.0": 9, "20.0": 10}),
        at="20m",
        fires=[{"cell": "c0", "model": "m"}],
    ),
    Case(
        what="first tokens that come in time",
        alert="BlockrelayFirstTokenLate",
        series=_histogram("blockrelay_time_to_first_token_seconds", {"10.0": 99, "20.0": 100}),
        at="20m",
    ),
    Case(
        what="a queue that is long",
        alert="BlockrelayQueueLong",
        series=_histogram("blockrelay_worker_request_queue_time_seconds", {"20.0": 8, "80.0": 10}),
        at="20m",
        fires=[{"cell": "c0", "model": "m"}],
    ),
    Case(
        what="an authority that ends in 13 days",
        alert="BlockrelayCertificateEnds",
        series={f'blockrelay_certificate_end_seconds{{{C0},redis="control",instance="s"}}': f"{13 * 86400}x10"},
        fires=[{"cell": "c0", "model": "m", "redis": "control"}],
    ),
    Case(
        what="a certificate that was not made anew",
        alert="BlockrelayCertificateEnds",
        series={
            _MANAGED % "redis-control": f"{6 * 86400}x10",
            _MANAGED % "somebody-else": "0x10",
        },
        fires=[{"namespace": "n", "name": "redis-control"}],
    ),
    Case(
        what="an authority that ends in 15 days",
        alert="BlockrelayCertificateEnds",
        series={f'blockrelay_certificate_end_seconds{{{C0},redis="control",instance="s"}}': f"{15 * 86400}x10"},
    ),
    Case(
        what="a disk with little left",
        alert="BlockrelayRedisDisk",
        series={_VOLUME % "available": "19x10", _VOLUME % "capacity": "100x10"},
        fires=[{"namespace": "n", "persistentvolumeclaim": "data-redis-control-0"}],
    ),
    Case(
        what="a file that cannot be written",
        alert="BlockrelayRedisAppendFails",
        series={f"redis_aof_last_write_status{{{_REDIS % 'a'}}}": "1 1 0x8"},
        fires=[{"job": "blockrelay-redis", "instance": "redis://a:6379"}],
    ),
    Case(
        what="a replica that lags",
        alert="BlockrelayRedisReplica",
        series={f'redis_connected_slave_lag_seconds{{{_REDIS % "a"},slave_ip="10.0.0.7"}}': "1 1 12x8"},
        fires=[{"job": "blockrelay-redis", "instance": "redis://a:6379", "slave_ip": "10.0.0.7"}],
    ),
)


def asked(case: Case) -> dict[str, Any]:
    """The case as `promtool test rules` reads it, which compares labels and no texts."""
    labels = [
        {"alertname": case.alert, "alertstate": "firing", **alerts()[case.alert]["labels"], **f} for f in case.fires
    ]
    sample = [
        {"labels": "{" + ",".join(f'{k}="{v}"' for k, v in sorted(one.items())) + "}", "value": 1} for one in labels
    ]
    return {
        "name": case.what,
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "promql_expr_test": [
            {
                "expr": f'max without (__name__) (ALERTS{{alertname="{case.alert}",alertstate="firing"}})',
                "eval_time": case.at,
                "exp_samples": sample,
            }
        ],
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_series_go_in_and_an_alert_comes_out(case: Case, tmp_path: Path) -> None:
    test = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [asked(case)]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        [binary("promtool"), "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_has_no_cause_here_has_series() -> None:
    assert {case.alert for case in CASES if case.fires} >= BY_SERIES_ONLY


def test_the_files_of_compose_are_what_the_programs_read() -> None:
    for command in (
        [binary("promtool"), "check", "rules", str(ALERTS)],
        [binary("promtool"), "check", "config", "--syntax-only", str(ALERTS.parent / "prometheus.yml")],
        [binary("amtool"), "check-config", str(ROOT / "deploy" / "alertmanager" / "alertmanager.yml")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
