"""Waiting for conditions. Tests never sleep for a fixed time."""

import threading
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], what: str, *, timeout_s: float = 30.0, poll_s: float = 0.02) -> None:
    """Return when `condition()` is true; fail naming `what` after `timeout_s`."""
    end = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {timeout_s} s in vain until {what}")
        pause.wait(poll_s)
