"""`blocks.json`: the files of a folder of ONNX blocks, with the SHA-256 of each and what the blocks declare.

It is generated when a user asks for it, and read again to see whether a file has been altered since. The same files
identify the blocks that a block folder was imported from (`fingerprint`).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from blockrelay.block_folder.manifest import MANIFEST_NAME, FileSpec, Manifest, decode_file
from blockrelay.block_folder.model import ModelConfig, Precision
from blockrelay.block_folder.precisions import format_precisions, kv_item_bytes
from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.signature import Signature, Tensor, check_names, in_order

_FORMAT = "blockrelay onnx blocks 1"
_MAX_BYTES = 64 << 20
#: Most files of a folder: more than any model has layers.
_MAX_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class BlockFiles:
    """A block, and the files that it consists of, by name: its graph first, then the weights beside it."""

    signature: Signature
    files: Mapping[str, FileSpec]


def block_names(root: Path) -> list[str]:
    """Returns the names of the blocks' files in the folder `root`, in order.

    Raises OnnxBlocksError that names the folder, or the file that is missing or not like the others.
    """
    try:
        names = [path.name for path in root.iterdir() if path.suffix == ".onnx" and not path.name.startswith(".")]
    except FileNotFoundError:
        raise OnnxBlocksError("there is no such folder", file=str(root)) from None
    except OSError as error:
        raise OnnxBlocksError(error.strerror or str(error), file=str(root)) from None
    if not names and (root / MANIFEST_NAME).exists():
        raise OnnxBlocksError(
            "is a block folder of Blockrelay already: it is served as it is, and checked whenever it is opened",
            file=str(root),
        )
    if not names:
        raise OnnxBlocksError("has no ONNX files; blocks are block_1.onnx, block_2.onnx and so on", file=str(root))
    if len(names) > _MAX_BLOCKS:
        raise OnnxBlocksError(
            f"has {len(names):,} ONNX files; a model has at most {_MAX_BLOCKS:,} blocks", file=str(root)
        )
    return in_order(names)


def fingerprint(sha256: Mapping[str, str]) -> str:
    """Returns a SHA-256 (hex) that identifies a folder of blocks, wherever it lies.

    `sha256` has the SHA-256 of each file of the blocks, graphs and weights, by name.
    """
    lines = (f"{sha256[name]} {name}\n" for name in sorted(sha256))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def why_no_stand_in(served: Manifest, imported: Manifest) -> str:
    """Returns why the model `imported` cannot compute in place of the ONNX blocks `served`, on their KV pages.

    "" means that it can: it is an import of exactly these files, and has the same KV pages (`why_other_pages`).
    """
    if imported.imported_from != fingerprint({path: spec.sha256 for path, spec in served.onnx_files().items()}):
        return "it is no import of these blocks in their own precision"
    return why_other_pages(served, imported.model, imported.precisions)


def why_other_pages(served: Manifest, model: ModelConfig, precisions: Sequence[Precision]) -> str:
    """Returns why an import of the ONNX blocks `served` as `model` in these precisions cannot use their KV pages.

    "" means that it can: it has the same KV pages and blocks, and no shorter context.
    """
    original = served.model
    if (original.blocks, original.layers) != (model.blocks, model.layers):
        return f"their import has {model.blocks} blocks, and there are {original.blocks}"
    if (original.kv_heads, original.head_dim, kv_item_bytes(served.precisions)) != (
        model.kv_heads,
        model.head_dim,
        kv_item_bytes(precisions),
    ):
        return (
            f"their import keeps keys and values differently: it is {format_precisions(precisions)}, and they are "
            f"{served.precision} in the blocks"
        )
    if original.max_position > model.max_position:
        return (
            f"the context of their import has {model.max_position} positions, as their tables have, and theirs "
            f"{original.max_position} (--max-position {model.max_position})"
        )
    return ""


def encode_blocks_file(blocks: Sequence[BlockFiles]) -> str:
    """Returns the content of `blocks.json`, which is the same for the same blocks."""
    listed = [
        {
            "name": block.signature.block,
            "file": block.signature.file,
            "files": {name: {"bytes": file.bytes, "sha256": file.sha256} for name, file in block.files.items()},
            "inputs": [asdict(tensor) for tensor in block.signature.inputs],
            "outputs": [asdict(tensor) for tensor in block.signature.outputs],
        }
        for block in blocks
    ]
    return json.dumps({"format": _FORMAT, "blocks": listed}, indent=1) + "\n"


def decode_blocks_file(content: bytes, where: str) -> tuple[BlockFiles, ...]:
    """Decodes `blocks.json`. Raises OnnxBlocksError if it is not a file of this format.

    `where` names the file in messages.
    """
    fields = Fields.parse(content, where, OnnxBlocksError)
    fields.text("format", one_of=(_FORMAT,))
    blocks = tuple(_decoded(one, index) for index, one in enumerate(fields.nested_list("blocks"), 1))
    fields.done()
    return blocks


def read_blocks_file(path: Path) -> tuple[BlockFiles, ...]:
    """Reads `blocks.json` at `path`. Raises OnnxBlocksError if it cannot be read or is not a file of this format."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise OnnxBlocksError(error.strerror or str(error), file=str(path)) from None
    if len(content) > _MAX_BYTES:
        raise OnnxBlocksError(f"larger than {_MAX_BYTES >> 20} MiB", file=str(path))
    return decode_blocks_file(content, str(path))


