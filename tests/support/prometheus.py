"""A real Prometheus that scrapes what a test tells it to, every second."""

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.project import ROOT
from tests.support.waiting import wait_until

SCRAPE_S = 1
Labels = tuple[tuple[str, str], ...]
#: Labels of a series, and its finite values.
Series = dict[Labels, list[float]]


@dataclass
class Prometheus:
    """Scrapes the targets of each job; `add` adds some while it runs."""

    url: str
    targets: Path
    _jobs: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    def add(self, job: str, *addresses: str) -> None:
        """Scrape these (`host:port`) too, as targets of `job`; returns when they have been scraped."""
        self._jobs.setdefault(job, set()).update(addresses)
        self._write(job)

        def scraped() -> bool:
            up = self.values(f'up{{job="{job}"}} == 1', time.time() - 3)
            return set(addresses) <= {dict(series)["instance"] for series in up}

        wait_until(scraped, f"the targets of {job} are scraped")

    def forget_those_that_are_down(self, job: str) -> None:
        """Targets that are not there any more, as a discovery of them would find."""
        down = self.values(f'up{{job="{job}"}} == 0', time.time() - 3)
        self._jobs[job] -= {dict(series)["instance"] for series in down}
        self._write(job)

    def forget(self, *jobs: str) -> None:
        """All targets of these, as a discovery does that finds none."""
        for job in jobs:
            self._jobs[job] = set()
            self._write(job)

    def _write(self, job: str) -> None:
        file = self.targets / f"{job}.json"
        file.with_suffix(".new").write_text(json.dumps([{"targets": sorted(self._jobs[job])}]))
        file.with_suffix(".new").replace(file)

    def values(self, expr: str, since: float) -> Series:
        """What a query has given from `since` (Unix seconds) to now, by series; nothing for what is NaN or infinite."""
        return {series: [value for _, value in points] for series, points in self.points(expr, since).items()}

    def points(self, expr: str, since: float) -> dict[Labels, list[tuple[float, float]]]:
        """As `values`, each with its time."""
        asked = {"query": expr, "start": since, "end": time.time(), "step": SCRAPE_S}
        answer = httpx.get(f"{self.url}/api/v1/query_range", params=asked, timeout=10).json()
        assert answer["status"] == "success", answer
        found: dict[Labels, list[tuple[float, float]]] = {}
        for series in answer["data"]["result"]:
            numbers = [(float(at), float(value)) for at, value in series["values"]]
            finite = [(at, number) for at, number in numbers if math.isfinite(number)]
            if finite:
                found[tuple(sorted(series["metric"].items()))] = finite
        return found


@contextmanager
def running_prometheus(
    folder: Path, port: int, jobs: Mapping[str, Mapping[str, Any]], **more: object
) -> Iterator[Prometheus]:
    """`jobs`: by name, what a scrape configuration says beside its name and targets. `more`: top-level settings."""
    (targets := folder / "targets").mkdir(parents=True)
    scraped = [
        {"job_name": name, "file_sd_configs": [{"files": [str(targets / f"{name}.json")]}], **options}
        for name, options in jobs.items()
    ]
    every = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": "1s"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"global": every, "scrape_configs": scraped, **more}))
    command = [
        binary("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    started = Prometheus(f"http://127.0.0.1:{port}", targets)

    def answers() -> bool:
        assert process.poll() is None, (folder / "prometheus.log").read_text()
        try:
            return httpx.get(f"{started.url}/-/ready", timeout=1).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(answers, "Prometheus is ready")
        yield started
    finally:
        process.kill()
        process.wait()


@contextmanager
def running_exporter(port: int) -> Iterator[None]:
    """The Redis exporter, which asks the servers that a scrape names."""
    command = [binary("prometheus-redis-exporter"), "-web.listen-address", f"127.0.0.1:{port}"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env={**os.environ, "REDIS_ADDR": ""}, stdout=quiet, stderr=quiet)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def through_exporter(port: int) -> dict[str, Any]:
    """What the job `blockrelay-redis` of deploy/prometheus/prometheus.yml says, for an exporter at this port."""
    committed = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    (job,) = [job for job in committed["scrape_configs"] if job["job_name"] == "blockrelay-redis"]
    *relabelled, address = job["relabel_configs"]
    exporter = {**address, "replacement": f"127.0.0.1:{port}"}
    return {"metrics_path": job["metrics_path"], "relabel_configs": [*relabelled, exporter]}


def binary(name: str) -> str:
    """Path of a program of Debian's packages."""
    found = shutil.which(name)
    assert found is not None, f"{name} is not installed: .ci/prometheus gets it"
    return found
