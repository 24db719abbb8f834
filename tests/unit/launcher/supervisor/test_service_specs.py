"""The settings that `up` gives to its gateways."""

from pathlib import Path

import pytest

from blockrelay_launcher.supervisor.service_specs import Layout, gateways
from blockrelay_launcher.up_options.options import UpOptions


def origins(tmp_path: Path, count: int, **options: str) -> list[set[str]]:
    layout = Layout(
        options=UpOptions(model=tmp_path, **options),  # pyright: ignore[reportArgumentType]
        control_url="unix:///none",
        payload_url=None,
        logs=tmp_path,
        plan=tmp_path / "plan.json",
        ports=tuple(range(8000, 8000 + count)),
    )
    return [set(child.env["BLOCKRELAY_CORS_ORIGINS"].split(",")) for child in gateways(layout)]


def test_pages_of_one_gateway_may_use_the_others(tmp_path: Path) -> None:
    hosts = {"http://127.0.0.1:8000", "http://localhost:8000", "http://127.0.0.1:8001", "http://localhost:8001"}
    assert origins(tmp_path, 2) == [hosts, hosts]
    assert origins(tmp_path, 2, cors_origins="https://a.example")[0] == hosts | {"https://a.example"}
    assert "http://[::1]:8001" in origins(tmp_path, 2, host="::")[0]


def test_one_alone_knows_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert origins(tmp_path, 1) == [{""}]
    monkeypatch.setenv("BLOCKRELAY_CORS_ORIGINS", "https://b.example")
    assert origins(tmp_path, 1) == [{"https://b.example"}]
    assert origins(tmp_path, 1, cors_origins="https://a.example") == [{"https://a.example"}]
