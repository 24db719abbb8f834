"""The alert drill: each cause on a real system, real Prometheus and Alertmanager, and somebody who is told.

The alert fires, the first command of its runbook names the culprit, the cause is removed, the alert resolves. Rules are
those of deploy/prometheus/alerts.yml with their times shortened. A loaded system without a cause is told nothing.
"""

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from blockrelay_launcher.supervisor.ports import kept_ports
from tests.support.documents import blocks
from tests.support.project import ROOT
from tests.support.prometheus import binary
from tests.support.systems.causes import CAUSES, Watched, watched_system
from tests.support.systems.system import StartSystem
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.observability, pytest.mark.timeout(900)]

ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
#: Seconds that a rule looks back on, and that a request stands still before that is told.
WINDOW_S, STILL_S = 15, 3


@dataclass(frozen=True, slots=True)
class Expected:
    """What the first command of an alert's runbook prints, as a regular expression.

    `{dead}` stands for the address of a worker that the cause has killed.
    """

    cause: str
    alert: str
    culprit: str


EXPECTED = (
    Expected("kill", "BlockrelayStandsStill", r"no progress for .*: req-[0-9a-f]{24}"),
    Expected(
        "kill", "BlockrelayStageWithoutWorker", r"not ready: stage 1 \(block_\d+ to block_\d+\) has no live worker"
    ),
    Expected("kill", "BlockrelayWorkersDie", "{dead}"),
    Expected("kill", "BlockrelayProcessDown", "{dead}"),
    Expected("books", "BlockrelayBooksDoNotBalance", "the books do not balance by 3"),
    Expected("overload", "BlockrelayRefuses", 'limit="in_flight"'),
    Expected("crowd", "BlockrelayPreempts", r'instance="127.0.0.1:\d+"'),
    Expected("gpu", "BlockrelayGpuFails", r'block="block_\d+", instance="127.0.0.1:\d+", reason="gpu_error"'),
    Expected("device", "BlockrelayDeviceLost", r'instance="127.0.0.1:\d+", reason="process_ended"'),
    Expected("device", "BlockrelayDeviceQuarantined", r'instance="127.0.0.1:\d+"'),
    Expected("poison", "BlockrelayDeadLetters", "req-3-0"),
    Expected("numerics", "BlockrelayNumericsGone", r"numerics id .*-b, of which none is left: \d requests"),
    Expected("memory", "BlockrelayRedisTooSmall", r"Redis uses \d+ of \d+ MiB"),
    Expected("redis", "BlockrelayNotAccepting", "Redis does not answer"),
    Expected("redis", "BlockrelayRedisTrouble", "Redis does not answer"),
)
#: Needs two machines that compute other bits under one numerics id: `promtool test rules` below.
BY_SERIES_ONLY = {"BlockrelayAnswersDiverge"}


def hastened() -> dict[str, Any]:
    """The rules with their times shortened."""
    rules = yaml.safe_load(ALERTS.read_text())
    for rule in rules["groups"][0]["rules"]:
        rule["expr"] = re.sub(r"\[\d+[smh]\]", f"[{WINDOW_S}s]", rule["expr"]).replace("> 60", f"> {STILL_S}")
        if "for" in rule:  # a busy machine may miss a scrape or two
            rule["for"] = "5s" if rule["expr"].startswith("up") else "1s"
    return rules


@dataclass
class Told:
    """What Alertmanager has sent: the newest status of each alert, by name, and when it came."""

    newest: dict[str, tuple[str, float]] = field(default_factory=dict[str, tuple[str, float]])
    fired: set[str] = field(default_factory=set[str])

    def hear(self, message: dict[str, Any]) -> None:
        name, status = message["commonLabels"]["alertname"], message["status"]
        self.newest[name] = status, time.time()
        if status == "firing":
            self.fired.add(name)

    def is_firing(self, name: str) -> bool:
        return self.newest.get(name, ("", 0.0))[0] == "firing"


@contextmanager
def alertmanager(folder: Path, port: int, webhook: int) -> Iterator[Told]:
    """Tells us of each alert on its own, at once."""
    told = Told()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name is http.server's
            told.hear(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", webhook), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at_once = {"group_by": ["alertname"], "group_wait": "0s", "group_interval": "1s", "repeat_interval": "1h"}
    config = {
        "route": {"receiver": "test", **at_once},
        "receivers": [{"name": "test", "webhook_configs": [{"url": f"http://127.0.0.1:{webhook}/"}]}],
    }
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(config))
    command = [
        binary("prometheus-alertmanager"),
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    with (folder / "alertmanager.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield told
    finally:
        process.kill()
        process.wait()
        server.shutdown()
        server.server_close()


@pytest.fixture
def drilled(start_system: StartSystem, tmp_path: Path) -> Iterator[tuple[Watched, Told]]:
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(hastened()))
    with ExitStack() as stack:
        port, webhook = stack.enter_context(kept_ports("127.0.0.1", 0, 2))
        told = stack.enter_context(alertmanager(tmp_path, port, webhook))
        config: dict[str, Any] = {
            "rule_files": [str(tmp_path / "alerts.yml")],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}]},
        }
        yield stack.enter_context(watched_system(start_system, tmp_path, **config)), told


