"""The file calibration.json beside a calibrated block folder: what it was calibrated with, and how much that helped.

It is not in the manifest: the last (fourth) digit of errors may differ between machines, and the model hash must not.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import LINEARS
from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import UsageError

REPORT_NAME = "calibration.json"


@dataclass(frozen=True, slots=True)
class CalibratedBlock:
    """One block of a calibrated folder."""

    source: str
    """The SHA-256 of the tensors that it was made of (`block_writer.source_digest`)."""
    file: str
    """The SHA-256 of its file."""
    errors: Mapping[str, Any]
    """Relative error of the output of each calibrated linear layer, `before` and `after`, and its `share` of smoothing,
    by the layer's kind."""


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """The content of calibration.json."""

    text_sha256: str
    """The SHA-256 (hex) of the text."""
    pieces: NDArray[np.int64]
    """The pieces of the text that were read, as token ids [S, L] (`calibration.sequences`)."""
    blocks: Mapping[int, CalibratedBlock]
    """All blocks of the folder, by number."""

    def encode(self) -> bytes:
        """Returns the bytes of the file."""
        blocks = {f"block_{index}": block for index, block in sorted(self.blocks.items())}
        content = {
            "text_sha256": self.text_sha256,
            "tokens": self.pieces.size,
            "relative_errors": {name: dict(block.errors) for name, block in blocks.items()},
            "pieces": [" ".join(map(str, piece)) for piece in self.pieces.tolist()],
            "blocks": {name: {"source": block.source, "file": block.file} for name, block in blocks.items()},
        }
        return json.dumps(content, indent=1).encode() + b"\n"


def read_record(root: Path, manifest: Manifest) -> CalibrationRecord | None:
    """Returns the record of the block folder `root`; None for one that was not calibrated.

    Raises UsageError for a record without what another checkpoint is calibrated with (of an older release), or of
    other blocks than those of the folder.
    """
    path = root / REPORT_NAME
    if not path.exists():
        return None
    fields = Fields.parse(path.read_bytes(), str(path), UsageError)
    errors, text = fields.nested("relative_errors"), fields.text("text_sha256")
    if not fields.has("pieces"):
        fields.fail("an older release calibrated it, and kept no text: convert its checkpoint again with --calibrate")
    blocks: dict[int, CalibratedBlock] = {}
    named = fields.nested("blocks")
    for block in manifest.blocks:
        own = named.nested(block.name)
        blocks[block.index] = CalibratedBlock(own.text("source"), own.text("file"), errors.take(block.name))
        if blocks[block.index].file != manifest.block_file(block.index).sha256:
            fields.fail(f"it is of another {block.name} than {path.parent} has: convert that checkpoint again")
    pieces = [piece.split() for piece in fields.texts("pieces")]
    lengths = {len(piece) for piece in pieces}
    if len(lengths) != 1 or not all(one.isdecimal() and int(one) < 1 << 31 for piece in pieces for one in piece):
        fields.fail("pieces are not token ids, equally many in each: convert its checkpoint again with --calibrate")
    return CalibrationRecord(text, np.array(pieces, np.int64), blocks)


def report_table(report: bytes) -> list[tuple[str, ...]]:
    """Returns a calibration.json, given as bytes, as rows of a table: a heading, then each block's errors by linear."""
    blocks = json.loads(report)["relative_errors"]
    lines: list[tuple[str, ...]] = [("block", *LINEARS)]
    for block, linears in blocks.items():
        pairs = [linears.get(linear) for linear in LINEARS]
        lines.append((block, *("" if one is None else f"{one['before']:.4f} > {one['after']:.4f}" for one in pairs)))
    return lines
