"""Real Redis servers started as the overlay `production` starts them, reached as its Secrets say."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import redis

from blockrelay.auth.password_file import with_password_file
from blockrelay.errors import RedisRefused, RedisTrouble
from blockrelay.protocol.keys import Keys
from blockrelay.redis import client as redis_link
from blockrelay.redis.client import server_run_id
from blockrelay_launcher.supervisor.ports import kept_ports
from tests.support.kubernetes.contracts.network import redis_urls, told
from tests.support.kubernetes.contracts.objects import containers, kinds, pod_of
from tests.support.kubernetes.rendering import Manifest, render
from tests.support.project import ROOT
from tests.support.redis.keda import unfinished
from tests.support.redis.redis_server import find_binary, has_tls
from tests.support.waiting import wait_until

PROGRAM = find_binary()
needs_tls = pytest.mark.skipif(
    not has_tls(PROGRAM) or shutil.which("redis-cli") is None, reason=f"{PROGRAM} has no TLS: install redis-server"
)
KEYS = Keys("c0")


@dataclass
class Servers:
    """`ports` by the name of the Service."""

    objects: list[Manifest]
    folder: Path
    ports: dict[str, int]

    def moved(self, workload: Manifest, text: str) -> str:
        """Paths of its container are below our folder."""
        for mount in containers(workload)[0]["volumeMounts"]:
            text = text.replace(mount["mountPath"], str(self.folder / workload["metadata"]["name"] / mount["name"]))
        return text

    def mount(self, workload: Manifest) -> None:
        """What its volumes show, as files."""
        secrets = {one["metadata"]["name"]: one["data"] for one in kinds(self.objects, "Secret")}
        place = self.folder / workload["metadata"]["name"]
        (place / "data").mkdir(parents=True, exist_ok=True)
        for volume in (one for one in pod_of(workload)["volumes"] if "secret" in one):
            (place / volume["name"]).mkdir(exist_ok=True)
            shown = {item["key"] for item in volume["secret"].get("items", [])}
            for name, value in secrets[volume["secret"]["secretName"]].items():
                if not shown or name in shown:
                    (place / volume["name"] / name).write_bytes(b64decode(value))

    def start(self, workload: Manifest, *more: str) -> subprocess.Popen[bytes]:
        if not (self.folder / workload["metadata"]["name"]).exists():
            self.mount(workload)
        arguments = [self.moved(workload, text) for text in containers(workload)[0]["args"]]
        arguments[arguments.index("--tls-port") + 1] = str(self.ports[workload["metadata"]["name"]])
        return subprocess.Popen([PROGRAM, *arguments[1:], "--bind", "127.0.0.1", *more], stdout=subprocess.DEVNULL)

    def says(self, workload: Manifest, probe: str, *, timeout_s: float = 10.0) -> bool:
        """What this probe of it says; no answer in time is a No."""
        port = str(self.ports[workload["metadata"]["name"]])
        words = [self.moved(workload, word) for word in containers(workload)[0][probe]["exec"]["command"]]
        if words[0] == "redis-cli":
            words[1:1] = ["-p", port]
        else:
            words[-1] = words[-1].replace("redis-cli ", f"redis-cli -p {port} ")
        try:
            return subprocess.run(words, capture_output=True, check=False, timeout=timeout_s).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def client(self, url: str, password: Path | None = None) -> redis.Redis:
        """To the server of the address, which listens here, and whose certificate has the names of its Service."""
        parts = urlsplit(url)
        user = parts.netloc.rpartition("@")[0]
        path = self.folder / "blockrelay-redis-control" / "tls" / "ca.crt"
        place = f"{user}@127.0.0.1:{self.ports[parts.hostname or '']}"
        query = f"ssl_ca_certs={path}&ssl_check_hostname=false"
        found = urlunsplit(parts._replace(netloc=place, query=query))
        return redis_link.connect(with_password_file(found, password and str(password)))

    def password_of(self, workload: Manifest) -> Path:
        """The file that its container is told of, as its volumes show it."""
        (path,) = map(Path, told(self.objects, workload, "REDIS_PASSWORD_FILE"))
        mounts = containers(workload)[0]["volumeMounts"]
        (volume,) = [mount["name"] for mount in mounts if mount["mountPath"] == str(path.parent)]
        return self.folder / workload["metadata"]["name"] / volume / path.name


@pytest.fixture(scope="module")
def servers(overlays: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    objects = render(overlays["production"])
    names = ("blockrelay-redis-control", "blockrelay-redis-payload")
    workloads = [one for one in kinds(objects, "StatefulSet", "Deployment") if one["metadata"]["name"] in names]
    started: list[subprocess.Popen[bytes]] = []
    with kept_ports("127.0.0.1", 0, 2) as ports:
        both = Servers(objects, tmp_path_factory.mktemp("redis"), dict(zip(names, ports, strict=True)))
        try:
            started += [both.start(one) for one in workloads]
            for one in workloads:
                wait_until(
                    lambda one=one: both.says(one, "readinessProbe"), f"the probe of {one['metadata']['name']} says so"
                )
            yield both
        finally:
            for process in started:
                process.kill()
                process.wait()


@pytest.fixture
def processes_may_stay() -> bool:
    """The servers are the module's, which ends them."""
    return True


