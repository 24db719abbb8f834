"""What tests have helper processes do. A helper imports the module of its work: this one imports next to nothing."""

import os
import signal
from pathlib import Path

from blockrelay.errors import BadRequest


def pid() -> int:
    return os.getpid()


def die(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(mark: str) -> str:
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def hang(mark: str) -> None:
    Path(mark).write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def fill_memory() -> None:
    raise MemoryError


def refuse() -> None:
    raise BadRequest("no", param="x")
