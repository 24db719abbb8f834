"""The data folder of one `blockrelay up`: its lock, the addresses of its services, its logs.

DATA/lock        locked while an `up` or its Redis runs here
DATA/up.json     the addresses of the running system; removed at a clean end
DATA/plan.json   the plan that schedulers start with
DATA/served.json the model that was served last, and its folder; stays
DATA/control/    the control Redis: all accepted requests
DATA/payload/    the payload Redis: data that may be lost
DATA/settings/   a file of NAME=VALUE lines for the service of its name, read at each start; users write it
DATA/logs/       one file per service, and one `.1` with its earlier lines; each has at most some 16 MiB
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from blockrelay.errors import UsageError
from blockrelay.up_file import NAME, Running
from blockrelay_launcher.policy import ABANDONED_REDIS_S


@dataclass(slots=True)
class DataFolder:
    """A locked data folder."""

    path: Path
    lock: int
    """The locked file descriptor: the lock lasts as long as any process has inherited it."""
    kept: bool
    """True if the folder stays when its `up` ends."""
    announced: bool = False
    """True if up.json is ours. One that is not is of an `up` that was killed."""

    def announce(self, running: Running) -> None:
        """Writes up.json, complete or not at all."""
        draft = self.path / f"{NAME}.new"
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(asdict(running), indent=1))
        draft.replace(self.path / NAME)
        self.announced = True

    def withdraw(self) -> None:
        """Removes up.json if `announce` has written it."""
        if self.announced:
            (self.path / NAME).unlink(missing_ok=True)


@contextlib.contextmanager
def open_data_folder(path: Path | None) -> Iterator[DataFolder]:
    """Makes and locks the folder. Without a path it is a temporary one, removed at the end unless `kept` is set.

    Waits up to ABANDONED_REDIS_S for the Redis servers of a dead `up`. Raises UsageError if another `up` or they still
    run in the folder, or if it cannot be written.
    """
    if path is None:
        folder = Path(tempfile.mkdtemp(prefix="blockrelay-"))
    else:
        folder = path.absolute()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--data {path}: {error.strerror}") from error
    opened = DataFolder(folder, lock=-1, kept=path is not None)
    try:
        opened.lock = _lock(folder)
        (folder / "logs").mkdir(mode=0o700, exist_ok=True)
        yield opened
    finally:
        if opened.lock >= 0:
            os.close(opened.lock)
        if not opened.kept:
            shutil.rmtree(folder, ignore_errors=True)


def parse_setting(line: str) -> dict[str, str]:
    """Returns the value of a line NAME=VALUE by its name; nothing for an empty line and a comment (#).

    Raises UsageError for any other line.
    """
    if not line.strip() or line.lstrip().startswith("#"):
        return {}
    name, equals, value = line.partition("=")
    if not equals or not name.strip():
        raise UsageError(f"{line.strip()[:100]!r} is not NAME=VALUE")
    return {name.strip(): value.strip()}


def read_service_settings(path: Path | None) -> dict[str, str]:
    """Returns the settings in a file; none if `path` is None or does not exist.

    Wrong lines are left out: a file that was broken while `up` runs must not keep a service from starting.
    """
    if path is None or not path.exists():
        return {}
    pairs: dict[str, str] = {}
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(UsageError):
            pairs |= parse_setting(line)
    return pairs


def _lock(folder: Path) -> int:
    """Locks the folder and returns the open lock file. Raises UsageError if another `up` has it."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"--data {folder}: {error.strerror}") from error
    end = time.monotonic() + ABANDONED_REDIS_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
            if _lives(owner) or time.monotonic() > end:
                os.close(lock)
                raise UsageError(f"another `blockrelay up` (process {owner}) runs on --data {folder}") from None
            time.sleep(0.05)
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def _lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (ValueError, PermissionError):  # the owner has not written its pid yet, or is another user's
        pass
    return True
