"""The default name of a converted model."""

import json
import os
from pathlib import Path

import pytest

from blockrelay_converter.checkpoint.source import original_name, read_source
from tests.support.models.checkpoints import write_checkpoint


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("/home/ada/models/tiny-llama", "tiny-llama"),
        ("./checkpoints/run 7", ""),
        ("", ""),
        (None, ""),
        (7, ""),
    ],
)
def test_config_json_may_say_what_a_checkpoint_was_called(told: object, name: str) -> None:
    assert original_name(json.dumps({"_name_or_path": told}).encode()) == name
    assert original_name(b"{}") == ""


def test_a_mounted_folder_has_the_name_of_its_mount_which_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mounted folder does not name its model: in a container every checkpoint is `/in`."""
    write_checkpoint(folder := tmp_path / "in", seed=1)
    assert read_source(folder).model.name == "in"
    monkeypatch.setattr(os.path, "ismount", lambda path: path == folder)
    found = read_source(folder)
    assert found.model.name == "in" and any("call the model in:" in note and "--name" in note for note in found.notes)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"_name_or_path": "acme/tiny"}))
    assert read_source(folder).model.name == "acme/tiny"
    named = read_source(folder, name="mine")
    assert named.model.name == "mine" and not any("mounted" in note for note in named.notes)
