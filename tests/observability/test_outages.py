"""The drill of what stops: each service, Redis, and everything, with the rules as they are shipped.

Discovery drops the targets of what has stopped, as DNS and Kubernetes do.
"""

from pathlib import Path

import pytest

from tests.support.alert_drill import STOPPED, drill, drilled_system, shipped
from tests.support.systems.outages import OUTAGES
from tests.support.systems.system import StartSystem

pytestmark = [pytest.mark.observability, pytest.mark.timeout(900)]


def test_whatever_stops_is_told_and_told_to_be_back(start_system: StartSystem, tmp_path: Path) -> None:
    with drilled_system(start_system, tmp_path, shipped()) as (watched, told):
        drill(watched, told, STOPPED, OUTAGES, timeout_s=150)
