"""The long suites that a change touches, one after the other: `python .ci/long_suites.py [--long] [--began EPOCH]`.

The table is suites.toml beside this file. The change is everything since the newest release that CHANGELOG.md names by
its commit; where git does not know that commit (a shallow clone), everything has changed. Ends with the exit code of
the first suite that fails, else with a list of what it left out and why.
"""

import argparse
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Seconds after the start from which on no suite begins.
LATEST_S = 40 * 60


@dataclass(frozen=True, slots=True)
class Suite:
    """`needs` is a command that must succeed first, or empty; `short` and `long` are shell commands."""

    name: str
    short: str
    long: str
    paths: tuple[str, ...]
    needs: str = ""

    def touched_by(self, changed: Sequence[str]) -> str | None:
        """The first changed path that concerns it."""
        return next((path for path in changed if matches(path, self.paths)), None)


@dataclass(frozen=True, slots=True)
class Table:
    """suites.toml."""

    always: tuple[str, ...]
    none: tuple[str, ...]
    suites: tuple[Suite, ...]


def read_table(path: Path = ROOT / ".ci" / "suites.toml") -> Table:
    raw = tomllib.loads(path.read_text())
    suites = [Suite(name=name, **row | {"paths": tuple(row["paths"])}) for name, row in raw["suites"].items()]
    return Table(tuple(raw["always"]), tuple(raw["none"]), tuple(suites))


def matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def newest_release(changelog: str) -> str | None:
    """The commit of the newest release that a changelog names."""
    found = re.search(r"^## \S+ \(([0-9a-f]{40})\)$", changelog, re.M)
    return found[1] if found else None


def changed_since(commit: str | None, root: Path = ROOT) -> list[str] | None:
    """Paths that differ from `commit`; None when git cannot say."""
    if commit is None:
        return None
    found = subprocess.run(
        ["git", "diff", "--name-only", "-z", "--no-renames", commit, "--"],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return [path for path in found.stdout.split("\0") if path] if found.returncode == 0 else None


def main() -> int:
    """The exit code; see above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--everything", action="store_true", help="as if every path had changed")
    parser.add_argument("--without", action="append", default=[], metavar="SUITE", help="it has run already")
    parser.add_argument("--long", action="store_true", help="the long form of each suite")
    parser.add_argument("--began", type=float, help="when the run began (seconds since 1970): its time is limited")
    table = read_table()
    names = [suite.name for suite in table.suites]
    parser.add_argument("--only", choices=names, metavar="SUITE", help="this one, whatever has changed")
    options = parser.parse_args()
    commit = newest_release((ROOT / "CHANGELOG.md").read_text())
    changed = None if options.everything or options.only else changed_since(commit)
    asked = [
        suite for suite in table.suites if suite.name not in options.without and options.only in (None, suite.name)
    ]
    touched = [suite for suite in asked if changed is None or suite.touched_by(changed)]
    left_out = [f"{suite.name}: nothing that it looks at has changed" for suite in asked if suite not in touched]
    say(f"since {commit}: {len(changed)} paths" if changed is not None else "everything counts as changed")
    for suite in touched:
        spent = time.time() - options.began if options.began else 0.0
        if spent > LATEST_S:
            left_out.append(f"{suite.name}: {spent / 60:.0f} minutes had passed")
        elif suite.needs and run(suite.needs):
            left_out.append(f"{suite.name}: {suite.needs} failed, see above")
        else:
            command = suite.long if options.long else suite.short
            began = time.monotonic()
            say(command)
            if code := run(command):
                say(f"{suite.name} failed")
                return code
            say(f"{suite.name}: good after {time.monotonic() - began:.0f} s")
    for line in left_out:
        say(f"NOT TESTED: {line}")
    return 0


def run(command: str) -> int:
    """The exit code of a shell command in the root of the project."""
    return subprocess.run(command, shell=True, cwd=ROOT, env=os.environ.copy(), check=False).returncode


def say(line: str) -> None:
    sys.stdout.write(f"== {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
