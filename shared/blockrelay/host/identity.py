"""Ids for this machine and its processes that differ from those of other machines with the same host name."""

import hashlib
import os
import socket
import uuid
from pathlib import Path

from blockrelay.host.control_groups import ROOT

_DIGITS = 6


def host_tag(*, root: Path = ROOT) -> str:
    """Returns 6 hex digits that identify this machine since its last start, and this container of it.

    They are the same for all processes that share one table of process ids. `root` is for tests.
    """
    try:
        identity = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
        identity += f" {os.stat(root / 'proc/self/ns/pid').st_ino}"
    except OSError:
        identity = f"{uuid.getnode():x}"  # not Linux
    return hashlib.sha256(identity.encode()).hexdigest()[:_DIGITS]


def process_prefix(pid: int) -> str:
    """Returns the beginning of the ids of all workers in process `pid` of this machine."""
    return f"{socket.gethostname()}:{pid}:{host_tag()}"


def host_name() -> str:
    """Returns HOST:TAG, a name of this machine that no other machine has. TAG is `host_tag`, and changes with it."""
    return f"{socket.gethostname()}:{host_tag()}"
