"""`docker compose up` for tests: one project with a name of its own, and what is done to its containers."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from tests.support.scraping import sampled
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
PROJECT = "blockrelay-test"
LABEL = f"label=com.docker.compose.project={PROJECT}"
#: What answers at a published port, by the variable NAME_PORT; all gateways at one.
PORTS = ("gateway", "prometheus", "alertmanager", "grafana", "jaeger")
READY = (
    "from urllib.request import ProxyHandler, build_opener; "
    "build_opener(ProxyHandler({})).open('http://127.0.0.1:9102/readyz', timeout=2)"
)


def run(*command: str, env: dict[str, str] | None = None) -> str:
    """stdout; fails with everything that the command has said."""
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (
        f"{' '.join(command)}: code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    )
    return done.stdout


def compose_command() -> list[str]:
    """Compose as a plug-in of docker, or the older program."""
    plugin = ["docker", "compose"]
    if shutil.which("docker") and not subprocess.run([*plugin, "version"], capture_output=True, check=False).returncode:
        return plugin
    assert shutil.which("docker-compose"), "there is no docker with compose: .ci/container-engine gets it"
    return ["docker-compose"]


def mountable_copy(model: Path, folder: Path) -> Path:
    """A block folder that the user of the containers may read, wherever `model` lies. `folder` is made readable too."""
    copy = Path(shutil.copytree(model, folder / "model"))
    for path in (folder, copy, *copy.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return copy


class ComposeStack:
    """The services of compose.yaml, built and started. `model` None: the one in the images; else a mounted folder.
    `more`: files that add to compose.yaml; `variables` of its environment. With the profile `observability` traces are
    sent too."""

    def __init__(self, model: Path | None, *more: Path, profile: str = "", **variables: str) -> None:
        with ExitStack() as stack:
            probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in PORTS]
            self._ports = {name: probe.getsockname()[1] for name, probe in zip(PORTS, probes, strict=True)}
        self.url = self.address("gateway")
        published = {f"{name.upper()}_PORT": str(port) for name, port in self._ports.items()}
        self._env = {**os.environ, **published, "MODEL_DIR": str(model or ""), **variables}
        if profile == "observability":
            self._env["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://jaeger:4318"
        files = ["compose.yaml", *(["deploy/compose/model.yaml"] if model else []), *map(str, more)]
        named = [option for file in files for option in ("-f", file)]
        self._command = [*compose_command(), "--project-name", PROJECT, *named]
        self._command += ["--profile", profile] if profile else []

    def address(self, service: str) -> str:
        """Where a service with a published port answers."""
        return f"http://127.0.0.1:{self._ports[service]}"

    def compose(self, *arguments: str) -> str:
        return run(*self._command, *arguments, env=self._env)

    def build(self) -> None:
        self.compose("build")

    def up(self, *services: str, **scale: int) -> None:
        """Ready: a token can be produced. What stands still is started again. `services`: only these; `scale`: how many
        of each."""
        many = [option for name, count in scale.items() for option in ("--scale", f"{name}={count}")]
        self.compose("up", "--detach", *many, *services)
        try:
            wait_until(self.is_ready, "/readyz of the gateway says yes", timeout_s=120, poll_s=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def logs(self) -> str:
        """The last lines of every container."""
        return self.compose("logs", "--no-color", "--tail", "10")

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "30")

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def containers(self, service: str | None = None) -> list[str]:
        """Ids, the stopped ones too."""
        also = ["--filter", f"label=com.docker.compose.service={service}"] if service else []
        return run("docker", "ps", "--all", "--quiet", "--no-trunc", "--filter", LABEL, *also).split()

    def inspect(self, container: str) -> dict[str, Any]:
        return json.loads(run("docker", "inspect", container))[0]

    def python(self, container: str, code: str) -> "subprocess.CompletedProcess[str]":
        """Run code with the interpreter of a container."""
        command = ["docker", "exec", container, "python", "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def kill(self, container: str) -> None:
        """SIGKILL to everything in it. The engine takes that for our wish and does not start it again."""
        run("docker", "kill", "--signal", "KILL", container)
        wait_until(lambda: not self.inspect(container)["State"]["Running"], "the container is dead")

    def start(self, container: str) -> None:
        run("docker", "start", container)

    def wait_healthy(self, container: str) -> None:
        """Its own check says so."""
        healthy = lambda: self.inspect(container)["State"]["Health"]["Status"] == "healthy"  # noqa: E731
        wait_until(healthy, f"{container[:12]} is healthy", timeout_s=120, poll_s=0.2)

    def gateway_sample(self, container: str, name: str) -> float:
        """A metric of one gateway, asked at its own address."""
        networks = self.inspect(container)["NetworkSettings"]["Networks"]
        address = networks[f"{PROJECT}_inside"]["IPAddress"]
        return sampled(httpx.get(f"http://{address}:8000/metrics", timeout=5).text, name)

    def wait_worker_ready(self, workers: Sequence[str], *, timeout_s: float = 60.0) -> None:
        """Each of them has a stage."""
        for worker_id in workers:
            ready = lambda: self.python(worker_id, READY).returncode == 0  # noqa: B023, E731  # called at once
            wait_until(ready, "a worker has its stage", timeout_s=timeout_s, poll_s=0.1)

    def running_requests(self) -> float:
        """As the gateway counts them."""
        return sampled(httpx.get(f"{self.url}/metrics", timeout=5).text, "blockrelay_gateway_requests_running")


def leftovers() -> list[str]:
    """Ids or names of containers, volumes and networks of the project."""
    found = [run("docker", kind, "ls", "--quiet", "--filter", LABEL, *more) for kind, *more in
             (["container", "--all"], ["volume"], ["network"])]  # fmt: skip
    return " ".join(found).split()
