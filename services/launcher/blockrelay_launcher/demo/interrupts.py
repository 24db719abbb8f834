"""Limits Ctrl-C to the parts of a program that it may interrupt."""

import contextlib
import signal
from collections.abc import Iterator


class Interrupts:
    """A context manager for the main thread, in which Ctrl-C raises KeyboardInterrupt only within `allowed`.

    A Ctrl-C at another time is kept for the next `allowed`, unless `forget` is called first.
    """

    def __init__(self) -> None:
        self._allowed = self._kept = False

    def __enter__(self) -> "Interrupts":
        self._former = signal.getsignal(signal.SIGINT)
        if self._former is not signal.SIG_IGN:  # a shell's background job must keep ignoring Ctrl-C
            signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._former)

    def _pressed(self, *_: object) -> None:
        self._kept = True
        self._raise()

    def _raise(self) -> None:
        if self._allowed and self._kept:
            self._allowed = self._kept = False
            raise KeyboardInterrupt

    def forget(self) -> None:
        """Drops a Ctrl-C that was kept."""
        self._kept = False

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """A context manager in which Ctrl-C raises KeyboardInterrupt, once."""
        self._allowed = True
        try:
            self._raise()
            yield
        finally:
            self._allowed = False
