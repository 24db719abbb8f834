"""Opening a block folder: whole ones open, anything missing, altered or pointing outside is refused by file name."""

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import BlockFolderError
from blockrelay_converter.convert import convert
from tests.support.models.checkpoints import CHAT_TEMPLATE, write_checkpoint
from tests.support.models.hub_cache import cached
from tests.support.models.lfs import POINTER


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    write_checkpoint(root / "checkpoint", seed=1, num_hidden_layers=2, hidden_size=32, intermediate_size=48)
    convert(root / "checkpoint", root / "blocks", precision="w8a8", report=lambda *_: None, name="tiny")
    return root / "blocks"


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


def test_a_whole_folder_opens_and_gives_its_tensors_read_only(original: Path) -> None:
    folder = open_block_folder(original)

    assert folder.model.name == "tiny"
    assert folder.model.blocks == 3
    tensors = folder.tensors(1)
    assert tensors["embedding"].shape == (512, 32)
    assert tensors["qkv.q"].dtype == np.int8
    for array in (*tensors.values(), *folder.rotary()):
        assert not array.flags.writeable
        assert array.ctypes.data % 64 == 0
    cos, sin = folder.rotary()
    assert cos.shape == sin.shape == (512, 4)
    assert (cos[0] == 1).all()
    assert (sin[0] == 0).all()
    assert folder.graph("qkv")
    assert folder.tokenizer_path == original / "tokenizer.json"
    assert folder.chat_template() == CHAT_TEMPLATE


def test_a_block_of_another_basis_is_refused_though_its_hash_is_in_the_manifest(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=1, num_hidden_layers=2, hidden_size=32, intermediate_size=96)
    for name, precision in (("rotated", "w8a8"), ("original", "w8a8,block_3=fp32")):
        convert(checkpoint, tmp_path / name, precision=precision, report=lambda *_: None, answers=False)
        assert open_block_folder(tmp_path / name, known_answers=False).manifest.basis == name
    rotated, other = (tmp_path / name / "blocks/block_2.bin" for name in ("rotated", "original"))
    before, after = (hashlib.sha256(each.read_bytes()).hexdigest() for each in (rotated, other))
    shutil.copy(other, rotated)
    manifest = tmp_path / "rotated/manifest.json"
    manifest.write_text(manifest.read_text().replace(before, after))
    with pytest.raises(BlockFolderError, match=r"block_2\.bin: not rotated, as the others of its folder: convert the "):
        open_block_folder(tmp_path / "rotated", known_answers=False)
    open_block_folder(tmp_path / "rotated", known_answers=False, blocks=[1, 3])  # not for a stage without it


