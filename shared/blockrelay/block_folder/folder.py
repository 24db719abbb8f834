"""Opens a block folder: checks its files against the manifest and maps the tensors of a block.

Nothing in a folder is trusted before it is checked: paths stay inside, no link is followed, sizes and SHA-256 must be
those of the manifest. BlockFolderError names the first file that is wrong. There are two exceptions. A snapshot in
Hugging Face's cache may consist of links within that cache (`hub_cache`). Files of ONNX blocks made by others may be
links within their folder (`weight_places.check_inside`).
"""

import hashlib
import os
import stat
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.hub_cache import HUB_NAME, cached_repository
from blockrelay.block_folder.lfs_pointer import IS_POINTER, is_lfs_pointer
from blockrelay.block_folder.manifest import (
    CHAT_TEMPLATE_NAME,
    MANIFEST_NAME,
    ONNX_BLOCKS_NAME,
    ROTARY_NAME,
    TOKENIZER_NAME,
    FileSpec,
    Manifest,
    decode_manifest,
)
from blockrelay.block_folder.model import ModelConfig, in_groups, is_exact
from blockrelay.errors import BlockFolderError
from blockrelay.host.cpu import cores
from blockrelay.onnx_blocks.blocks_file import read_blocks_file
from blockrelay.onnx_blocks.weight_places import check_inside
from blockrelay.typed_command import typed

