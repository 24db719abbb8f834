"""Models and repositories are recognised by the names of folders in Hugging Face's cache."""

from pathlib import Path

import pytest

from blockrelay.block_folder.hub_cache import cached_repository, model_name

HUB = "hub/models--acme--tiny-1b"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        (f"{HUB}/snapshots/0123abcd", "acme/tiny-1b"),
        (f"{HUB}/snapshots/0123abcd/onnx", "acme/tiny-1b"),
        ("hub/models--gpt2/snapshots/0123abcd", "gpt2"),
        ("my-models/tiny-1b", "tiny-1b"),
        ("snapshots/0123abcd", "0123abcd"),
        (f"{HUB}/blobs", "blobs"),
        ("hub/datasets--acme--text/snapshots/0123abcd", "0123abcd"),
    ],
)
def test_a_snapshot_is_called_as_its_repository(folder: str, name: str, tmp_path: Path) -> None:
    place = tmp_path / folder
    place.mkdir(parents=True)
    assert model_name(place) == name
    link = tmp_path / "link"
    link.symlink_to(place)
    assert model_name(link) == name
    repository = cached_repository(place)
    assert (repository is None) == (name == place.name), "a folder of its own"
