"""Names in the environment: a misspelt setting is refused with the nearest name; names of other programs pass."""

import subprocess
import sys

import pytest
from _pytest.mark import ParameterSet

from blockrelay.errors import UsageError
from blockrelay.settings import (
    GatewaySettings,
    Settings,
    WorkerSettings,
    check_names,
    environment_for,
    read_settings,
)

SERVICES = ["blockrelay_gateway", "blockrelay_scheduler", "blockrelay_worker", "blockrelay_launcher"]


def quick_for(*quick: str) -> list[ParameterSet]:
    """Every service; a process of each takes a second, so that only `quick` ones are in the quick suite."""
    return [pytest.param(one, marks=() if one in quick else pytest.mark.thorough) for one in SERVICES]


@pytest.mark.parametrize("module", quick_for("blockrelay_scheduler", "blockrelay_launcher"))
def test_a_name_that_nobody_knows_ends_every_service_in_one_line(module: str) -> None:
    argv = [sys.executable, "-m", module, *(["status"] if module == "blockrelay_launcher" else [])]
    env = {**environment_for(), "BLOCKRELAY_RETENSION_S": "60"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert "BLOCKRELAY_RETENSION_S" in line and line.endswith("BLOCKRELAY_RETENTION_S")


def test_names_of_other_services_and_of_other_programs_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    check_names(
        {
            "BLOCKRELAY_STAGES": "3",  # the scheduler's
            "BLOCKRELAY_API_KEYS": "x",  # the gateway's
            "blockrelay_threads": "2",
            "BLOCKRELAY_WORKERS": "4",  # compose.yaml
            "BLOCKRELAY_GATEWAY_SERVICE_HOST": "10.0.0.1",
            "BLOCKRELAY_GATEWAY_SERVICE_PORT_HTTP": "80",
            "BLOCKRELAY_GATEWAY_PORT": "tcp://10.0.0.1:80",
            "BLOCKRELAY_GATEWAY_PORT_80_TCP_ADDR": "10.0.0.1",
            "BLOCKRELAYED": "",
        }
    )
    monkeypatch.setenv("BLOCKRELAY_STAGES", "3")
    assert read_settings(WorkerSettings, [], program="worker").threads == 1


@pytest.mark.parametrize("module", quick_for("blockrelay_worker")[:-1])
def test_a_port_that_kubernetes_has_set_is_named_as_that(module: str) -> None:
    argv = [sys.executable, "-m", module]
    env = {**environment_for(), "BLOCKRELAY_PORT": "tcp://10.0.0.1:8000"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert "BLOCKRELAY_PORT is tcp://10.0.0.1:8000: Kubernetes tells a pod so of a Service called blockrelay;" in line
    assert "`enableServiceLinks: false`" in line


@pytest.mark.parametrize("option", [("--port", "8123"), ("--port=8123",)])
def test_where_the_command_line_has_the_port_the_variable_says_nothing(
    option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKRELAY_PORT", "tcp://10.0.0.1:8000")
    assert read_settings(GatewaySettings, option, program="gateway").port == 8123


@pytest.mark.parametrize("name", ["BLOCKRELAY_", "BLOCKRELAY_X", "BLOCKRELAY_METRIC_PORTS"])
def test_every_slip_has_a_nearest_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"^{name} is not a setting; the nearest name is BLOCKRELAY_"):
        check_names({name: "1"})


@pytest.mark.parametrize(
    ("files", "control", "payload"),
    [
        ({}, "redis://u@a", "redis://u@b?db=1"),
        ({"redis_password_file": "/x y"}, "redis://u@a?password_file=%2Fx+y", "redis://u@b?db=1&password_file=%2Fx+y"),
        ({"redis_password_file": ""}, "redis://u@a", "redis://u@b?db=1"),
        ({"payload_redis_password_file": "/y"}, "redis://u@a", "redis://u@b?db=1&password_file=%2Fy"),
        (
            {"redis_password_file": "/x", "payload_redis_password_file": "/y"},
            "redis://u@a?password_file=%2Fx",
            "redis://u@b?db=1&password_file=%2Fy",
        ),
        (
            {"redis_password_file": "/x", "payload_redis_password_file": ""},
            "redis://u@a?password_file=%2Fx",
            "redis://u@b?db=1",
        ),
    ],
)
def test_both_redis_servers_have_the_password_of_one_file_unless_the_other_has_its_own(
    files: dict[str, str], control: str, payload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"redis_url": "redis://u@a", "payload_redis_url": "redis://u@b?db=1", **files}.items():
        monkeypatch.setenv(f"BLOCKRELAY_{name.upper()}", value)
    settings = Settings()
    assert (settings.control_redis, settings.payload_redis) == (control, payload)


def test_a_payload_redis_whose_url_has_a_password_needs_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKRELAY_PAYLOAD_REDIS_URL", "redis://u:p@b")
    monkeypatch.setenv("BLOCKRELAY_REDIS_PASSWORD_FILE", "/x")
    assert Settings().payload_redis == "redis://u:p@b"


@pytest.mark.parametrize("url", ["redis://u:p@a", "redis://a?password=p", "redis+sentinel://u:p@a,b/m"])
@pytest.mark.parametrize("server", ["", "PAYLOAD_"])
def test_two_passwords_for_one_redis_are_refused(server: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"BLOCKRELAY_{server}REDIS_URL", url)
    monkeypatch.setenv(f"BLOCKRELAY_{server}REDIS_PASSWORD_FILE", "/x")
    with pytest.raises(UsageError, match=f"BLOCKRELAY_{server}REDIS_PASSWORD_FILE: .*{server}REDIS_URL has a password"):
        read_settings(WorkerSettings, [], program="worker")