def all_files(blocks: Iterable[BlockFiles]) -> dict[str, FileSpec]:
    """Returns the files of all blocks by name."""
    return {name: file for block in blocks for name, file in block.files.items()}


def check_unaltered(known: Sequence[BlockFiles], actual: Sequence[BlockFiles], where: str) -> None:
    """Raises OnnxBlocksError that names the first file that is missing in `actual`, altered, or not in `known`.

    It also raises it for a block with other inputs or outputs than in `known`. Both have the same number of blocks.
    `known` comes from a `blocks.json`, which messages call `where`.
    """
    files, expected = all_files(actual), all_files(known)
    for name, file in expected.items():
        present = files.get(name)
        if present is None:
            raise OnnxBlocksError(f"missing; {where} lists it", file=name)
        if present.bytes != file.bytes:
            raise OnnxBlocksError(f"altered: {present.bytes} bytes instead of {file.bytes}", file=name)
        if present.sha256 != file.sha256:
            raise OnnxBlocksError(f"altered: its SHA-256 is not the one in {where}", file=name)
    for name in files:
        if name not in expected:
            raise OnnxBlocksError(f"not listed in {where}", file=name)
    for expected_block, block in zip(known, actual, strict=True):
        if expected_block.signature != block.signature:
            raise OnnxBlocksError(f"{where} says other inputs or outputs", file=block.signature.file)


def _decoded(fields: Fields, index: int) -> BlockFiles:
    fields.text("name", one_of=(f"block_{index}",))
    file = fields.text("file")
    inner = fields.nested("files")
    files = {name: inner.read(name, decode_file) for name in inner.names()}
    if next(iter(files), None) != file:
        fields.fail(f"the first of files must be {file}")
    signature = Signature(index, file, _tensors(fields, file, "inputs"), _tensors(fields, file, "outputs"))
    fields.done()
    return BlockFiles(signature, files)


def _tensors(fields: Fields, file: str, kind: str) -> tuple[Tensor, ...]:
    tensors = tuple(_tensor(one) for one in fields.nested_list(kind))
    check_names(file, kind, [tensor.name for tensor in tensors])
    return tensors


def _tensor(fields: Fields) -> Tensor:
    name, dtype, dims = fields.text("name"), fields.text("dtype"), fields.take("dims")
    if dims is not None and not (isinstance(dims, list) and all(isinstance(dim, int | str) for dim in dims)):
        fields.fail("dims must be a list of numbers and names, or null")
    fields.done()
    return Tensor(name, dtype, None if dims is None else tuple(dims))
