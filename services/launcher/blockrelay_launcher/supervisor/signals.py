"""Wakes the main thread for signals and for the ends of child processes."""

import contextlib
import select
import signal
import socket
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Alarm:
    """A context manager that wakes the main thread for signals and ended children; only one may be active.

    Only for the main thread; it can be entered once. `stop_requests` counts SIGINT, SIGTERM and SIGHUP, except those
    that were ignored before: the second one means "at once".
    """

    def __init__(self) -> None:
        self.stop_requests = 0
        self._former: dict[int, Any] = {}
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._former_fd = -1

    def __enter__(self) -> "Alarm":
        self._former_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup, SIGHUP must stay ignored
                self._former[number] = signal.signal(number, self._stop)
        self._former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        self._read.close()
        self._write.close()

    def _stop(self, *_: object) -> None:
        self.stop_requests += 1

    def wait(self, timeout_s: float) -> None:
        """Returns after a signal (also one since the last call), the end of a child, or `timeout_s` seconds."""
        select.select([self._read], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            while self._read.recv(4096):
                pass
