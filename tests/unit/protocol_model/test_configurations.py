"""Small bounds of every configuration of the protocol model; `make model` has the large ones."""

import pytest

from tests.protocol_model.__main__ import describe
from tests.protocol_model.bounds import Bounds
from tests.protocol_model.configurations import parts
from tests.protocol_model.explorer import explore
from tests.protocol_model.protocol import Protocol

pytestmark = pytest.mark.model


@pytest.mark.parametrize(
    "bounds", [pytest.param(bounds, id=f"{c.name}: {describe(bounds)}") for c, bounds in parts(full=False)]
)
def test_every_invariant_holds_and_nothing_hangs(bounds: Bounds) -> None:
    found = explore(Protocol(bounds))
    assert found.counterexample is None, str(found.counterexample)