#: Hex digits of `BlockFolder.model_key`: 64 bits.
MODEL_KEY_DIGITS = 16
_MAX_MANIFEST_BYTES = 64 << 20
#: The file beside a manifest of ONNX blocks that lie elsewhere, with the absolute path of their folder. The path is not
#: in the manifest, because a model is the same wherever it lies.
ONNX_FOLDER_NAME = "onnx_folder"
_MAX_PATH_BYTES = 1 << 12
#: Norms whose weights a rotated block has in the linear layers behind them. Ones are left, or powers of two after
#: calibration.
_FOLDED_NORMS = {"norm_attention", "norm_mlp", "norm_final"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFolder:
    """A checked block folder, as `open_block_folder` returns it. Holds no file open."""

    root: Path
    manifest: Manifest
    onnx_root: Path | None = None
    """The folder with the files of ONNX blocks made by others; None for other models."""
    unchecked: frozenset[int] = frozenset()
    """Numbers of the blocks whose files were not read: `check_blocks` compares them with the manifest."""

    @property
    def model(self) -> ModelConfig:
        return self.manifest.model

    @property
    def model_key(self) -> str:
        """The model's name in Redis: the first MODEL_KEY_DIGITS digits of its hash."""
        return self.manifest.model_hash[:MODEL_KEY_DIGITS]

    def tensors(self, index: int) -> dict[str, NDArray[Any]]:
        """Maps the tensors of block `index` (1 to N) and returns them by name, as read-only arrays.

        Processes share the memory, and it is loaded on first use. The arrays are 64-byte aligned views of one mapping,
        which lives as long as any of them. Raises BlockFolderError for another index, or if the file is shorter than
        the manifest says. Not for models of ONNX blocks made by others, whose files may lie elsewhere.
        """
        block = self.manifest.block(index)
        raw = np.memmap(self.root / block.file, dtype=np.uint8, mode="r").view(np.ndarray)
        tensors: dict[str, NDArray[Any]] = {}
        for name, spec in block.tensors.items():
            if spec.offset + spec.nbytes > raw.size:  # the file shrank after it was checked
                raise BlockFolderError(f"{block.file}: shorter than its manifest says")
            view = raw[spec.offset : spec.offset + spec.nbytes]
            tensors[name] = view.view(np.dtype(spec.dtype).newbyteorder("<")).reshape(spec.shape)
        return tensors

    def rotary(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Maps the tables of cos and sin: float32 [max_position, head_dim/2] each, read-only.

        Models of ONNX blocks made by others have no such tables.
        """
        shape = (2, self.model.max_position, self.model.head_dim // 2)
        tables = np.memmap(self.root / ROTARY_NAME, dtype="<f4", mode="r", shape=shape).view(np.ndarray)
        return tables[0], tables[1]

    def graph(self, kind: str) -> bytes:
        """Reads the ONNX graph of a kind of linear layer; `kind` is a key of `Manifest.graphs`."""
        return (self.root / self.manifest.graphs[kind]).read_bytes()

    @property
    def tokenizer_path(self) -> Path | None:
        """The path of tokenizer.json, or None for a model that takes token ids only."""
        return self.root / TOKENIZER_NAME if TOKENIZER_NAME in self.manifest.files else None

    def chat_template(self) -> str | None:
        """Reads the chat template (Jinja); None if the model has none."""
        if CHAT_TEMPLATE_NAME not in self.manifest.files:
            return None
        return (self.root / CHAT_TEMPLATE_NAME).read_text(encoding="utf-8")


def open_block_folder(
    root: Path | str, *, blocks: Collection[int] | None = None, known_answers: bool = True
) -> BlockFolder:
    """Checks the folder `root` and returns it.

    Every file must be there, be a plain file and have its size. The SHA-256 is computed for all files, except those of
    blocks not in `blocks` (None means all blocks): a worker passes the blocks of its stage, a gateway an empty list.
    Blocks of exact precisions must have known answers, unless `known_answers` is False (for the converter, before it
    has computed them). Raises BlockFolderError that names the file and says what is wrong with it.
    """
    root = Path(root)
    if not root.is_dir():
        raise BlockFolderError(_no_folder(root))
    refuse_onnx_blocks(root)
    if not (root / MANIFEST_NAME).exists() and (root / "config.json").exists():
        raise BlockFolderError(f"{root}: a checkpoint, not a block folder; make one of it with `{_convert(root)}`")
    if not os.path.lexists(root / MANIFEST_NAME) and not (root / "blocks").exists():
        raise BlockFolderError(
            f"{root}: no block folder, it has no {MANIFEST_NAME}; make one of a Hugging Face checkpoint with "
            f"`{_convert('CHECKPOINT')}`"
        )
    _check_plain(root, MANIFEST_NAME)
    with (root / MANIFEST_NAME).open("rb") as file:
        content = file.read(_MAX_MANIFEST_BYTES + 1)
    if len(content) > _MAX_MANIFEST_BYTES:
        raise BlockFolderError(f"{root / MANIFEST_NAME}: larger than {_MAX_MANIFEST_BYTES >> 20} MiB")
    try:
        manifest = decode_manifest(content)
    except BlockFolderError as error:
        raise BlockFolderError(f"{root}/{error}") from None
    for block in manifest.blocks:
        if known_answers and is_exact(manifest.precision_of(block.index)) and block.known_answer is None:
            raise BlockFolderError(f"{root / MANIFEST_NAME}: {block.name} has no known answer; convert the model again")
    onnx_root = None if manifest.model.onnx_blocks is None else _onnx_root(root)
    unread = {block.file for block in manifest.blocks if blocks is not None and block.index not in blocks}
    onnx_files = set(manifest.onnx_files())
    if onnx_files and unread:
        unread = onnx_files - _files_of_blocks(root, blocks or ())
    places = {path: (onnx_root or root if path in onnx_files else root) / path for path in manifest.files}
    for path, spec in manifest.files.items():
        if path in onnx_files:
            size = check_inside(onnx_root or root, path, file=str(places[path])).stat().st_size
        else:
            size = _check_plain(root, path)
        if size != spec.bytes and is_lfs_pointer(places[path]):
            raise BlockFolderError(f"{places[path]}: {IS_POINTER}")
        if size != spec.bytes:
            raise BlockFolderError(f"{places[path]}: altered: {size} bytes instead of {spec.bytes}")
    unchecked = frozenset(block.index for block in manifest.blocks if block.file in unread)
    folder = BlockFolder(root=root, manifest=manifest, onnx_root=onnx_root, unchecked=unchecked)
    _check_sums({places[path]: spec for path, spec in manifest.files.items() if path not in unread})
    for block in manifest.blocks:
        if block.file not in unread:
            _check_content(folder, block.index)
    return folder


def check_blocks(folder: BlockFolder, blocks: Collection[int]) -> None:
    """Compares the files of `blocks` with the manifest, those that were not checked when the folder was opened.

    Raises BlockFolderError as `open_block_folder` does. Not for models of ONNX blocks made by others.
    """
    manifest = folder.manifest
    specs = [manifest.block(index) for index in sorted(folder.unchecked & set(blocks))]
    _check_sums({folder.root / block.file: manifest.files[block.file] for block in specs})
    for block in specs:
        _check_content(folder, block.index)


def _check_sums(files: Mapping[Path, FileSpec]) -> None:
    """Raises BlockFolderError that names the first file with another SHA-256 than its own here."""
    with ThreadPoolExecutor(cores(), thread_name_prefix="sha256") as pool:
        sums = list(pool.map(file_sha256, files))
    for (place, spec), sha256 in zip(files.items(), sums, strict=True):
        if sha256 != spec.sha256:
            raise BlockFolderError(f"{place}: altered: its SHA-256 is not the one in {MANIFEST_NAME}")


def _check_content(folder: BlockFolder, index: int) -> None:
    """Raises BlockFolderError for numbers in the file of a block that its precision or the folder's basis excludes."""
    if in_groups(folder.manifest.precision_of(index)):
        _check_groups(folder, index)
    if folder.manifest.basis == "rotated":
        _check_rotated(folder, index)


def _check_groups(folder: BlockFolder, index: int) -> None:
    """Raises BlockFolderError if a scale or a minimum of a group of weights is not finite."""
    for name, tensor in folder.tensors(index).items():
        if name.endswith((".gs", ".gm")) and not np.isfinite(tensor).all():
            path = folder.root / folder.manifest.block(index).file
            raise BlockFolderError(f"{path}: tensor {name} holds values that are not finite")


def _check_rotated(folder: BlockFolder, index: int) -> None:
    """Raises BlockFolderError for a block that is not rotated: its norms are other numbers than powers of two."""
    tensors = folder.tensors(index)
    for name in _FOLDED_NORMS & tensors.keys():
        if not (np.frexp(np.abs(tensors[name]))[0] == 0.5).all():
            path = folder.root / folder.manifest.block(index).file
            raise BlockFolderError(f"{path}: not rotated, as the others of its folder: convert the model again")


def _convert(checkpoint: Path | str) -> str:
    return typed(f"convert {checkpoint} OUT")


def _no_folder(root: Path) -> str:
    """Returns the message for a path that is no folder. It may be the name of a model on Hugging Face's hub."""
    if root.exists():
        return f"{root}: a file, not a block folder"
    name = os.path.relpath(root)
    if not HUB_NAME.fullmatch(name) or name.startswith("."):
        return f"{root}: no such block folder"
    return (
        f"{root}: no such block folder; to serve {name} of Hugging Face, download its files "
        f"(`hf download {name} --local-dir CHECKPOINT`) and make a block folder of them with `{_convert('CHECKPOINT')}`"
    )


def refuse_onnx_blocks(root: Path) -> None:
    """Raises BlockFolderError for a folder of ONNX blocks without a manifest, which is neither a block folder nor a
    checkpoint."""
    if (root / "block_1.onnx").exists() and not (root / MANIFEST_NAME).exists():
        raise BlockFolderError(
            f"{root}: ONNX blocks, not a block folder; make one of them with `{typed(f'import {root} OUT')}`, or serve "
            f"them as they are with `{typed(f'up --blocks {root}')}`"
        )


def _files_of_blocks(root: Path, blocks: Collection[int]) -> set[str]:
    """Returns the files of `blocks` of a model of ONNX blocks: graphs, and the weights beside them.

    `blocks.json` lists them; like any file it is compared with the manifest.
    """
    if not blocks:
        return set()
    listed = read_blocks_file(root / ONNX_BLOCKS_NAME)
    return {name for block in listed if block.signature.index in blocks for name in block.files}


def _onnx_root(root: Path) -> Path:
    """Returns the folder of the ONNX files: `root`, unless its file ONNX_FOLDER_NAME names another."""
    named = root / ONNX_FOLDER_NAME
    if not named.exists():
        return root
    with named.open("rb") as file:
        content = file.read(_MAX_PATH_BYTES + 1)
    try:
        folder = Path(content.decode().strip())
    except UnicodeDecodeError:
        folder = Path()
    if len(content) > _MAX_PATH_BYTES or not folder.is_absolute():
        raise BlockFolderError(f"{named}: must have the absolute path of a folder of ONNX blocks")
    return folder


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, in hex. Reads in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_plain(root: Path, path: str) -> int:
    """Returns the size in bytes of `root/path`. Raises BlockFolderError unless it is a regular file without a link
    below `root`; in a snapshot of Hugging Face's cache the file itself may be a link into the snapshot's repository."""
    place = root
    mode = size = 0
    for part in path.split("/"):
        place /= part
        try:
            status = place.lstat()
        except OSError:
            raise BlockFolderError(f"{root / path}: missing from the block folder") from None
        if stat.S_ISLNK(status.st_mode):
            if place == root / path and (target := _in_cache(root, place)) is not None:
                status = target.stat()
                mode, size = status.st_mode, status.st_size
                break
            raise BlockFolderError(f"{place}: is a link; a block folder must hold plain files")
        mode, size = status.st_mode, status.st_size
    if not stat.S_ISREG(mode):
        raise BlockFolderError(f"{place}: is not a plain file")
    return size


def _in_cache(root: Path, link: Path) -> Path | None:
    """Returns the file that `link` leads to, if `root` is a snapshot and the file is in its repository; else None."""
    repository = cached_repository(root)
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):  # the link leads nowhere, or in a circle
        return None
    return target if repository is not None and target.is_relative_to(repository) else None
