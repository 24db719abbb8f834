"""The manifest of a block folder: the converter writes it, and all other processes read it (`folder` opens folders).

A block folder is opened only through its `manifest.json`:

    manifest.json            this module
    tokenizer.json           optional: models without one take token ids only
    chat_template.jinja      optional
    rotary.bin               float32 [2, max_position, head_dim/2]: the cos table, then the sin table
    graphs/<kind>.onnx       graphs without weights, one per kind of linear layer, the same for all blocks
    blocks/block_<i>.bin     the tensors of block i, raw little-endian, each at a multiple of 64 bytes

Blocks are numbered from 1. Block 1 is the embedding and layer 0, block i is layer i-1, block N = layers+1 is the final
norm and the head. `block_tensors` lists the tensors of each.

A model of ONNX blocks made by others (`ModelConfig.onnx_layers`) has a manifest too. It lists their files and those
beside them, and `blocks.json` (`onnx_blocks.blocks_file`) in place of tensors, graphs and rotary tables.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, cast, get_args

from blockrelay.block_folder.model import (
    FLOATS,
    GROUP,
    HEAD_DIMS,
    ITEM_BYTES,
    ModelConfig,
    Precision,
    TensorType,
    block_tensors,
    graph_kinds,
    is_head_dim,
    ungroupable,
)
from blockrelay.block_folder.precisions import format_precisions, kv_cache_layout, parse_precisions
from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import BlockFolderError, UsageError

FORMAT_VERSION = 2
Basis = Literal["original", "rotated"]
"""The basis of the residual stream. `original`: the checkpoint's. `rotated`: multiplied by a fixed orthogonal matrix,
with the norms' weights moved into the linear layers behind them (`quantisation.rotated_weights` of the converter)."""
MANIFEST_NAME = "manifest.json"
ROTARY_NAME = "rotary.bin"
ONNX_BLOCKS_NAME = "blocks.json"
TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
#: Files that we write for ONNX blocks made by others, beside the manifest; the ONNX files may lie elsewhere.
_MADE_FOR_ONNX_BLOCKS = (ONNX_BLOCKS_NAME, TOKENIZER_NAME, CHAT_TEMPLATE_NAME)
ALIGNMENT = 64
"""Bytes. Every tensor starts at a multiple of it, so that kernels may load whole SIMD registers from the mapping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling parameters that the model's author recommends; None for those without a recommendation.

    A temperature of 0 is greedy.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Type, shape and place of a tensor in its block's file, where it is little-endian and in C order.

    `offset` is in bytes, a multiple of ALIGNMENT.
    """

    dtype: TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """One block of a model: its file, and the tensors in it."""

    index: int
    """1 to N."""
    file: str
    """Its path in the folder, a key of `Manifest.files`."""
    tensors: Mapping[str, TensorSpec]
    """The tensors by name; empty for ONNX blocks made by others."""
    known_answer: str | None = None
    """SHA-256 (hex) of the block's output for the fixed input; None for a precision that is not exact, and before the
    converter has computed it."""

    @property
    def name(self) -> str:
        return f"block_{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSpec:
    """The SHA-256 (hex) and the size in bytes that a file must have."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of manifest.json. `check_manifest` checks that its parts fit together."""

    model: ModelConfig
    generation: GenerationDefaults
    precisions: tuple[Precision, ...]
    """The precision of block i at index i-1. manifest.json has them as one text, `precision`."""
    basis: Basis
    """The same for all blocks. It changes no result but by rounding, and no key or value."""
    exact: bool
    """True if no bit depends on batch, chunking, threads, stages or machine (docs/quantisation.md)."""
    graphs: Mapping[str, str]
    """The file of the ONNX graph of each kind of linear layer; `graph_kinds` has the keys."""
    blocks: tuple[BlockSpec, ...]
    """Block i at index i-1."""
    files: Mapping[str, FileSpec]
    """All files that are read, except the manifest, by their paths in the folder, with slashes."""
    ignored_defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of generation_config.json that would change answers and are not applied, with their values."""
    imported_from: str | None = None
    """The fingerprint of the ONNX blocks that the folder was imported from (`blocks_file.fingerprint`); None if it was
    made of something else."""

    @property
    def precision(self) -> str:
        """The precisions as one text: `w8a8`, or `w8a8,block_33=fp32`."""
        return format_precisions(self.precisions)

    @property
    def kv_cache_layout(self) -> str:
        """The numbers in KV pages: `fp16` or `fp32`. It follows from the precisions."""
        return kv_cache_layout(self.precisions)

    def precision_of(self, index: int) -> Precision:
        """Returns the precision of block `index`, 1 to N."""
        return self.precisions[index - 1]

    def block(self, index: int) -> BlockSpec:
        """Returns block `index`, 1 to N. Raises BlockFolderError for another index."""
        if not 1 <= index <= len(self.blocks):
            raise BlockFolderError(f"there is no block_{index}: the model has block_1 to block_{len(self.blocks)}")
        return self.blocks[index - 1]

    def block_file(self, index: int) -> FileSpec:
        """Returns what the file of block `index` must be, 1 to N. Raises BlockFolderError for another index."""
        return self.files[self.block(index).file]

    def numerics_inputs(self) -> dict[str, str]:
        """Returns the folder's part of the numerics id: the SHA-256 of its graphs and rotary tables, by path.

        For ONNX blocks made by others it is the SHA-256 of `blocks.json`.
        """
        own = [*self.graphs.values(), ROTARY_NAME] if self.model.onnx_blocks is None else [ONNX_BLOCKS_NAME]
        paths = sorted(own)
        return {path: self.files[path].sha256 for path in paths}

    def onnx_files(self) -> dict[str, FileSpec]:
        """Returns the files of ONNX blocks made by others, graphs and weights, by path; empty for other models."""
        if self.model.onnx_blocks is None:
            return {}
        return {path: spec for path, spec in self.files.items() if path not in _MADE_FOR_ONNX_BLOCKS}

    def encode(self) -> bytes:
        """Returns the bytes of manifest.json, which are the same for equal manifests."""
        content: dict[str, Any] = {"format": FORMAT_VERSION, "precision": self.precision, **asdict(self)}
        del content["precisions"]
        # Fields that came later are left out where a model does not use them: its hash stays as it was before.
        if self.model.onnx_blocks is None:
            del content["model"]["onnx_layers"]
        if self.generation.repetition_penalty is None:
            del content["generation"]["repetition_penalty"]
        if not self.ignored_defaults:
            del content["ignored_defaults"]
        named = dict(content["model"].pop("special_tokens"))
        if named:
            content["model"]["special_tokens"] = named
        if self.imported_from is None:
            del content["imported_from"]
        return json.dumps(content, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"

    @property
    def model_hash(self) -> str:
        """SHA-256 (hex) of the encoded manifest; it covers every file through `files`."""
        return hashlib.sha256(self.encode()).hexdigest()


def place_tensors(tensors: Mapping[str, tuple[TensorType, tuple[int, ...]]]) -> tuple[dict[str, TensorSpec], int]:
    """Lays out `tensors` (dtype and shape by name) one after the other, each at a multiple of ALIGNMENT bytes.

    Returns their specs, and the size of the file in bytes.
    """
    placed: dict[str, TensorSpec] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        placed[name] = TensorSpec(dtype=dtype, shape=shape, offset=-(-end // ALIGNMENT) * ALIGNMENT)
        end = placed[name].offset + placed[name].nbytes
    return placed, end


def decode_manifest(content: bytes) -> Manifest:
    """Decodes and checks the content of manifest.json.

    Raises BlockFolderError that names the field that is missing, unknown or makes no sense.
    """
    fields = Fields.parse(content, MANIFEST_NAME, BlockFolderError)
    version = fields.integer("format")
    if version != FORMAT_VERSION:
        fields.fail(
            f"format {version} was made by a newer release: upgrade (this one reads {FORMAT_VERSION})"
            if version > FORMAT_VERSION
            else f"format {version} was made by an older release (this one reads {FORMAT_VERSION}): convert the"
            " checkpoint again with this release into a NEW folder (`blockrelay convert CHECKPOINT NEW`), and let the"
            " older one finish what it has accepted: docs/procedures/new-numbers.md"
        )
    model = fields.read("model", _decode_model)
    blocks = fields.read_list("blocks", _decode_block)
    precision = fields.text("precision")
    try:
        precisions = parse_precisions(precision, max(1, len(blocks)))  # not `model.blocks`, which is not checked yet
    except UsageError as error:
        fields.fail(str(error))
    if precision != format_precisions(precisions):
        fields.fail(f"precision {precision!r} is written {format_precisions(precisions)!r}")
    graphs = fields.nested("graphs")
    files = fields.nested("files")
    ignored = fields.part("ignored_defaults")
    manifest = Manifest(
        model=model,
        generation=fields.read("generation", _decode_generation),
        precisions=precisions,
        basis=cast(Basis, fields.text("basis", one_of=get_args(Basis))),
        exact=fields.flag("exact"),
        graphs={kind: graphs.text(kind) for kind in graphs.names()},
        blocks=blocks,
        files={path: files.read(path, decode_file) for path in files.names()},
        ignored_defaults={name: ignored.take(name) for name in ignored.names()},
        imported_from=fields.text("imported_from") if fields.has("imported_from") else None,
    )
    fields.done()
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Raises BlockFolderError unless the parts fit together: paths, tensors of each block, sizes. Reads no file."""

    def fail(message: str) -> None:
        raise BlockFolderError(f"{MANIFEST_NAME}: {message}")

    model, foreign = manifest.model, manifest.model.onnx_blocks is not None
    if len(manifest.blocks) != model.blocks:
        fail(f"a model of {model.layers} layers has {model.blocks} blocks, not {len(manifest.blocks)}")
    if len(manifest.precisions) != model.blocks:
        fail(f"{len(manifest.precisions)} precisions for {model.blocks} blocks")
    if any(token >= model.vocab_size for token in model.eos_ids):
        fail(f"eos_ids {list(model.eos_ids)} are not all below vocab_size {model.vocab_size}")
    if model.onnx_layers is not None and sum(model.onnx_layers) != model.layers:
        fail(f"onnx_layers {list(model.onnx_layers)} are not {model.layers} layers together")
    if foreign and not set(manifest.precisions) <= set(FLOATS):
        fail(f"precision {manifest.precision!r}: ONNX blocks have {' or '.join(FLOATS)}, the type of their KV")
    if not foreign:
        _check_sizes(manifest, fail)
    for path in manifest.files:
        if not is_inside(path):
            fail(f"file path {path!r} is not a plain relative path inside the folder")
    kinds = {} if foreign else graph_kinds(manifest.precisions)
    if set(manifest.graphs) != set(kinds):
        fail(f"graphs must be {', '.join(kinds) or 'none'}")
    beside = ONNX_BLOCKS_NAME if foreign else ROTARY_NAME
    for path in [*manifest.graphs.values(), beside, *(block.file for block in manifest.blocks)]:
        if path not in manifest.files:
            fail(f"{path} is used but not listed in files")
    if not foreign and manifest.files[ROTARY_NAME].bytes != 4 * model.max_position * model.head_dim:
        fail(f"{ROTARY_NAME} must have {4 * model.max_position * model.head_dim} bytes")
    for index, block in enumerate(manifest.blocks, 1):
        if block.index != index:
            fail(f"blocks[{index - 1}] must be block_{index}")
        expected = {} if foreign else block_tensors(model, manifest.precision_of(index), index)
        actual = {name: (spec.dtype, spec.shape) for name, spec in block.tensors.items()}
        for name in sorted(expected.keys() | actual.keys()):
            if expected.get(name) != actual.get(name):
                fail(f"{block.name}: tensor {name} is {actual.get(name)}, expected {expected.get(name)}")
        size = manifest.files[block.file].bytes
        for name, spec in block.tensors.items():
            if spec.offset % ALIGNMENT or spec.offset + spec.nbytes > size:
                fail(f"{block.name}: tensor {name} at {spec.offset} is not aligned or lies outside {block.file}")


