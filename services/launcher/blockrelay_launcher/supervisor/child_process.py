"""Child processes: started, started again after a growing pause when they end, and never left behind.

Everything here runs on the main thread: signals and deaths of children wake one `select`, and a child that is told to
die with its parent dies with the thread that started it.
"""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from blockrelay.exit_codes import UNUSABLE
from blockrelay.failpoints import reach
from blockrelay_launcher.supervisor.data_folder import read_service_settings
from blockrelay_launcher.supervisor.signals import Alarm

#: Seconds before a dead child is started again: doubled for each quick death, back to the first after a long life.
FIRST_DELAY_S, LONGEST_DELAY_S, LONG_LIFE_S = 0.05, 5.0, 2.0
#: Seconds of life after which a service that had refused to serve is taken to serve.
REFUSAL_STANDS_S = 60.0

#: A log that has grown beyond this is moved aside, over the one that was moved aside before.
LOG_BYTES = 16 << 20

_PR_SET_PDEATHSIG = 1
_libc: ctypes.CDLL | None = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclass(slots=True, kw_only=True)
class Child:
    """One process that should be running. `log` gets its stdout and stderr.

    `last_signal` is what it gets from the kernel when this process is killed. `held` are file descriptors it inherits.
    `plain_log`: it logs text for people, not JSON lines. `settings`: NAME=VALUE lines that go before `env`, where there
    is such a file at the time of a start. `refused`: why it last ended with UNUSABLE, until `refusal_is_over`.
    """

    name: str
    argv: list[str]
    env: Mapping[str, str]
    log: Path
    last_signal: int = signal.SIGKILL
    held: tuple[int, ...] = ()
    plain_log: bool = False
    settings: Path | None = None
    process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)
    deaths: int = field(default=0, init=False)
    quick_deaths: int = field(default=0, init=False)
    start_at: float = field(default=0.0, init=False)
    last_log_line: str = field(default="", init=False)
    refused: str = field(default="", init=False)
    _started: float = field(default=0.0, init=False)
    _tail: BinaryIO | None = field(default=None, init=False)
    _partial: bytes = field(default=b"", init=False)

    @property
    def pid(self) -> int:
        """Of the running or the last process; 0 before the first start."""
        return self.process.pid if self.process else 0

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def start(self) -> None:
        reach("launcher.before_spawn")
        with self.log.open("ab") as log:
            if self._tail is None:
                self._tail = self.log.open("rb")
                self._tail.seek(0, os.SEEK_END)
            self.process = subprocess.Popen(
                self.argv,
                env={**self.env, **read_service_settings(self.settings)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal reaches this process only
                pass_fds=self.held,
                preexec_fn=die_with_parent(self.last_signal),
            )
        self._started = time.monotonic()
        reach("launcher.after_spawn")

    def reap(self) -> int | None:
        """The exit code, once, when the process has ended since the last call; plans the next start."""
        if self.process is None or self.process.returncode is not None or self.process.poll() is None:
            return None
        self.deaths += 1
        self.quick_deaths = 1 if time.monotonic() - self._started > LONG_LIFE_S else self.quick_deaths + 1
        delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(self.quick_deaths - 1, 20))
        if self.process.returncode == UNUSABLE:  # a start costs a whole load, and only people can mend the cause
            delay = LONGEST_DELAY_S
        self.start_at = time.monotonic() + delay
        return self.process.returncode

    def refusal_is_over(self) -> bool:
        """Whether it runs so long after a refusal that the cause must be gone; forgets the refusal then."""
        over = bool(self.refused) and self.running and time.monotonic() - self._started > REFUSAL_STANDS_S
        self.refused = "" if over else self.refused
        return over

    def signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)  # does nothing to a process that has ended

    def new_lines(self) -> Iterator[str]:
        """Complete lines that the log has got since the last call; the last one with content becomes `last_log_line`.

        Moves a log aside that has become too long.
        """
        if self._tail is None:
            return
        news = self._tail.read()
        if self._tail.tell() > LOG_BYTES:
            news += self._rotate(self._tail)
        *lines, self._partial = (self._partial + news).split(b"\n")
        for raw in lines:
            line = raw.decode("utf-8", "replace")
            self.last_log_line = line if line.strip() else self.last_log_line
            yield line

    def _rotate(self, tail: BinaryIO) -> bytes:
        """Copy the end of the log to `<log>.1` and empty it; what was written meanwhile, which the copy has too.

        The process holds the file open and appends to it, so it has to stay the same file. Lines that it writes between
        the last read and the truncation are lost: microseconds. Whoever is killed in here leaves the old copy or the
        new one, and the log as it was or empty. On a full disk there is no copy, and room again.
        """
        draft, meanwhile = self.log.with_name(f"{self.log.name}.new"), b""
        try:
            with draft.open("wb") as copy:
                tail.seek(-LOG_BYTES, os.SEEK_CUR)
                copy.write(tail.read(LOG_BYTES))
                meanwhile = tail.read()
                copy.write(meanwhile)
            draft.replace(self.log.with_name(f"{self.log.name}.1"))
        except OSError:
            draft.unlink(missing_ok=True)
        os.truncate(self.log, 0)
        tail.seek(0)
        return meanwhile

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()
            self._tail = None


def stop_all(children: list[Child], alarm: Alarm, *, patience_s: float, number: int = signal.SIGTERM) -> list[Child]:
    """The signal `number` to all of them, SIGKILL to those still there after `patience_s` or at a second stop request.

    Returns those that had to be killed. None is running afterwards.
    """
    for child in children:
        child.signal(number)
    end = time.monotonic() + patience_s
    while any(_alive(c) for c in children) and time.monotonic() < end and alarm.stop_requests < 2:
        alarm.wait(min(0.1, max(0.0, end - time.monotonic())))
    killed = [c for c in children if _alive(c)]
    for child in killed:
        child.signal(signal.SIGKILL)
    for child in children:
        if child.process is not None:
            child.process.wait()
    return killed


def _alive(child: Child) -> bool:
    return child.process is not None and child.process.poll() is None


def die_with_parent(number: int) -> Callable[[], None] | None:
    """Runs between fork and exec: the kernel sends `number` when this process ends, however it ends. Linux only."""
    libc, parent = _libc, os.getpid()
    if libc is None:
        return None

    def tie() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)

    return tie


def plain(line: str) -> str:
    """What people read of a line of a service's log: of an entry what happened, the error, and the facts that it has;
    of another line all but the service's role, since `up` puts its name before it."""
    event = _entry(line)
    if event is None:
        return re.sub(r"^(gateway|scheduler|worker): ", "", line)
    facts = {name: event.get(name) for name in ("request_id", "session_id", "step")} | event.get("data", {})
    traceback = str(facts.pop("exception", "")).strip()
    error = facts.pop("error", None) or traceback.rpartition("\n")[2]
    told = ", ".join(f"{name}={_brief(value)}" for name, value in facts.items() if value not in (None, "", []))
    return f"{event['event_type']}{f': {error}' if error else ''}{f' ({told})' if told else ''}"


def _brief(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _entry(line: str) -> dict[str, Any] | None:
    """A log line as `blockrelay.observability.logs` writes them; None for any other."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    is_entry = isinstance(event, dict) and "event_type" in event and isinstance(event.get("data", {}), dict)
    return event if is_entry else None


def is_worth_showing(line: str) -> bool:
    """Errors, and what is not a log line at all (a traceback): people should see it without opening the log."""
    if not line.strip():
        return False
    event = _entry(line)
    return event is None or event.get("level") in ("ERROR", "CRITICAL")
