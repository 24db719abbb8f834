"""When a device that was lost is tried again."""

import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import DeviceLost
from blockrelay_worker.execution.process.renewal import in_quarantine, usable_in_s
from blockrelay_worker.policy import MAX_LOSSES, OF_LATE_S, QUARANTINE_S
from tests.support.worker.devices import Misbehaving


def test_a_device_that_was_never_lost_is_usable() -> None:
    assert usable_in_s([], 5.0) == 0.0 and not in_quarantine([])


@pytest.mark.parametrize(("losses", "wait_s"), [([100.0], 1.0), ([100.0, 110.0], 5.0)])
def test_it_is_left_alone_longer_each_time(losses: list[float], wait_s: float) -> None:
    assert usable_in_s(losses, losses[-1]) == wait_s
    assert usable_in_s(losses, losses[-1] + wait_s - 0.5) == 0.5
    assert usable_in_s(losses, losses[-1] + wait_s) == 0.0


def test_too_many_losses_of_late_are_quarantine() -> None:
    losses = [100.0 + 10 * number for number in range(MAX_LOSSES)]
    assert in_quarantine(losses) and usable_in_s(losses, losses[-1]) == QUARANTINE_S
    assert usable_in_s(losses, losses[-1] + QUARANTINE_S) == 0.0, "then it is tried again"


def test_losses_of_long_ago_do_not_count() -> None:
    losses = [0.0, OF_LATE_S, 2 * OF_LATE_S + 1]
    assert not in_quarantine(losses) and usable_in_s(losses, losses[-1]) == 1.0


def test_a_process_that_ends_before_it_has_opened_its_device_is_a_loss_too(
    misbehaving: Misbehaving, fp32: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that takes its process along each time it is opened would be tried again for ever."""
    executors = misbehaving()
    executors.renew()
    monkeypatch.setenv("DIES_AT", "open")
    for losses in range(1, MAX_LOSSES + 1):
        with pytest.raises(DeviceLost, match="status 3"):
            executors.load(fp32, 1, 2, pages=8)
        assert executors.usable_in_s() > 0 and executors.losses == losses
    assert executors.in_quarantine and executors.last_loss == "process_ended"