def _check_sizes(manifest: Manifest, fail: Callable[[str], None]) -> None:
    """Calls `fail` for sizes of the model that our own blocks cannot have."""
    model = manifest.model
    for name in ("hidden_size", "heads", "intermediate_size"):
        if getattr(model, name) < 1:
            fail(f"model: {name} must be an integer of at least 1")
    if model.heads % model.kv_heads:
        fail(f"heads ({model.heads}) must be a multiple of kv_heads ({model.kv_heads})")
    if not is_head_dim(model.head_dim):
        fail(f"head_dim ({model.head_dim}) must be {HEAD_DIMS}")
    if (odd := ungroupable(model, manifest.precisions)) is not None:
        precision, kind = odd
        fail(f"{kind} has {model.linear_shape(kind)[0]} inputs: {precision} needs multiples of {GROUP}")


def is_inside(path: str) -> bool:
    """Returns whether `path` is relative and stays in its folder on every system: no `..`, drive, root or backslash.

    manifest.json itself is refused too.
    """
    parts = path.split("/")
    plain = all(part not in ("", ".", "..") for part in parts) and not any(c in path for c in "\\:\0")
    return plain and not PurePosixPath(path).is_absolute() and path != MANIFEST_NAME


def _decode_model(fields: Fields) -> ModelConfig:
    special = fields.part("special_tokens")
    return ModelConfig(
        name=fields.text("name"),
        family=fields.text("family"),
        hidden_size=fields.integer("hidden_size"),
        layers=fields.integer("layers", minimum=1),
        heads=fields.integer("heads"),
        kv_heads=fields.integer("kv_heads", minimum=1),
        head_dim=fields.integer("head_dim", minimum=1),
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size", minimum=1),
        max_position=fields.integer("max_position", minimum=1),
        rms_norm_eps=fields.number("rms_norm_eps"),
        qkv_bias=fields.flag("qkv_bias"),
        qk_norm=fields.flag("qk_norm"),
        eos_ids=fields.integers("eos_ids"),
        bos_id=fields.optional_integer("bos_id"),
        bos_token=fields.optional_text("bos_token"),
        eos_token=fields.optional_text("eos_token"),
        special_tokens=tuple((name, special.text(name)) for name in sorted(special.names())),
        onnx_layers=fields.integers("onnx_layers") if fields.has("onnx_layers") else None,
    )


