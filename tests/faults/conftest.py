"""Fixtures of the fault tests."""

import pytest

from blockrelay_launcher.client import resuming


@pytest.fixture
def first_gateway_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client begins at the first gateway of its list, not at any."""

    def zero(_: int) -> int:
        return 0

    monkeypatch.setattr(resuming.random, "randrange", zero)


@pytest.fixture
def processes_may_stay() -> bool:
    """Every case replaces a worker of the system that its module shares; the module ends them all."""
    return True