def first_command(alert: str) -> str:
    """Of its runbook."""
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    (rule,) = [rule for rule in rules if rule["alert"] == alert]
    first, *_ = [block for block in blocks(ROOT / rule["annotations"]["runbook_url"]) if block.language == "sh"]
    return re.sub(r"\[\d+[mh]\]", f"[{WINDOW_S}s]", first.text)


def run(command: str, on: Watched) -> str:
    """What it prints, with what people have set in their shell."""
    variables = {
        "BLOCKRELAY_REDIS_URL": on.here.control.url,
        "BLOCKRELAY_CELL": "t",
        "BLOCKRELAY_MODEL": str(on.here.model),
        "PROMETHEUS": on.prometheus.url,
        "GATEWAY": on.url,
        "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
        "COLUMNS": "200",
    }
    done = subprocess.run(
        ["sh", "-c", command], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def culprits(on: Watched, expected: Expected) -> Sequence[str]:
    """What the output must match, one of them."""
    if "{dead}" not in expected.culprit:
        return [expected.culprit]
    down = on.prometheus.values('up{job="blockrelay-worker"} == 0', time.time() - 3)
    return [re.escape(dict(series)["instance"]) for series in down]


def test_every_alert_has_a_cause_here() -> None:
    alerts = {rule["alert"] for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]}
    assert {expected.alert for expected in EXPECTED} | BY_SERIES_ONLY == alerts


def test_each_cause_fires_its_alerts_whose_runbooks_name_it_and_which_resolve(drilled: tuple[Watched, Told]) -> None:
    watched, told = drilled
    with CAUSES["load"](watched):
        pass
    assert not told.fired, "a loaded system without a cause"
    seconds: dict[str, tuple[float, float]] = {}
    for cause in dict.fromkeys(expected.cause for expected in EXPECTED):
        of_it = [expected for expected in EXPECTED if expected.cause == cause]
        began, fired = time.time(), dict[str, float]()
        with CAUSES[cause](watched):
            for expected in of_it:
                wait_until(lambda e=expected: told.is_firing(e.alert), f"{expected.alert} fires", timeout_s=45)
                fired[expected.alert] = told.newest[expected.alert][1] - began
                printed = run(first_command(expected.alert), watched)
                assert any(re.search(one, printed) for one in culprits(watched, expected)), (expected, printed)
        mended = time.time()
        for expected in of_it:
            if expected.alert == "BlockrelayProcessDown":  # until Prometheus is told that its target is gone
                watched.prometheus.forget_those_that_are_down("blockrelay-worker")
            wait_until(lambda e=expected: not told.is_firing(e.alert), f"{expected.alert} resolves", timeout_s=90)
            seconds[expected.alert] = fired[expected.alert], told.newest[expected.alert][1] - mended
    for alert, (to_fire, to_resolve) in seconds.items():
        print(f"{alert:32} fires after {to_fire:5.1f} s, resolves after {to_resolve:5.1f} s")  # noqa: T201


def test_an_answer_that_diverges_is_told(tmp_path: Path) -> None:
    """By series alone, and not by others."""
    labels = '{cell="c0",model="m",instance="a",verdict="%s"}'
    series = [
        {"series": "blockrelay_worker_commits_total" + labels % verdict, "values": values}
        for verdict, values in (("DIVERGED", "0 0 1 1 1"), ("LOST", "0 3 5 9 9"))
    ]
    alert = {
        "exp_labels": {"cell": "c0", "model": "m", "severity": "critical"},
        "exp_annotations": {
            "summary": "A worker of m computed other tokens than were committed; they were refused.",
            "runbook_url": "docs/runbooks/answers-diverge.md",
        },
    }
    asked = [
        {"alertname": "BlockrelayAnswersDiverge", "eval_time": "1m", "exp_alerts": []},
        {"alertname": "BlockrelayAnswersDiverge", "eval_time": "4m", "exp_alerts": [alert]},
    ]
    test = {
        "rule_files": [str(ALERTS)],
        "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": asked}],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        [binary("promtool"), "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_of_compose_are_what_the_programs_read() -> None:
    for command in (
        [binary("promtool"), "check", "rules", str(ALERTS)],
        [binary("promtool"), "check", "config", "--syntax-only", str(ALERTS.parent / "prometheus.yml")],
        [binary("amtool"), "check-config", str(ROOT / "deploy" / "alertmanager" / "alertmanager.yml")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
