"""Systems that a test may put together from workers on other CPUs."""

from tests.support.systems.fixtures import start_system as start_system
