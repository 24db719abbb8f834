"""Runs the commands that `make bench` and `make quality` consist of, and says where their files lie."""

import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from bench.environments import last_line

ROOT = Path(__file__).parents[1]
DOCS, WORK = ROOT / "docs", ROOT / ".bench"
ENVS = WORK / "envs"
BLOCKRELAY = Path(sys.executable).with_name("blockrelay")
#: Most seconds of one run.
PATIENCE_S = 900


class Failed(Exception):
    """A run failed; the text is the last line that it printed."""


def say(line: str) -> None:
    """Prints a line with the time to stderr."""
    sys.stderr.write(f"{datetime.now(UTC):%H:%M:%S} {line}\n")


def run(command: list[str], *, log: Path, capture: bool = True) -> str:
    """Runs a command and returns its stdout; its stderr goes into the file `log`.

    `capture=False`: its stdout goes there too. Raises Failed for an exit code other than 0, with the name of the signal
    that killed it, and after PATIENCE_S.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as errors:
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE if capture else errors, stderr=errors, text=True, timeout=PATIENCE_S,
                check=False, cwd=ROOT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Failed(f"no end after {PATIENCE_S} s") from None
    if done.returncode < 0:
        name, last = signal.Signals(-done.returncode).name, log.read_text(errors="replace").strip()
        raise Failed(f"died of {name}" + (f": {last_line(last)}" if last else ""))
    if done.returncode:
        raise Failed(last_line(log.read_text(errors="replace")))
    return done.stdout or ""
