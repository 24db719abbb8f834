"""The options of `up` in their groups: the help that people see, and what does not go together."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from blockrelay.errors import UsageError
from blockrelay_launcher.cli.main import app
from blockrelay_launcher.option_groups import OptionGroup
from blockrelay_launcher.up_options.groups import (
    AdvancedOptions,
    DeviceOptions,
    LimitOptions,
    NetworkOptions,
    ServedModelOptions,
    TopologyOptions,
)
from blockrelay_launcher.up_options.plan_choice import PlanChoice

GROUPS: tuple[type[OptionGroup], ...] = (
    ServedModelOptions,
    TopologyOptions,
    DeviceOptions,
    LimitOptions,
    NetworkOptions,
    AdvancedOptions,
)


def test_the_help_of_up_has_six_groups_with_whole_names_within_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    shown = CliRunner().invoke(app, ["up", "--help"], catch_exceptions=False).stdout.splitlines()
    assert max(map(len, shown)) <= 80
    assert "…" not in "".join(shown), "nothing is cut off"
    titles = ["Options", "Model", "Topology", "Devices", "Limits", "Network", "Advanced"]
    assert [line.strip("╭╮─ ") for line in shown if line.startswith("╭")] == titles
    words = {word for line in shown for word in line.split()[1:2]}
    assert words >= set(option_names()) and len(list(option_names())) == 40


def option_names() -> Iterator[str]:
    for group in GROUPS:
        yield from (f"--{field.name.replace('_', '-')}" for field in fields(group))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("group", "given", "message"),
    [
        (ServedModelOptions(blocks=Path("b")), {"blocks", "model"}, "--blocks is instead of --model and --topology"),
        (ServedModelOptions(blocks=Path("b")), {"blocks", "topology"}, "--blocks is instead of --model and --topology"),
        (ServedModelOptions(max_position=8), {"max_position"}, "--max-position is for --blocks"),
        (ServedModelOptions(sequential=True), {"sequential"}, "--sequential is for --blocks"),
        (ServedModelOptions(blocks=Path("b"), memory=5), {"blocks"}, "--memory is for --sequential"),
        (ServedModelOptions(max_warm_sessions=5), {"max_warm_sessions"}, "--max-warm-sessions is for --sequential"),
        (TopologyOptions(topology=Path("t")), {"topology", "stages"}, "--stages and --topology: the file says"),
        (TopologyOptions(topology=Path("t")), {"topology", "payload_redis"}, "--payload-redis and --topology: the"),
        (DeviceOptions(gpu="cuda:0", gpu_workers=1), {"gpu", "gpu_workers"}, "--gpu and --gpu-workers: the one names"),
        (DeviceOptions(gpu=","), {"gpu", "gpu_memory"}, "--gpu-memory needs --gpu"),
        (NetworkOptions(payload_redis="redis://h"), {"payload_redis"}, "--payload-redis needs --redis"),
    ],
)
def test_options_that_do_not_go_together_are_refused(group: OptionGroup, given: set[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        group.check(given)


@pytest.mark.parametrize("group", GROUPS)
def test_the_defaults_go_together(group: type[OptionGroup]) -> None:
    group().check(set())


def test_what_goes_together_is_taken() -> None:
    ServedModelOptions(blocks=Path("b"), sequential=True, memory=5, max_warm_sessions=2, max_position=8).check(
        {"blocks", "sequential", "memory", "max_warm_sessions", "max_position"}
    )
    TopologyOptions(topology=Path("t")).check({"topology", "host", "port", "data"})
    DeviceOptions(gpu="cuda:0,").check({"gpu", "gpu_memory"})
    DeviceOptions(gpu_workers=1).check({"gpu_workers", "gpu_memory"})
    NetworkOptions(redis="redis://h", payload_redis="redis://h").check({"redis", "payload_redis"})


def test_groups_have_what_follows_from_their_options() -> None:
    assert DeviceOptions(gpu="cuda:0,,webgpu:1").named == ["cuda:0", "webgpu:1"]
    assert (NetworkOptions().address, NetworkOptions(host="::").address) == ("127.0.0.1", "::")
    assert TopologyOptions(stages=2, strategy="auto", objective="latency").first_plan == PlanChoice(
        stages=2, strategy="auto", objective="latency"
    )
