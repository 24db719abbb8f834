"""The processes of devices, as seen from outside."""

from contextlib import suppress
from pathlib import Path


def child_of(worker: int) -> int:
    """That of the device of the worker with this pid."""
    found = children_of(worker)
    assert len(found) == 1, found
    return found[0]


def children_of(worker: int) -> list[int]:
    """One, or none while the device is lost."""
    found: list[int] = []
    for thread in Path(f"/proc/{worker}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found += map(int, (thread / "children").read_text().split())
    return found
