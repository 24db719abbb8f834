"""Commands that become another process do so before the launcher is loaded, and refusals load little."""

import os
import subprocess
import sys

import pytest

from blockrelay_launcher.cli.main import app
from blockrelay_launcher.other_services import OTHER_SERVICES, become_at_once


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What processes this one would have become."""
    found: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, argv: found.append(argv))  # pyright: ignore[reportUnknownLambdaType]
    return found


def test_a_command_becomes_its_process_with_its_arguments(became: list[list[str]]) -> None:
    become_at_once(["convert", "in", "out", "--force"], {"PATH": ""})
    assert became == [[sys.executable, "-P", "-m", "blockrelay_converter", "in", "out", "--force"]]


def test_settings_and_other_commands_are_looked_at_first(became: list[list[str]]) -> None:
    become_at_once(["convert", "in", "out"], {"blockrelay_threds": "2"})
    become_at_once(["status"], {})
    become_at_once([], {})
    assert not became


def test_each_is_a_command() -> None:
    assert OTHER_SERVICES.keys() <= {command.name for command in app.registered_commands}


@pytest.mark.parametrize(
    ("program", "unloaded"),
    [
        (
            "import blockrelay_launcher.__main__",
            ("numpy", "pydantic", "redis", "typer", "blockrelay_launcher.cli.main"),
        ),
        ("from blockrelay_converter.__main__ import run; run(['/nope', 'out'])", ("numpy", "onnx", "tokenizers")),
    ],
    ids=["the command", "a refusal of convert"],
)
def test_what_takes_long_to_load_is_not_loaded(program: str, unloaded: tuple[str, ...]) -> None:
    shown = f"import sys; print(*sorted({set(unloaded)!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", f"{program}\n{shown}"], capture_output=True, text=True, check=True)
    assert done.stdout == "\n", "loaded"
