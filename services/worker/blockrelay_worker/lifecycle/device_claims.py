"""Which devices of this host have a worker of their own: known by locks on files, which end with their process.

A worker shares the device that it is started with. One that looks for another device takes none that somebody has.
Workers of other users, and those in containers, do not see each other's locks.
"""

import os
import re
import socket
import sys
from pathlib import Path

from blockrelay_worker.execution.onnx.compiled.cache_folder import default_root, private_folder

if sys.platform != "win32":
    import fcntl


class DeviceClaims:
    """Those of this process, by the names of cards (`Provider.card`). One thread uses it at a time."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` of the locks; None: one in the user's cache folder, whatever folder graphs are kept in."""
        self._held: dict[str, int] = {}
        self._folder: Path | None = None
        root = default_root(os.environ)
        folder = folder or (root and root / "devices")
        if sys.platform != "win32" and folder is not None:
            self._folder = private_folder(folder)

    @property
    def known(self) -> bool:
        """Whether anybody can tell who has what."""
        return self._folder is not None

    def share(self, card: str) -> None:
        """This process computes on it, as others may that were started for it."""
        self._lock(card, exclusive=False)

    def take(self, card: str) -> bool:
        """Have it alone, until `give_back`. False where somebody has it."""
        return not self.known or self._lock(card, exclusive=True)

    def taken(self, card: str) -> bool:
        """Whether another process has it. Where nobody can tell, it has."""
        if card in self._held:
            return False
        free = self.known and self._lock(card, exclusive=True)
        self.give_back(card)
        return not free

    def give_back(self, card: str) -> None:
        """This process has nothing there any more."""
        if card in self._held:
            os.close(self._held.pop(card))

    def _lock(self, card: str, *, exclusive: bool) -> bool:
        if card in self._held:
            return True
        if self._folder is None or sys.platform == "win32":
            return False
        path = self._folder / re.sub(r"[^A-Za-z0-9.-]", "_", f"{socket.gethostname()}.{card}")
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return False
        self._held[card] = file
        return True
