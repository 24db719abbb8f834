"""Converts a checkpoint like an earlier block folder, so that equal blocks are hard links to its files: `--like`.

Blocks that were not calibrated come out equal where their tensors are, and their files are compared. What calibration
does to a block depends on all blocks before it too: of a calibrated folder, blocks are taken whose tensors are those
that the folder was made of, and others are calibrated with the tokens that it kept.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import numpy as np

from blockrelay.block_folder.folder import BlockFolder, check_blocks, file_sha256, open_block_folder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import ModelConfig, Precision
from blockrelay.block_folder.precisions import parse_precisions
from blockrelay.errors import UsageError
from blockrelay.quantities import counted, format_quantity
from blockrelay.text.text_file import read_text_file
from blockrelay_converter.checkpoint.source import CheckpointSource, read_source
from blockrelay_converter.quantisation.calibration_record import REPORT_NAME, CalibrationRecord, read_record
from blockrelay_converter.rotary import Rotation

#: What two models may differ in and have equal blocks, and the context, which has a message of its own.
_FREE = {"name", "family", "eos_ids", "bos_id", "bos_token", "eos_token", "special_tokens", "max_position"}
#: Parts of tokenizer.json that say how batches are cut, and change no token.
_OF_BATCHES = ("truncation", "padding")
#: Positions of the rotary tables that are compared at a time.
_POSITIONS = 4096
#: Errors of a file system that has no link from one place to the other, or allows none.
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}


def open_like(root: Path, out: Path) -> "Like":
    """Opens the block folder `root`, like which a checkpoint is to be converted to the folder `out`.

    Its blocks are not read yet. Raises BlockFolderError for a folder that is none, and UsageError for one of ONNX
    blocks, with a calibration that cannot be used again, or of which `out` is a part.
    """
    folder = open_block_folder(root, blocks=())
    if folder.model.onnx_blocks is not None:
        raise UsageError(f"--like {root}: its ONNX blocks were made by others; give a folder that `convert` has made")
    mine, theirs = out.absolute().resolve(), root.resolve()
    if mine.is_relative_to(theirs) or theirs.is_relative_to(mine):
        raise UsageError(f"{out} and --like {root} lie in each other: give OUT a place of its own")
    return Like(folder, read_record(root, folder.manifest))


class Like:
    """A block folder that one other checkpoint is converted like, and what the result shares with it."""

    def __init__(self, folder: BlockFolder, record: CalibrationRecord | None) -> None:
        self.folder = folder
        self.record = record
        """What it was calibrated with; None if it was not."""
        self.unchanged: frozenset[int] = frozenset()
        """The blocks of a calibrated folder that are made of equal tensors (`compare`)."""
        self.shared: set[int] = set()
        """The blocks of the result that are equal to the folder's."""
        self.linked_bytes = 0
        """Bytes of these that are on the disk once."""

    @property
    def manifest(self) -> Manifest:
        return self.folder.manifest

    def source(self, checkpoint: Path, *, name: str | None, max_position: int | None) -> CheckpointSource:
        """Reads the JSON files of the checkpoint (`read_source`), with the context of the folder.

        Raises UsageError for a model of another shape, context or tokenizer, and for another `max_position`.
        """
        root, context = self.folder.root, self.manifest.model.max_position
        if max_position not in (None, context):
            raise UsageError(f"--max-position {max_position}: --like {root} has a context of {context}; leave it out")
        whole = read_source(checkpoint, name=name) if max_position is None else None
        if whole is not None and whole.model.max_position < context:
            raise UsageError(
                f"--like {root} has a context of {context} tokens, the checkpoint {whole.model.max_position}: "
                "convert without --like"
            )
        found = read_source(checkpoint, name=name, max_position=context)
        if (why := shape_difference(found.model, self.manifest.model)) is not None:
            raise UsageError(f"--like {root} has another shape: {why}; convert without --like")
        if not self._has_tokenizer(found.texts.tokenizer):
            raise UsageError(f"--like {root} has another tokenizer than the checkpoint: convert without --like")
        return found

    def precisions(self, asked: str | None) -> tuple[Precision, ...]:
        """Returns the precisions of the folder. Raises UsageError if `asked`, the text of an option, is another mix."""
        own = self.manifest.precisions
        if asked is not None and parse_precisions(asked, len(own)) != own:
            raise UsageError(
                f"--precision {asked}: --like {self.folder.root} is in {self.manifest.precision}; leave out --precision"
            )
        return own

    def check_text(self, path: Path | None) -> None:
        """Raises UsageError for a text to calibrate with, in the file `path`, that is not the folder's."""
        if path is None:
            return
        if self.record is None:
            raise UsageError(f"--calibrate {path}: --like {self.folder.root} is not calibrated; leave out --calibrate")
        if hashlib.sha256(read_text_file(path).encode()).hexdigest() != self.record.text_sha256:
            raise UsageError(
                f"--calibrate {path}: --like {self.folder.root} was calibrated with another text; leave out --calibrate"
            )

    def compare(self, sources: Mapping[int, str]) -> None:
        """Finds the `unchanged` blocks of a calibrated folder by the digests of their tensors, by number."""
        if self.record is not None:
            self.unchanged = frozenset(
                index for index, block in self.record.blocks.items() if sources[index] == block.source
            )

    def verify(self) -> None:
        """Compares all files with the manifest. Raises BlockFolderError that names the first wrong one."""
        check_blocks(self.folder, range(1, self.folder.model.blocks + 1))

    def check_rotation(self, rotation: Rotation) -> None:
        """Raises UsageError if the checkpoint rotates queries and keys otherwise than the folder."""
        own, context = self.folder.rotary(), self.manifest.model.max_position
        for first in range(0, context, _POSITIONS):
            places = slice(first, min(first + _POSITIONS, context))
            tables = rotation.tables(places.start, places.stop)
            if not all(np.array_equal(mine, its[places]) for mine, its in zip(tables, own, strict=True)):
                raise UsageError(
                    f"--like {self.folder.root} has another rotary embedding than the checkpoint (rope_theta, "
                    "rope_scaling): convert without --like"
                )

    def take(self, index: int, path: Path) -> None:
        """Makes `path`, which does not exist, the folder's file of the unchanged block `index`: a link, or a copy."""
        if not self._link(index, path):
            shutil.copyfile(self._file(index), path)
        self.shared.add(index)

    def adopt(self, index: int, path: Path) -> None:
        """Makes the file `path` of block `index`, which has been written, a link to the folder's if both are equal."""
        if index in self.shared or file_sha256(path) != self.manifest.block_file(index).sha256:
            return
        link = path.with_name(f"{path.name}.link")
        if self._link(index, link):
            link.replace(path)
        self.shared.add(index)

    def line(self) -> str:
        """Returns what the result shares with the folder, in a line for people."""
        root, blocks = self.folder.root, counted(self.folder.model.blocks, "block")
        if not self.shared:
            lost = "" if self.record else f", or calibrated and lost {REPORT_NAME}"
            return f"0 of {blocks} shared with {root}: it was made of other tensors{lost}"
        size = sum(self.manifest.block_file(index).bytes for index in self.shared)
        if self.linked_bytes < size:
            return f"{len(self.shared)} of {blocks} equal to those of {root}, as copies: no links lead there"
        return f"{len(self.shared)} of {blocks} shared with {root}, {format_quantity(size, 'B')} saved"

    def _file(self, index: int) -> Path:
        return (self.folder.root / self.manifest.block(index).file).resolve()

    def _link(self, index: int, path: Path) -> bool:
        """Makes `path` a link to the folder's file of block `index`. Returns whether the file system allows that."""
        try:
            os.link(self._file(index), path)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            return False
        self.linked_bytes += self.manifest.block_file(index).bytes
        return True

    def _has_tokenizer(self, content: bytes | None) -> bool:
        path = self.folder.tokenizer_path
        if path is None or content is None:
            return path is None and content is None
        return path.read_bytes() == content or _vocabulary(path.read_bytes()) == _vocabulary(content)


def shape_difference(mine: ModelConfig, theirs: ModelConfig) -> str | None:
    """Returns the first setting in which blocks of two models differ, in words for people; None if they fit."""
    for name in (field.name for field in fields(ModelConfig) if field.name not in _FREE):
        if getattr(mine, name) != getattr(theirs, name):
            return f"{name} {getattr(theirs, name)}, where the checkpoint has {getattr(mine, name)}"
    return None


def _vocabulary(content: bytes) -> dict[str, object]:
    """Returns a tokenizer.json, without the parts that change no token."""
    return {name: part for name, part in json.loads(content).items() if name not in _OF_BATCHES}
