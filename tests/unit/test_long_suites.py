"""The table of long suites is complete, and a change runs the suites that it touches."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.project import ROOT

#: Targets that decide nothing about a commit, or run what others run.
NO_SUITES = {
    "help",
    "demo",
    "up",
    "clean",
    "install",
    "test-all",
    "flaky",
    "coverage",
    "docs-pages",
    "parity",
    "dashboards",
    "dashboard-pictures",
    "manifests",
    "lock",
    "gpu-kit",
}
FIGURES = {"bench", "bench-moves", "bench-plans", "bench-recovery", "bench-simulator", "overload", "turns"}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("long_suites", ROOT / ".ci" / "long_suites.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["long_suites"] = module
    spec.loader.exec_module(module)
    return module


long_suites = load()
TABLE = long_suites.read_table()


def targets() -> set[str]:
    """The targets that people call."""
    (line,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    return set(line.split())


def test_every_file_touches_a_suite_or_is_listed_as_touching_none() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    files = [name for name in listed.decode().split("\0") if name]
    assert len(files) > 300
    known = [*TABLE.none, *(pattern for suite in TABLE.suites for pattern in suite.paths)]
    assert not [name for name in files if not long_suites.matches(name, known)]
    assert not [p for p in known if not any(long_suites.matches(name, [p]) for name in files)], "patterns of nothing"


def test_every_target_is_a_suite_or_always_runs_or_is_none() -> None:
    names = {suite.name for suite in TABLE.suites}
    assert targets() == names | set(TABLE.always) | NO_SUITES | FIGURES & targets()
    assert not names & set(TABLE.always)
    for suite in TABLE.suites:
        for command in (suite.short, suite.long):
            assert command.split()[:2] == ["make", suite.name]


def test_ci_runs_what_always_runs() -> None:
    program = (ROOT / ".ci" / "run").read_text()
    assert tuple(re.findall(r"^make ([\w-]+)$", program, re.M)) == TABLE.always


@pytest.mark.parametrize(
    ("path", "touched", "untouched"),
    [
        ("services/worker/native/matmul.h", {"sanitize", "equality", "test-system"}, {"audit"}),
        ("deploy/Dockerfile", {"test-compose"}, {"sanitize"}),
        ("pyproject.toml", {"audit", "test-compose", "parity-goldens"}, {"sanitize", "drill"}),
        ("tests/parity/exporters/genai.txt", {"parity-exporters"}, {"parity-goldens", "audit"}),
        ("tests/faults/test_workers.py", {"faults", "test-system"}, {"drill", "fuzz"}),
        ("README.md", {"docs"}, {"faults", "drill", "fuzz", "test-system"}),
        ("docs/generate/metrics.py", {"docs"}, {"faults", "drill", "fuzz", "test-system"}),
    ],
)
def test_a_change_touches_its_suites(path: str, touched: set[str], untouched: set[str]) -> None:
    found = {suite.name for suite in TABLE.suites if suite.touched_by([path])}
    assert touched <= found and not untouched & found


def test_the_newest_release_is_the_first_that_names_a_commit() -> None:
    commits = ["b" * 40, "a" * 40]
    text = f"# Changes\n\n## Unreleased\n\n## 0.2.0 ({commits[0]})\n\nx\n\n## 0.1.0 ({commits[1]})\n"
    assert long_suites.newest_release(text) == commits[0]
    assert long_suites.newest_release("# Changes\n\n## Unreleased\n") is None
    assert long_suites.newest_release((ROOT / "CHANGELOG.md").read_text())


def test_without_the_release_everything_has_changed(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    for text in ("one", "two"):
        (tmp_path / text).write_text(text)
        subprocess.run([*git, "add", "-A"], cwd=tmp_path, check=True)
        subprocess.run([*git, "commit", "-qm", text], cwd=tmp_path, check=True)
    first = subprocess.run([*git, "rev-parse", "HEAD~1"], cwd=tmp_path, check=True, capture_output=True, text=True)
    (tmp_path / "one").write_text("not committed")
    assert long_suites.changed_since(first.stdout.strip(), tmp_path) == ["one", "two"]
    assert long_suites.changed_since("c" * 40, tmp_path) is None
    assert long_suites.changed_since(None, tmp_path) is None


def test_the_hosted_workflow_runs_the_same_targets_in_shards() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    (shards,) = re.findall(r"^ +suite: \[(.*)\]$", workflow, re.M)
    assert shards.split(", ") == [suite.name for suite in TABLE.suites]
    for target in TABLE.always:
        assert re.search(rf"run: make {target}\b", workflow), target


def test_a_suite_that_is_not_there_is_refused() -> None:
    asked = [sys.executable, ROOT / ".ci" / "long_suites.py", "--only", "nothing"]
    refused = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "invalid choice: 'nothing'" in refused.stderr