def _decode_generation(fields: Fields) -> GenerationDefaults:
    return GenerationDefaults(
        temperature=fields.optional_number("temperature"),
        top_k=fields.optional_integer("top_k"),
        top_p=fields.optional_number("top_p"),
        min_p=fields.optional_number("min_p"),
        max_tokens=fields.optional_integer("max_tokens", minimum=1),
        repetition_penalty=fields.number("repetition_penalty") if fields.has("repetition_penalty") else None,
    )


def _decode_block(fields: Fields) -> BlockSpec:
    tensors = fields.nested("tensors")
    return BlockSpec(
        index=fields.integer("index", minimum=1),
        file=fields.text("file"),
        tensors={name: tensors.read(name, _decode_tensor) for name in tensors.names()},
        known_answer=fields.optional_text("known_answer"),
    )


def _decode_tensor(fields: Fields) -> TensorSpec:
    return TensorSpec(
        dtype=cast(TensorType, fields.text("dtype", one_of=tuple(ITEM_BYTES))),
        shape=fields.integers("shape", minimum=1),
        offset=fields.integer("offset"),
    )


def decode_file(fields: Fields) -> FileSpec:
    """Reads the size and SHA-256 of a file. Raises the error of `fields` for anything else."""
    return FileSpec(sha256=fields.text("sha256"), bytes=fields.integer("bytes"))
