"""Costs that are calibrated: a simulated system in the place of the real one, whose costs are therefore known."""

from dataclasses import replace

import pytest

from bench.simulate.configurations import Configuration
from bench.simulate.costs import BlockCosts, Costs
from bench.simulate.load import Figures, Lengths, Load
from bench.simulate.measured.calibrating import calibrated
from bench.simulate.system import Setup, simulate

pytestmark = pytest.mark.thorough

#: Slow, so that there is little to simulate.
_BLOCK = BlockCosts(rows={1: 0.010, 8: 0.020})
REAL = Costs(blocks=(_BLOCK, _BLOCK), part=0.002, hop=0.008, hop_late=0.003, cold=0.070, speeds=(1.0, 1.5), turn=0.004)
ONE, TWO = Setup(), Setup(workers=2, stages=2, groups=2)


def known(setup: Setup) -> list[tuple[Configuration, Figures]]:
    found: list[tuple[Configuration, Figures]] = []
    for clients in (1, 8):
        one = Configuration("", setup, Load(prompt=Lengths(1, 3), new=Lengths(4, 12), clients=clients))
        found.append((one, simulate(setup, one.load, REAL, seconds=30, warm_up=2, seed=7).figures))
    return found


def test_costs_that_are_wrong_become_those_of_the_system() -> None:
    wrong = replace(REAL.times(1.25), hop_late=0.0, cold=0.0, speeds=(1.0, 2.0))
    right = calibrated(wrong, known(ONE), known(TWO))
    assert right.part == pytest.approx(REAL.part, rel=0.05)
    assert right.speeds == (1.0, pytest.approx(1.5, abs=0.15))
    assert right.cold == pytest.approx(REAL.cold, rel=0.1)


def test_what_is_late_is_what_the_token_does_not_wait_for() -> None:
    right = calibrated(replace(REAL, hop_late=0.0), known(ONE), known(TWO))
    assert right.hop_late == pytest.approx(REAL.hop_late, rel=0.1)


def test_nobody_waits_longer_where_all_computes_longer() -> None:
    twice = REAL.times(2)
    assert (twice.cold, twice.turn, twice.speeds) == (REAL.cold, REAL.turn, REAL.speeds)
    assert (twice.part, twice.hop, twice.blocks[0].rows[8]) == (0.004, 0.016, 0.040)
