"""The script `blockrelay` is in every image, also where its libraries are not."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.project import ROOT


def run_script(*arguments: str, path: Path) -> "subprocess.CompletedProcess[str]":
    """What the installed script does, with `path` before everything else that Python finds modules in."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["blockrelay"]
    module, function = declared.split(":")
    program = f"import sys; from {module} import {function}; sys.exit({function}())"
    env = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    argv = [sys.executable, "-c", program, *arguments]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("missing", ["typer", "rich", "httpx"])
def test_without_a_library_it_says_in_one_line_what_to_install(tmp_path: Path, missing: str) -> None:
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('none', name='{missing}')")
    done = run_script("--version", path=tmp_path)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert missing in line and "blockrelay[launcher]" in line


def test_with_its_libraries_it_runs(tmp_path: Path) -> None:
    done = run_script("--version", path=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("blockrelay ")
