"""The processes of devices, as seen from outside."""

from blockrelay_launcher.drill.system import children_of


def child_of(worker: int) -> int:
    """That of the device of the worker with this pid."""
    found = children_of(worker)
    assert len(found) == 1, found
    return found[0]
