"""The shape of a model, and the tensors that its blocks have in each precision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Precision = Literal["w8a8", "w4a8", "fp32", "fp16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
TensorType = Literal["int8", "uint8", "float16", "float32"]
#: Precisions whose weights are floats, and the type of these in files. CPUs compute with float32 in both.
FLOATS: Mapping[Precision, TensorType] = {"fp32": "float32", "fp16": "float16"}
#: The kinds of linear layers, in the order of a block; the head is the last block's.
LINEARS = ("qkv", "o", "gate_up", "down", "head")
ITEM_BYTES: Mapping[TensorType, int] = {"int8": 1, "uint8": 1, "float16": 2, "float32": 4}
GROUP = 32
"""Inputs of a linear layer that share a scale and a minimum in w4a8. The number of inputs must be a multiple of it."""

HADAMARD_SIZES = (16, 512)
"""The smallest matrix of the Hadamard step, as wide as a register of the kernels, and the largest."""

MAX_HEAD_DIM = 256
"""The widest head that the attention kernels take (`kMaxHeadDim`)."""
HEAD_DIMS = f"a multiple of 8, {MAX_HEAD_DIM} at most"
"""The condition of `is_head_dim`, for messages."""


def is_head_dim(head_dim: int) -> bool:
    """Returns whether attention kernels can compute heads of this width."""
    return head_dim % 8 == 0 and 0 < head_dim <= MAX_HEAD_DIM


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a Llama-like decoder. All sizes are numbers of elements.

    A model of ONNX blocks made by others (`onnx_layers`) has only the sizes of KV, vocabulary and context;
    hidden_size, heads and intermediate_size are 0.
    """

    name: str
    family: str
    """llama, mistral, qwen2 or qwen3, for information only: differences in computing are in the fields below."""
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    """The context length in tokens; `rotary.bin` has this many positions."""
    rms_norm_eps: float
    qkv_bias: bool
    """Blocks have `qkv.bias`, added after the row scale (Qwen2)."""
    qk_norm: bool
    """Blocks have `norm_q` and `norm_k`: RMS norm of each query and key head before the rotation (Qwen3)."""
    eos_ids: tuple[int, ...] = ()
    """Token ids that end a text. May be empty."""
    bos_id: int | None = None
    bos_token: str | None = None
    """The text of the BOS token, for the chat template; None if the tokenizer has none."""
    eos_token: str | None = None
    """The text of the EOS token, for the chat template; None if the tokenizer has none."""
    special_tokens: tuple[tuple[str, str], ...] = ()
    """Name and text of other special tokens that the chat template names, such as `pad_token`."""
    onnx_layers: tuple[int, ...] | None = None
    """The number of layers in each ONNX block made by others and served as it is. None for blocks of our own."""

    @property
    def template_tokens(self) -> dict[str, str]:
        """The texts of the model's special tokens, by the names that a chat template uses for them."""
        ends = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        return {name: token for name, token in ends.items() if token is not None} | dict(self.special_tokens)

    @property
    def onnx_blocks(self) -> int | None:
        """The number of ONNX blocks of a model of ONNX blocks made by others; None for blocks of our own."""
        return None if self.onnx_layers is None else len(self.onnx_layers)

    @property
    def blocks(self) -> int:
        """The number N of blocks; they are numbered 1 to N."""
        return self.layers + 1 if self.onnx_blocks is None else self.onnx_blocks

    def layers_in(self, first_block: int, last_block: int) -> int:
        """Returns the number of layers in blocks `first_block` to `last_block`, both included. The head has none."""
        if self.onnx_layers is None:
            return min(last_block, self.layers) - first_block + 1
        return sum(self.onnx_layers[first_block - 1 : last_block])

    @property
    def qkv_columns(self) -> int:
        """Columns of the fused projection: all query heads, then the key heads, then the value heads."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def linear_shape(self, kind: str) -> tuple[int, int]:
        """Returns inputs K and outputs N of a kind of linear layer, one of LINEARS. Its weights are [K, N]."""
        return {
            "qkv": (self.hidden_size, self.qkv_columns),
            "o": (self.heads * self.head_dim, self.hidden_size),
            "gate_up": (self.hidden_size, 2 * self.intermediate_size),
            "down": (self.intermediate_size, self.hidden_size),
            "head": (self.hidden_size, self.vocab_size),
        }[kind]


def is_exact(precision: Precision) -> bool:
    """Returns whether results in this precision are the same bits everywhere; then blocks have known answers."""
    return precision not in FLOATS


def quantises_rows(precision: Precision) -> bool:
    """Returns whether linear layers take their inputs quantised to uint8; otherwise they take floats."""
    return precision not in FLOATS


def in_groups(precision: Precision) -> bool:
    """Returns whether the weights of linear layers are 4-bit numbers in groups of GROUP."""
    return precision == "w4a8"


def row_group(precision: Precision) -> int:
    """Returns how many neighbours in a quantised row share a scale; 0: all of the row."""
    return GROUP if in_groups(precision) else 0


def hadamard_size(model: ModelConfig, precision: Precision) -> int:
    """Returns the size of the Hadamard matrices by which inputs of `down` are multiplied before they are quantised.

    A Hadamard matrix spreads a large value over its block, so that the others keep more of the 255 levels (QuaRot,
    arXiv 2404.00456). The size is the largest power of two up to 512 that divides the number of inputs. It is 0, for no
    such step, where that is below 16, and in all precisions but w8a8: their rows have finer scales, or are not rounded.
    """
    size = min(model.intermediate_size & -model.intermediate_size, HADAMARD_SIZES[1])
    return size if precision == "w8a8" and size >= HADAMARD_SIZES[0] else 0


def block_linears(index: int, blocks: int) -> tuple[str, ...]:
    """Returns the kinds of linear layers in block `index` (1 to N) of a model with N = `blocks` blocks."""
    return LINEARS[-1:] if index == blocks else LINEARS[:-1]


def ungroupable(model: ModelConfig, precisions: Sequence[Precision]) -> tuple[Precision, str] | None:
    """Returns the first linear layer that cannot be cut into the groups of its block's precision; None if all can.

    `precisions` has one for each block. The result is the precision and the kind of linear layer.
    """
    for index, precision in enumerate(precisions, 1):
        for kind in block_linears(index, model.blocks):
            if in_groups(precision) and model.linear_shape(kind)[0] % GROUP:
                return precision, kind
    return None


def graph_kinds(precisions: Sequence[Precision]) -> dict[str, Precision]:
    """Returns the keys of `Manifest.graphs` for blocks of these precisions, each with the precision it is for.

    w8a8 has two graphs per linear layer: `qkv` multiplies uint8 rows with int8 weights; `qkv.u8u8` takes the weights as
    uint8 (plus 128) and subtracts 128, for CPUs where the first one saturates. Layers in groups have no graph.
    """
    kinds: dict[str, Precision] = {}
    for index, precision in enumerate(precisions, 1):
        for kind in block_linears(index, len(precisions)):
            if precision in FLOATS:
                kinds[float_graph(kind, precisions)] = precision
            elif not in_groups(precision):
                kinds[kind] = kinds[f"{kind}.u8u8"] = precision
    return kinds


def float_graph(kind: str, precisions: Sequence[Precision]) -> str:
    """Returns the key of the graph for a kind of linear layer in fp32 or fp16, which takes float32 weights.

    It is `kind` in a model of one precision, and `kind.fp32` beside other precisions.
    """
    return kind if len(set(precisions)) == 1 else f"{kind}.fp32"


def block_tensors(
    model: ModelConfig, precision: Precision, index: int
) -> dict[str, tuple[TensorType, tuple[int, ...]]]:
    """Returns dtype and shape of every tensor of block `index` (1 to N), by name, in the order of the file.

    A linear layer with inputs k and columns n multiplies a row by
        w[k, n]                                             fp32, fp16
        q[k, n] * scale[n]                                  w8a8
        nibble[k, n] * gs[k // 32, n] + gm[k // 32, n]      w4a8; row i of q4 holds nibbles 2i (low half) and 2i + 1
    In w8a8 the rows that `down` multiplies have been through the Hadamard step (`hadamard_size`).
    """
    tensors: dict[str, tuple[TensorType, tuple[int, ...]]] = {}

    def linear(kind: str) -> None:
        """Adds the tensors of a kind of linear layer."""
        rows, columns = model.linear_shape(kind)
        if precision in FLOATS:
            tensors[f"{kind}.w"] = (FLOATS[precision], (rows, columns))
            return
        if in_groups(precision):
            tensors[f"{kind}.q4"] = ("uint8", (rows // 2, columns))
            tensors[f"{kind}.gs"] = ("float16", (rows // GROUP, columns))
            tensors[f"{kind}.gm"] = ("float16", (rows // GROUP, columns))
            return
        tensors[f"{kind}.q"] = ("int8", (rows, columns))
        tensors[f"{kind}.scale"] = ("float32", (columns,))

    if index == 1:
        tensors["embedding"] = (FLOATS.get(precision, "float16"), (model.vocab_size, model.hidden_size))
    if index == model.blocks:
        tensors["norm_final"] = ("float32", (model.hidden_size,))
        linear("head")
        return tensors
    tensors["norm_attention"] = ("float32", (model.hidden_size,))
    linear("qkv")
    if model.qkv_bias:
        tensors["qkv.bias"] = ("float32", (model.qkv_columns,))
    if model.qk_norm:
        tensors["norm_q"] = ("float32", (model.head_dim,))
        tensors["norm_k"] = ("float32", (model.head_dim,))
    linear("o")
    tensors["norm_mlp"] = ("float32", (model.hidden_size,))
    linear("gate_up")
    linear("down")
    return tensors
