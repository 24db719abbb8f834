"""The package without extras: the help is there, and what is missing is named."""

import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest

from blockrelay.extras import MODULES
from tests.support.project import ROOT

pytestmark = pytest.mark.thorough

#: Runs the command where these modules cannot be imported, nor found.
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {modules!r} else found(name, package)
sys.argv[0] = "blockrelay"
import runpy
runpy.run_module("blockrelay_launcher", run_name="__main__")
"""


def bare(*arguments: str) -> "subprocess.CompletedProcess[str]":
    modules = {name for names in MODULES.values() for name in names} | {"uvicorn", "websockets", "jinja2"}
    command = [sys.executable, "-c", WITHOUT.format(modules=modules), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_help_needs_no_extra() -> None:
    told = bare("--help")
    assert told.returncode == 0, told.stderr
    assert all(command in told.stdout for command in ("up", "demo", "status", "plan", "convert"))
    assert bare("up", "--help").returncode == bare("bench", "--help").returncode == 0
    alone = bare()
    assert (alone.returncode, alone.stderr) == (0, "") and "First steps" in alone.stdout, "no arguments: the help"
    assert bare("--version").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("up",), "launcher"),
        (("demo",), "launcher"),
        (("bench",), "launcher"),
        (("drill", "--minutes", "1"), "launcher"),
        (("profile",), "launcher"),
        (("plan",), "scheduler"),
        (("generate", "--prompt", "x"), "worker"),
        (("evaluate", "x"), "worker"),
        (("devices",), "worker"),
        (("convert", "a", "b"), "converter"),
        (("import", "a", "b"), "converter"),
    ],
)
def test_what_is_missing_is_one_line_that_names_the_extra(arguments: tuple[str, ...], extra: str) -> None:
    told = bare(*arguments)
    assert told.returncode == 2 and told.stdout == "", told
    (line,) = told.stderr.splitlines()
    assert line.startswith("blockrelay: ") and f"install '.[{extra}]'` in " in line


def test_the_package_alone_has_neither_onnx_runtime_nor_any_part_that_an_extra_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = " ".join(project["dependencies"])
    distributions = packages_distributions()
    for name in {name for names in MODULES.values() for name in names}:
        assert not any(distribution in base for distribution in distributions[name]), name
