"""Builds the manifest of ONNX blocks that are served as they are. Pure: reads no file."""

from collections.abc import Mapping, Sequence

from blockrelay.block_folder.manifest import ONNX_BLOCKS_NAME, BlockSpec, FileSpec, Manifest, check_manifest
from blockrelay.block_folder.model import ModelConfig, Precision
from blockrelay.onnx_blocks.beside import Beside
from blockrelay.onnx_blocks.blocks_file import BlockFiles, all_files
from blockrelay.onnx_blocks.served_shape import ServedShape


def served_manifest(
    blocks: Sequence[BlockFiles], shape: ServedShape, beside: Beside, *, name: str, own: Mapping[str, FileSpec]
) -> Manifest:
    """Returns the manifest of the model `name`, which consists of `blocks`. Its precision is the type of their KV.

    `own` has the files that we generate: `blocks.json`, and those about text. Raises BlockFolderError for parts that do
    not fit together.
    """
    texts = beside.texts
    precision: Precision = "fp16" if shape.dtype == "float16" else "fp32"
    assert ONNX_BLOCKS_NAME in own, "the wiring is in there"
    model = ModelConfig(
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
        onnx_layers=shape.block_layers,
    )
    manifest = Manifest(
        model=texts.added_to(model),
        generation=texts.generation,
        ignored_defaults=texts.ignored_defaults,
        precisions=(precision,) * len(blocks),
        basis="original",
        exact=False,
        graphs={},
        blocks=tuple(BlockSpec(index=one.signature.index, file=one.signature.file, tensors={}) for one in blocks),
        files=dict(sorted({**all_files(blocks), **own}.items())),
    )
    check_manifest(manifest)
    return manifest
