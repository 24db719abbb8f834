"""Ctrl-C ends what it may end, and nothing else."""

import signal

import pytest

from blockrelay_launcher.demo.interrupts import Interrupts


def press() -> None:
    """Ctrl-C, handled when this returns."""
    signal.raise_signal(signal.SIGINT)


def test_it_is_raised_where_it_is_allowed_and_kept_elsewhere() -> None:
    former = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            press()
        press()
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            raise AssertionError("it was pressed before")
        with interrupts.allowed():
            pass
    assert signal.getsignal(signal.SIGINT) is former


def test_it_is_raised_once() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            try:
                press()
            finally:
                press()  # as the answer is being closed
        interrupts.forget()
        with interrupts.allowed():
            pass


def test_where_it_is_ignored_it_stays_so() -> None:
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts, interrupts.allowed():
            press()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)
