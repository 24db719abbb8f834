"""Every test is in exactly one suite, and every suite has a make target that runs it."""

import re
from pathlib import Path

import pytest

from bench.gpu_kit.suites import arguments
from tests.support.project import ROOT
from tests.support.suites import FOLDERS, OTHER_MARKERS, SUITES, suite_of


@pytest.mark.parametrize(
    ("path", "markers", "suite"),
    [
        ("unit/worker/test_pages.py", ["parametrize"], "quick"),
        ("contract/test_scripts.py", [], "quick"),
        ("recovery/test_workers.py", ["timeout"], "system"),
        ("stories/test_demo.py", [], "system"),
        ("recovery/test_zombies.py", ["faults"], "faults"),
        ("recovery/test_accidents.py", ["quick"], "quick"),
        ("unit/launcher/test_bench.py", ["system"], "system"),
    ],
)
def test_a_marker_decides_and_else_the_folder(path: str, markers: list[str], suite: str) -> None:
    assert suite_of(Path(path), markers) == suite


def test_nothing_is_in_two_suites() -> None:
    with pytest.raises(ValueError, match="not in faults and system"):
        suite_of(Path("recovery/test_workers.py"), ["system", "faults"])


def test_every_suite_has_a_target_that_runs_it() -> None:
    chosen = {
        name for said in re.findall(r"pytest .*-m ('[^']*'|\w+)", (ROOT / "Makefile").read_text())
        for name in re.findall(r"\w+", said)
    }  # fmt: skip
    on_a_gpu = arguments(story=False, small=False, float16=True)
    chosen |= set(re.findall(r"\w+", on_a_gpu[on_a_gpu.index("-m") + 1]))
    assert chosen - {"or", "and", "not"} == SUITES.keys() | OTHER_MARKERS.keys()


def test_every_folder_with_a_suite_exists() -> None:
    for folder in FOLDERS:
        assert (ROOT / "tests" / folder).is_dir(), folder


def test_thorough_tests_are_where_their_target_looks() -> None:
    (said,) = re.findall(r"-m thorough (.+) \$\(ARGS\)", (ROOT / "Makefile").read_text())
    marked = [file for file in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark\.thorough\b", file.read_text())]
    assert len(marked) > 20
    assert not [file for file in marked if not any(file.is_relative_to(ROOT / folder) for folder in said.split())]
