"""compose.yaml and what may be added to it: services read every setting that it passes on."""

import re
from typing import Any

import pytest
import yaml

from blockrelay.settings import GatewaySettings, SchedulerSettings, Settings, WorkerSettings
from tests.support.project import ROOT

SETTINGS: dict[str, type[Settings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}
COMPOSE = ROOT / "compose.yaml"
ADDITIONS = sorted((ROOT / "deploy" / "compose").glob("*.yaml"))
#: Fields of schedulers that say how the model is cut.
PLAN_FIELDS = ("plan", "strategy", "objective", "profile", "devices")


def services(file: Any) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())["services"]


@pytest.mark.parametrize("file", [COMPOSE, *ADDITIONS], ids=lambda file: file.name)
def test_every_setting_is_one_of_the_service_that_gets_it(file: Any) -> None:
    for name, service in services(file).items():
        if "observability" in service.get("profiles", ()):
            continue  # programs of others
        for variable in service.get("environment", {}):
            if name == "gateway" and variable.startswith("OTEL_"):
                assert f"`{variable}`" in (ROOT / "docs" / "tracing.md").read_text()
                continue
            field = variable.removeprefix("BLOCKRELAY_").lower()
            assert variable.startswith("BLOCKRELAY_") and field in SETTINGS[name].model_fields, f"{name}: {variable}"


def test_what_is_not_set_outside_is_not_set_inside() -> None:
    """An empty value is one: `BLOCKRELAY_PLAN=` names no file."""
    environment = services(COMPOSE)["scheduler"]["environment"]
    for field in PLAN_FIELDS:
        variable = f"BLOCKRELAY_{field.upper()}"
        assert variable in environment and environment[variable] is None


@pytest.mark.parametrize("file", ADDITIONS, ids=lambda file: file.name)
def test_an_addition_changes_services_that_are_there_and_is_explained(file: Any) -> None:
    assert services(file).keys() <= services(COMPOSE).keys()
    assert f"deploy/compose/{file.name}" in COMPOSE.read_text()
    for variable in re.findall(r"\$\{(\w+):\?", file.read_text()):
        assert f"{variable}=" in COMPOSE.read_text()
