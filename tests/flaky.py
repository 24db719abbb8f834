"""Which tests fail now and then: `python -m tests.flaky --times 10 --load 2` (make flaky).

Runs a make target again and again, every second time beside K endless loops, and adds up what failed how often in
`.flaky/<commit>.json`, so that a table can be filled in pieces. A tree with changes is a key of its own. Prints the
table of this key and target; exit code 1 if it has a failure.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(".flaky")
#: Ends by itself when whoever started it is gone, however that ended.
LOOP = "import os, sys\nparent = int(sys.argv[1])\nwhile os.getppid() == parent:\n    for _ in range(10**6): pass"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a target. `load` is the number of endless loops beside it; seconds are of wall time and of CPU."""

    target: str
    load: int
    wall_s: float
    cpu_s: float
    tests: int
    failed: tuple[str, ...]


def key_of_the_tree() -> str:
    """The commit; with a hash behind it where files differ from it."""
    commit = _git("rev-parse", "HEAD").decode().strip()
    change = _git("diff", "--binary", "HEAD")
    for name in sorted(_git("ls-files", "--others", "--exclude-standard", "-z").split(b"\0")):
        if name:
            change += name + Path(os.fsdecode(name)).read_bytes()
    return f"{commit}-{hashlib.sha256(change).hexdigest()[:12]}" if change else commit


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], capture_output=True, check=True).stdout


def read_tally(key: str) -> list[Run]:
    try:
        entries = json.loads((FOLDER / f"{key}.json").read_text())
    except FileNotFoundError:
        return []
    return [Run(**entry | {"failed": tuple(entry["failed"])}) for entry in entries]


def add_to_tally(key: str, run: Run) -> list[Run]:
    """All runs of this key, the new one last."""
    runs = [*read_tally(key), run]
    draft = FOLDER / f"{key}.json.new"
    draft.write_text(json.dumps([asdict(one) for one in runs], indent=1))
    draft.replace(FOLDER / f"{key}.json")
    return runs


@contextmanager
def loops(count: int) -> Iterator[None]:
    """`count` processes that compute without an end, for as long as this lasts."""
    running = [subprocess.Popen([sys.executable, "-S", "-c", LOOP, str(os.getpid())]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def run_once(target: str, load: int) -> Run:
    """Run `make target`. A run that fails without a failing test counts as a failure of its own."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder, loops(load):
        report, log = Path(folder).absolute() / "report.xml", Path(folder) / "log"
        began = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(["make", target, f"ARGS=--junitxml={report}"], stdout=output, stderr=output)
            try:
                _, status, usage = os.wait4(process.pid, 0)
            except BaseException:
                process.terminate()
                raise
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.monotonic() - began
        tests, failed = read_report(report)
        if process.returncode and not failed:
            failed = (f"(the run itself: exit code {process.returncode})",)
        if failed:
            sys.stdout.write(log.read_text(errors="replace")[-20_000:])
        cpu_s = usage.ru_utime + usage.ru_stime
        return Run(target, load, round(wall_s, 1), round(cpu_s, 1), tests, failed)


def read_report(path: Path) -> tuple[int, tuple[str, ...]]:
    """The number of tests in a JUnit report and the names of those that failed; nothing where there is no report."""
    if not path.exists():
        return 0, ()
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    return len(cases), tuple(sorted({f"{case.get('classname')}::{case.get('name')}" for case in bad}))


def table(target: str, runs: Sequence[Run]) -> str:
    """What people read."""
    rows = [("make " + target, "runs", "green", "tests", "wall s", "CPU s")]
    for name, some in (("quiet", [r for r in runs if not r.load]), ("loaded", [r for r in runs if r.load])):
        if some:
            wall, cpu = (f"{min(s):.0f}..{max(s):.0f}" for s in ([r.wall_s for r in some], [r.cpu_s for r in some]))
            green = sum(not r.failed for r in some)
            rows.append((name, str(len(some)), str(green), str(max(r.tests for r in some)), wall, cpu))
    lines = [f"{row[0]:<18}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows]
    failures = Counter(name for run in runs for name in run.failed)
    lines += [f"{count:>5} of {len(runs)}: {name}" for name, count in failures.most_common()]
    return "\n".join(lines if failures else [*lines, "no test has failed"])


def main() -> int:
    """The exit code; see above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=1, help="runs to be added")
    parser.add_argument("--load", type=int, default=0, help="endless loops beside every second run")
    parser.add_argument("--target", default="test", choices=["test", "test-system"])
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runs: list[Run] = []
    for _ in range(options.times):
        key = key_of_the_tree()
        before = [run for run in read_tally(key) if run.target == options.target]
        loaded = sum(run.load > 0 for run in before)
        run = run_once(options.target, options.load if loaded < len(before) - loaded else 0)
        if key_of_the_tree() != key:
            sys.stdout.write("the tree has changed under this run: it does not count\n")
            return 1
        runs = [one for one in add_to_tally(key, run) if one.target == options.target]
        sys.stdout.write(f"{key}\n{table(options.target, runs)}\n")
        sys.stdout.flush()
    return int(any(run.failed for run in runs))


if __name__ == "__main__":
    sys.exit(main())
