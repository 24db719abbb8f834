"""The processes of devices, as seen from outside."""

from pathlib import Path


def child_of(worker: int) -> int:
    """That of the device of the worker with this pid."""
    found = children_of(worker)
    assert len(found) == 1, found
    return found[0]


def children_of(worker: int) -> list[int]:
    """One, or none while the device is lost."""
    return [int(pid) for pid in Path(f"/proc/{worker}/task/{worker}/children").read_text().split()]
