"""Which workers of one device may load a stage of which block folder."""

from blockrelay.protocol.plan import Stage
from blockrelay_worker.execution.process.sharing import Sharing

STAGE = Stage(first=1, last=2)


def never() -> bool:
    return False


def test_a_device_has_stages_of_one_folder_at_a_time() -> None:
    device = Sharing(2)
    assert device.takes(0, "w8a8") and device.takes(1, "w8a8")
    device.has_loaded(0, STAGE, 100)
    device.has_loaded(1, STAGE, 200)
    assert device.loaded == ((STAGE, 100), (STAGE, 200))
    device.has_closed(0)
    assert not device.takes(0, "w4a8"), "the other one has its stage still"
    device.has_closed(1)
    assert device.takes(0, "w4a8")
    assert not device.takes(1, "w8a8") and device.takes(1, "w4a8")
    assert device.loaded == ()


def test_one_that_could_not_load_does_not_keep_others_waiting() -> None:
    device = Sharing(2)
    assert device.takes(0, "w4a8")
    device.waits_for_stage(0)
    assert device.takes(1, "w8a8")
    device.has_loaded(1, STAGE, 100)
    device.waits_for_stage(1)
    assert not device.takes(0, "w4a8"), "a stage that it has loaded stays"


def test_a_new_process_has_no_stage_of_any_folder() -> None:
    device = Sharing(1)
    device.join(0, never)
    device.takes(0, "w8a8")
    device.has_loaded(0, STAGE, 100)
    device.ask_all_to_leave(0.0)
    assert device.leave(0, lambda: None, never)
    assert device.loaded == () and device.takes(1, "w4a8")