@needs_tls
@pytest.mark.parametrize("role", ["gateway", "scheduler", "worker-cpu"])
def test_every_role_comes_in_by_the_addresses_of_its_secret(servers: Servers, role: str) -> None:
    (workload,) = [
        one for one in kinds(servers.objects, "Deployment") if one["metadata"]["name"] == f"blockrelay-{role}"
    ]
    servers.mount(workload)
    file = servers.password_of(workload)
    urls = redis_urls(servers.objects, workload)
    assert len(urls) == 2
    for url in urls:
        with servers.client(url, file) as client:
            assert client.ping()
        with servers.client(url.replace("@", ":wrong@")) as client, pytest.raises(RedisRefused):
            client.ping()


#: `kubectl` for load-users: what pods show is in folders here, and their servers listen here.
STAND_IN = """\
#!{python}
import base64, json, subprocess, sys
words, told = sys.argv[1:], json.loads({told!r})
if "secret" in words:
    assert words[words.index("secret") + 1] == "blockrelay-redis-users"
    field = words[-1].removeprefix("jsonpath={{.data.").removesuffix("}}").replace(chr(92), "")
    sys.stdout.write(json.load(open(told["secret"]))[field])
elif "pods" in words:
    component = words[words.index("--selector") + 1].rpartition("=")[2]
    print(*(f"pod/{{pod}}" for pod in told["paths"] if pod.endswith(component)))
else:
    pod, command = words[words.index("exec") + 1].partition("/")[2], words[words.index("--") + 1 :]
    for old, new in (*told["paths"][pod].items(), ("-p 6379 ", f"-p {{told['ports'][pod]}} ")):
        command = [word.replace(old, new) for word in command]
    sys.exit(subprocess.run(command).returncode)
"""


