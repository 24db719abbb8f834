"""What compose.yaml lets its containers take and who reaches them: limits, folders, ports, passwords."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from blockrelay.errors import RedisRefused
from blockrelay.redis.client import connect
from tests.support.project import ROOT
from tests.support.redis.redis_server import find_binary
from tests.support.waiting import wait_until

COMPOSE: Any = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
HAPROXY = (ROOT / "deploy" / "compose" / "haproxy.cfg").read_text()
MAKE_PASSWORD = ROOT / "deploy" / "compose" / "make-redis-password"
FROM_VOLUME = "redis-password:/run/redis-password:ro"
UNITS = {"m": 1 << 20, "mb": 1 << 20, "g": 1 << 30, "gb": 1 << 30, "s": 1}


def by_default(value: object) -> str:
    """A value of compose.yaml with the defaults of its variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))


def amount(text: str) -> int:
    """Bytes, or seconds, of 512m, 1gb, 60s."""
    number, unit = re.fullmatch(r"(\d+)([a-z]*)", text.lower()).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return int(number) * UNITS.get(unit, 1)


def in_memory(service: dict[str, Any]) -> int:
    """Bytes of its folders in memory. Fails for one without a bound."""
    found = [re.search(r"[:,]size=(\w+)", folder) for folder in service["tmpfs"]]
    assert all(found), service["tmpfs"]
    return sum(amount(size[1]) for size in found if size)


def option(service: str, name: str) -> str:
    """What follows an option in the command of a service."""
    command = SERVICES[service]["command"]
    return by_default(command[command.index(name) + 1])


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_bounds_and_privileges_that_it_needs(name: str) -> None:
    service = SERVICES[name]
    cpus, memory = by_default(service["cpus"]), by_default(service["mem_limit"])
    small = "profiles" not in service or "observability" in service["profiles"]
    assert 0 < float(cpus) <= (1 if small else 2), "the engine starts nothing that may have more than the machine has"
    assert in_memory(service) <= amount(memory) // 2 or amount(memory) <= 64 << 20
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["pids_limit"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}


def test_who_serves_another_model_can_raise_every_limit() -> None:
    operations = (ROOT / "docs" / "operations.md").read_text()
    for name, service in SERVICES.items():
        if name == "redis-password":
            continue  # it writes three small files
        for field, ending in (("mem_limit", "MEMORY"), ("cpus", "CPUS")):
            variable = re.match(r"\$\{(\w+):-", service[field])
            assert variable is not None and variable[1].endswith(f"_{ending}"), f"{name}: {field}"
            assert f"`{variable[1].removesuffix(ending)}`" in operations, f"{variable[1]} is not explained"


def test_memory_limits_hold_what_settings_let_a_service_take() -> None:
    memory = {name: amount(by_default(service["mem_limit"])) for name, service in SERVICES.items()}
    kv_bytes = int(by_default(SERVICES["worker"]["environment"]["BLOCKRELAY_KV_BYTES"]))
    model = sum(file.stat().st_size for file in (ROOT / "shared/blockrelay/models").rglob("*") if file.is_file())
    assert memory["worker"] >= kv_bytes + model + (400 << 20)
    assert memory["redis"] >= 2 * amount(option("redis", "--maxmemory")) + (256 << 20), "it rewrites its file by fork"
    assert memory["redis-payload"] >= 1.5 * amount(option("redis-payload", "--maxmemory"))


def test_one_port_is_published_on_this_machine_only() -> None:
    published = {name: [by_default(port) for port in s["ports"]] for name, s in SERVICES.items() if "ports" in s}
    assert published["proxy"] == ["127.0.0.1:8000:8000"]
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert {name for name in published if "profiles" not in SERVICES[name]} == {"proxy"}, "any number of gateways"
    assert COMPOSE["networks"]["inside"]["internal"] and "outside" not in SERVICES["redis"]["networks"]


def test_no_service_that_may_be_scaled_has_a_name_or_a_port_of_its_own() -> None:
    for name in ("gateway", "scheduler", "worker"):
        assert not {"ports", "container_name", "hostname"} & SERVICES[name].keys(), name


