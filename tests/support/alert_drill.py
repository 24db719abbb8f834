"""A drill of the alerts: causes on a real system, a real Prometheus and Alertmanager, and somebody who is told.

Each alert fires, the first command of its runbook names the culprit, the cause is removed, the alert resolves.
"""

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from blockrelay_launcher.supervisor.ports import kept_ports
from tests.support.documents import blocks
from tests.support.project import ROOT
from tests.support.prometheus import binary
from tests.support.systems.causes import Cause, Watched, watched_system
from tests.support.systems.system import StartSystem
from tests.support.waiting import wait_until

ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
#: Seconds that a shortened rule looks back on, and that a request stands still before that is told.
WINDOW_S, STILL_S = 15, 3
Rules = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Expected:
    """What the first command of an alert's runbook prints, as a regular expression.

    `{dead}` stands for the address of a worker that the cause has killed. `service`: of an alert that has the label.
    """

    cause: str
    alert: str
    culprit: str
    service: str = ""

    @property
    def name(self) -> str:
        return f"{self.alert} ({self.service})" if self.service else self.alert


_ABSENT, _DOWN = "BlockrelayServiceAbsent", "BlockrelayRedisDown"
#: What stops, and who tells of it (tests/observability/test_outages.py).
STOPPED = (
    Expected("gateways", _ABSENT, 'service="gateway"', service="gateway"),
    Expected("schedulers", _ABSENT, 'service="scheduler"', service="scheduler"),
    Expected("workers", _ABSENT, 'service="worker"', service="worker"),
    Expected("servers", _DOWN, r"redis_up\{.*redis\.sock"),
    Expected("everything", _DOWN, r"redis_up\{.*redis\.sock"),
    *(Expected("everything", _ABSENT, f'service="{one}"', service=one) for one in ("gateway", "scheduler", "worker")),
)
#: Needs two machines that compute other bits under one numerics id, a kubelet, a clock that is months ahead, or hours.
BY_SERIES_ONLY = {
    "BlockrelayAnswersDiverge",
    "BlockrelayRedisDisk",
    "BlockrelayFirstTokenLate",
    "BlockrelayQueueLong",
    "BlockrelayCertificateEnds",
}


def shipped() -> Rules:
    """The rules as they are."""
    return yaml.safe_load(ALERTS.read_text())


def alerts() -> dict[str, dict[str, Any]]:
    """Every alert's rule by its name."""
    rules = [rule for group in shipped()["groups"] for rule in group["rules"]]
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


def hastened() -> Rules:
    """The rules with their times shortened."""
    rules = shipped()
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        rule["expr"] = re.sub(r"\[(?!6h)\d+[smh]\]", f"[{WINDOW_S}s]", rule["expr"])
        rule["expr"] = rule["expr"].replace("> 60", f"> {STILL_S}").replace("> 0.65", "> 0.55")
        if "for" in rule:  # a busy machine may miss a scrape or two
            rule["for"] = "5s" if re.search(r"\bup\b|build_info|redis_up", rule["expr"]) else "1s"
    return rules


def page_of(rule: Mapping[str, Any]) -> Path:
    """The runbook that an alert links to."""
    _, _, name = rule["annotations"]["runbook_url"].rpartition("/")
    return ROOT / "docs" / "runbooks" / name.replace(".html", ".md")


@dataclass
class Told:
    """What Alertmanager has sent: the names (of `Expected`) that fire now, by alert; since when each fires or fires no
    more; and the alerts that ever fired."""

    now: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    at: dict[str, float] = field(default_factory=dict[str, float])
    fired: set[str] = field(default_factory=set[str])

    def hear(self, message: dict[str, Any]) -> None:
        """One message is about all alerts of a name, and may repeat what is known."""
        alert = message["commonLabels"]["alertname"]
        firing = [one["labels"] for one in message["alerts"] if one["status"] == "firing"]
        services = {labels["service"] for labels in firing if "service" in labels}
        names = {alert for _ in firing} | {Expected("", alert, "", service=service).name for service in services}
        for changed in names ^ self.now.get(alert, set()):
            self.at[changed] = time.time()
        self.now[alert] = names
        if firing:
            self.fired.add(alert)

    def is_firing(self, one: Expected) -> bool:
        return one.name in self.now.get(one.alert, ())


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


@contextmanager
def drilled_system(start: StartSystem, folder: Path, rules: Rules) -> Iterator[tuple[Watched, Told]]:
    """A system beside a Prometheus that has these rules, and nothing fires."""
    (folder / "alerts.yml").write_text(yaml.safe_dump(rules))
    with ExitStack() as stack:
        port, webhook = stack.enter_context(kept_ports("127.0.0.1", 0, 2))
        told = stack.enter_context(alertmanager(folder, port, webhook))
        config: dict[str, Any] = {
            "rule_files": [str(folder / "alerts.yml")],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}]},
        }
        watched = stack.enter_context(watched_system(start, folder, **config))
        wait_until(lambda: not any(told.now.values()), "what was absent before it was scraped is there")
        told.fired.clear()
        yield watched, told


def first_command(alert: str) -> str:
    """The first command of the alert's runbook."""
    first, *_ = [block for block in blocks(page_of(alerts()[alert])) if block.language == "sh"]
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


def drill(
    watched: Watched, told: Told, expected: Sequence[Expected], causes: Mapping[str, Cause], *, timeout_s: float = 45
) -> None:
    """Each cause fires its alerts, whose runbooks name it and which resolve.

    Prints after how many seconds: of the cause, and of the end of its mending (0: before it was over)."""
    for cause in dict.fromkeys(one.cause for one in expected):
        of_it = [one for one in expected if one.cause == cause]
        for one in of_it:  # what another cause has made it fire for says nothing
            wait_until(lambda e=one: not told.is_firing(e), f"{cause}: {one.name} does not fire before", timeout_s=90)
        began, fired = time.time(), dict[str, float]()
        with causes[cause](watched):
            for one in of_it:
                wait_until(lambda e=one: told.is_firing(e), f"{cause}: {one.name} fires", timeout_s=timeout_s)
                fired[one.name] = told.at[one.name] - began
                printed = run(first_command(one.alert), watched)
                assert any(re.search(line, printed) for line in culprits(watched, one)), (one, printed)
        mended = time.time()
        for one in of_it:
            if one.alert == "BlockrelayProcessDown":  # until Prometheus is told that its target is gone
                watched.prometheus.forget_those_that_are_down("blockrelay-worker")
            wait_until(lambda e=one: not told.is_firing(e), f"{cause}: {one.name} resolves", timeout_s=90)
            to_resolve = max(0.0, told.at[one.name] - mended)
            print(f"| {cause} | {one.name} | {fired[one.name]:.0f} | {to_resolve:.0f} |", flush=True)  # noqa: T201
