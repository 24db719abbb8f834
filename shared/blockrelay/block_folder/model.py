"""The shape of a model, and which tensors its blocks have in each precision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Precision = Literal["w8a8", "w4a8", "fp32", "fp16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
TensorType = Literal["int8", "uint8", "float16", "float32"]
#: Precisions whose weights are floats, and the type of these. Where CPUs compute they are float32 in both.
FLOATS: Mapping[Precision, TensorType] = {"fp32": "float32", "fp16": "float16"}
LINEARS = ("qkv", "o", "gate_up", "down", "head")
ITEM_BYTES: Mapping[TensorType, int] = {"int8": 1, "uint8": 1, "float16": 2, "float32": 4}
GROUP = 32
"""Inputs of a linear layer that share a factor in w4a8; each of its widths must be a multiple of it."""

MAX_HEAD_DIM = 256
"""The widest head that the attention kernels take (`kMaxHeadDim`)."""
HEAD_DIMS = f"a multiple of 8, {MAX_HEAD_DIM} at most"
"""How messages say what `is_head_dim` wants."""


def is_head_dim(head_dim: int) -> bool:
    """True for a width of heads that can be computed."""
    return head_dim % 8 == 0 and 0 < head_dim <= MAX_HEAD_DIM


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a Llama-like decoder. All sizes in elements.

    Of a model whose blocks are ONNX files that others made (`onnx_layers`) the sizes of KV, vocabulary and context are
    known; hidden_size, heads and intermediate_size are 0.
    """

    name: str
    family: str
    """llama, mistral, qwen2 or qwen3; informative: what differs in computing is in the fields below."""
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
    eos_ids: tuple[int, ...]
    """Each of them ends a text. May be empty."""
    bos_id: int | None
    bos_token: str | None
    """How the chat template spells it; None if the tokenizer has none."""
    eos_token: str | None
    special_tokens: tuple[tuple[str, str], ...] = ()
    """Other special tokens that the chat template names: their names, such as `pad_token`, and how they are spelled."""
    onnx_layers: tuple[int, ...] | None = None
    """How many layers each of the ONNX files has that the model is, which are served as they are. None: it has blocks
    of ours."""

    @property
    def template_tokens(self) -> dict[str, str]:
        """The special tokens by the names that a chat template has for them, without those that the model has not."""
        ends = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        return {name: token for name, token in ends.items() if token is not None} | dict(self.special_tokens)

    @property
    def onnx_blocks(self) -> int | None:
        """How many ONNX files the model is. None: it has blocks of ours."""
        return None if self.onnx_layers is None else len(self.onnx_layers)

    @property
    def blocks(self) -> int:
        """The number N of blocks; they are numbered 1 to N."""
        return self.layers + 1 if self.onnx_blocks is None else self.onnx_blocks

    def layers_in(self, first_block: int, last_block: int) -> int:
        """How many layers these blocks have (both included); the head alone has none."""
        if self.onnx_layers is None:
            return min(last_block, self.layers) - first_block + 1
        return sum(self.onnx_layers[first_block - 1 : last_block])

    @property
    def qkv_columns(self) -> int:
        """Columns of the fused projection: all query heads, then the key heads, then the value heads."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def linear_shape(self, kind: str) -> tuple[int, int]:
        """[K, N] of a linear layer, one of LINEARS."""
        return {
            "qkv": (self.hidden_size, self.qkv_columns),
            "o": (self.heads * self.head_dim, self.hidden_size),
            "gate_up": (self.hidden_size, 2 * self.intermediate_size),
            "down": (self.intermediate_size, self.hidden_size),
            "head": (self.hidden_size, self.vocab_size),
        }[kind]


def is_exact(precision: Precision) -> bool:
    """Whether folders of this precision are marked exact and carry known answers."""
    return precision not in FLOATS


def quantises_rows(precision: Precision) -> bool:
    """Whether linear layers take uint8 rows; otherwise rows are floats."""
    return precision not in FLOATS


def in_groups(precision: Precision) -> bool:
    """Whether the weights of linear layers are 4-bit numbers in groups."""
    return precision == "w4a8"


def block_linears(index: int, blocks: int) -> tuple[str, ...]:
    """The linear layers of block `index` of `blocks`."""
    return LINEARS[-1:] if index == blocks else LINEARS[:-1]


def ungroupable(model: ModelConfig, precisions: Sequence[Precision]) -> tuple[Precision, str] | None:
    """The first linear layer whose inputs cannot be cut into the groups that its block's precision asks for."""
    for index, precision in enumerate(precisions, 1):
        for kind in block_linears(index, model.blocks):
            if in_groups(precision) and model.linear_shape(kind)[0] % GROUP:
                return precision, kind
    return None


def graph_kinds(precisions: Sequence[Precision]) -> dict[str, Precision]:
    """The keys of `Manifest.graphs` for blocks of these precisions, and which one each graph computes.

    w8a8 has two graphs per linear layer: `qkv` multiplies uint8 rows with int8 weights; `qkv.u8u8` takes the weights as
    uint8 (plus 128) and subtracts 128, for CPUs where the first one saturates. Layers in groups have no graph.
    """
    found: dict[str, Precision] = {}
    for index, precision in enumerate(precisions, 1):
        for kind in block_linears(index, len(precisions)):
            if precision in FLOATS:
                found[float_graph(kind, precisions)] = precision
            elif not in_groups(precision):
                found[kind] = found[f"{kind}.u8u8"] = precision
    return found


def float_graph(kind: str, precisions: Sequence[Precision]) -> str:
    """The key of the graph of a linear layer in fp32 or fp16, which takes float32 weights. Beside other precisions it
    has a name of its own."""
    return kind if len(set(precisions)) == 1 else f"{kind}.fp32"


def block_tensors(
    model: ModelConfig, precision: Precision, index: int
) -> dict[str, tuple[TensorType, tuple[int, ...]]]:
    """Name -> (dtype, shape) of every tensor of block `index` (1 to N), in file order.

    A linear layer with inputs k and columns n multiplies a row by
        w[k, n]                                             fp32, fp16
        q[k, n] * scale[n]                                  w8a8
        (nibble[k, n] - 8) * gs[k // 32, n] * scale[n]      w4a8; row i of q4 holds nibbles 2i (low half) and 2i + 1
    """
    tensors: dict[str, tuple[TensorType, tuple[int, ...]]] = {}

    def linear(kind: str) -> None:
        rows, columns = model.linear_shape(kind)
        if precision in FLOATS:
            tensors[f"{kind}.w"] = (FLOATS[precision], (rows, columns))
            return
        if in_groups(precision):
            tensors[f"{kind}.q4"] = ("uint8", (rows // 2, columns))
            tensors[f"{kind}.gs"] = ("float16", (rows // GROUP, columns))
        else:
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