@pytest.mark.parametrize("part", ["gs", "gm"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_group_of_weights_that_is_not_finite_is_refused_by_tensor(tmp_path: Path, part: str, value: float) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=1, num_hidden_layers=2, hidden_size=32, intermediate_size=96)
    precision = "w8a8,block_2=w4a8"
    convert(checkpoint, tmp_path / "out", precision=precision, report=lambda *_: None, answers=False)
    # Given a folder whose manifest fits its files
    path = tmp_path / "out/blocks/block_2.bin"
    place = open_block_folder(tmp_path / "out", known_answers=False).manifest.block(2).tensors[f"down.{part}"]
    old, content = path.read_bytes(), bytearray(path.read_bytes())
    content[place.offset + 2 : place.offset + 4] = np.float16(value).tobytes()
    path.write_bytes(content)
    manifest = tmp_path / "out/manifest.json"
    before, after = (hashlib.sha256(each).hexdigest() for each in (old, content))
    manifest.write_text(manifest.read_text().replace(before, after))
    with pytest.raises(BlockFolderError) as caught:
        open_block_folder(tmp_path / "out", known_answers=False)
    assert str(caught.value) == f"{path}: tensor down.{part} holds values that are not finite"
    open_block_folder(tmp_path / "out", known_answers=False, blocks=[1, 3])  # not for a stage without it


def test_a_block_that_does_not_exist_is_named(original: Path) -> None:
    with pytest.raises(BlockFolderError, match="there is no block_4: the model has block_1 to block_3"):
        open_block_folder(original).tensors(4)


def _flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _leave_pointer(path: Path) -> None:
    path.write_bytes(POINTER)


def _link_to_copy(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("file", ["blocks/block_2.bin", "rotary.bin", "tokenizer.json", "graphs/qkv.onnx"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (Path.unlink, "missing"),
        (_flip_bit, "altered"),
        (_cut, "altered"),
        (_link_to_copy, "is a link"),
        (_leave_pointer, "is a Git LFS pointer in place of the file: `git lfs pull`"),
        (_make_fifo, "not a plain file"),
        (_make_folder, "not a plain file"),
    ],
    ids=["missing", "flipped", "cut", "link", "pointer", "fifo", "folder"],
)
def test_a_spoiled_file_is_refused_by_name(
    folder: Path, file: str, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(folder / file)
    with pytest.raises(BlockFolderError) as caught:
        open_block_folder(folder)
    assert file in str(caught.value)
    assert message in str(caught.value)


def test_a_linked_directory_inside_the_folder_is_refused(folder: Path) -> None:
    (folder / "blocks").rename(folder.parent / "outside")
    (folder / "blocks").symlink_to(folder.parent / "outside")
    with pytest.raises(BlockFolderError, match="blocks: is a link"):
        open_block_folder(folder)


def test_a_folder_in_the_cache_of_hugging_face_has_links_within_its_repository(folder: Path, tmp_path: Path) -> None:
    snapshot = cached(folder, tmp_path / "hub")
    assert (snapshot / "blocks/block_2.bin").is_symlink()
    assert open_block_folder(snapshot).manifest == open_block_folder(folder).manifest
    (snapshot / "blocks/block_2.bin").unlink()
    (snapshot / "blocks/block_2.bin").symlink_to(folder / "blocks/block_2.bin")
    with pytest.raises(BlockFolderError, match=r"block_2\.bin: is a link"):
        open_block_folder(snapshot)


def test_a_folder_without_a_manifest_is_refused(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(BlockFolderError, match=r"manifest\.json: missing"):
        open_block_folder(folder)


@pytest.mark.parametrize("beside", ["tokenizer.json", "config.json"])
def test_onnx_blocks_are_no_block_folder_whatever_lies_beside_them(tmp_path: Path, beside: str) -> None:
    (tmp_path / "block_1.onnx").write_bytes(b"")
    (tmp_path / beside).write_text("{}")
    with pytest.raises(BlockFolderError, match=r"blockrelay import.*up --blocks"):
        open_block_folder(tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BlockFolderError, match="no such block folder"):
        open_block_folder(tmp_path / "nowhere")


def test_other_files_in_the_folder_do_no_harm(folder: Path) -> None:
    (folder / "MODEL_CARD.md").write_text("hello")
    open_block_folder(folder)


def test_a_worker_checks_only_its_own_blocks_but_misses_no_missing_one(folder: Path) -> None:
    _flip_bit(folder / "blocks/block_2.bin")
    open_block_folder(folder, blocks=[1, 3])
    open_block_folder(folder, blocks=[])
    with pytest.raises(BlockFolderError, match=r"block_2\.bin"):
        open_block_folder(folder, blocks=[2])
    (folder / "blocks/block_2.bin").unlink()
    with pytest.raises(BlockFolderError, match=r"block_2\.bin: missing"):
        open_block_folder(folder, blocks=[1])


def test_an_exact_folder_without_known_answers_opens_only_on_request(folder: Path) -> None:
    manifest = open_block_folder(folder).manifest
    without = replace(manifest, blocks=tuple(replace(block, known_answer=None) for block in manifest.blocks))
    (folder / "manifest.json").write_bytes(without.encode())
    with pytest.raises(BlockFolderError, match="block_1 has no known answer"):
        open_block_folder(folder)
    assert open_block_folder(folder, known_answers=False).manifest == without