def test_redis_asks_for_a_password_that_is_nowhere_in_clear() -> None:
    for name in ("redis", "redis-payload"):
        assert option(name, "--include") == "/run/redis-password/redis.conf"
        (health,) = [line for line in SERVICES[name]["healthcheck"]["test"] if "redis-cli" in line]
        assert health.startswith("REDISCLI_AUTH=$$(cat /run/redis-password/password) ")
        assert SERVICES[name]["depends_on"] == {"redis-password": {"condition": "service_completed_successfully"}}
    for name in (
        "redis",
        "redis-payload",
        "redis-exporter",
        "gateway",
        "scheduler",
        "worker",
        "worker-gpu",
        "worker-webgpu",
    ):
        assert FROM_VOLUME in SERVICES[name]["volumes"], name
    for name in ("gateway", "scheduler", "worker", "worker-gpu", "worker-webgpu"):
        environment = SERVICES[name]["environment"]
        assert environment["BLOCKRELAY_REDIS_PASSWORD_FILE"] == "/run/redis-password/password"
        assert "@" not in environment["BLOCKRELAY_REDIS_URL"] + environment["BLOCKRELAY_PAYLOAD_REDIS_URL"]
    assert SERVICES["redis-exporter"]["environment"]["REDIS_PASSWORD_FILE"] == "/run/redis-password/exporter.json"
    assert not re.search(r"requirepass|--pass|REDIS_PASSWORD:", (ROOT / "compose.yaml").read_text())
    mounting = {name for name, s in SERVICES.items() if any("redis-password:" in v for v in s.get("volumes", ()))}
    assert not mounting & {"proxy", "prometheus", "alertmanager", "grafana", "jaeger", "converter"}


def test_services_wait_for_a_redis_that_reads_a_long_file() -> None:
    """While it reads, its answers count as failures. `up` ends when a container that others wait for is unhealthy."""
    assert SERVICES["redis"]["command"][SERVICES["redis"]["command"].index("--appendonly") + 1] == "yes"
    assert amount(SERVICES["redis"]["healthcheck"]["start_period"]) >= 600


@contextmanager
def redis_server(config: Path, folder: Path) -> Iterator[str]:
    """The path of the socket of a server that includes the file."""
    socket = folder / "redis.sock"
    command = [
        find_binary(),
        "--include",
        str(config),
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--dir",
        str(folder),
    ]
    with subprocess.Popen([*command, "--save", ""], stdout=subprocess.DEVNULL) as server:
        try:
            wait_until(socket.exists, "it listens")
            yield str(socket)
        finally:
            server.terminate()


def test_the_password_is_made_once_and_redis_takes_it(tmp_path: Path) -> None:
    subprocess.run([MAKE_PASSWORD, tmp_path], check=True)
    password = (tmp_path / "password").read_text()
    assert re.fullmatch(r"[0-9a-f]{64}\n", password)
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in tmp_path.iterdir())
    (tmp_path / "redis.conf").unlink()
    subprocess.run([MAKE_PASSWORD, tmp_path], check=True)
    assert {file.name for file in tmp_path.iterdir()} == {"password", "redis.conf", "exporter.json"}
    assert (tmp_path / "password").read_text() == password, "a volume outlives what starts again"
    job = next(
        job
        for job in yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
        if job["job_name"] == "blockrelay-redis"
    )
    exporter = json.loads((tmp_path / "exporter.json").read_text())
    assert exporter == dict.fromkeys(job["static_configs"][0]["targets"], password.strip())

    with redis_server(tmp_path / "redis.conf", tmp_path) as socket:
        with connect(f"unix://{socket}") as client, pytest.raises(RedisRefused):
            client.ping()
        with connect(f"unix://{socket}?password_file={tmp_path / 'password'}") as client:
            assert client.ping()


def test_the_proxy_waits_as_long_as_gateways_do_and_not_longer_than_the_engine() -> None:
    hard_stop = re.search(r"^ +hard-stop-after (\w+)$", HAPROXY, re.M)
    assert hard_stop is not None
    gateway, proxy = (amount(SERVICES[name]["stop_grace_period"]) for name in ("gateway", "proxy"))
    assert gateway < amount(hard_stop[1]) < proxy
    assert SERVICES["proxy"]["stop_signal"] == "SIGUSR1", "which lets end what is under way"


def test_the_proxy_sends_nothing_twice_and_breaks_no_stream_of_a_gateway_that_drains() -> None:
    lines = [line.strip() for line in HAPROXY.splitlines()]
    assert [line for line in lines if line.startswith("retry-on")] == ["retry-on conn-failure"]
    assert "on-marked-down" not in HAPROXY, "a gateway that is not ready has streams"
    assert "http-buffer-request" not in HAPROXY and "option abortonclose" in lines
    assert next(line for line in lines if line.startswith("http-check send")).split()[5] == "/readyz?for=accepting"


def test_the_proxy_tells_prometheus_what_it_does_at_a_port_that_is_not_published() -> None:
    jobs = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    (job,) = [job for job in jobs if job["job_name"] == "blockrelay-proxy"]
    (target,) = job["static_configs"][0]["targets"]
    name, _, port = target.partition(":")
    listener = re.search(
        rf"^frontend metrics\n +bind :{port}\n +http-request use-service prometheus-exporter", HAPROXY, re.M
    )
    assert name == "proxy" and listener is not None and "inside" in SERVICES["proxy"]["networks"]
    assert not [each for each in SERVICES["proxy"]["ports"] if by_default(each).endswith(f":{port}")]
