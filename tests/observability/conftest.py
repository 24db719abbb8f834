"""Systems of processes, as the recovery tests start them."""

import pytest

from tests.support.systems.fixtures import start_system as start_system


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--panels-to", metavar="FILE", help="keep what every panel has shown (make dashboard-pictures)")
