"""Systems of processes, as the recovery tests start them."""

from tests.support.systems.fixtures import start_system as start_system
from tests.support.systems.fixtures import tiny_model as tiny_model
