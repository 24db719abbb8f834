"""Starts child processes, restarts them after a growing pause when they end, and never leaves one behind.

All of it runs on the main thread: signals and deaths of children wake one `select`, and a child that must die with its
parent dies with the thread that started it.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from blockrelay.exit_codes import PREFIX, UNUSABLE
from blockrelay.failpoints import reach
from blockrelay_launcher.policy import FIRST_DELAY_S, LOG_BYTES, LONG_LIFE_S, LONGEST_DELAY_S, REFUSAL_STANDS_S
from blockrelay_launcher.supervisor.data_folder import read_service_settings
from blockrelay_launcher.supervisor.signals import Alarm

_PR_SET_PDEATHSIG = 1
_libc: ctypes.CDLL | None = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclass(slots=True, kw_only=True)
class ChildProcess:
    """A child process that must always run. Only for the main thread."""

    name: str
    argv: list[str]
    env: Mapping[str, str]
    log: Path
    """File for its stdout and stderr."""
    last_signal: int = signal.SIGKILL
    """The signal that the kernel sends it when this process dies."""
    held: tuple[int, ...] = ()
    """File descriptors that it inherits."""
    plain_log: bool = False
    """True if it logs text for people, not JSON lines."""
    settings: Path | None = None
    """A file of NAME=VALUE lines that override `env`; it is read at every start, and need not exist."""
    process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)
    """The running or the last process."""
    deaths: int = field(default=0, init=False)
    quick_deaths: int = field(default=0, init=False)
    """Deaths in a row: the first after any life, the others after at most LONG_LIFE_S."""
    start_at: float = field(default=0.0, init=False)
    """Time (monotonic) of the next start."""
    last_log_line: str = field(default="", init=False)
    refused: str = field(default="", init=False)
    """The cause of its last end if that was with UNUSABLE; `up` sets it, `refusal_is_over` clears it. Empty: none."""
    _started: float = field(default=0.0, init=False)
    _tail: BinaryIO | None = field(default=None, init=False)
    _partial: bytes = field(default=b"", init=False)

    @property
    def pid(self) -> int:
        """The pid of the running or the last process; 0 before the first start."""
        return self.process.pid if self.process else 0

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def start(self) -> None:
        """Starts the process, with the settings in its file at this time. It must not be running.

        Raises OSError if it cannot be started.
        """
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
        """Returns the exit code if the process has ended since the last call, and sets `start_at`; else returns None.

        A code below 0 is minus the number of the signal that killed it.
        """
        if self.process is None or self.process.returncode is not None or self.process.poll() is None:
            return None
        self.deaths += 1
        self.quick_deaths = 1 if time.monotonic() - self._started > LONG_LIFE_S else self.quick_deaths + 1
        delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(self.quick_deaths - 1, 20))
        if self.process.returncode == UNUSABLE:  # a start loads the whole model, and only a person can mend the cause
            delay = LONGEST_DELAY_S
        self.start_at = time.monotonic() + delay
        return self.process.returncode

    def refusal_is_over(self) -> bool:
        """Returns True, and clears `refused`, if the process has run so long that the cause must be gone."""
        over = bool(self.refused) and self.running and time.monotonic() - self._started > REFUSAL_STANDS_S
        self.refused = "" if over else self.refused
        return over

    def signal(self, number: int) -> None:
        """Sends a signal to the process, if it runs."""
        if self.process is not None:
            self.process.send_signal(number)  # does nothing to a process that has ended

    def new_lines(self) -> Iterator[str]:
        """Yields the complete lines of the log since the last call; the last one with content becomes `last_log_line`.

        Take all of them: the rest would be lost. Rotates a log that is longer than LOG_BYTES.
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
        """Copies the end of the log to `<log>.1`, empties it, and returns the bytes written in the meantime.

        The copy has these bytes too. The process holds the file open and appends to it, so it must stay the same file.
        Lines that it writes between the last read and the truncation (microseconds) are lost. If this process is killed
        here, the old copy or the new one remains, and the log is unchanged or empty. On a full disk there is no copy,
        and the truncation makes room.
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
        """Closes the log file."""
        if self._tail is not None:
            self._tail.close()
            self._tail = None


def stop_all(
    children: list[ChildProcess], alarm: Alarm, *, patience_s: float, number: int = signal.SIGTERM
) -> list[ChildProcess]:
    """Sends the signal `number` to all children, and SIGKILL to those that run after `patience_s` seconds.

    A second stop request ends the wait early. Returns the children that had to be killed; none runs afterwards.
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


def _alive(child: ChildProcess) -> bool:
    return child.process is not None and child.process.poll() is None


def die_with_parent(number: int) -> Callable[[], None] | None:
    """Returns a `preexec_fn` by which the kernel sends `number` to a child when this process ends, however it ends.

    The child also gets it when the thread that starts it ends. Returns None on systems other than Linux.
    """
    libc, parent = _libc, os.getpid()
    if libc is None:
        return None

    def tie() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the line above
            os._exit(1)

    return tie


def plain(line: str) -> str:
    """Returns a line of a service's log as text for people.

    For a JSON entry this is the event, the error and the facts. Any other line loses the prefix that begins every
    error, because `up` shows the service's name before it.
    """
    event = _entry(line)
    if event is None:
        return line.removeprefix(PREFIX)
    facts = {name: event.get(name) for name in ("request_id", "session_id", "step")} | event.get("data", {})
    traceback = str(facts.pop("exception", "")).strip()
    error = facts.pop("error", None) or traceback.rpartition("\n")[2]
    shown = ", ".join(f"{name}={_brief(value)}" for name, value in facts.items() if value not in (None, "", []))
    return f"{event['event_type']}{f': {error}' if error else ''}{f' ({shown})' if shown else ''}"


def _brief(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _entry(line: str) -> dict[str, Any] | None:
    """Returns the entry in a JSON log line of `blockrelay.observability.logs`; None for any other line."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    is_entry = isinstance(event, dict) and "event_type" in event and isinstance(event.get("data", {}), dict)
    return event if is_entry else None


def is_worth_showing(line: str) -> bool:
    """True for errors and for lines that are no log entry (a traceback): `up` shows them without `--verbose`."""
    if not line.strip():
        return False
    event = _entry(line)
    return event is None or event.get("level") in ("ERROR", "CRITICAL")
