"""Opening the device of a process at its start: its settings, and retries after failures."""

from typing import Any

import pytest

from blockrelay.errors import DeviceLost, KnownAnswerMismatch, UsageError
from blockrelay.settings import WorkerSettings
from blockrelay_worker.lifecycle import workers
from blockrelay_worker.lifecycle.workers import Workers


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"device": "gpu"}, "a worker of the class gpu needs its device: --gpu webgpu:0"),
        (
            {"device": "cpu", "gpu": "webgpu:0"},
            "--device cpu and --gpu webgpu:0: a worker on a GPU is of the class gpu",
        ),
    ],
)
def test_a_worker_is_of_the_class_of_its_device(
    settings: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Workers(WorkerSettings.model_validate(settings)).run() == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


def test_a_gpu_says_the_class_and_the_name_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKRELAY_GPU", "webgpu:0")
    found = WorkerSettings()
    assert (found.device, found.named_device) == ("gpu", "webgpu:0")
    monkeypatch.setenv("BLOCKRELAY_DEVICE_ID", "big")
    assert WorkerSettings().named_device == "big"
    monkeypatch.delenv("BLOCKRELAY_GPU")
    assert (WorkerSettings().device, WorkerSettings().named_device) == ("cpu", "big")


class _Opened(Exception):
    """Raised instead of opening a device, when no more failures are planned."""


def opening(monkeypatch: pytest.MonkeyPatch, *errors: Exception, gpu: str) -> list[float]:
    """Returns the pauses between tries to open a device that fails with these errors, one after the other."""
    left, pauses = list(errors), list[float]()

    def executors_for(*_: Any, **__: Any) -> None:
        raise left.pop(0) if left else _Opened

    for maker in ("executors_for", "DeviceExecutors"):
        monkeypatch.setattr(workers, maker, executors_for)
    monkeypatch.setattr(workers.time, "sleep", pauses.append)
    settings = WorkerSettings(gpu=gpu) if gpu else WorkerSettings()
    with pytest.raises((_Opened, UsageError, KnownAnswerMismatch)):
        Workers(settings)._made()  # pyright: ignore[reportPrivateUsage]
    assert not left or not pauses
    return pauses


LOST = DeviceLost("the process of webgpu:0 has ended", reason="process_ended", code="INTERNAL")
WRONG = KnownAnswerMismatch("webgpu:0 attends wrongly", block="block_1")


@pytest.mark.parametrize(
    ("errors", "gpu", "pauses"),
    [
        ((LOST, WRONG, LOST, LOST, LOST), "webgpu:0", [1.0, 5.0, 30.0, 60.0, 60.0]),
        ((LOST, UsageError("there is no device webgpu:0 here")), "webgpu:0", [1.0, 5.0]),
        ((UsageError("there is no device webgpu:0 here"), LOST), "webgpu:0", []),
        ((WRONG, LOST), "", []),
    ],
    ids=["it fails", "it vanishes", "it is not here", "a CPU"],
)
def test_a_device_that_is_here_is_tried_until_it_can_be_used(
    monkeypatch: pytest.MonkeyPatch, errors: tuple[Exception, ...], gpu: str, pauses: list[float]
) -> None:
    assert opening(monkeypatch, *errors, gpu=gpu) == pauses
