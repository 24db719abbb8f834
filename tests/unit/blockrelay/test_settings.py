"""Names in the environment: a slip is refused by name, what others read is left alone."""

import subprocess
import sys

import pytest

from blockrelay.errors import UsageError
from blockrelay.settings import GatewaySettings, WorkerSettings, check_names, environment_for, read_settings

SERVICES = ["blockrelay_gateway", "blockrelay_scheduler", "blockrelay_worker", "blockrelay_launcher"]


@pytest.mark.parametrize("module", SERVICES)
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


@pytest.mark.parametrize("module", [one for one in SERVICES if one != "blockrelay_launcher"])
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


@pytest.mark.parametrize("name", ["BLOCKRELAY_", "BLOCKRELAY_X", "BLOCKRELAY_METRICS_PORT"])
def test_every_slip_has_a_nearest_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"^{name} is not a setting; the nearest name is BLOCKRELAY_"):
        check_names({name: "1"})
