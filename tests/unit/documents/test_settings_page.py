"""docs/settings.md has two parts: what operators set, and what developers and tests set."""

from blockrelay.settings import GatewaySettings, SchedulerSettings, Settings, WorkerSettings
from docs.generate.settings import DEVELOPERS, own_settings, page


def test_every_setting_stands_in_one_part() -> None:
    operators, developers = page().split("\n## What developers and tests set\n")
    for kind in (Settings, GatewaySettings, SchedulerSettings, WorkerSettings):
        for name in own_settings(kind):
            row = f"| `BLOCKRELAY_{name.upper()}` |"
            assert (row in developers) == (name in DEVELOPERS)
            assert (row in operators) == (name not in DEVELOPERS)


def test_the_settings_of_developers_exist_and_those_of_operators_are_few() -> None:
    known = {
        name for kind in (Settings, GatewaySettings, SchedulerSettings, WorkerSettings) for name in own_settings(kind)
    }
    assert known >= DEVELOPERS
    assert page().split("\n## What developers")[0].count("\n| `BLOCKRELAY_") <= 60
