"""What tells this machine from another one of the same name, and its processes from others of the same number."""

import hashlib
import os
import socket
import uuid
from pathlib import Path

from blockrelay.host.control_groups import ROOT

_DIGITS = 6


def host_tag(*, root: Path = ROOT) -> str:
    """Hexadecimal digits that are equal for processes whose ids are of one table alone: one machine since it has
    started, and one container of it. `root` is for tests."""
    try:
        told = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
        told += f" {os.stat(root / 'proc/self/ns/pid').st_ino}"
    except OSError:
        told = f"{uuid.getnode():x}"  # no Linux
    return hashlib.sha256(told.encode()).hexdigest()[:_DIGITS]


def process_prefix(pid: int) -> str:
    """How the ids of all workers of a process of this machine begin."""
    return f"{socket.gethostname()}:{pid}:{host_tag()}"


def host_name() -> str:
    """The name of this machine that no other one has."""
    return f"{socket.gethostname()}:{host_tag()}"
