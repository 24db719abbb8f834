"""The message about kernels that are missing, cannot be loaded or are of another release."""

import os
import shutil
import subprocess
import unicodedata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from blockrelay_worker.kernels import libraries
from blockrelay_worker.kernels.libraries import (
    Library,
    describe,
    library,
    look,
    shortcoming,
    supported_isas,
)
from tests.support.project import ROOT

HERE = EXTENSION_SUFFIXES[0]
NUMPY = "NumPy computes in place of our C++ kernels, some 30 times slower: they"
SOURCE = Path("/src/blockrelay")
MISSING = Library(problem="are missing", missing=True)
STALE = Library(problem="are of another release (version 4, not 5)")
BUILT = Library(Path("_x.so"))


def test_a_folder_without_the_file_or_with_one_for_another_python(tmp_path: Path) -> None:
    assert look(tmp_path, "baseline") == MISSING
    (tmp_path / "_avx512vnni.so").touch()
    assert look(tmp_path, "avx512") == MISSING, "another variant's"
    (tmp_path / "_avx512.cpython-299-vax-linux-gnu.so").touch()
    found = look(tmp_path, "avx512")
    assert found.problem == "are for another Python or machine (_avx512.cpython-299-vax-linux-gnu.so)"
    assert found.path is None and not found.missing


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    (tmp_path / f"_baseline{HERE}").write_bytes(b"\x7fELF" + bytes(60))
    found = look(tmp_path, "baseline")
    assert found.path is None and found.problem.startswith("cannot be loaded (") and "_baseline" in found.problem


def test_a_library_that_is_none_of_ours(tmp_path: Path) -> None:
    """A library without a version is one of a release before versions."""
    (tmp_path / f"_baseline{HERE}").write_bytes(Path(str(unicodedata.__file__)).read_bytes())
    assert look(tmp_path, "baseline").problem == "are of another release"


@pytest.mark.skipif(not supported_isas(), reason="no native kernels were built")
def test_a_library_of_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    good, version = library("baseline").path, libraries.LIBRARY_VERSION
    assert good is not None and look(good.parent, "baseline") == Library(good)
    monkeypatch.setattr(libraries, "LIBRARY_VERSION", 99)
    assert look(good.parent, "baseline").problem == f"are of another release (version {version}, not 99)"


@pytest.mark.parametrize(
    ("found", "compiler", "said"),
    [
        ({"avx2": BUILT, "baseline": BUILT}, True, ""),
        (
            {"avx2": MISSING, "baseline": MISSING},
            False,
            f"{NUMPY} are missing; install g++ or clang++, then `make install` again in /src/blockrelay",
        ),
        (
            {"avx2": MISSING, "baseline": MISSING},
            True,
            f"{NUMPY} are missing; `make install` again in /src/blockrelay",
        ),
        (
            {"avx2": STALE, "baseline": STALE},
            True,
            f"{NUMPY} are of another release (version 4, not 5); remove /k/_*.so, then `make install` again in "
            "/src/blockrelay",
        ),
        (
            {"avx2": MISSING, "baseline": BUILT},
            True,
            "the C++ kernels for baseline compute, more slowly than this CPU can: those for avx2 are missing; install "
            "a newer g++ or clang++, then remove /k/_*.so, then `make install` again in /src/blockrelay",
        ),
    ],
    ids=["all is well", "no compiler", "a compiler has come", "stale", "an old compiler"],
)
def test_one_line_says_what_is_missing_and_what_to_do(found: dict[str, Library], compiler: bool, said: str) -> None:
    folder = Path("/k")
    assert describe(("avx2", "baseline"), found, compiler=compiler, source=SOURCE, folder=folder) == said


def test_what_was_installed_from_a_wheel_is_installed_again() -> None:
    said = describe(("baseline",), {"baseline": MISSING}, compiler=True, source=None)
    assert said.endswith("; install Blockrelay again")


def test_here_the_fastest_kernels_are_in_use() -> None:
    assert bool(shortcoming()) == (supported_isas()[:1] != libraries.isas_for(libraries.cpu_features())[:1])


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("there", [True, False], ids=["built", "missing"])
def test_make_builds_them_where_a_compiler_has_come_since_the_last_install(tmp_path: Path, there: bool) -> None:
    """`make install` builds the kernels after the remedy, although no source has changed."""
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    kernels = libraries.FOLDER.relative_to(ROOT)
    for name in ("pyproject.toml", "setup.py", ".venv/bin/python", f"{kernels}/_baseline.x.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if there or not name.endswith(".so"):
            (tmp_path / name).touch()
    (tmp_path / ".venv/.installed").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "g++").touch(mode=0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["make", "-n", "install"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert ("--editable" in done.stdout) is not there
