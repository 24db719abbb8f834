"""The file that `blockrelay plan --json` writes and a scheduler reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockrelay.errors import UsageError
from blockrelay.planning.plan_file import read_plan_file
from blockrelay.protocol.plan import Stage
from blockrelay.protocol.planned_split import ANY_CPU, ANY_GPU, parse_planned


def written(folder: Path, *stages: dict[str, Any]) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps({"strategy": "auto", "stages": stages, "whatever": "else"}))
    return path


def test_stages_and_reasons_are_read(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"blocks": "1-3", "devices": ["cpu:0", "cpu:1"], "reason": "it has\nroom"},
        {"blocks": "4-4", "device": "gpu0"},
    )
    found = read_plan_file(path, 4)
    assert found.stages == (Stage(first=1, last=3), Stage(first=4, last=4))
    assert found.reasons == ("planned for cpu:0 and cpu:1 (it has room)", "planned for gpu0")


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (["1-2", "4-4"], "block_3 is in no stage before stage 4-4"),
        (["1-2", "2-4"], "block_2 is in stage 2-4 and in stage 1-2 before it"),
        (["1-2", "3-4", "1-3"], "block_1 is in stage 1-3 and in stage 1-2 before it"),
        (["2-4"], "block_1 is in no stage before stage 2-4"),
        (["1-3", "4-3"], "stage 4-3 is no run of blocks"),
        (["0-3"], "stage 0-3 is no run of blocks"),
        (["1-3"], "a plan of 3 blocks, but the model has 4: it lacks block_4"),
        (["1-5"], "a plan of 5 blocks, but the model has 4: there is no block_5"),
        ([], "a plan without stages"),
        (["one"], "not what `blockrelay plan --json` writes"),
        ([7], "not what `blockrelay plan --json` writes"),
    ],
)
def test_stages_that_are_no_plan_of_the_model_are_refused(tmp_path: Path, stages: list[Any], said: str) -> None:
    path = written(tmp_path, *({"blocks": blocks} for blocks in stages))
    with pytest.raises(UsageError, match=said) as raised:
        read_plan_file(path, 4)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_class_of_each_block_is_a_plan_too(tmp_path: Path, wrapped: bool) -> None:
    """The execution plan of the pipeline server: consecutive blocks of one class are a stage."""
    classes = {"block_3": "GPU", "block_1": "GPU", "block_2": "cpu", "block_4": "GPU"}
    (tmp_path / "p").write_text(json.dumps({"plan": classes, "k": 2} if wrapped else classes))
    found = read_plan_file(tmp_path / "p", 4)
    assert found.text == "1-1,2-2,3-4"
    assert found.devices == ((ANY_GPU, ANY_CPU), (ANY_CPU,), (ANY_GPU, ANY_CPU))
    assert found.classes == ("GPU", "CPU", "GPU") and found.reasons[2] == "the plan has GPU for it"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"block_1": "GPU", "block_3": "GPU", "block_4": "CPU"}', "block_2 is missing"),
        ('{"block_1": "GPU", "block_1": "CPU"}', "block_1 is there twice"),
        ('{"plan": {"block_2": "GPU", "block_2": "GPU"}}', "block_2 is there twice"),
        ('{"block_1": "TPU"}', "block_1 is for 'tpu': a block is for GPU or CPU"),
        ('{"layer_1": "GPU"}', "'layer_1' is no block: they are called block_1, block_2 and so on"),
        ('{"block_1": "GPU", "block_2": "CPU"}', "a plan of 2 blocks, but the model has 4: it lacks block_3"),
        ('{"plan": {}}', "not what `blockrelay plan --json` writes"),
        ('{"block_1": 7}', "block_1 is for '7': a block is for GPU or CPU"),
    ],
)
def test_classes_that_are_no_plan_of_the_model_are_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "p").write_text(content)
    with pytest.raises(UsageError, match=said) as raised:
        read_plan_file(tmp_path / "p", 4)
    assert "\n" not in str(raised.value)


def test_classes_of_devices_are_kept(tmp_path: Path) -> None:
    found = read_plan_file(written(tmp_path, {"blocks": "1-3", "devices": ["a"], "class": "GPU"}, {"blocks": "4-4"}), 4)
    assert found.classes == ("GPU", "") and found.for_gpus == (True, False)
    assert parse_planned(found.to_json(), "again") == found
    untold = read_plan_file(written(tmp_path, {"blocks": "1-3", "devices": ["gpu0"]}, {"blocks": "4-4"}), 4)
    assert untold.classes == () and untold.for_gpus == (True, False), "by the id of the device"


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"stages": 1}', '{"stages": [1]}', "\x00", "[" * 100_000])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "p").write_text(content)
    with pytest.raises(UsageError, match="not what `blockrelay plan --json` writes"):
        read_plan_file(tmp_path / "p", 4)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing: No such file"):
        read_plan_file(tmp_path / "nothing", 4)