@needs_tls
def test_users_are_read_again_by_one_command_when_they_have_reached_the_pods(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A password that Redis is to know from now on comes in at once, and the servers run on."""
    (secret,) = [one for one in kinds(servers.objects, "Secret") if one["metadata"]["name"] == "blockrelay-redis-users"]
    (gateway,) = [
        one for one in kinds(servers.objects, "Deployment") if one["metadata"]["name"] == "blockrelay-gateway"
    ]
    servers.mount(gateway)
    known = servers.password_of(gateway)
    new, file = tmp_path / "new", tmp_path / "secret.json"
    new.write_text("another\n")
    digest = sha256(b"another").hexdigest()
    data = {
        name: re.sub(r"(user gateway on )", rf"\1#{digest} ", b64decode(value).decode()) if ".acl" in name else ""
        for name, value in secret["data"].items()
    }
    file.write_text(json.dumps({name: b64encode(text.encode()).decode() for name, text in data.items()}))
    workloads = {one["metadata"]["name"]: one for one in kinds(servers.objects, "StatefulSet", "Deployment")}
    redises = {name: workloads[name] for name in servers.ports}
    paths = {
        name: {m["mountPath"]: servers.moved(one, m["mountPath"]) for m in containers(one)[0]["volumeMounts"]}
        for name, one in redises.items()
    }
    world = {"secret": str(file), "paths": paths, "ports": servers.ports}
    stand_in = tmp_path / "bin" / "kubectl"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN.format(python=sys.executable, told=json.dumps(world)))
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    urls = redis_urls(servers.objects, gateway)
    ids: list[str] = []
    for url in urls:
        with servers.client(url, known) as client:
            ids.append(server_run_id(client))
        with servers.client(url, new) as client, pytest.raises(RedisTrouble):
            client.ping()

    loading = subprocess.Popen([ROOT / "deploy" / "k8s" / "load-users"], stdout=subprocess.PIPE, text=True)
    for name in redises:  # the kubelet is later than the command
        acl = "control.acl" if "control" in name else "payload.acl"
        (servers.folder / name / "users" / acl).write_text(data[acl])
    said, _ = loading.communicate(timeout=60)
    assert loading.returncode == 0 and said.count("knows the users of the Secret") == 2
    for url, before in zip(urls, ids, strict=True):
        for password in (known, new):
            with servers.client(url, password) as client:
                assert server_run_id(client) == before, "nothing was restarted"


@needs_tls
def test_the_autoscaler_counts_by_its_secret_and_does_nothing_else(servers: Servers) -> None:
    (secret,) = [one for one in kinds(servers.objects, "Secret") if one["metadata"]["name"] == "blockrelay-redis-keda"]
    told = {name: b64decode(value).decode() for name, value in secret["data"].items()}
    host = told["address"].partition(".")[0]
    with servers.client(f"rediss://{told['username']}:{told['password']}@{host}:6379/0") as client:
        assert unfinished(client, KEYS) == 0
        with pytest.raises(RedisRefused):
            client.get(KEYS.running)


@needs_tls
def test_nobody_comes_in_without_tls(servers: Servers) -> None:
    for port in servers.ports.values():
        with redis_link.connect(f"redis://probe:any@127.0.0.1:{port}/0") as client, pytest.raises(RedisTrouble):
            client.ping()


@needs_tls
def test_the_certificate_has_the_names_that_services_and_keda_use(servers: Servers, overlays: dict[str, Path]) -> None:
    secrets = overlays["production"] / "secrets"
    asked = ["openssl", "verify", "-CAfile", secrets / "ca.crt"]
    for name in ("blockrelay-redis-control", "blockrelay-redis-payload", "blockrelay-redis-control.blockrelay.svc"):
        done = subprocess.run([*asked, "-verify_hostname", name, secrets / "tls.crt"], capture_output=True, check=False)
        assert done.returncode == 0, done
    done = subprocess.run(
        [*asked, "-verify_hostname", "redis.example", secrets / "tls.crt"], capture_output=True, check=False
    )
    assert done.returncode != 0


@needs_tls
def test_the_exporter_asks_what_it_needs_and_sees_nothing_else(servers: Servers) -> None:
    (secret,) = [one for one in kinds(servers.objects, "Secret") if "redis-exporter" in one["metadata"]["name"]]
    told = {name: b64decode(value).decode() for name, value in secret["data"].items()}
    (monitor,) = [one for one in kinds(servers.objects, "PodMonitor") if one["metadata"]["name"] == "blockrelay-redis"]
    targets = [one["params"]["target"][0] for one in monitor["spec"]["podMetricsEndpoints"]]
    assert len(targets) == 2
    for target in targets:
        user = f"{told['REDIS_USER']}:{told['REDIS_PASSWORD']}"
        with servers.client(target.replace("://", f"://{user}@")) as client:
            info: dict[str, Any] = client.info("all")  # pyright: ignore[reportAssignmentType]
            assert info["maxmemory"] == 1 << 30 and "aof_last_write_status" in info
            for command in ("CONFIG GET *", "SLOWLOG GET 1", "SCAN 0", "MONITOR", "CLIENT LIST"):
                with pytest.raises(RedisRefused):
                    client.execute_command(*command.split())
            with pytest.raises(RedisRefused):
                client.get(KEYS.running)


@needs_tls
def test_a_redis_that_reads_its_file_lives_and_one_that_answers_nothing_does_not(
    overlays: dict[str, Path], tmp_path: Path
) -> None:
    objects = render(overlays["production"])
    (control,) = kinds(objects, "StatefulSet")
    name = control["metadata"]["name"]
    with kept_ports("127.0.0.1", 0, 1) as ports:
        server = Servers(objects, tmp_path, {name: ports[0]})
        process = server.start(control)
        try:
            wait_until(lambda: server.says(control, "readinessProbe"), "it is ready")
            (gateway,) = [
                one for one in kinds(objects, "Deployment") if one["metadata"]["name"] == "blockrelay-gateway"
            ]
            url = next(url for url in redis_urls(objects, gateway) if name in url)
            server.mount(gateway)
            password = server.password_of(gateway)
            with server.client(url, password) as client, client.pipeline(transaction=False) as pipeline:
                for number in range(30_000):
                    pipeline.hset(KEYS.request(str(number)), "v", "1")
                pipeline.execute()
            process.kill()
            process.wait()
            # Ten seconds and more; it looks at its clients once in 1,024 commands.
            process = server.start(control, "--key-load-delay", "400")
            wait_until(lambda: server.says(control, "startupProbe"), "it has begun to read")
            assert server.says(control, "livenessProbe") and not server.says(control, "readinessProbe")
            os.kill(process.pid, signal.SIGSTOP)
            with socket.create_connection(("127.0.0.1", ports[0]), timeout=5):
                pass  # its port is open
            assert not server.says(control, "livenessProbe", timeout_s=1)
        finally:
            process.kill()
            process.wait()
