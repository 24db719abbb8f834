"""The folder of one `up`: its lock, what runs in it, its logs.

DATA/lock        held while an `up` or its Redis runs here
DATA/up.json     how to reach what runs here; gone after a clean end
DATA/plan.json   the plan that schedulers are started with
DATA/control/    the control Redis: everything that was accepted
DATA/payload/    the payload Redis: nothing that matters
DATA/settings/   NAME=VALUE lines for the service of that name, read whenever it starts; made by users
DATA/logs/       one file per service, and one `.1` of what stood in it before; each has some 16 MiB at most
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

#: A Redis whose launcher was killed needs a moment to end; its files are locked until then. Seconds.
ABANDONED_S = 10.0


@dataclass(slots=True)
class DataFolder:
    """An opened folder. `lock` is the locked file descriptor: who inherits it keeps the lock alive.

    `kept`: it stays when its `up` ends, even if nobody named it.
    """

    path: Path
    lock: int
    kept: bool

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def announce(self, running: Running) -> None:
        """Write up.json, whole or not at all."""
        draft = self.path / f"{NAME}.new"
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(asdict(running), indent=1))
        draft.replace(self.path / NAME)

    def withdraw(self) -> None:
        (self.path / NAME).unlink(missing_ok=True)


@contextlib.contextmanager
def open_data_folder(path: Path | None) -> Iterator[DataFolder]:
    """Make and lock the folder; without a path a temporary one, which is removed at the end unless it is `kept`.

    Raises:
        UsageError: another `up` runs in it, or it cannot be written.
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
        opened.logs.mkdir(mode=0o700, exist_ok=True)
        yield opened
    finally:
        if opened.lock >= 0:
            os.close(opened.lock)
        if not opened.kept:
            shutil.rmtree(folder, ignore_errors=True)


def parse_setting(line: str) -> tuple[str, str] | None:
    """Name and value; None for an empty line and for a comment (#). Raises UsageError for any other."""
    if not line.strip() or line.lstrip().startswith("#"):
        return None
    name, equals, value = line.partition("=")
    if not equals or not name.strip():
        raise UsageError(f"{line.strip()[:100]!r} is not NAME=VALUE")
    return name.strip(), value.strip()


def read_service_settings(path: Path | None) -> dict[str, str]:
    """The settings in a file; none without one. Lines that mean nothing are left out: a file that was broken while
    `up` runs must not keep a service from starting."""
    if path is None or not path.exists():
        return {}
    pairs: dict[str, str] = {}
    for line in path.read_text(errors="replace").splitlines():
        try:
            if pair := parse_setting(line):
                pairs[pair[0]] = pair[1]
        except UsageError:
            continue
    return pairs


def _lock(folder: Path) -> int:
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"--data {folder}: {error.strerror}") from error
    end = time.monotonic() + ABANDONED_S
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
    except ValueError:
        return True  # its owner is just about to write its number
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
