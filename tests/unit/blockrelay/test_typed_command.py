"""Commands in messages, as the reader can type them."""

import sys
import sysconfig
from pathlib import Path

import pytest

from blockrelay.extras import checkout, how_to_install
from blockrelay.typed_command import program, typed, typed_path
from tests.support.project import ROOT


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment's folder of programs, below the current folder, which is not on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    folder = tmp_path / ".venv" / "bin"
    for place in (folder, tmp_path / "elsewhere"):
        place.mkdir(parents=True)
    (folder / "blockrelay").touch(mode=0o755)
    return folder


def test_the_path_where_the_environment_is_not_active(scripts: Path) -> None:
    assert program("blockrelay", scripts=scripts) == ".venv/bin/blockrelay"


def test_the_name_alone_where_it_is(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(scripts))
    assert program("blockrelay", scripts=scripts) == "blockrelay"


def test_a_program_of_the_same_name_in_another_environment_is_not_meant(scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "blockrelay").touch(mode=0o755)
    assert program("blockrelay", scripts=scripts) == ".venv/bin/blockrelay"


def test_from_within_its_folder_and_from_far_away(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scripts)
    assert program("blockrelay", scripts=scripts) == "./blockrelay"
    (deep := scripts / "a" / "b" / "c" / "d" / "e" / "f" / "g" / "h" / "i" / "j" / "k" / "l" / "m").mkdir(parents=True)
    for _ in range(len(str(scripts)) // 3):
        (deep := deep / "x").mkdir()
    monkeypatch.chdir(deep)
    assert program("blockrelay", scripts=scripts) == str(scripts / "blockrelay")


def test_an_environment_without_the_program_has_python(scripts: Path) -> None:
    (scripts / "blockrelay").unlink()
    assert program("blockrelay", scripts=scripts) == f"{typed_path(Path(sys.executable))} -m blockrelay_launcher"
    assert program("pip", scripts=scripts).endswith(" -m pip")


def test_what_a_shell_would_split_is_quoted(scripts: Path, tmp_path: Path) -> None:
    (spaced := tmp_path / "my env").mkdir()
    (spaced / "blockrelay").touch(mode=0o755)
    assert program("blockrelay", scripts=spaced) == "'my env/blockrelay'"


def test_a_command_here_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    ours = Path(sysconfig.get_path("scripts")) / "blockrelay"
    assert typed("status --data x") == f"{typed_path(ours)} status --data x"


def test_an_extra_comes_from_the_checkout_and_from_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT.parent)
    assert checkout() == ROOT
    assert how_to_install("otel", pip="pip") == f"`pip install '.[otel]'` in {typed_path(ROOT)}"
