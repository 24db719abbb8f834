"""Which block folders are one model in several precisions."""

from pathlib import Path

import pytest

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.other_precisions import open_precisions
from blockrelay.errors import UsageError
from blockrelay_converter.convert import convert
from tests.support.models.checkpoints import write_checkpoint


def folder_of(root: Path, precision: str, *, seed: int = 3, **changes: object) -> Path:
    """A folder of a tiny checkpoint, which `seed` decides."""
    name = f"{precision}-{seed}-{'-'.join(map(str, changes.values()))}"
    write_checkpoint(root / f"{name} checkpoint", seed=seed, **changes)  # pyright: ignore[reportArgumentType]
    convert(root / f"{name} checkpoint", root / name, precision=precision, report=lambda *_: None, name=name)
    return root / name


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    return open_block_folder(folder_of(tmp_path_factory.mktemp("own"), "w8a8"), blocks=[])


@pytest.mark.parametrize("precision", ["w4a8", "fp32", "fp16", "w8a8,block_1=w4a8"])
def test_a_conversion_of_the_same_checkpoint_is_taken(own: BlockFolder, precision: str, tmp_path: Path) -> None:
    other = folder_of(tmp_path, precision)
    assert [one.root for one in open_precisions(own, [other])] == [own.root, other]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 4}, "it has other embeddings, so it comes from another checkpoint"),
        ({"max_position_embeddings": 128}, "its context is 128 tokens, not"),
        ({"intermediate_size": 96}, "it has another shape"),
    ],
)
def test_one_of_another_model_is_refused(own: BlockFolder, changes: dict[str, int], said: str, tmp_path: Path) -> None:
    other = folder_of(tmp_path, "w4a8", **changes)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError) as error:
        open_precisions(own, [other])
    assert said in str(error.value) and str(other) in str(error.value)


def test_two_of_one_precision_are_refused(own: BlockFolder, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="are both w8a8: leave one of them out"):
        open_precisions(own, [folder_of(tmp_path, "w8a8")])
