"""Ctrl-C, where it may end what is going on and nowhere else."""

import contextlib
import signal
from collections.abc import Iterator


class Interrupts:
    """A context manager for the main thread: within it, Ctrl-C raises KeyboardInterrupt in `allowed` alone.

    One that comes elsewhere is kept for the next `allowed`, unless `forget` comes first.
    """

    def __init__(self) -> None:
        self._allowed = self._kept = False

    def __enter__(self) -> "Interrupts":
        self._former = signal.getsignal(signal.SIGINT)
        if self._former is not signal.SIG_IGN:  # a shell's background job stays one
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
        """What was pressed until now is over."""
        self._kept = False

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Ctrl-C raises KeyboardInterrupt in here, once."""
        self._allowed = True
        try:
            self._raise()
            yield
        finally:
            self._allowed = False
