"""File locks that show which devices of this host have a worker. The system releases them when the process ends.

A worker holds a shared lock on the device that it is started with. A worker that looks for another device takes only
one without a lock. Workers of other users, and those in containers, do not see each other's locks.
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
    """The locks that this process holds, by card. One thread uses it at a time.

    A card is the name of a device that all processes of the host agree on (`Provider.card`): a UUID, or `webgpu:0`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` has the lock files; None: a folder in the user's cache folder, even if graphs are kept elsewhere."""
        self._held: dict[str, int] = {}
        self._folder: Path | None = None
        root = default_root(os.environ)
        folder = folder or (root and root / "devices")
        if sys.platform != "win32" and folder is not None:
            self._folder = private_folder(folder)

    @property
    def known(self) -> bool:
        """True if locks can be used: the system has them, and there is a private folder for them."""
        return self._folder is not None

    def share(self, card: str) -> None:
        """Takes a shared lock on a card that this process computes on; other workers may be started for it too.

        Does nothing where that fails, for example because another process has an exclusive lock.
        """
        self._lock(card, exclusive=False)

    def take(self, card: str) -> bool:
        """Takes an exclusive lock until `give_back`. Returns False where another process has any lock on the card.

        It also returns False if the lock's file cannot be opened. It returns True without locks (`known` is False), and
        for a card that this process has locked, which keeps its lock as it is.
        """
        return not self.known or self._lock(card, exclusive=True)

    def taken(self, card: str) -> bool:
        """Returns whether another process has a lock on the card; True without locks (`known` is False).

        It returns False for a card that this process has locked, whether or not others share it. A card without a lock
        is locked for a moment to find out.
        """
        if card in self._held:
            return False
        free = self.known and self._lock(card, exclusive=True)
        self.give_back(card)
        return not free

    def give_back(self, card: str) -> None:
        """Releases this process's lock on the card, if it has one."""
        if card in self._held:
            os.close(self._held.pop(card))

    def _lock(self, card: str, *, exclusive: bool) -> bool:
        """Locks the card's file, without waiting. Returns whether this process has the lock, now or already."""
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
