"""The file that `blockrelay plan --json` writes and a scheduler reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockrelay.errors import UsageError
from blockrelay.planning.plan_file import read_plan_file
from blockrelay.protocol.plan import Stage


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
        (["1-2", "4-4"], "stage 4-4 does not continue at block_3"),
        (["1-2", "2-4"], "stage 2-4 does not continue at block_3"),
        (["2-4"], "stage 2-4 does not continue at block_1"),
        (["1-3", "4-3"], "stage 4-3 does not continue at block_4"),
        (["1-3"], "a plan of 3 blocks, but the model has 4"),
        (["1-5"], "a plan of 5 blocks, but the model has 4"),
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


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"stages": 1}', '{"stages": [1]}', "\x00", "[" * 100_000])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "p").write_text(content)
    with pytest.raises(UsageError, match="not what `blockrelay plan --json` writes"):
        read_plan_file(tmp_path / "p", 4)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing: No such file"):
        read_plan_file(tmp_path / "nothing", 4)
