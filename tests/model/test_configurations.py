"""Small bounds of every configuration of the protocol model; `make model` has the large ones."""

import pytest

from model.__main__ import describe
from model.configurations import parts
from model.data import Bounds
from model.explorer import explore
from model.protocol import Protocol


@pytest.mark.parametrize(
    "bounds", [pytest.param(bounds, id=f"{c.name}: {describe(bounds)}") for c, bounds in parts(full=False)]
)
def test_every_invariant_holds_and_nothing_hangs(bounds: Bounds) -> None:
    found = explore(Protocol(bounds))
    assert found.counterexample is None, str(found.counterexample)
