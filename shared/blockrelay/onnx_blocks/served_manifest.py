"""The manifest of ONNX blocks that are served as they are, and what may compute in their place. Pure."""

from collections.abc import Mapping, Sequence

from blockrelay.block_folder.manifest import ONNX_BLOCKS_NAME, BlockSpec, FileSpec, Manifest, check_manifest
from blockrelay.block_folder.model import ModelConfig, Precision
from blockrelay.block_folder.precisions import kv_item_bytes
from blockrelay.onnx_blocks.beside import Beside
from blockrelay.onnx_blocks.blocks_file import BlockFiles, fingerprint
from blockrelay.onnx_blocks.served_shape import ServedShape


def served_manifest(
    blocks: Sequence[BlockFiles], shape: ServedShape, beside: Beside, *, name: str, own: Mapping[str, FileSpec]
) -> Manifest:
    """`own`: the files that are generated (`blocks.json`, and those about text). Its precision is the type of the KV.

    Raises BlockFolderError for parts that do not fit together.
    """
    texts = beside.texts
    precision: Precision = "fp16" if shape.dtype == "float16" else "fp32"
    files = {file.name: FileSpec(sha256=file.sha256, bytes=file.bytes) for block in blocks for file in block.files}
    assert ONNX_BLOCKS_NAME in own, "the wiring is in there"
    manifest = Manifest(
        model=ModelConfig(
            name=name,
            family="onnx",
            hidden_size=0,
            layers=len(shape.layers),
            heads=0,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=0,
            vocab_size=shape.vocabulary,
            max_position=beside.max_position,
            rms_norm_eps=0.0,
            qkv_bias=False,
            qk_norm=False,
            eos_ids=texts.eos_ids,
            bos_id=texts.bos_id,
            bos_token=texts.bos_token,
            eos_token=texts.eos_token,
            onnx_blocks=len(blocks),
        ),
        generation=texts.generation,
        precisions=(precision,) * len(blocks),
        exact=False,
        graphs={},
        blocks=tuple(BlockSpec(index=one.signature.index, file=one.signature.file, tensors={}) for one in blocks),
        files={path: {**files, **own}[path] for path in sorted({**files, **own})},
    )
    check_manifest(manifest)
    return manifest


def why_no_stand_in(served: Manifest, imported: Manifest) -> str:
    """Why what `imported` describes cannot compute in place of the blocks of `served`, on their KV pages; "": it can.

    It has to be an import of just these files, layer by layer in blocks of the same numbers.
    """
    if imported.imported_from != fingerprint({path: spec.sha256 for path, spec in served.onnx_files().items()}):
        return "it was not imported from these blocks"
    one, other = served.model, imported.model
    if (one.blocks, one.layers) != (other.blocks, other.layers):
        return f"it has {other.blocks} blocks, and there are {one.blocks}"
    if (one.kv_heads, one.head_dim, kv_item_bytes(served.precisions)) != (
        other.kv_heads,
        other.head_dim,
        kv_item_bytes(imported.precisions),
    ):
        return f"its keys and values are kept differently: it is {imported.precision}, they are {served.precision}"
    if one.max_position > other.max_position:
        return (
            f"its context has {other.max_position} positions, as their tables have, and theirs {one.max_position} "
            f"(--max-position {other.max_position})"
        )
    return ""
